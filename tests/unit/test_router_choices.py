"""Several choices, logprobs and echoes on the wire: what is one, what is each choice's own, and that nothing is lost."""

from __future__ import annotations

import asyncio
import codecs
import json
import threading
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest

from cluster.config import PriorityClass
from cluster.engine.text import TextCodec
from cluster.model import ModelFolder
from cluster.types import FinishReason, Generation, Outcome, ReplicaId, Request, TokenDelta
from router.logprobs import Vocabulary, Word
from tests.unit.fake_replica import FakeReplica, expected_text, score, token_id
from tests.unit.http_kit import CHAT, HI, TEXT, World, client, events, plain_client, post, raw_post, serving

utf8 = codecs.getincrementaldecoder("utf-8")


def chunks_of(got: list[str]) -> list[dict[str, Any]]:
    assert got[-1] == "[DONE]"
    assert got.count("[DONE]") == 1
    return [json.loads(event) for event in got[:-1]]


def by_index(chunks: Iterable[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """The chunks of each choice."""
    choices: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for chunk in chunks:
        for choice in chunk["choices"]:
            choices[choice["index"]].append(choice)
    return dict(choices)


def said(choices: list[dict[str, Any]]) -> str:
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


def finishes(choices: list[dict[str, Any]]) -> list[str]:
    return [c["finish_reason"] for c in choices if c["finish_reason"] is not None]


def speaking(world: World, model: ModelFolder) -> TextCodec:
    """Let the replica speak with the model's own tokens."""
    codec = TextCodec.from_file(model.tokenizer_path)
    world.replica.codec, world.replica.end_ids = codec, frozenset(model.eos_token_ids)
    return codec


def drawn(request: Request, model: ModelFolder) -> list[int]:
    """The ids of a request's output, without an end token."""
    ids = [token_id(request.request_id, k) for k in range(request.sampling.max_tokens)]
    return next((ids[:k] for k, i in enumerate(ids) if i in model.eos_token_ids), ids)


def expected_chat(codec: TextCodec, ids: list[int], top: int) -> list[dict[str, Any]]:
    def word(token: int) -> dict[str, Any]:
        raw = codec.token_bytes(token)
        assert raw is not None
        try:
            return {"token": raw.decode(), "bytes": list(raw)}
        except UnicodeDecodeError:
            return {"token": "bytes:" + "".join(f"\\x{b:02x}" for b in raw), "bytes": list(raw)}

    content = []
    for k, token in enumerate(ids):
        scored = score(token, k, top)
        likeliest = [word(t) | {"logprob": p} for t, p in scored.top]
        content.append(word(token) | {"logprob": scored.logprob, "top_logprobs": likeliest})
    return content


# --- n ---


@pytest.mark.parametrize("temperature", [0, 1])
async def test_each_choice_has_its_own_text_and_the_prompt_is_counted_once(
    tiny_model: ModelFolder, temperature: int
) -> None:
    async with serving(tiny_model) as world, client(world) as api:
        answer = await api.completions.create(
            model="tiny-llama", prompt="hello", max_tokens=5, n=3, temperature=temperature
        )
        requests = {r.choice: r for r, _ in world.replica.added}
        assert sorted(requests) == [0, 1, 2]
        assert [c.index for c in answer.choices] == [0, 1, 2]
        assert [c.text for c in answer.choices] == [expected_text(requests[k]) for k in range(3)]
        assert [c.finish_reason for c in answer.choices] == ["length"] * 3
        assert {r.group_id for r in requests.values()} == {answer.id} == {requests[0].request_id}
        assert answer.usage is not None
        prompt = len(requests[0].prompt_ids)
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt, 15)
        assert answer.usage.total_tokens == prompt + 15
        prompts = world.registry.get_sample_value("forebay_prompt_tokens_total", {"priority_class": "standard"})
        assert prompts == prompt
        assert world.ended(Outcome.FINISHED) == 3


async def test_streamed_choices_are_interleaved_and_each_ends_once_before_the_one_end(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model) as world:
        body = CHAT | {"n": 3, "stream": True, "stream_options": {"include_usage": True}}
        chunks = chunks_of(await events(await post(world, "/v1/chat/completions", body)))
        requests = {r.choice: r for r, _ in world.replica.added}
        choices = by_index(chunks)
        assert sorted(choices) == [0, 1, 2]
        for k, of_choice in choices.items():
            assert of_choice[0]["delta"] == {"role": "assistant", "content": ""}
            assert said(of_choice) == expected_text(requests[k])
            assert finishes(of_choice) == ["length"]
            assert of_choice[-1]["finish_reason"] is not None, "the reason is the last that a choice says"
        order = [c["choices"][0]["index"] for c in chunks if c["choices"] and c["choices"][0]["delta"].get("content")]
        assert order != sorted(order), "they take turns"
        usages = [chunk["usage"] for chunk in chunks if chunk["usage"] is not None]
        prompt = len(requests[0].prompt_ids)
        counts = {"prompt_tokens": prompt, "completion_tokens": 15, "total_tokens": prompt + 15}
        assert usages == [counts | {"prompt_tokens_details": {"cached_tokens": 0}}]
        assert chunks[-1]["choices"] == []


async def test_choices_are_admitted_all_or_none(tiny_model: ModelFolder) -> None:
    classes = (PriorityClass(name="standard", priority=0, max_queued_requests=2),)
    async with serving(tiny_model, auto=False, classes=classes) as world, plain_client(world) as http:
        world.replica.slots = 1
        world.replica.beat()
        running = asyncio.create_task(http.post("/v1/completions", json=TEXT))
        await world.until(lambda: world.replica.held)
        refused = await http.post("/v1/completions", json=TEXT | {"n": 3})
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert world.core.bands()[0].queued_requests == 0
        assert world.ended(Outcome.REJECTED_QUEUE_FULL) == 3
        taken = asyncio.create_task(http.post("/v1/completions", json=TEXT | {"n": 2}))
        await world.until(lambda: world.core.bands()[0].queued_requests == 2)
        for _ in range(20):
            world.replica.turn()
        assert (await running).status_code == (await taken).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_client_gone_aborts_all_its_choices(tiny_model: ModelFolder, stream: bool) -> None:
    async with serving(tiny_model, auto=False) as world:
        world.replica.slots = 2
        world.replica.beat()
        _, writer = await raw_post(world, TEXT | {"max_tokens": 500, "n": 3, "stream": stream})
        await world.until(lambda: len(world.replica.held) == 2)
        world.replica.turn()
        writer.close()
        await world.until(lambda: world.ended(Outcome.CANCELLED) == 3)
        assert not world.replica.held
        assert world.core.bands() == ()


async def test_error_of_one_choice_ends_the_request_and_aborts_the_others(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model, auto=False, retry_share=0) as world, plain_client(world) as http:
        body = TEXT | {"n": 3, "max_tokens": 50}
        for stream in (True, False):
            before = len(world.replica.added)
            asking = asyncio.create_task(http.post("/v1/completions", json=body | {"stream": stream}))
            await world.until(lambda: len(world.replica.held) == 3)
            world.replica.turn()
            await asyncio.sleep(0.01)  # the stream's first bytes leave
            bad = world.replica.added[before + 1][0].request_id
            world.replica.send(TokenDelta(bad, 1, 1, (), (), FinishReason.ERROR, "bad logits"))
            del world.replica.held[bad]
            response = await asking
            if stream:
                got = [json.loads(event) for event in await events(response)]
                assert [event["error"]["message"] for event in got if "error" in event] == ["bad logits"]
                assert "error" in got[-1]
                assert all(c["finish_reason"] is None for event in got[:-1] for c in event["choices"])
            else:
                assert (response.status_code, response.json()["error"]["message"]) == (500, "bad logits")
            await world.until(lambda: not world.replica.held)
            world.replica.beat()
        assert world.ended(Outcome.ENGINE_ERROR) == 2
        assert world.ended(Outcome.CANCELLED) == 4


async def test_choices_share_the_bound_of_their_client(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model, auto=False, max_stream_bytes=100_000) as world:
        reader, writer = await raw_post(world, TEXT | {"max_tokens": 1900, "stream": True, "n": 2})
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await world.until(lambda: len(world.replica.held) == 2)
        ids = list(world.replica.held)
        sent = 0
        while not world.ended(Outcome.SLOW_CLIENT):
            assert sent < 1900
            world.replica.send(TokenDelta(ids[sent % 2], 1, sent // 2, (1,), ("x" * 20_000,)))
            sent += 1
            await asyncio.sleep(0)
        await world.until(lambda: world.ended(Outcome.CANCELLED) == 1)
        assert not world.replica.held
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        received = await asyncio.wait_for(reader.read(), 10)
        assert received.count(b'"error"') == 1
        assert b'"slow_client"' in received
        assert b"[DONE]" not in received
        writer.close()


# --- logprobs ---


@pytest.mark.parametrize("n", [1, 3])
async def test_logprobs_stay_whole_when_a_replica_is_lost_under_the_stream(tiny_model: ModelFolder, n: int) -> None:
    """Half the tokens come from one replica and half from another, which is told what has been emitted."""
    async with serving(tiny_model, auto=False) as world, plain_client(world) as http:
        codec = speaking(world, tiny_model)
        fields = {"max_tokens": 24, "n": n, "logprobs": True, "top_logprobs": 2, "stream": True}
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=CHAT | fields))
        await world.until(lambda: len(world.replica.held) == n)
        for _ in range(9):
            world.replica.turn()
        await asyncio.sleep(0.01)
        world.replica.step()  # a frame that is lost with it
        other = FakeReplica(
            world.core, ReplicaId("r2"), Generation(1, "b"), codec=codec, end_ids=world.replica.end_ids
        ).connect()
        world.replica.die()
        for _ in range(24):
            other.turn()
        choices = by_index(chunks_of(await events(await asking)))
        # Ids are drawn by chance, and tokens follow from them: one may have ended before.
        going_on = [r for r, _ in world.replica.added if len(drawn(r, tiny_model)) >= 9]
        assert [len(r.emitted_ids) for r, _ in other.added] == [9] * len(going_on)
        for request, _ in world.replica.added:
            ids = drawn(request, tiny_model)
            of_choice = choices[request.choice]
            content = [entry for c in of_choice if c["logprobs"] for entry in c["logprobs"]["content"]]
            assert content == expected_chat(codec, ids, 2)
            assert said(of_choice) == codec.text(ids)
        assert world.ended(Outcome.FINISHED) == n


async def test_logprobs_stay_whole_when_a_link_breaks_and_is_rewound(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model, auto=False) as world, plain_client(world) as http:
        codec = speaking(world, tiny_model)
        body = TEXT | {"max_tokens": 12, "logprobs": 1, "echo": True, "stream": True}
        asking = asyncio.create_task(http.post("/v1/completions", json=body))
        await world.until(lambda: world.replica.held)
        request = world.held()
        world.replica.step()  # lost with the link, the prompt's logprobs with it
        world.replica.break_link()
        world.replica.connect()
        for _ in range(5):
            world.replica.turn()
        world.replica.step()
        world.replica.break_link()
        world.replica.connect()
        for _ in range(12):
            world.replica.turn()
        of_choice = by_index(chunks_of(await events(await asking)))[0]
        forms = [c["logprobs"] for c in of_choice if c["logprobs"]]
        prompt, output = list(request.prompt_ids), drawn(request, tiny_model)
        scores = [score(t, k, 1).logprob for k, t in enumerate(prompt)][1:]
        scores += [score(t, k, 1).logprob for k, t in enumerate(output)]
        assert [p for form in forms for p in form["token_logprobs"]] == [None, *scores]
        assert len({len([x for form in forms for x in form[name]]) for name in forms[0]}) == 1
        assert said(of_choice) == "hello" + codec.text(output)
        assert len(world.replica.added) == 1, "it was resumed, not begun again"


@pytest.mark.parametrize("api", ["chat", "completions"])
async def test_official_client_reads_the_same_logprobs_whole_and_streamed(tiny_model: ModelFolder, api: str) -> None:
    async with serving(tiny_model) as world, client(world) as sdk:
        speaking(world, tiny_model)
        world.replica.script = lambda request, k: (k * 37 + 11) % 1000  # the same in both
        if api == "chat":
            asked: dict[str, Any] = {"model": "tiny-llama", "messages": HI, "max_tokens": 30}
            asked |= {"logprobs": True, "top_logprobs": 3}
            whole = (await sdk.chat.completions.create(**asked)).choices[0]
            parts = [c async for c in await sdk.chat.completions.create(**asked, stream=True)]
            assert whole.logprobs is not None
            assert whole.logprobs.content
            streamed = [e for c in parts if (lp := c.choices[0].logprobs) and lp.content for e in lp.content]
            assert streamed == whole.logprobs.content
            assert all(len(e.top_logprobs) == 3 for e in streamed)
            spoken = b"".join(bytes(e.bytes or ()) for e in streamed if not e.token.startswith("<|"))
            assert utf8("replace").decode(spoken) == whole.message.content
        else:
            asked = {"model": "tiny-llama", "prompt": "hello", "max_tokens": 30, "logprobs": 3, "echo": True}
            text = (await sdk.completions.create(**asked)).choices[0]
            pieces = [c.choices[0] async for c in await sdk.completions.create(**asked, stream=True)]
            assert text.logprobs is not None
            forms = [p.logprobs for p in pieces if p.logprobs]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                assert [x for f in forms for x in getattr(f, name)] == getattr(text.logprobs, name)
            assert "".join(p.text for p in pieces) == text.text
            offsets = text.logprobs.text_offset or []
            assert offsets == sorted(offsets)
            assert offsets[0] == 0
            tokens = text.logprobs.tokens or []
            for before, token, offset in zip(["", *tokens], tokens, offsets, strict=False):
                if not before.startswith("bytes:") and not token.startswith(("bytes:", "<|")):
                    assert text.text[offset:].startswith(token)


async def test_plain_requests_say_logprobs_null(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model) as world:
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
            assert (await post(world, path, body)).json()["choices"][0]["logprobs"] is None
            chunks = chunks_of(await events(await post(world, path, body | {"stream": True})))
            assert all(c["logprobs"] is None for chunk in chunks for c in chunk["choices"])


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_of_a_long_prompt_keep_no_other_stream_waiting(
    tiny_model: ModelFolder, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are written by another thread than the event loop's, and whole."""
    writers: set[int] = set()
    word = Vocabulary.word

    def watched(self: Vocabulary, token: int) -> Word:
        writers.add(threading.get_ident())
        return word(self, token)

    monkeypatch.setattr(Vocabulary, "word", watched)
    async with serving(tiny_model) as world:
        speaking(world, tiny_model)
        prompt = [5 + k % 900 for k in range(1500)]
        body = TEXT | {"prompt": prompt, "echo": True, "max_tokens": 0, "logprobs": 1, "stream": stream}
        answer = await post(world, "/v1/completions", body)
        choices = by_index(chunks_of(await events(answer)))[0] if stream else answer.json()["choices"]
        logprobs = [p for c in choices if c["logprobs"] for p in c["logprobs"]["token_logprobs"]]
        assert logprobs == [None, *[score(t, k, 1).logprob for k, t in enumerate(prompt)][1:]]
        assert writers
        assert threading.get_ident() not in writers


# --- echo ---


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_puts_the_prompt_before_each_choice_s_text(tiny_model: ModelFolder, stream: bool) -> None:
    async with serving(tiny_model) as world:
        body = TEXT | {"echo": True, "n": 2, "stream": stream}
        answer = await post(world, "/v1/completions", body)
        requests = [r for r, _ in world.replica.added]
        texts = [f"hello{expected_text(r)}" for r in requests]
        if stream:
            choices = by_index(chunks_of(await events(answer)))
            assert [said(choices[k]) for k in range(2)] == texts
        else:
            assert [c["text"] for c in answer.json()["choices"]] == texts
            assert answer.json()["usage"]["completion_tokens"] == 10


async def test_echo_of_token_ids_is_their_text(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model) as world:
        await post(world, "/v1/completions", TEXT | {"prompt": "Hé llo 水"})
        ids = list(world.replica.added[0][0].prompt_ids)
        answer = await post(world, "/v1/completions", TEXT | {"prompt": ids, "echo": True})
        assert answer.json()["choices"][0]["text"].startswith("Hé llo 水")


# --- public reports ---


@pytest.mark.parametrize("stream", [False, True])
async def test_no_character_of_a_stop_string_is_ever_sent_nor_the_logprobs_of_its_tokens(
    tiny_model: ModelFolder, stream: bool
) -> None:
    """Public report: the first tokens of a stop string of several tokens were streamed before it was complete."""
    async with serving(tiny_model) as world:
        codec = speaking(world, tiny_model)
        alphabet = "ABCDEFGHIJKLMNOP"
        letters = [t for c in alphabet for t in range(1024) if codec.token_bytes(t) == c.encode()]
        world.replica.script = lambda request, k: letters[k]
        body = TEXT | {"stop": ["DEFGHIJ"], "temperature": 0, "max_tokens": 14, "stream": stream, "logprobs": 0}
        answer = await post(world, "/v1/completions", body)
        if stream:
            of_choice = by_index(chunks_of(await events(answer)))[0]
            tokens = [t for c in of_choice if c["logprobs"] for t in c["logprobs"]["tokens"]]
            text, reasons = said(of_choice), finishes(of_choice)
        else:
            (choice,) = answer.json()["choices"]
            text, reasons, tokens = choice["text"], [choice["finish_reason"]], choice["logprobs"]["tokens"]
        assert (text, reasons, tokens) == ("ABC", ["stop"], ["A", "B", "C"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": ""}, "prompt"),
        ("/v1/completions", {"prompt": [""]}, "prompt"),
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {"prompt": [[]]}, "prompt"),
        ("/v1/completions", {"prompt": "", "echo": True, "max_tokens": 0, "logprobs": 1}, "prompt"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
    ],
)
async def test_prompt_without_tokens_is_refused_and_the_next_request_succeeds(
    tiny_model: ModelFolder, path: str, fields: dict[str, Any], param: str, stream: bool
) -> None:
    """Public report: an empty prompt reached the engine and killed the server."""
    async with serving(tiny_model) as world:
        refused = await post(world, path, {"model": "tiny-llama", "max_tokens": 5, "stream": stream} | fields)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        assert not world.replica.added
        assert (await post(world, "/v1/completions", TEXT)).status_code == 200


@pytest.mark.parametrize("logprobs", [None, 0, 1])
@pytest.mark.parametrize("prompt", ["one two three", "a", [5], [5, 900, 17]], ids=str)
async def test_scoring_a_prompt_generates_nothing(
    tiny_model: ModelFolder, prompt: str | list[int], logprobs: int | None
) -> None:
    """Public report: echo with max_tokens 0 gave a 500, or let one generated token into text and usage."""
    async with serving(tiny_model) as world:
        codec = speaking(world, tiny_model)
        body = {"model": "tiny-llama", "prompt": prompt, "echo": True, "max_tokens": 0, "logprobs": logprobs, "n": 2}
        whole = (await post(world, "/v1/completions", body)).json()
        request = world.replica.added[0][0]
        text = prompt if isinstance(prompt, str) else codec.text(prompt)
        scores = [score(t, k, logprobs or 0).logprob for k, t in enumerate(request.prompt_ids)][1:]
        assert [c["text"] for c in whole["choices"]] == [text] * 2
        assert [c["finish_reason"] for c in whole["choices"]] == ["length"] * 2
        assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (len(request.prompt_ids), 0)
        for choice in whole["choices"]:
            form = choice["logprobs"]
            assert (form is None) == (logprobs is None)
            if form is not None:
                assert form["token_logprobs"] == [None, *scores]
                assert {len(values) for values in form.values()} == {len(request.prompt_ids)}
        streamed = await post(world, "/v1/completions", body | {"stream": True})
        for index, of_choice in by_index(chunks_of(await events(streamed))).items():
            assert said(of_choice) == text
            assert finishes(of_choice) == ["length"]
            forms = [c["logprobs"] for c in of_choice if c["logprobs"]]
            assert forms == ([whole["choices"][index]["logprobs"]] if logprobs is not None else [])


@pytest.mark.parametrize("lost", ["replica", "frame"])
async def test_scoring_goes_on_elsewhere_when_it_is_lost_before_its_answer(tiny_model: ModelFolder, lost: str) -> None:
    async with serving(tiny_model, auto=False) as world, plain_client(world) as http:
        speaking(world, tiny_model)
        body = TEXT | {"prompt": "one two three", "echo": True, "max_tokens": 0, "logprobs": 1}
        asking = asyncio.create_task(http.post("/v1/completions", json=body))
        await world.until(lambda: world.replica.held)
        if lost == "replica":
            other = FakeReplica(world.core, ReplicaId("r2"), Generation(1, "b"), codec=world.replica.codec).connect()
            world.replica.die()
            other.turn()
        else:
            world.replica.step()
            world.replica.break_link()
            world.replica.connect()
            world.replica.turn()
        choice = (await asking).json()["choices"][0]
        assert choice["text"] == "one two three"
        request = world.replica.added[0][0]
        assert len(choice["logprobs"]["token_logprobs"]) == len(request.prompt_ids)


async def test_null_is_an_absent_field_on_the_wire_too(tiny_model: ModelFolder) -> None:
    """Public report: an explicit null for an optional number made the server answer 500."""
    optional = [
        "max_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
        "repetition_penalty", "logit_bias", "seed", "stop", "min_tokens", "ignore_eos", "logprobs", "top_logprobs", "n",
        "best_of", "echo", "suffix", "stream", "stream_options", "priority", "service_tier", "expected_output_tokens",
        "response_format", "guided_json", "guided_regex", "tools", "tool_choice", "user", "max_completion_tokens",
    ]  # fmt: skip
    async with serving(tiny_model) as world:
        for path, body in (
            ("/v1/chat/completions", {"model": "tiny-llama", "messages": HI}),
            ("/v1/completions", {"model": "tiny-llama", "prompt": "test"}),
        ):
            fields = [f for f in optional if not (f == "max_completion_tokens" and "prompt" in body)]
            for nulls in [[name] for name in fields] + [fields]:
                answer = await post(world, path, body | dict.fromkeys(nulls))
                assert answer.status_code == 200, (nulls, answer.text)
        sent = [r.sampling for r, _ in world.replica.added]
        assert len({(s.temperature, s.top_p, s.logprobs, s.stop, s.logit_bias, s.min_tokens) for s in sent}) == 1


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"guided_regex": "ab**"}, "guided_regex"),
        (
            "/v1/chat/completions",
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"a": "not-a-schema"}}},
                }
            },
            "response_format",
        ),
        ("/v1/completions", {"guided_grammar": "(((("}, "guided_grammar"),
        ("/v1/completions", {"structured_outputs": {"regex": "ab**"}}, "structured_outputs"),
        ("/v1/chat/completions", {"tools": [{"type": "function"}]}, "tools"),
        ("/v1/completions", {"logit_bias": {"99999999": 1}}, "logit_bias"),
    ],
)
async def test_what_is_not_offered_reaches_no_engine_and_hurts_no_other_stream(
    tiny_model: ModelFolder, path: str, fields: dict[str, Any], param: str
) -> None:
    """Public report: a malformed expression for constrained output failed in the engine and took all users down."""
    async with serving(tiny_model, auto=False) as world, plain_client(world) as http:
        world.replica.slots = 20
        world.replica.beat()
        body = TEXT | {"max_tokens": 8, "stream": True}
        others = [asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(20)]
        await world.until(lambda: len(world.replica.held) == 20)
        world.replica.turn()
        base = CHAT if "chat" in path else TEXT
        refused = await http.post(path, json=base | fields)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        for _ in range(8):
            world.replica.turn()
        requests = {r.request_id: r for r, _ in world.replica.added}
        assert len(requests) == len(world.replica.added) == 20, "nothing was sent for it, and nothing again"
        for answer in await asyncio.gather(*others):
            chunks = chunks_of(await events(answer))
            assert said(by_index(chunks)[0]) == expected_text(requests[chunks[0]["id"]])
