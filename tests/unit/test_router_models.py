"""Several models behind one router: each has its own replicas, queue and order; who may ask, and how much, is shared."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer

from cluster.config import Auth, RouterConfig
from cluster.metrics import MODEL_LABEL, TURNED_AWAY
from cluster.model import ModelFolder
from cluster.types import RequestId
from router.app import build_app
from router.auth import Identify
from router.errors import ApiError
from router.exposition import ByModel
from router.headers import Asked
from router.keys import Identity
from router.limits import Limits
from router.openai import Api, Origin
from router.pools import Pool, Pools
from tests.unit.http_kit import HI, MAX_LEN, World, listening, plain_client
from tests.unit.test_router_fuzz import raws

FIRST, SECOND, ALIAS = "tiny-llama", "tiny-other", "small"
SECOND_LEN = 700
PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")


def text(model: str = FIRST, **changes: Any) -> dict[str, Any]:
    return {"model": model, "prompt": "hello", "max_tokens": 5} | changes


@dataclass
class Two:
    """A server of two models, each with one replica; `http` asks it."""

    first: World
    second: World
    pools: Pools
    http: httpx.AsyncClient

    async def post(self, path: str, body: dict[str, Any] | bytes) -> httpx.Response:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.http.post(path, content=raw, headers={"content-type": "application/json"})


@asynccontextmanager
async def serving_two(
    models: tuple[ModelFolder, ModelFolder], *, identify: Identify | None = None, **config: Any
) -> AsyncIterator[Two]:
    made = RouterConfig(silent_after_s=600, fenced_after_s=900, **config)
    first, second = worlds = World(made), World(made)
    registry = CollectorRegistry()
    registry.register(ByModel({FIRST: first.registry, SECOND: second.registry}))
    pools = Pools(
        [Pool(models[0], first.core, MAX_LEN, made), Pool(models[1], second.core, SECOND_LEN, made, aliases=(ALIAS,))]
    )
    app = build_app(
        pools=pools,
        config=made,
        registry=registry,
        cluster_status=first.cluster_status,
        drain=first.drain,
        identify=identify,
        rng=random.Random(2),
    )
    async with listening(app) as port:
        for world in worlds:
            world.port = port
            world.replica.connect()
        async with plain_client(first) as http:
            yield Two(first, second, pools, http)


@pytest.fixture
def models(tiny_model: ModelFolder, other_model: ModelFolder) -> tuple[ModelFolder, ModelFolder]:
    assert (tiny_model.name, other_model.name) == (FIRST, SECOND)
    return tiny_model, other_model


@pytest.fixture
async def two(models: tuple[ModelFolder, ModelFolder]) -> AsyncIterator[Two]:
    async with serving_two(models) as running:
        yield running


async def answered(world: World, asking: asyncio.Task[httpx.Response]) -> httpx.Response:
    """The answer of the one request that this world's replica has."""
    await world.until(lambda: world.replica.held)
    while world.replica.held:
        world.replica.turn()
    return await asking


# --- which model ---


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS[:2])
@pytest.mark.parametrize("name", [FIRST, SECOND, ALIAS])
async def test_a_request_goes_to_the_replicas_of_the_model_that_it_names_and_to_no_other(
    two: Two, models: tuple[ModelFolder, ModelFolder], name: str, path: str, stream: bool
) -> None:
    mine, others = (two.first, two.second) if name == FIRST else (two.second, two.first)
    folder = models[0] if name == FIRST else models[1]
    body = text(name, stream=stream)
    if "chat" in path:
        del body["prompt"]
        body["messages"] = HI
    answer = await answered(mine, asyncio.create_task(two.post(path, body)))
    assert answer.status_code == 200
    assert others.replica.added == []
    ((request, _),) = mine.replica.added
    if "chat" not in path:
        assert request.prompt_ids == tuple(Tokenizer.from_file(str(folder.tokenizer_path)).encode("hello").ids)
    said = json.loads(answer.text.split("\n")[0].removeprefix("data: ") if stream else answer.text)
    assert said["model"] == folder.name, "an answer says the model's first name"


@pytest.mark.parametrize("path", PATHS)
async def test_a_model_that_is_not_there_is_404_naming_those_that_are(two: Two, path: str) -> None:
    answer = await two.post(path, {"model": "gpt-9", "prompt": "x", "messages": HI, "tokens": [5]})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (404, "model", "model_not_found")
    assert all(repr(name) in error["message"] for name in ("gpt-9", FIRST, SECOND, ALIAS))
    assert not two.first.replica.added + two.second.replica.added


@pytest.mark.parametrize("path", PATHS)
async def test_where_there_are_several_the_model_must_be_named(two: Two, path: str) -> None:
    for body in ({"prompt": "x", "messages": HI, "tokens": [5]}, {"model": None, "prompt": "x"}):
        answer = await two.post(path, body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "model")
        assert error["code"] == "missing_required_parameter"
        assert repr(SECOND) in error["message"]


UNREADABLE = (
    b"", b"{", b"[]", b"5", b'"tiny-other"', b"\xff\xfe", b'{"model": 5, "prompt": "x"}', b'{"model": "tiny-other"',
    b'{"model": ["tiny-other"], "prompt": "x"}', b"[" * 100_000, b'{"model": "tiny-other", "prompt": NaN}',
    b'{"model": "tiny-other", "model": "tiny-llama", "prompt": "x"}', b'{"model": "tiny-other", "a\\ud800": 1}',
)  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
async def test_a_body_that_cannot_be_read_is_refused_by_name_whatever_model_it_may_have_meant(
    two: Two, path: str
) -> None:
    for raw in UNREADABLE:
        answer = await two.post(path, raw)
        assert answer.status_code == 400, raw
        assert answer.json()["error"]["code"] in {"invalid_json", "invalid_value", "duplicate_parameter"}, raw
    assert not two.first.replica.added + two.second.replica.added


@settings(max_examples=300, deadline=None)
@given(data=st.data(), api=st.sampled_from(list(Api)), name=st.sampled_from([FIRST, SECOND, ALIAS, "none"]))
def test_the_name_that_is_found_first_is_the_one_that_the_whole_body_says(
    parsed: Pools, data: st.DataObject, api: Api, name: str
) -> None:
    """Whatever else is in it: what is taken is taken by the parser of the model that it names."""
    raw = data.draw(raws[api]).replace(FIRST.encode(), name.encode())
    try:
        prepared = parsed.prepare(api, raw, Origin(Asked(), "t", RequestId("r"), 0.0, 1))
    except ApiError:
        return
    assert prepared.model == parsed[json.loads(raw)["model"]].name


@pytest.fixture(scope="module")
def parsed(tiny_model: ModelFolder, other_model: ModelFolder) -> Pools:
    config = RouterConfig()
    return Pools(
        [
            Pool(tiny_model, World(config).core, 256, config),
            Pool(other_model, World(config).core, 256, config, (ALIAS,)),
        ]
    )


def test_models_of_one_name_are_refused(tiny_model: ModelFolder) -> None:
    config = RouterConfig()
    one = Pool(tiny_model, World(config).core, 256, config)
    for pools in ([one, Pool(tiny_model, World(config).core, 256, config)], []):
        with pytest.raises(ValueError, match="names that differ"):
            Pools(pools)


async def test_models_are_listed_by_every_name_with_the_length_of_each(two: Two) -> None:
    listed = (await two.http.get("/v1/models")).json()["data"]
    assert [(card["id"], card["root"], card["max_model_len"]) for card in listed] == [
        (FIRST, FIRST, MAX_LEN),
        (SECOND, SECOND, SECOND_LEN),
        (ALIAS, SECOND, SECOND_LEN),
    ]
    for card in listed:
        assert (await two.http.get(f"/v1/models/{card['id']}")).json() == card
    missing = await two.http.get("/v1/models/gpt-9")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_tokens_are_those_of_the_model_that_is_named(two: Two, models: tuple[ModelFolder, ModelFolder]) -> None:
    counts = []
    for folder, length in zip(models, (MAX_LEN, SECOND_LEN), strict=True):
        ids = Tokenizer.from_file(str(folder.tokenizer_path)).encode("the quiet water").ids
        asked = {"model": folder.name, "prompt": "the quiet water"}
        said = (await two.post("/tokenize", asked)).json()
        assert (said["tokens"], said["max_model_len"]) == (ids, length)
        back = await two.post("/detokenize", {"model": folder.name, "tokens": ids})
        assert back.json() == {"prompt": "the quiet water"}
        counts.append(len(ids))
    assert counts[0] < counts[1], "the second has fewer tokens, so that a text takes more of them"
    beyond = await two.post("/detokenize", {"model": SECOND, "tokens": [700]})
    assert (beyond.status_code, beyond.json()["error"]["param"]) == (400, "tokens")
    assert (await two.post("/detokenize", {"model": FIRST, "tokens": [700]})).status_code == 200


# --- what is each model's own ---


async def test_a_flood_of_one_model_leaves_the_place_of_another_model_s_request_alone(two: Two) -> None:
    two.first.replica.slots = 1
    two.first.replica.beat()
    flood = [asyncio.create_task(two.post("/v1/completions", text(service_tier="priority"))) for _ in range(20)]
    await two.first.until(lambda: two.first.core.bands() and two.first.core.bands()[0].queued_requests == 19)
    answer = await answered(two.second, asyncio.create_task(two.post("/v1/completions", text(SECOND))))
    assert answer.status_code == 200
    assert two.first.core.bands()[0].queued_requests == 19, "it went past all of them"
    said = (await two.http.get(f"/v1/requests/{answer.json()['id']}/explain")).json()
    assert [d["event"] for d in said["decisions"]].count("returned") == 0
    assert said["queue_wait_ms"] < 1000
    for task in flood:
        task.cancel()
    await asyncio.gather(*flood, return_exceptions=True)


async def test_ready_as_long_as_any_model_takes_work_and_says_which(two: Two) -> None:
    async def ready() -> tuple[int, dict[str, bool] | str]:
        answer = await two.http.get("/ready")
        return answer.status_code, answer.json().get("models") or answer.json()["error"]["code"]

    assert await ready() == (200, {FIRST: True, SECOND: True})
    two.second.replica.die()
    assert await ready() == (200, {FIRST: True, SECOND: False})
    shown = {m["model"]: m["ready"] for m in (await two.http.get("/status")).json()["router"]["models"]}
    assert shown == {FIRST: True, SECOND: False}
    two.first.replica.die()
    assert await ready() == (503, "not_ready")


async def test_series_carry_their_model_and_each_family_is_there_once(two: Two) -> None:
    for world, name in ((two.first, FIRST), (two.second, SECOND), (two.second, ALIAS)):
        await answered(world, asyncio.create_task(two.post("/v1/completions", text(name))))
        world.core.tick()
    shown = (await two.http.get("/metrics")).text
    families = Counter(line.split()[2] for line in shown.splitlines() if line.startswith("# TYPE"))
    assert set(families.values()) == {1}
    told = {family.name: family.samples for family in text_string_to_metric_families(shown)}
    assert not any(MODEL_LABEL in s.labels for s in told.pop(TURNED_AWAY.name)), "which is no core's"
    samples = [s for of_family in told.values() for s in of_family]
    assert {s.labels[MODEL_LABEL] for s in samples} == {FIRST, SECOND}
    finished = {
        s.labels[MODEL_LABEL]: s.value
        for s in samples
        if s.name == "forebay_requests_total"
        and (s.labels["priority_class"], s.labels["outcome"]) == ("standard", "finished")
    }
    assert finished == {FIRST: 1, SECOND: 2}
    ready = {s.labels[MODEL_LABEL]: s.value for s in samples if s.name == "forebay_replicas_ready"}
    assert ready == {FIRST: 1, SECOND: 1}


@pytest.mark.parametrize("name", [FIRST, SECOND])
async def test_a_request_is_explained_whatever_its_model_live_and_ended(two: Two, name: str) -> None:
    world = two.first if name == FIRST else two.second
    asking = asyncio.create_task(two.post("/v1/completions", text(name)))
    await world.until(lambda: world.replica.held)
    live = (await two.http.get(f"/v1/requests/{world.held().request_id}/explain")).json()
    assert live["state"] == "running"
    answer = await answered(world, asking)
    ended = (await two.http.get(f"/v1/requests/{answer.json()['id']}/explain")).json()
    assert (ended["request_id"], ended["state"]) == (live["request_id"], "ended")


# --- what they share ---


@pytest.mark.parametrize("limits", [Limits(max_streams=1), Limits(tokens_per_min=1000), Limits(requests_per_s=1)])
async def test_a_key_s_limits_hold_over_all_models_together(
    models: tuple[ModelFolder, ModelFolder], limits: Limits
) -> None:
    limited = Identity("t", key_id="k", limits=limits)
    async with serving_two(models, auth=Auth.KEYS, identify=lambda _: limited) as two:
        asking = asyncio.create_task(two.post("/v1/completions", text(max_tokens=600)))
        await two.first.until(lambda: two.first.replica.held)
        refused = await two.post("/v1/completions", text(SECOND, max_tokens=600))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert two.second.replica.added == []
        asking.cancel()
