"""Whatever a client sends, it alone is answered for it: by its parameter's name, while twenty streams beside it go on.

One application runs through all rows. Around each row every stream gets one more token, and at the end its whole text.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import httpx
import pytest
import pytest_asyncio

from cluster.metrics import TURNED_AWAY
from cluster.model import ModelFolder
from router.bodies import MAX_CHOICES, MAX_STOP_CHARS, MAX_STOPS
from router.errors import AT_THE_DOOR
from router.exchange import MAX_HEADERS
from router.headers import MAX_MS, MAX_SESSION_CHARS
from router.prompts import TEXT_BYTES_PER_TOKEN
from tests.unit.fake_replica import expected_text
from tests.unit.http_kit import HI, MAX_LEN, TEXT, World, plain_client, raw_post, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

BYSTANDERS = 20
BYSTANDER_TOKENS = 1500
MAX_BODY_BYTES = 2**20
CHAT_PATH, TEXT_PATH, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"
MODEL = b'"model":"tiny-llama"'
PARAM_OF_NONE = None
"""Of bytes that have no parameters."""


class Row(NamedTuple):
    what: str
    path: str
    body: bytes
    param: str | None
    status: int = 400
    headers: dict[str, str] = {}  # noqa: RUF012 - nobody changes it


def text(what: str, param: str | None, status: int = 400, headers: dict[str, str] | None = None, **fields: Any) -> Row:
    return Row(what, TEXT_PATH, json.dumps(TEXT | fields).encode(), param, status, headers or {})


def chat(what: str, param: str | None, **fields: Any) -> Row:
    body = {"model": "tiny-llama", "messages": HI, "max_tokens": 5} | fields
    return Row(what, CHAT_PATH, json.dumps(body).encode(), param)


def raw(what: str, body: bytes, param: str | None = PARAM_OF_NONE, path: str = TEXT_PATH) -> Row:
    return Row(what, path, body, param)


def spoken(headers: dict[str, str], param: str, status: int = 400) -> Row:
    return text(f"header {param} {list(headers.values())}"[:70], param, status, headers)


ROWS = [
    # Bytes that are no JSON object.
    raw("empty", b""),
    raw("cut off", b'{"model": "tiny-llama", "prompt": "x'),
    raw("two values", b'{"model": "tiny-llama"} {}'),
    raw("array", b"[1, 2]"),
    raw("string", b'"hello"'),
    raw("null", b"null"),
    raw("single quotes", b"{'model': 'tiny-llama'}"),
    raw("trailing comma", b"{" + MODEL + b',"prompt":"x",}'),
    raw("byte order mark", b"\xef\xbb\xbf{" + MODEL + b"}"),
    raw("UTF-16", ('{"model": "tiny-llama"}').encode("utf-16")),
    raw("invalid UTF-8", b"{" + MODEL + b',"prompt":"\xff\xfe"}'),
    raw("overlong UTF-8", b"{" + MODEL + b',"prompt":"\xc0\xaf"}'),
    raw("lone high surrogate", b"{" + MODEL + b',"prompt":"\\ud800"}'),
    raw("lone low surrogate", b"{" + MODEL + b',"prompt":"a\\udc00b"}'),
    raw("half a pair as a name, twice", b'{"\\ud800":1,"\\ud800":2}'),
    raw("encoded surrogate", b"{" + MODEL + b',"prompt":"\xed\xa0\x80"}'),
    raw("raw NUL", b"{" + MODEL + b',"prompt":"\x00"}'),
    raw("NaN", b"{" + MODEL + b',"prompt":"x","temperature":NaN}'),
    raw("Infinity", b"{" + MODEL + b',"prompt":"x","temperature":Infinity}'),
    raw("minus Infinity", b"{" + MODEL + b',"prompt":"x","top_p":-Infinity}'),
    raw("float out of range", b"{" + MODEL + b',"prompt":"x","temperature":1e999}'),
    raw("5,000 digits", b"{" + MODEL + b',"prompt":"x","max_tokens":' + b"9" * 5000 + b"}"),
    raw("deep arrays", b"[" * 200_000),
    raw("deep objects", b'{"a":' * 100_000),
    raw("deep within a field", b"{" + MODEL + b',"prompt":' + b"[" * 5000 + b"]" * 5000 + b"}"),
    raw("340,000 empty lists", b"{" + MODEL + b',"prompt":[' + b"[]," * 340_000 + b"[]]}"),
    raw("60,000 names", b"{" + b",".join(b'"k%d":1' % k for k in range(60_000)) + b"}"),
    raw("names without end in a message", b"{" + MODEL + b',"messages":[{' + b",".join(b'"k%d":1' % k for k in range(2000)) + b"}]}", "messages[0].k0", CHAT_PATH),
    raw("wrong ids without end", b'{"tokens":[' + b'"x",' * 200_000 + b"5]}", "tokens[0]", DETOKENIZE),
    raw("gzip", b"\x1f\x8b\x08\x00" + bytes(100)),
    # One name twice.
    raw("model twice", b"{" + MODEL + b"," + MODEL + b',"prompt":"x"}', "model"),
    raw("priority twice", b"{" + MODEL + b',"prompt":"x","priority":-10,"priority":10}', "priority"),
    raw("role twice", b"{" + MODEL + b',"messages":[{"role":"user","role":"system","content":"x"}]}', "role", CHAT_PATH),
    # Wrong kinds and encodings of bodies.
    spoken({"content-type": "text/plain"}, "content-type", 415),
    spoken({"content-type": "application/x-www-form-urlencoded"}, "content-type", 415),
    spoken({"content-type": "multipart/form-data; boundary=x"}, "content-type", 415),
    spoken({"content-type": "application/json; charset=utf-16"}, "content-type", 415),
    spoken({"content-encoding": "gzip"}, "content-encoding", 415),
    # Headers.
    spoken({"x-llm-d-inference-objective": "vip"}, "x-llm-d-inference-objective"),
    spoken({"x-llm-d-inference-objective": ""}, "x-llm-d-inference-objective"),
    *(spoken({"x-forebay-timeout-ms": v}, "x-forebay-timeout-ms") for v in ("0", "-1", "1.5", "1e3", "+5", "٥", "soon", "")),
    spoken({"x-forebay-timeout-ms": str(MAX_MS + 1)}, "x-forebay-timeout-ms"),
    spoken({"x-forebay-timeout-ms": "9" * 5000}, "x-forebay-timeout-ms"),
    spoken({"x-llm-d-slo-ttft-ms": "0"}, "x-llm-d-slo-ttft-ms"),
    spoken({"x-llm-d-slo-ttft-ms": "1_000"}, "x-llm-d-slo-ttft-ms"),
    spoken({"x-session-id": "s" * (MAX_SESSION_CHARS + 1)}, "x-session-id"),
    spoken({"x-session-id": "a b"}, "x-session-id"),
    spoken({"x-request-id": "r" * 5000}, "x-request-id"),
    # The model.
    text("model unknown", "model", 404, model="gpt-9"),
    text("model empty", "model", 404, model=""),
    text("model with NUL", "model", 404, model="tiny-llama\0"),
    text("model a number", "model", model=5),
    text("model null", "model", model=None),
    raw("model absent", b'{"prompt": "x"}', "model"),
    # Prompts.
    raw("prompt absent", b"{" + MODEL + b"}", "prompt"),
    text("prompt empty", "prompt", prompt=""),
    text("prompt empty list", "prompt", prompt=[]),
    text("prompt number", "prompt", prompt=5),
    text("prompt object", "prompt", prompt={"text": "x"}),
    text("several prompts", "prompt", prompt=["a", "b"]),
    text("several prompts of ids", "prompt", prompt=[[1], [2]]),
    text("mixed prompt", "prompt", prompt=[1, "a"]),
    text("negative id", "prompt", prompt=[5, -1]),
    text("id beyond the vocabulary", "prompt", prompt=[1024]),
    text("id of 70 bits", "prompt", prompt=[2**70]),
    text("ids of fractions", "prompt", prompt=[1.5]),
    text("ids of truths", "prompt", prompt=[True]),
    text("ids that fill the context", "prompt", prompt=[5] * MAX_LEN),
    text("130,000 ids", "prompt", prompt=[5] * 130_000),
    text("text longer than the context", "prompt", prompt="word " * MAX_LEN),
    text("text of digits", "prompt", prompt="1234567890" * MAX_LEN),
    text("text that is not even read", "prompt", prompt="x" * (TEXT_BYTES_PER_TOKEN * MAX_LEN + 1)),
    text("text of wide characters that is not even read", "prompt", prompt="水" * (TEXT_BYTES_PER_TOKEN * MAX_LEN // 3 + 1)),
    chat("messages empty", "messages", messages=[]),
    chat("messages a string", "messages", messages="hi"),
    chat("message a string", "messages[0]", messages=["hi"]),
    chat("role unknown", "messages[0].role", messages=[{"role": "robot", "content": "x"}]),
    chat("role of a tool", "messages[0].role", messages=[{"role": "tool", "content": "x"}]),
    chat("content null", "messages[0].content", messages=[{"role": "user", "content": None}]),
    chat("image", "messages[0].content", messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
    chat("audio part", "messages[0].content", messages=[{"role": "user", "content": [{"type": "input_audio"}]}]),
    chat("message field unknown", "messages[0].colour", messages=[{"role": "user", "content": "x", "colour": 1}]),
    chat("chat longer than the context", "messages", messages=[{"role": "user", "content": "word " * MAX_LEN}]),
    chat("chat not even read", "messages", messages=[{"role": "user", "content": "x" * 16 * MAX_LEN}]),
    # Fields out of their type or range.
    text("temperature above", "temperature", temperature=2.1),
    text("temperature below", "temperature", temperature=-0.1),
    text("temperature string", "temperature", temperature="1"),
    text("temperature huge", "temperature", temperature=10**400),
    text("top_p zero", "top_p", top_p=0),
    text("top_k fraction", "top_k", top_k=1.5),
    text("max_tokens negative", "max_tokens", max_tokens=-1),
    text("max_tokens zero", "max_tokens", max_tokens=0),
    text("max_tokens of 40 digits", "max_tokens", max_tokens=10**40),
    text("max_tokens beyond the context", "max_tokens", max_tokens=MAX_LEN),
    text("n zero", "n", n=0),
    text("n huge", "n", n=10**9),
    text("n one too many", "n", n=MAX_CHOICES + 1),
    text("n truth", "n", n=True),
    text("seed of 64 bits", "seed", seed=2**63),
    text("stop empty", "stop", stop=""),
    text("stop too long", "stop", stop="x" * (MAX_STOP_CHARS + 1)),
    text("too many stops", "stop", stop=["x"] * (MAX_STOPS + 1)),
    text("stop object", "stop", stop={"a": 1}),
    text("logit_bias of words", "logit_bias", logit_bias={"hello": 1}),
    text("logit_bias out of range", "logit_bias", logit_bias={"5": 101}),
    text("logit_bias beyond the vocabulary", "logit_bias", logit_bias={"1024": 1}),
    text("logprobs too many", "logprobs", logprobs=6),
    text("min_tokens above max_tokens", "min_tokens", min_tokens=6),
    text("stream a string", "stream", stream="true"),
    text("metadata not of strings", "metadata.a", metadata={"a": 1}),
    text("priority string", "priority", priority="high"),
    text("priority out of range", "priority", priority=10**9),
    text("service_tier unknown", "service_tier", service_tier="gold"),
    # Fields that do not go together.
    text("tier against priority", "service_tier, priority", service_tier="flex", priority=-10),
    text(
        "header against tier",
        "service_tier, x-llm-d-inference-objective",
        headers={"x-llm-d-inference-objective": "batch"},
        service_tier="priority",
    ),
    text("stream_options without stream", "stream_options", stream_options={"include_usage": True}),
    text("best_of above n", "best_of", best_of=4, n=2),
    chat("two maxima", "max_tokens, max_completion_tokens", max_completion_tokens=6),
    chat("top_logprobs alone", "top_logprobs", top_logprobs=2),
    # What is not offered.
    text("unknown field", "temprature", temprature=1),
    raw("nameless field", b"{" + MODEL + b',"prompt":"x","":1}', ""),
    chat("tools", "tools", tools=[{"type": "function", "function": {"name": "f"}}]),
    chat("tool_choice", "tool_choice", tool_choice="required"),
    chat("functions", "functions", functions=[{"name": "f"}]),
    chat("structured output", "response_format", response_format={"type": "json_object"}),
    chat("schema that is none", "response_format", response_format={"type": "json_schema", "json_schema": {"name": "x"}}),
    chat("broken regex", "guided_regex", guided_regex="ab**"),
    chat("audio out", "modalities", modalities=["text", "audio"]),
    chat("the client's own template", "chat_template", chat_template="{{ 1 }}"),
    chat("its arguments", "chat_template_kwargs", chat_template_kwargs={"a": 1}),
    text("cache salt", "cache_salt", cache_salt="s"),
    text("embedded prompt", "prompt_embeds", prompt_embeds="AAAA"),
    text("beam search", "use_beam_search", use_beam_search=True),
    text("suffix", "suffix", suffix="x"),
    # Tokens.
    raw("neither prompt nor messages", b"{}", "prompt, messages", TOKENIZE),
    raw("both prompt and messages", b'{"prompt":"x","messages":[{"role":"user","content":"x"}]}', "prompt, messages", TOKENIZE),
    raw("tokenize no string", b'{"prompt":["x"]}', "prompt", TOKENIZE),
    raw("tokenize too long", b'{"prompt":"' + b"x" * 900_000 + b'"}', "prompt", TOKENIZE),
    Row("tokenize other model", TOKENIZE, b'{"prompt":"x","model":"y"}', "model", 404),
    raw("detokenize without tokens", b"{}", "tokens", DETOKENIZE),
    raw("detokenize a text", b'{"tokens":"5"}', "tokens", DETOKENIZE),
    raw("detokenize beyond the vocabulary", b'{"tokens":[5,1024]}', "tokens", DETOKENIZE),
    raw("detokenize below", b'{"tokens":[5,-1]}', "tokens[1]", DETOKENIZE),
    # Sizes.
    Row("body too large", TEXT_PATH, b" " * (MAX_BODY_BYTES + 1), None, 413),
    text("too many headers", None, 431, {f"x-{k}": "v" for k in range(MAX_HEADERS + 1)}),
]  # fmt: skip


def counted(world: World) -> set[tuple[int, str]]:
    """Status and code of all that is or could be turned away."""
    families = [family for family in world.registry.collect() if family.name == TURNED_AWAY.name]
    return {(int(s.labels["status"]), s.labels["code"]) for family in families for s in family.samples}


class Crowd:
    """An application with streams open that every row must leave alone."""

    def __init__(self, world: World, http: httpx.AsyncClient, readers: list[asyncio.StreamReader]) -> None:
        self.world = world
        self.http = http
        self.readers = readers
        self.ids: set[str] = set(world.replica.held)

    async def each_gets_a_token(self) -> None:
        """One step of the engine reaches every stream, which has ended none."""
        assert set(self.world.replica.held) == self.ids, "no stream has ended, and nothing bad reached the engine"
        self.world.replica.turn()
        await asyncio.wait_for(asyncio.gather(*(reader.readuntil(b"}\n\n\r\n") for reader in self.readers)), 10)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def crowd(tiny_model: ModelFolder) -> AsyncIterator[Crowd]:
    async with serving(tiny_model, auto=False, max_body_bytes=MAX_BODY_BYTES) as world, plain_client(world) as http:
        world.replica.slots = BYSTANDERS
        world.replica.blocks = 10_000
        world.replica.beat()
        body = TEXT | {"max_tokens": BYSTANDER_TOKENS, "stream": True}
        opened = [await raw_post(world, body) for _ in range(BYSTANDERS)]
        await world.until(lambda: len(world.replica.held) == BYSTANDERS)
        requests = {request.request_id: request for request, _ in world.replica.added}
        received = [bytearray() for _ in opened]

        async def relay(source: asyncio.StreamReader, kept: bytearray, onward: asyncio.StreamReader) -> None:
            while data := await source.read(2**16):
                kept += data
                onward.feed_data(data)
            onward.feed_eof()

        onwards = [asyncio.StreamReader() for _ in opened]
        relays = [
            asyncio.create_task(relay(reader, kept, onward))
            for (reader, _), kept, onward in zip(opened, received, onwards, strict=True)
        ]
        yield Crowd(world, http, onwards)
        assert len(world.replica.held) == BYSTANDERS
        while world.replica.held:
            world.replica.turn()
            await asyncio.sleep(0)
        await asyncio.wait_for(asyncio.gather(*relays), 60)
        for kept, (_, writer) in zip(received, opened, strict=True):
            found = [line[6:] for line in kept.split(b"\n") if line.startswith(b"data: ")]
            assert found[-1] == b"[DONE]"
            chunks = [json.loads(event) for event in found[:-1]]
            said = "".join(chunk["choices"][0]["text"] for chunk in chunks)
            assert said == expected_text(requests[chunks[0]["id"]])
            writer.close()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what.replace("\0", ""))
async def test_bad_request_is_answered_by_its_parameter_s_name_and_disturbs_nobody(crowd: Crowd, row: Row) -> None:
    await crowd.each_gets_a_token()
    headers = {"content-type": "application/json"} | row.headers
    encoded = {name.encode(): value.encode() for name, value in headers.items()}
    answer = await crowd.http.post(row.path, content=row.body, headers=encoded)
    assert (answer.status_code, answer.headers["content-type"]) == (row.status, "application/json"), answer.text
    assert answer.json().keys() == {"error"}
    error = answer.json()["error"]
    assert (error["param"], error["type"]) == (row.param, "invalid_request_error")
    assert error["message"]
    assert len(answer.content) < 1000, "a client is not sent its own flood back"
    assert counted(crowd.world) == set(AT_THE_DOOR), "what is counted was known from the start"
    await crowd.each_gets_a_token()
    healthy = await crowd.http.get("/health")
    assert healthy.status_code == 200


async def test_table_is_as_wide_as_it_should_be() -> None:
    assert len(ROWS) >= 40
    assert len({row.what for row in ROWS}) == len(ROWS)
