"""Replicas that die, freeze or are killed by a prompt, and clients that leave or dawdle: what the other clients see.

Controller, router and replicas are processes of their own. Where a moment matters, steps are held until it has come, so
that no figure here depends on how fast the machine is but those that are printed.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.metrics import (
    CONTINUED,
    ENGINE_DEATHS,
    FENCED,
    IN_FLIGHT,
    QUEUED,
    REPLICA_BLOCKS,
    REPLICA_BLOCKS_FREE,
    REPLICA_RUNNING,
    REPLICA_WAITING,
    REQUESTS,
    RETRIES,
    TOKENS_OUT,
)
from cluster.model import ModelFolder
from deployments.settings import Profile
from ops.bench.router_load import dechunk, process_cpu_s
from router.suspects import CLEARED_AFTER_TOKENS
from tests.line import until
from tests.process_parts import POISON_ID
from tests.processes import Cluster, ReplicaPart, running_cluster

pytestmark = pytest.mark.slow

PROFILE = Profile.model_validate(
    {
        "engine": {"slots": 32, "step_token_budget": 256, "blocks": 1024, "max_model_len": 1024},
        "router": {"step_age_limit_s": 600.0},  # steps are held here
    }
)
STEP_S = 0.025
SHORT_STEP_S = 0.01
"""Where steps are held and their length decides nothing."""
PROMPT = [101, 203, 305, 407, 509, 611, 713, 815]
OPENER = PROMPT[:2]
TOKENS = 200
GAP_MAX_MS = 2000
"""A dead replica's end of a connection is seen in milliseconds; the rest is the prefill of what had been said. All that it
ran is suspect of its death: the one replica that is left tries them one after the other, for so many steps each, which is
added by the longest step that undisturbed streams had."""
SUSPECTS = 16
TRIAL_STEPS = CLEARED_AFTER_TOKENS + 2

CPU_PER_DISCONNECT_S = 0.0025
"""Of the router, for a request whose client goes at once: two seconds for a thousand on a core of its own, and the asking."""

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1, "seed": 5},
    "penalised": {"temperature": 0.8, "seed": 6, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "three choices": {"temperature": 1, "seed": 11, "n": 3},
    "logprobs": {"temperature": 1, "seed": 3, "logprobs": 2},
}


def body(**changes: Any) -> dict[str, Any]:
    fields = {"model": "tiny-llama", "prompt": PROMPT, "temperature": 0, "ignore_eos": True, "max_tokens": TOKENS}
    return fields | {"stream": True, "stream_options": {"include_usage": True}} | changes


class Heard:
    """One stream, as its client reads it."""

    def __init__(self, client: httpx.AsyncClient, **changes: Any) -> None:
        self.events: list[dict[str, Any]] = []
        self.at_s: list[float] = []
        self.done = False
        self.status = 0
        self.begun = asyncio.Event()
        """Each choice has had an event (one may wait in an engine while another runs), or the answer is an error."""
        self.task = asyncio.create_task(self._read(client, body(**changes)))

    async def _read(self, client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
        silent = set(range(fields.get("n", 1)))
        async with client.stream("POST", "/v1/completions", json=fields) as response:
            self.status = response.status_code
            if self.status != 200:
                self.events.append(json.loads(await response.aread()))
                self.begun.set()
                return
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    self.done = True
                elif line.startswith("data: "):
                    self.events.append(json.loads(line[6:]))
                    self.at_s.append(time.monotonic())
                    silent -= {choice["index"] for choice in self.events[-1].get("choices", ())}
                    if not silent or self.errors:
                        self.begun.set()

    @property
    def request_id(self) -> str:
        return str(self.events[0]["id"])

    @property
    def errors(self) -> list[dict[str, Any]]:
        return [event["error"] for event in self.events if "error" in event]

    def gap_ms(self, since_s: float) -> float:
        """From a moment on to the next event after it."""
        return (next(at_s for at_s in self.at_s if at_s > since_s) - since_s) * 1000

    def longest_gap_ms(self) -> float:
        return max(b - a for a, b in zip(self.at_s, self.at_s[1:], strict=False)) * 1000

    def said(self) -> dict[int | str, Any]:
        """All of it by choice, put together, in what can be compared with `==`."""
        assert (self.errors, self.done) == ([], True)
        whole: dict[int | str, Any] = {"usage": [event["usage"] for event in self.events if event.get("usage")]}
        for event in self.events:
            for choice in event["choices"]:
                one = whole.setdefault(choice["index"], {"text": "", "finish": [], "tokens": [], "offsets": []})
                one["text"] += choice["text"]
                if choice["finish_reason"] is not None:
                    one["finish"].append(choice["finish_reason"])
                if (scores := choice["logprobs"]) is not None:
                    one["tokens"] += scores["tokens"]
                    one["offsets"] += scores["text_offset"]
        return whole

    def logprobs(self) -> list[float]:
        scores = (choice["logprobs"] for event in self.events for choice in event["choices"])
        return [value for one in scores if one is not None for value in one["token_logprobs"]]


async def explained(cluster: Cluster, heard: Heard) -> dict[str, Any]:
    answer = await cluster.client.get(f"/v1/requests/{heard.request_id}/explain")
    told: dict[str, Any] = answer.raise_for_status().json()
    return told


async def placed(cluster: Cluster, heard: Heard) -> list[str]:
    """The replicas that it was sent to, in order."""
    return [d["replica"] for d in (await explained(cluster, heard))["decisions"] if d["event"] == "dispatched"]


async def step_age_s(cluster: Cluster, replica: ReplicaPart) -> float | None:
    """Of the step that it runs; None where it runs none, or nobody says."""
    told = (await cluster.client.get("/status")).json()["cluster"]
    ages_s = [
        one["report"]["step_age_s"]
        for one in (told["replicas"] if told else ())
        if one["entry"]["replica_id"] == replica.replica_id and one["report"]
    ]
    return ages_s[0] if ages_s else None


@pytest.fixture
async def cluster(tiny_model: ModelFolder, tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(tiny_model, PROFILE, tmp_path, step_s=STEP_S) as running:
        yield running


# --- a replica that dies ---


def across(text: str, at: int) -> str:
    """A part of a text that begins before position `at` and ends after it, and is not there sooner."""
    for width in range(1, len(text)):
        begin = max(0, at - width)
        part = text[begin : at + width]
        if text.find(part) == begin:
            return part
    raise AssertionError("the text says nothing only once")


@pytest.mark.timeout(240)
async def test_a_killed_replica_leaves_no_mark_in_any_stream_before_the_first_token_or_after_1_50_or_199(
    tiny_model: ModelFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All streams run on the one replica that there is, which is held at its token; when another has come, it is killed,
    and they go on there; then the same again. A stop string that is half matched at that moment is one of them."""
    async with running_cluster(tiny_model, PROFILE, tmp_path, step_s=SHORT_STEP_S, replicas=1) as cluster:
        undisturbed = {name: Heard(cluster.client, **fields) for name, fields in KINDS.items()}
        offsets = Heard(cluster.client, logprobs=0)
        await asyncio.gather(*(heard.task for heard in (*undisturbed.values(), offsets)))
        expected = {name: heard.said() for name, heard in undisturbed.items()}
        text, token_begins = expected["greedy"][0]["text"], offsets.said()[0]["offsets"]
        assert [usage["completion_tokens"] for usage in expected["greedy"]["usage"]] == [TOKENS]
        assert [usage["completion_tokens"] for usage in expected["three choices"]["usage"]] == [3 * TOKENS]
        own_ms = max(heard.longest_gap_ms() for heard in undisturbed.values())
        gaps_ms = {}
        for tokens in (0, 1, 50, 199):
            stop = across(text, token_begins[tokens])
            ends = text.index(stop) + len(stop)
            needed = next((k for k in range(1, TOKENS) if token_begins[k] >= ends), TOKENS)
            expected["stopped"] = {"text": text[: ends - len(stop)], "tokens": needed}
            gaps_ms[tokens] = await _killed_after(cluster, tokens, stop, expected, undisturbed["logprobs"].logprobs())
        with capsys.disabled():
            shown = ", ".join(f"{gap_ms:.0f} after {tokens} tokens" for tokens, gap_ms in gaps_ms.items())
            print(f"\n[faults] replica killed: longest gap of a stream in ms: {shown}; undisturbed: {own_ms:.0f}")
        assert max(gaps_ms.values()) <= GAP_MAX_MS + SUSPECTS * TRIAL_STEPS * own_ms


async def _killed_after(
    cluster: Cluster, tokens: int, stop: str, expected: dict[str, dict[int | str, Any]], logprobs: list[float]
) -> float:
    """Kill the only replica when the first stream has so many tokens; returns the longest gap in ms."""
    (victim,) = cluster.replicas
    continued, had = await cluster.metric(CONTINUED), await cluster.metric(TOKENS_OUT)
    # While a step is held all requests come together behind it, so that each has as many tokens as the others.
    await victim.hold(len(OPENER))
    opener = Heard(cluster.client, prompt=OPENER, max_tokens=1)
    await until(lambda: step_age_s(cluster, victim), bool)
    streams = [(name, Heard(cluster.client, **fields)) for name, fields in KINDS.items() for _ in range(2)]
    stopped = [Heard(cluster.client, stop=[stop]) for _ in range(2)]
    every = [*(heard for _, heard in streams), *stopped]
    further = 2 * 2
    choices = len(every) + further
    assert choices == SUSPECTS
    await until(lambda: cluster.metric(IN_FLIGHT), (1.0 + choices).__eq__)
    await victim.hold(len(PROMPT) + tokens)
    starting = asyncio.create_task(cluster.start_replica())
    await opener.task
    # Further choices of a prompt are a step behind the first, whose prefill serves them too.
    held = had + 1 + tokens * len(every) + max(0, tokens - 1) * further
    await until(lambda: cluster.metric(TOKENS_OUT), held.__eq__)
    if tokens:  # half a character, or what a stop string may begin with, is not said yet; logprobs are
        await asyncio.gather(*(heard.begun.wait() for name, heard in streams if name == "logprobs"))
    await starting
    await cluster.until_ready(2)
    assert not any(heard.task.done() for heard in every), "it is held"
    assert {bool(heard.events) for heard in every} <= ({True} if tokens >= 50 else {bool(tokens), False})
    killed_s = time.monotonic()
    cluster.kill(victim)
    await asyncio.gather(*(heard.task for heard in every))
    for name, heard in streams:
        assert heard.said() == expected[name], f"{name}, after {tokens}"
        if name == "logprobs":
            assert heard.logprobs() == pytest.approx(logprobs, abs=1e-4)
    for heard in stopped:
        said = heard.said()
        assert (said[0]["text"], said[0]["finish"]) == (expected["stopped"]["text"], ["stop"])
        assert [usage["completion_tokens"] for usage in said["usage"]] == [expected["stopped"]["tokens"]]
    assert await cluster.metric(CONTINUED) - continued == choices, "each went on, once"
    return max(heard.gap_ms(killed_s) for heard in every)


async def test_a_replica_killed_while_clients_read_slowly_or_not_at_all_costs_nobody_a_byte(cluster: Cluster) -> None:
    """One client has read half and stops; one reads 64 bytes at a time into the smallest buffer that there is."""
    expected = Heard(cluster.client, max_tokens=60)
    await expected.task
    text = expected.said()[0]["text"]
    for replica in cluster.replicas:
        await replica.hold(len(PROMPT) + 30)
    paused, resumes = [asyncio.Event() for _ in range(4)], asyncio.Event()
    dawdlers = [asyncio.create_task(_half_read(cluster.url, one, resumes)) for one in paused]
    dawdlers += [asyncio.create_task(_read_slowly(cluster.url)) for _ in range(4)]
    others = [Heard(cluster.client, max_tokens=60) for _ in range(8)]
    await until(lambda: cluster.metric(IN_FLIGHT), float(len(dawdlers) + len(others)).__eq__)
    await asyncio.gather(*(one.wait() for one in paused))
    victim, survivor = cluster.replicas
    cluster.kill(victim)
    await survivor.hold(None)
    await asyncio.gather(*(heard.task for heard in others))
    resumes.set()
    assert {heard.said()[0]["text"] for heard in others} == {text}
    assert await cluster.metric(CONTINUED) > 0
    for raw in await asyncio.gather(*dawdlers):
        events = streamed_events(raw)
        assert events[-1] == "[DONE]"
        choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
        assert "".join(choice["text"] for choice in choices) == text
    assert await cluster.metric(REQUESTS, outcome="finished") == await cluster.metric(REQUESTS)


def raw_request(**changes: Any) -> bytes:
    raw = json.dumps(body(**changes)).encode()
    return (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(raw) + raw
    )


def streamed_events(raw: bytes) -> list[str]:
    """What the events of a whole streamed answer say."""
    events = dechunk(raw.partition(b"\r\n\r\n")[2]).decode().split("\n\n")
    assert events.pop() == ""
    return [event.removeprefix("data: ") for event in events]


async def _half_read(url: str, paused: asyncio.Event, resumes: asyncio.Event) -> bytes:
    reader, writer = await asyncio.open_connection(*address(url), limit=1024)
    writer.write(raw_request(max_tokens=60))
    begun = await reader.readuntil(b"\r\n\r\n") + await reader.readexactly(2000)
    paused.set()
    await resumes.wait()
    rest = await reader.read(-1)
    writer.close()
    return begun + rest


async def _read_slowly(url: str) -> bytes:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    sock.setblocking(False)
    loop, parts = asyncio.get_running_loop(), list[bytes]()
    with sock:
        await loop.sock_connect(sock, address(url))
        await loop.sock_sendall(sock, raw_request(max_tokens=60))
        while part := await loop.sock_recv(sock, 64):
            parts.append(part)
            await asyncio.sleep(0.005)
    return b"".join(parts)


def address(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)


# --- a replica that errs ---


@pytest.mark.timeout(120)
async def test_errors_of_a_replica_leave_no_mark_in_any_stream_where_another_replica_goes_on(
    tiny_model: ModelFolder, tmp_path: Path
) -> None:
    """Its model computes no numbers from a token on: the first, the second, one within and the last. It is never put out
    here, so it errs on all that it gets."""
    profile = PROFILE.model_copy(update={"router": PROFILE.router.model_copy(update={"outlier_faults": 10_000})})
    async with running_cluster(tiny_model, profile, tmp_path, step_s=SHORT_STEP_S) as cluster:
        length = 40
        undisturbed = {name: Heard(cluster.client, max_tokens=length, **fields) for name, fields in KINDS.items()}
        await asyncio.gather(*(heard.task for heard in undisturbed.values()))
        text = undisturbed["greedy"].said()[0]["text"]
        sick, retried = cluster.replicas[0], 0.0
        for tokens in (0, 1, 20, length - 1):
            await sick.err(len(PROMPT) + tokens)
            streams = {name: Heard(cluster.client, max_tokens=length, **fields) for name, fields in KINDS.items()}
            stop = across(text, len(text) // 2)
            stopped = Heard(cluster.client, max_tokens=length, stop=[stop])
            await asyncio.gather(*(heard.task for heard in (*streams.values(), stopped)))
            for name, heard in streams.items():
                assert heard.said() == undisturbed[name].said(), f"{name}, after {tokens}"
                if name == "logprobs":
                    assert heard.logprobs() == pytest.approx(undisturbed[name].logprobs(), abs=1e-4)
            assert stopped.said()[0]["text"] == text[: text.index(stop)]
            before, retried = retried, await cluster.metric(RETRIES, outcome="retried")
            assert retried > before, "one of them at least was with the replica that errs"
            for heard in (*streams.values(), stopped):
                events = [d["event"] for d in (await explained(cluster, heard))["decisions"]]
                assert len(went := await placed(cluster, heard)) == 1 + events.count("retried")
                assert len(set(went)) == len(went), "it was tried again elsewhere"
        assert await cluster.metric(RETRIES) == retried, "each error was tried again once, and none failed again"
        assert await cluster.metric(CONTINUED) == 0
        assert await cluster.metric(REQUESTS, outcome="finished") == await cluster.metric(REQUESTS)


@pytest.mark.timeout(60)
async def test_where_both_replicas_err_the_client_is_told_so_and_not_to_send_it_again(cluster: Cluster) -> None:
    for replica in cluster.replicas:
        await replica.err(0)
    whole = await cluster.client.post("/v1/completions", json=body(stream=False, stream_options=None))
    assert (whole.status_code, whole.json()["error"]["code"]) == (500, "engine_error")
    assert whole.headers["x-should-retry"] == "false"
    await cluster.replicas[0].err(None)
    await cluster.replicas[1].err(None)
    healed = Heard(cluster.client, max_tokens=5)
    await healed.task
    assert healed.said()


# --- a replica that freezes ---


async def test_a_frozen_replica_is_left_in_two_seconds_its_streams_go_on_and_its_late_tokens_reach_nobody(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = Heard(cluster.client)
    await expected.task
    streams = [Heard(cluster.client) for _ in range(16)]
    await asyncio.gather(*(heard.begun.wait() for heard in streams))
    where = [(await placed(cluster, heard))[-1] for heard in streams]
    assert {*where} == {replica.replica_id for replica in cluster.replicas}
    zombie, other = cluster.replicas
    assert await cluster.metric(FENCED, kind="stale") == 0
    await zombie.freeze()
    frozen_s = time.monotonic()
    unrouted_s = await cluster.until_ready(1)
    late = [Heard(cluster.client, max_tokens=8) for _ in range(8)]
    await asyncio.gather(*(heard.task for heard in (*streams, *late)))
    assert {heard.said()[0]["text"] for heard in streams} == {expected.said()[0]["text"]}
    assert [await placed(cluster, heard) for heard in late] == [[other.replica_id]] * len(late)
    moved = [heard for heard, replica_id in zip(streams, where, strict=True) if replica_id == zombie.replica_id]
    assert {tuple(await placed(cluster, heard)) for heard in moved} == {(zombie.replica_id, other.replica_id)}
    gap_ms = max(heard.gap_ms(frozen_s) for heard in moved)
    zombie.thaw()
    thawed_s = time.monotonic()
    await cluster.until_ready(2)
    back_s = time.monotonic() - thawed_s
    fenced, _ = await until(lambda: cluster.metric(FENCED, kind="stale"), bool, within_s=5)
    assert await cluster.metric(FENCED, kind="repeat") == 0
    again = [Heard(cluster.client, max_tokens=8) for _ in range(16)]
    await asyncio.gather(*(heard.task for heard in again))
    assert zombie.replica_id in {(await placed(cluster, heard))[0] for heard in again}
    assert len({heard.said()[0]["text"] for heard in (*late, *again)}) == 1
    with capsys.disabled():
        print(
            f"\n[faults] replica frozen: unrouted after {unrouted_s:.2f} s, longest gap of its streams {gap_ms:.0f} ms, "
            f"{fenced:.0f} late tokens' frames fenced, used again {back_s:.2f} s after it went on"
        )
    assert unrouted_s <= 2.0


# --- clients that leave ---


async def test_of_a_thousand_clients_that_leave_at_once_nothing_runs_two_seconds_later_anywhere(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    request = raw_request(max_tokens=900)

    async def leave() -> None:
        _, writer = await asyncio.open_connection(*address(cluster.url))
        writer.write(request)
        await writer.drain()
        writer.transport.abort()

    for _ in range(20):
        await asyncio.gather(*(leave() for _ in range(50)))
    left_s, cpu_s = time.monotonic(), process_cpu_s(cluster.routers[0].pid)
    await until(lambda: cluster.metric(REQUESTS), (1000.0).__eq__, within_s=60)
    read_s, cpu_s = time.monotonic() - left_s, process_cpu_s(cluster.routers[0].pid) - cpu_s

    async def rest() -> tuple[float, ...]:
        return (
            *[await cluster.metric(metric) for metric in (IN_FLIGHT, QUEUED, REPLICA_RUNNING, REPLICA_WAITING)],
            await cluster.metric(REPLICA_BLOCKS) - await cluster.metric(REPLICA_BLOCKS_FREE),
        )

    _, rest_s = await until(rest, lambda seen: not any(seen), within_s=10)
    ends = {outcome: await cluster.metric(REQUESTS, outcome=outcome) for outcome in ("cancelled", "finished")}
    with capsys.disabled():
        print(
            f"\n[faults] 1,000 clients left at once: the router had heard all {read_s:.2f} s later, for {cpu_s:.2f} s of its "
            f"processor time, and {rest_s:.2f} s after that nothing ran anywhere"
        )
    assert ends["finished"] == 0
    assert ends["cancelled"] == 1000
    assert rest_s <= 2.0
    assert cpu_s <= CPU_PER_DISCONNECT_S * 1000
    assert (
        await cluster.client.post("/v1/completions", json=body(max_tokens=2, stream=False, stream_options=None))
    ).status_code == 200


# --- a prompt that kills ---


@pytest.mark.timeout(180)
async def test_a_prompt_that_kills_its_engine_ends_in_one_500_and_31_bystanders_are_whole(
    tiny_model: ModelFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Replicas that die are replaced, as Serve does it."""
    async with running_cluster(tiny_model, PROFILE, tmp_path, step_s=STEP_S, replicas=3) as cluster:
        reference = Heard(cluster.client, max_tokens=40)
        await reference.task

        async def replaced(replica: ReplicaPart) -> None:
            await replica.ended()
            cluster.replicas.remove(replica)
            await replaced(await cluster.start_replica())

        supervising = [asyncio.create_task(replaced(replica)) for replica in cluster.replicas]
        bystanders = [Heard(cluster.client, max_tokens=40) for _ in range(31)]
        await asyncio.gather(*(heard.begun.wait() for heard in bystanders))
        poison = Heard(cluster.client, prompt=[POISON_ID, *PROMPT])
        await asyncio.gather(poison.task, *(heard.task for heard in bystanders))
        for task in supervising:
            task.cancel()
        await asyncio.gather(*supervising, return_exceptions=True)
        deaths = await cluster.metric(ENGINE_DEATHS)  # a process may outlive its engine, and the answer that follows
        with capsys.disabled():
            print(f"\n[faults] poison among 31: {deaths:.0f} engines died of it, answered with {poison.status}")
        assert poison.status == 500
        assert len(poison.events) == 1
        assert [heard.status for heard in bystanders] == [200] * 31
        assert {json.dumps(heard.said()) for heard in bystanders} == {json.dumps(reference.said())}
        assert await cluster.metric(REQUESTS, outcome="finished") == 1 + 31
        assert await cluster.metric(REQUESTS) == 1 + 31 + 1
        assert 2 <= deaths <= 3, "one death proves nothing against a request, and three are enough"
