"""Laws that only many requests show: how streams end, what clients leave behind, and that one hurts no other."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import openai
import psutil
import pytest

from cluster.config import Auth
from cluster.engine.text import TextCodec
from cluster.metrics import IN_FLIGHT, QUEUED, REFUSALS, REPLICA_BLOCKS_FREE, REPLICA_RUNNING, REPLICAS_READY, REQUESTS
from cluster.model import ModelFolder
from cluster.types import FinishReason, Outcome, RequestId, TokenDelta
from router.keys import Identity
from router.limits import Limits
from tests.unit.fake_replica import FakeReplica, expected_text
from tests.unit.http_kit import MAX_LEN, TEXT, World, plain_client, post, raw_post, serving

FAILING_TOKENS = 13
"""Requests for so many tokens fail in the engine after three."""


@dataclass
class Seen:
    """One stream from its first byte to the end of its connection."""

    fields: dict[str, Any]
    events: list[str] = field(default_factory=list)
    closed_after_s: float = 0.0
    """From the last event."""


def failing(replica: FakeReplica) -> list[TokenDelta]:
    """The errors of those that fail now; the engine is rid of them."""
    held = replica.held.values()
    ended = [h for h in held if h.request.sampling.max_tokens == FAILING_TOKENS and h.made >= 3]
    for h in ended:
        replica.forget(h.request.request_id)
    return [TokenDelta(h.request.request_id, h.attempt, h.made, (), (), FinishReason.ERROR, "broken") for h in ended]


async def engine(replica: FakeReplica) -> None:
    """Turn while there is work, and fail what is to fail."""
    while True:
        await replica.work.wait()
        replica.turn()
        if errors := failing(replica):
            replica.send(*errors)
        if not replica.held:
            replica.work.clear()
        await asyncio.sleep(0)


class Pulse:
    """How long this loop, which server and clients share, has stood still at most: the machine's doing, not ours."""

    def __init__(self) -> None:
        self.stalled_s = 0.0

    async def run(self) -> None:
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(0.01)
            self.stalled_s = max(self.stalled_s, time.monotonic() - before_s - 0.01)


async def see(world: World, fields: dict[str, Any]) -> Seen:
    seen = Seen(fields)
    reader, writer = await raw_post(world, {"model": "tiny-llama", "stream": True} | fields)
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 "), head
    received, last_s = b"", time.monotonic()
    while data := await reader.read(2**16):
        received += data
        if b"data: " in data:
            last_s = time.monotonic()
    seen.closed_after_s = time.monotonic() - last_s
    writer.close()
    seen.events = [line[6:] for line in received.decode().split("\n") if line.startswith("data: ")]
    return seen


def draw(rng: random.Random, codec: TextCodec) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "prompt": [5] * rng.choice([1, 3, 40, 400]),
        "max_tokens": rng.choice([1, 2, 5, 20, FAILING_TOKENS]),
        "n": rng.choice([1, 1, 1, 2]),
    }
    if rng.random() < 0.3:
        fields["stop"] = [codec.text([rng.randrange(3, 1000)]) or "e"]
    if rng.random() < 0.5:
        fields["stream_options"] = {"include_usage": rng.random() < 0.7}
    return fields


@pytest.mark.parametrize("count", [600, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
async def test_every_stream_ends_once_per_choice_then_with_the_one_mark_or_with_one_error(
    tiny_model: ModelFolder, count: int
) -> None:
    rng, room = random.Random(7), asyncio.Semaphore(48)
    async with serving(tiny_model, auto=False) as world:
        codec = TextCodec.from_file(tiny_model.tokenizer_path)
        world.replica.codec, world.replica.end_ids = codec, frozenset(tiny_model.eos_token_ids)
        world.replica.slots, world.replica.blocks = 128, 10_000
        world.replica.beat()
        pulse = Pulse()
        running = [asyncio.create_task(engine(world.replica)), asyncio.create_task(pulse.run())]

        async def one() -> Seen:
            async with room:
                return await see(world, draw(rng, codec))

        streams = await asyncio.gather(*(one() for _ in range(count)))
        for task in running:
            task.cancel()
    ends: Counter[str] = Counter()
    for seen in streams:
        chunks = [json.loads(event) for event in seen.events if event != "[DONE]"]
        finishes = [
            (choice["index"], choice["finish_reason"])
            for chunk in chunks
            if "error" not in chunk
            for choice in chunk["choices"]
            if choice["finish_reason"] is not None
        ]
        errors = [chunk for chunk in chunks if "error" in chunk]
        assert seen.closed_after_s < 1.0 + pulse.stalled_s
        if errors:
            assert seen.fields["max_tokens"] == FAILING_TOKENS, "nothing else may fail"
            assert errors == [chunks[-1]], "one error, and it is last"
            assert "[DONE]" not in seen.events
            assert all(reason == "stop" for _, reason in finishes), "only a sibling that had ended already"
            assert len(finishes) < seen.fields["n"]
            ends["error"] += 1
            continue
        assert seen.events.count("[DONE]") == 1
        assert seen.events[-1] == "[DONE]"
        assert sorted(index for index, _ in finishes) == list(range(seen.fields["n"])), "one end for each choice"
        usages = [chunk for chunk in chunks if chunk.get("usage") is not None]
        wanted = seen.fields.get("stream_options", {}).get("include_usage", False)
        assert usages == ([chunks[-1]] if wanted else [])
        ends.update(reason for _, reason in finishes)
    assert {"stop", "length", "error"} <= ends.keys(), "the mix has every kind of end"


async def test_of_a_thousand_clients_that_leave_within_50_ms_nothing_stays_behind(tiny_model: ModelFolder) -> None:
    rng = random.Random(3)
    async with serving(tiny_model) as world:
        world.replica.slots, world.replica.blocks = 64, 20_000
        world.replica.beat()
        room = asyncio.Semaphore(100)

        async def leave() -> None:
            async with room:
                _, writer = await raw_post(world, TEXT | {"max_tokens": MAX_LEN - 10, "stream": True})
                await asyncio.sleep(rng.random() * 0.05)
                writer.transport.abort()

        await asyncio.gather(*(leave() for _ in range(1000)))
        async with asyncio.timeout(2):
            await world.core.drained()
        world.replica.turn()
        world.core.tick()
        assert not world.replica.held
        assert world.core.bands() == ()
        for metric in (IN_FLIGHT, QUEUED):
            assert world.registry.get_sample_value(metric.name, {"priority_class": "standard"}) == 0
        by_replica = {"replica": str(world.replica.replica_id)}
        assert world.registry.get_sample_value(REPLICA_RUNNING.name, by_replica) == 0
        assert world.registry.get_sample_value(REPLICA_BLOCKS_FREE.name, by_replica) == world.replica.blocks
        cancelled = world.ended(Outcome.CANCELLED)
        assert sum(world.ended(outcome) for outcome in Outcome) == cancelled, "and each ended once"
        assert cancelled >= len({request.request_id for request, _ in world.replica.added}) > 0
        assert (await post(world, "/v1/completions", TEXT)).status_code == 200


async def test_bad_requests_of_one_tenant_cost_no_other_anything(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model) as world, plain_client(world) as http:
        too_long = TEXT | {"prompt": [5] * MAX_LEN, "user": "a"}
        bad = [http.post("/v1/completions", json=too_long) for _ in range(50)]
        good = [http.post("/v1/completions", json=TEXT | {"user": "b"}) for _ in range(20)]
        statuses = [answer.status_code for answer in await asyncio.gather(*bad, *good)]
        assert statuses == [400] * 50 + [200] * 20
        world.core.tick()
        assert len(world.replica.added) == 20, "what is bad reaches no replica"
        assert world.registry.get_sample_value(REPLICAS_READY.name) == 1
        assert not world.registry.get_sample_value(f"{REFUSALS.name}_total", {"reason": "full"})
        assert (await http.get("/ready")).status_code == 200


async def test_official_client_waits_as_long_as_it_is_told_and_then_succeeds(tiny_model: ModelFolder) -> None:
    limited = Identity("t", "k", limits=Limits(requests_per_s=1))
    refused: list[Any] = []

    async def keep(response: Any) -> None:
        if response.status_code == 429:
            await response.aread()
            refused.append(response)

    async with (
        serving(tiny_model, auth=Auth.KEYS, identify=lambda _: limited) as world,
        openai.DefaultAsyncHttpxClient(verify=False, event_hooks={"response": [keep]}) as transport,
        openai.AsyncOpenAI(
            base_url=world.url + "/v1", api_key="fb-key", max_retries=2, http_client=transport
        ) as client,
    ):
        await client.completions.create(model="tiny-llama", prompt="x", max_tokens=2)
        began_s = time.monotonic()
        answer = await client.completions.create(model="tiny-llama", prompt="x", max_tokens=2)
        took_s = time.monotonic() - began_s
    assert answer.choices[0].finish_reason == "length"
    (first, *_) = refused
    assert first.headers["retry-after"].isdecimal(), "whole seconds"
    assert took_s >= int(first.headers["retry-after"]) >= 1
    assert (first.json()["error"]["type"], first.json()["error"]["code"]) == (
        "rate_limit_error",
        "rate_limit_exceeded",
    )


async def test_what_clients_make_up_makes_no_series_and_is_no_success(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model) as world, plain_client(world) as http:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)

        async def status(head: str, body: bytes = b"") -> int:
            """On one connection, which keeps nothing of what it was answered."""
            writer.write(f"{head} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
            answered = await reader.readuntil(b"\r\n\r\n")
            (length,) = [int(line[15:]) for line in answered.split(b"\r\n") if line.startswith(b"content-length:")]
            await reader.readexactly(length)
            return int(answered.split()[1])

        async def made_up(k: int) -> None:
            unknown = json.dumps(TEXT | {"model": f"model-{k}"}).encode()
            assert await status("POST /v1/completions", unknown) == 404
            assert await status(f"GET /path-{k}/{k}") == 404

        async def series() -> list[str]:
            return [s for s in (await http.get("/metrics")).text.splitlines() if not s.startswith("#")]

        await post(world, "/v1/completions", TEXT)
        for k in range(200):
            await made_up(-k)
        gc.collect()
        before, memory = await series(), psutil.Process().memory_info().rss
        for k in range(1000):
            await made_up(k)
        gc.collect()
        after = await series()
        assert len(after) <= len(before) + 10
        assert psutil.Process().memory_info().rss - memory < 5 * 2**20
        finished = {"priority_class": "standard", "outcome": "finished"}
        assert world.registry.get_sample_value(f"{REQUESTS.name}_total", finished) == 1
        writer.close()


async def test_cancelling_one_of_two_requests_of_one_name_leaves_the_other_its_text(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model, auto=False) as world, plain_client(world) as http:
        headers = {"x-request-id": "same"}
        kept = asyncio.create_task(
            http.post("/v1/completions", json=TEXT | {"max_tokens": 50, "stream": True}, headers=headers)
        )
        await world.until(lambda: world.replica.held)
        (kept_request,) = [h.request for h in world.replica.held.values()]
        dropped = asyncio.create_task(
            http.post("/v1/completions", json=TEXT | {"max_tokens": 500, "stream": True}, headers=headers)
        )
        await world.until(lambda: len(world.replica.held) == 2)
        world.replica.turn()
        dropped.cancel()
        await world.until(lambda: world.ended(Outcome.CANCELLED) == 1)
        assert set(world.replica.held) == {kept_request.request_id}
        for _ in range(50):
            world.replica.turn()
        text = (await kept).text
        chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        assert {RequestId(chunk["id"]) for chunk in chunks} == {kept_request.request_id}
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected_text(kept_request)


async def test_name_of_a_megabyte_is_refused(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model) as world:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-id: " + b"a" * 2**20 + b"\r\n\r\n")
        status = (await asyncio.wait_for(reader.readuntil(b"\r\n"), 5)).split()[1]
        assert status in {b"400", b"431"}
        writer.close()
