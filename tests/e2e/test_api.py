"""The HTTP API over the whole line: what its documents say, what clients that go leave, and generated requests."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.metrics import REPLICA_BLOCKS, REPLICA_BLOCKS_FREE, REPLICA_RUNNING, REPLICA_WAITING
from cluster.model import ModelFolder
from tests.e2e.conftest import MODEL
from tests.line import Line, until
from tests.unit.http_kit import serving

SLOTS = MODEL.replicas * MODEL.engine.slots


def body(**changes: Any) -> dict[str, Any]:
    return {"model": "tiny-llama", "prompt": "once upon a time", "temperature": 0, "ignore_eos": True} | changes


async def test_tokens_are_what_the_engines_are_given(line: Line) -> None:
    """A prompt that goes in as its own ids is the same prompt: same text out, same charge."""
    messages = [{"role": "user", "content": "naïve façade 水 🙂"}]
    counted = (await line.client.post("/tokenize", json={"messages": messages})).json()
    chat = {"model": "tiny-llama", "messages": messages, "temperature": 0, "ignore_eos": True, "max_tokens": 16}
    answered = (await line.client.post("/v1/chat/completions", json=chat)).json()
    by_ids = (await line.client.post("/v1/completions", json=body(prompt=counted["tokens"], max_tokens=16))).json()
    assert answered["usage"]["prompt_tokens"] == by_ids["usage"]["prompt_tokens"] == counted["count"]
    assert answered["choices"][0]["message"]["content"] == by_ids["choices"][0]["text"] != ""


async def test_a_request_that_has_run_can_be_explained(line: Line) -> None:
    answer = (await line.client.post("/v1/completions", json=body(max_tokens=4))).json()
    told = (await line.client.get(f"/v1/requests/{answer['id']}/explain")).json()
    assert (told["state"], told["outcome"], told["finish"]) == ("ended", "finished", "length")
    assert told["output_tokens"] == 4
    placed = [d["replica"] for d in told["decisions"] if d["event"] == "dispatched"]
    assert placed[0] in {"replica-0", "replica-1"}


async def test_a_stream_past_its_stated_time_ends_with_an_error_event_and_frees_its_blocks(slow_line: Line) -> None:
    headers = {"x-forebay-timeout-ms": "600"}
    fields = body(stream=True, max_tokens=800)
    async with slow_line.client.stream("POST", "/v1/completions", json=fields, headers=headers) as response:
        assert response.status_code == 200
        events = [line[6:] async for line in response.aiter_lines() if line.startswith("data: ")]
    assert "error" in json.loads(events[-1])
    assert all("error" not in json.loads(event) for event in events[:-1])

    async def used() -> int:
        return sum(slow_line.blocks_used())

    await until(used, lambda blocks: blocks == 0, within_s=2)


async def test_when_all_clients_leave_at_once_every_gauge_says_so_without_new_traffic(slow_line: Line) -> None:
    writers = []
    host, port = slow_line.url.removeprefix("http://").split(":")
    raw = json.dumps(body(stream=True, max_tokens=900)).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(raw)
    for _ in range(100):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(head + raw)
        writers.append(writer)

    async def running() -> float:
        return await slow_line.metric(REPLICA_RUNNING)

    await until(running, lambda requests: requests == SLOTS)
    for writer in writers:
        writer.transport.abort()

    async def gauges() -> tuple[float, ...]:
        free, total = await slow_line.metric(REPLICA_BLOCKS_FREE), await slow_line.metric(REPLICA_BLOCKS)
        return await running(), await slow_line.metric(REPLICA_WAITING), total - free

    await until(gauges, lambda seen: not any(seen), within_s=2)
    # And both replicas are sent work again.
    asked = await asyncio.gather(
        *(slow_line.client.post("/v1/completions", json=body(max_tokens=2)) for _ in range(SLOTS))
    )
    assert all(answer.status_code == 200 for answer in asked)

    async def placed(answer: httpx.Response) -> str:
        told = (await slow_line.client.get(f"/v1/requests/{answer.json()['id']}/explain")).json()
        return next(str(d["replica"]) for d in told["decisions"] if d["event"] == "dispatched")

    assert {await placed(answer) for answer in asked} == {"replica-0", "replica-1"}


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_no_generated_request_makes_the_server_fail_or_answer_as_it_does_not_say(
    tiny_model: ModelFolder,
) -> None:
    async with serving(tiny_model) as world:
        world.meant = {}  # there is a controller, and no replica of any name
        checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
        command = [
            str(Path(sys.executable).parent / "schemathesis"), "--no-color", "run", f"{world.url}/openapi.json",
            "--checks", checks, "--max-examples", "50", "--generation-deterministic",
        ]  # fmt: skip
        ran = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=550, check=False)
        assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr[-2000:]
