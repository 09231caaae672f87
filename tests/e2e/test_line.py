"""Laws of the whole line, over real sockets with real engines: what a client sees."""

from __future__ import annotations

import asyncio
import gc
import json
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httpx
import openai
import pytest

from cluster.engine.text import TextCodec
from cluster.metrics import CONTINUED, IN_FLIGHT, PREEMPTIONS, QUEUED, REQUESTS
from cluster.model import ModelFolder
from cluster.types import Request
from deployments.replica_link import ReplicaLink
from deployments.transport import RejectedError
from ops.examples.priority import demonstrate
from router.logprobs import Vocabulary
from router.tokenizer import PromptTokenizer
from tests.e2e.conftest import MODEL, STEP_S
from tests.line import Line, until

SLOTS = MODEL.replicas * MODEL.engine.slots


@pytest.fixture
async def client(line: Line) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{line.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def body(**changes: Any) -> dict[str, Any]:
    fields = {"model": "tiny-llama", "prompt": "once upon a time", "temperature": 0, "ignore_eos": True, "stream": True}
    return fields | changes


@asynccontextmanager
async def stream(client: httpx.AsyncClient, **changes: Any) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """An open completion stream, as its events; leaving drops the connection."""
    async with client.stream("POST", "/v1/completions", json=body(**changes)) as response:
        assert response.status_code == 200, await response.aread()

        async def events() -> AsyncIterator[dict[str, Any]]:
            async for text in response.aiter_lines():
                if text.startswith("data: ") and text != "data: [DONE]":
                    yield json.loads(text[6:])

        yield events()


async def nothing_is_left(line: Line) -> float:
    """Seconds until no block is used and no request is queued or in flight."""

    async def left() -> tuple[float, ...]:
        return (*line.blocks_used(), await line.metric(QUEUED), await line.metric(IN_FLIGHT))

    _, waited_s = await until(left, lambda seen: not any(seen))
    return waited_s


# --- the API, with the official client ---


async def test_chat_streams_the_text_that_it_answers_whole(client: openai.AsyncOpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Tell me a story"}]
    whole = await client.chat.completions.create(
        model="tiny-llama", messages=messages, temperature=0, max_tokens=24, extra_body={"ignore_eos": True}
    )
    chunks = [
        chunk
        async for chunk in await client.chat.completions.create(
            model="tiny-llama",
            messages=messages,
            temperature=0,
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
    ]
    joined = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert joined == whole.choices[0].message.content != ""
    assert chunks[0].choices[0].delta.role == whole.choices[0].message.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    streamed = chunks[-1].usage
    assert streamed is not None
    # The second may find what the first computed.
    assert streamed.model_copy(update={"prompt_tokens_details": whole.usage.prompt_tokens_details}) == whole.usage
    assert whole.usage.completion_tokens == 24


async def test_a_seed_repeats_a_drawn_text_and_another_seed_does_not(client: openai.AsyncOpenAI) -> None:
    async def draw(seed: int) -> str:
        answer = await client.completions.create(
            model="tiny-llama", prompt="once", temperature=1, seed=seed, max_tokens=24, extra_body={"ignore_eos": True}
        )
        return answer.choices[0].text

    first, again, other = await asyncio.gather(draw(1), draw(1), draw(2))
    assert first == again != other


async def test_a_stop_string_ends_the_text_before_it_and_none_of_it_is_streamed(line: Line) -> None:
    async def text(**changes: Any) -> tuple[str, str]:
        joined, reason = "", ""
        async with stream(line.client, max_tokens=40, **changes) as events:
            async for event in events:
                joined += event["choices"][0]["text"]
                reason = event["choices"][0]["finish_reason"] or reason
        return joined, reason

    full, reason = await text()
    assert reason == "length"
    stop = full[20:26]
    cut, reason = await text(stop=[stop])
    assert (cut, reason) == (full[: full.index(stop)], "stop")


async def test_models_health_ready_and_metrics_answer(line: Line, client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["tiny-llama"]
    for path in ("/health", "/ready", "/metrics"):
        assert (await line.client.get(path)).status_code == 200
    status = (await line.client.get("/status")).json()
    assert [r["entry"]["replica_id"] for r in status["cluster"]["replicas"]] == ["replica-0", "replica-1"]
    assert {r["report"]["load"]["slots_total"] for r in status["cluster"]["replicas"]} == {MODEL.engine.slots}


async def test_a_process_whose_tick_has_died_says_that_it_is_unhealthy(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    line.router.check()
    line.replicas[0].check()

    def broken(**_: object) -> None:
        raise ValueError("broken on purpose")

    async def unhealthy(check: Callable[[], None]) -> str:
        try:
            check()
        except RuntimeError as error:
            return str(error)
        return ""

    for process, ticked in ((line.router, line.core), (line.replicas[0], line.replicas[0].server)):
        monkeypatch.setattr(ticked, "tick", broken)
        said, _ = await until(partial(unhealthy, process.check), bool, within_s=5)
        assert said == "the task 'tick' has ended: ValueError('broken on purpose')"


async def test_errors_have_the_one_form(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.completions.create(model="gpt-9", prompt="x")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as empty:
        await client.completions.create(model="tiny-llama", prompt="")
    assert empty.value.param == "prompt"
    with pytest.raises(openai.BadRequestError) as disagree:
        await client.completions.create(
            model="tiny-llama", prompt="x", extra_body={"service_tier": "flex", "priority": -10}
        )
    assert "service_tier" in disagree.value.message
    assert "priority" in disagree.value.message


# --- several choices, logprobs, echoes ---


async def complete(line: Line, **changes: Any) -> dict[str, Any]:
    answer = await line.client.post("/v1/completions", json=body(stream=False, **changes))
    assert answer.status_code == 200, answer.text
    whole: dict[str, Any] = answer.json()
    return whole


async def streamed(line: Line, **changes: Any) -> dict[int, list[dict[str, Any]]]:
    """What each choice said, event by event."""
    choices: dict[int, list[dict[str, Any]]] = defaultdict(list)
    async with stream(line.client, **changes) as events:
        async for event in events:
            assert "error" not in event, event
            for choice in event["choices"]:
                choices[choice["index"]].append(choice)
    return choices


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(event["text"] for event in events)


def listed(events: list[dict[str, Any]], name: str) -> list[Any]:
    """One of the lists of logprobs, put together."""
    return [item for event in events if event["logprobs"] is not None for item in event["logprobs"][name]]


def near(got: list[float | None], expected: list[float | None]) -> bool:
    """The same logprobs, within what rounding makes of another batch."""
    pairs = list(zip(got, expected, strict=True))
    return all((a is None and b is None) or (a is not None and b is not None and abs(a - b) < 1e-3) for a, b in pairs)


async def test_choices_differ_from_each_other_and_repeat_from_run_to_run(line: Line) -> None:
    drawn = {"n": 3, "temperature": 1, "seed": 5, "max_tokens": 16}
    first, again = await asyncio.gather(complete(line, **drawn), complete(line, **drawn))
    texts = [choice["text"] for choice in first["choices"]]
    assert texts == [choice["text"] for choice in again["choices"]]
    assert len(set(texts)) == 3
    assert first["usage"]["completion_tokens"] == 48
    events = await streamed(line, **drawn)
    assert [text_of(events[k]) for k in range(3)] == texts
    greedy = await complete(line, n=3, max_tokens=16)
    assert len({choice["text"] for choice in greedy["choices"]}) == 1


async def test_scoring_what_was_generated_gives_the_logprobs_that_it_was_generated_with(line: Line) -> None:
    """Ids, not text, go in again: a text of random tokens need not be tokenised as it was written."""
    prompt = [300, 301, 302, 303]
    made = (await complete(line, prompt=prompt, max_tokens=12, logprobs=5))["choices"][0]["logprobs"]
    assert len(made["tokens"]) == 12
    for token, logprob, top in zip(made["tokens"], made["token_logprobs"], made["top_logprobs"], strict=True):
        assert len(top) == 5
        assert max(top.values()) == top[token] == logprob <= 0, "greedy takes the likeliest"
    codec = TextCodec.from_file(line.model.tokenizer_path)
    vocabulary = Vocabulary(codec, ())
    ids = {vocabulary.word(token_id).token: token_id for token_id in range(1024)}
    scored = await complete(line, prompt=prompt + [ids[t] for t in made["tokens"]], max_tokens=0, echo=True, logprobs=5)
    (choice,) = scored["choices"]
    assert (choice["finish_reason"], scored["usage"]["completion_tokens"]) == ("length", 0)
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert near(choice["logprobs"]["token_logprobs"][4:], made["token_logprobs"])
    silent = await complete(line, max_tokens=0, echo=True)
    assert (silent["choices"][0]["text"], silent["choices"][0]["finish_reason"]) == ("once upon a time", "length")


async def test_bias_rules_the_draw_and_logprobs_are_of_the_model_before_it(line: Line) -> None:
    prompt, biased = [300, 301, 302], 400
    answer = await complete(line, prompt=prompt, max_tokens=3, logit_bias={str(biased): 100}, logprobs=0)
    codec = TextCodec.from_file(line.model.tokenizer_path)
    assert answer["choices"][0]["text"] == codec.text([biased] * 3)
    scored = await complete(line, prompt=[*prompt, *[biased] * 3], max_tokens=0, echo=True, logprobs=0)
    assert near(
        answer["choices"][0]["logprobs"]["token_logprobs"],
        scored["choices"][0]["logprobs"]["token_logprobs"][3:],
    )
    banned = await complete(
        line, prompt=prompt, max_tokens=3, logit_bias={str(biased): 100, "401": 100}, presence_penalty=2
    )
    assert banned["choices"][0]["text"] != answer["choices"][0]["text"], "a penalty of 2 decides between equal biases"


async def test_penalties_count_what_has_been_said(line: Line) -> None:
    """Two tokens are biased alike; each time that one is said the other becomes likelier by the frequency penalty."""
    codec = TextCodec.from_file(line.model.tokenizer_path)
    fields = {"prompt": [300], "max_tokens": 16, "logit_bias": {"400": 100, "401": 100}, "logprobs": 0}
    plain = (await complete(line, **fields))["choices"][0]["logprobs"]["tokens"]
    fair = (await complete(line, frequency_penalty=2, **fields))["choices"][0]["logprobs"]["tokens"]
    words = {Vocabulary(codec, ()).word(i).token for i in (400, 401)}
    assert set(plain) | set(fair) <= words
    spread = max(fair.count(w) for w in words) - min(fair.count(w) for w in words)
    assert spread < max(plain.count(w) for w in words) - min(plain.count(w) for w in words)


async def test_min_tokens_keeps_the_end_away_until_they_are_made(line: Line) -> None:
    (end_id,) = line.model.eos_token_ids
    fields: dict[str, Any] = {"max_tokens": 9, "logit_bias": {str(end_id): 100}, "ignore_eos": False}
    early, late = await complete(line, **fields), await complete(line, min_tokens=5, **fields)
    assert (early["usage"]["completion_tokens"], late["usage"]["completion_tokens"]) == (1, 6)
    assert early["choices"][0]["text"] == ""
    assert [a["choices"][0]["finish_reason"] for a in (early, late)] == ["stop", "stop"]


async def test_a_replica_that_is_lost_leaves_no_mark_in_three_streams_with_logprobs(
    slow_line: Line, tiny_model: ModelFolder
) -> None:
    fields = {"n": 3, "temperature": 1, "seed": 11, "max_tokens": 30, "logprobs": 2, "echo": True, "stop": ["\x00\x01"]}
    undisturbed = await streamed(slow_line, **fields)

    async def spoken() -> int:
        return sum(replica.engine.progress().load.tokens_total for replica in slow_line.replicas)

    before = await spoken()

    async def lose_one() -> None:
        """Once every choice has spoken: the replica that runs most of them."""
        await until(spoken, lambda tokens: tokens >= before + 15)
        busy = [sum(p.requests for p in r.engine.progress().load.running) for r in slow_line.replicas]
        assert sum(busy) == 3
        await slow_line.replicas[busy.index(max(busy))].close()

    losing = asyncio.create_task(lose_one())
    disturbed = await streamed(slow_line, **fields)
    await losing
    assert await slow_line.metric(CONTINUED) >= 1
    for choice in range(3):
        whole, cut = undisturbed[choice], disturbed[choice]
        assert text_of(cut) == text_of(whole)
        assert [e["finish_reason"] for e in cut if e["finish_reason"]] == ["length"]
        for name in ("tokens", "text_offset"):
            assert listed(cut, name) == listed(whole, name)
        assert near(listed(cut, "token_logprobs"), listed(whole, "token_logprobs"))
        # All of the prompt and of the output, each once: none fell into the gap between two replicas.
        prompt = PromptTokenizer(tiny_model.tokenizer_path).encode("once upon a time", add_special_tokens=True)
        assert len(listed(cut, "tokens")) == len(prompt) + 30
    assert len({text_of(disturbed[k]) for k in range(3)}) == 3


async def test_a_client_that_leaves_three_choices_frees_the_blocks_of_all(slow_line: Line) -> None:
    async with stream(slow_line.client, max_tokens=500, n=3) as events:
        await anext(events)
        assert sum(slow_line.blocks_used()) > 0
    assert await nothing_is_left(slow_line) < 1.0
    assert await slow_line.metric(REQUESTS, outcome="cancelled") == 3


# --- priority ---


@pytest.fixture
def no_collections() -> Iterator[None]:
    """The line shares this process with all that tests have ever imported: to look through that takes as long as ten steps."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collections")
async def test_urgent_work_starts_within_two_steps_though_64_streams_hold_every_slot(slow_line: Line) -> None:
    """Two steps and its own prefill, which is one step here: at most three, of which one has begun before it came."""
    result = await demonstrate(slow_line.url, flex_tokens=80)
    assert result.slots == SLOTS == 64
    assert result.preemptions == 1
    assert result.texts_equal == 64
    assert result.flex_ended_before_it == 0
    # Half a step of slack for each: the machine is shared, and then the measured step is longer than the padded one.
    assert result.urgent_ttft_ms <= 3 * 1.5 * max(STEP_S * 1000, result.step_ms)


async def test_equal_priority_never_preempts(slow_line: Line) -> None:
    async def one(client: httpx.AsyncClient) -> None:
        async with stream(client, max_tokens=12, service_tier="flex") as events:
            async for _ in events:
                pass

    await asyncio.gather(*(one(slow_line.client) for _ in range(SLOTS + 8)))
    assert await slow_line.metric(PREEMPTIONS) == 0
    assert await slow_line.metric(REQUESTS, outcome="finished") == SLOTS + 8


async def test_more_urgent_classes_leave_the_queue_first(slow_line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """All slots are held by urgent work, so that nothing is preempted and the order is the queue's alone."""
    left: list[str] = []
    add = ReplicaLink.add

    def watched(link: ReplicaLink, request: Request, attempt: int, *, shared: bool = False) -> int:
        left.append(request.priority_class)
        return add(link, request, attempt, shared=shared)

    monkeypatch.setattr(ReplicaLink, "add", watched)

    async def one(tier: str, max_tokens: int) -> None:
        async with stream(slow_line.client, max_tokens=max_tokens, service_tier=tier) as events:
            async for _ in events:
                pass

    fillers = [asyncio.create_task(one("priority", 900)) for _ in range(SLOTS)]
    await until(lambda: slow_line.metric(IN_FLIGHT), lambda n: n == SLOTS)
    waiting = []
    for turn, tier in enumerate(("flex", "default", "priority"), start=1):
        waiting += [asyncio.create_task(one(tier, 2)) for _ in range(4)]
        await until(lambda: slow_line.metric(QUEUED), float(4 * turn).__eq__)
    for filler in fillers:
        filler.cancel()
    await asyncio.gather(*waiting)
    await asyncio.gather(*fillers, return_exceptions=True)
    assert left[SLOTS:] == ["interactive"] * 4 + ["standard"] * 4 + ["batch"] * 4


# --- clients that leave ---


async def test_a_client_that_leaves_while_decoding_frees_its_blocks_within_a_second(slow_line: Line) -> None:
    async with stream(slow_line.client, max_tokens=500) as events:
        await anext(events)
        assert sum(slow_line.blocks_used()) > 0
    assert await nothing_is_left(slow_line) < 1.0
    assert await slow_line.metric(REQUESTS, outcome="cancelled") == 1


async def test_a_client_that_leaves_with_another_request_pipelined_behind_is_noticed_too(slow_line: Line) -> None:
    host, port = slow_line.url.removeprefix("http://").split(":")
    payload = json.dumps(body(max_tokens=500)).encode()
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(payload)}\r\n\r\n"
    writer.write(head.encode() + payload + b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    await reader.readuntil(b"data: ")
    writer.transport.abort()
    assert await nothing_is_left(slow_line) < 1.0
    assert await slow_line.metric(REQUESTS, outcome="cancelled") == 1


async def test_a_request_that_offers_http_2_is_answered(line: Line) -> None:
    upgrade = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAMAAABkAAQAAP__"}
    answer = await line.client.post("/v1/completions", json=body(stream=False, max_tokens=2), headers=upgrade)
    assert answer.status_code == 200, answer.text


async def test_a_client_that_leaves_in_prefill_frees_its_blocks_within_a_second(slow_line: Line) -> None:
    """960 tokens at 64 a step are 15 steps, close to a second: it leaves when the first have run."""
    prompt = list(range(10, 970))
    task = asyncio.create_task(slow_line.client.post("/v1/completions", json=body(prompt=prompt, max_tokens=2)))

    async def used() -> int:
        return sum(slow_line.blocks_used())

    await until(used, lambda blocks: blocks > 0)
    assert not task.done()
    task.cancel()
    assert await nothing_is_left(slow_line) < 1.0
    assert await slow_line.metric(REQUESTS, outcome="cancelled") == 1
    assert sum(r.engine.progress().load.tokens_total for r in slow_line.replicas) == 0


async def test_a_client_that_leaves_the_queue_never_reaches_a_replica(slow_line: Line) -> None:
    fillers = [
        asyncio.create_task(slow_line.client.post("/v1/completions", json=body(max_tokens=30, stream=False)))
        for _ in range(SLOTS)
    ]
    await until(lambda: slow_line.metric(IN_FLIGHT), lambda n: n == SLOTS)
    queued = asyncio.create_task(slow_line.client.post("/v1/completions", json=body(max_tokens=30)))
    await until(lambda: slow_line.metric(QUEUED), lambda n: n == 1)
    queued.cancel()
    _, waited_s = await until(lambda: slow_line.metric(QUEUED), lambda n: n == 0)
    assert waited_s < 1.0
    await asyncio.gather(*fillers)
    adds = sum(r.engine.progress().load.adds_total for r in slow_line.replicas)
    assert adds == SLOTS
    assert await nothing_is_left(slow_line) < 1.0


async def test_a_replica_that_was_out_of_reach_is_used_again(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = asyncio.Event()
    replica_lost = line.core.replica_lost

    def told(*args: Any) -> None:
        replica_lost(*args)
        lost.set()

    async def unreachable(*args: Any) -> None:
        raise RejectedError("cut off by the test")

    monkeypatch.setattr(line.core, "replica_lost", told)
    with monkeypatch.context() as cut:
        cut.setattr("deployments.replica_link.connect", unreachable)
        link = next(link for link in line.router._links.values() if link is not None)
        assert link._link is not None
        link._link.abort("cut off by the test")
        await asyncio.wait_for(lost.wait(), 10)
        await until(line.ready_replicas, (1.0).__eq__)
    await until(line.ready_replicas, (2.0).__eq__)


@pytest.mark.slow
async def test_blocks_are_conserved_over_1000_random_requests_of_which_300_are_dropped(line: Line) -> None:
    rng = random.Random(7)
    gate = asyncio.Semaphore(100)
    plans = [
        {
            "drop_after": rng.randrange(0, 20) if i % 10 < 3 else None,
            "prompt": [rng.randrange(10, 1000) for _ in range(rng.randrange(1, 200))],
            "max_tokens": rng.randrange(1, 24),
            "temperature": rng.choice([0, 1]),
            "service_tier": rng.choice(["flex", "default", "priority"]),
        }
        for i in range(1000)
    ]

    async def one(plan: dict[str, Any]) -> str:
        drop_after = plan.pop("drop_after")
        got = 0
        async with gate, stream(line.client, **plan) as events:
            async for event in events:
                if drop_after is not None and got >= drop_after:
                    return "dropped"
                got += 1
                assert "error" not in event
        return "finished"

    ends = await asyncio.gather(*(one(plan) for plan in plans))
    assert await nothing_is_left(line) < 2.0
    seen = {o: await line.metric(REQUESTS, outcome=o) for o in ("finished", "cancelled")}
    assert sum(seen.values()) == await line.metric(REQUESTS) == 1000
    # A stream may end between the last event that its client read and the drop.
    assert ends.count("dropped") >= seen["cancelled"] > 0
    for replica in line.replicas:
        replica.engine._engine.check_integrity()  # type: ignore[attr-defined]
