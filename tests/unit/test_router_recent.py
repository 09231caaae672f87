"""The newest decisions about everybody's requests: told in order, to operators, with a count of what was missed."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc

import httpx
import pytest

from cluster.config import Auth
from cluster.model import ModelFolder
from cluster.types import Request, RequestId, Sampling
from router import recent
from router.journal import Decision
from router.keys import Identity
from router.recent import BYTES_MAX, DECISIONS_MAX, Recent
from tests.unit.http_kit import TEXT, plain_client, serving

PATH = "/v1/decisions"


def request(number: int) -> Request:
    return Request(
        request_id=RequestId(f"cmpl-{number:032d}"), tenant="tenant", priority=0, priority_class="standard",
        arrived_unix_s=0.0, prompt_ids=(1, 2, 3), sampling=Sampling(max_tokens=5, seed=1),
    )  # fmt: skip


def filled(memory: Recent, count: int) -> Recent:
    note = memory.noting("m")
    for number in range(1, count + 1):
        why = f"for cmpl-{number:032d}: pause"
        numbers = {"attempt": float(number), "blocks": 0.5 + number, "emitted": 0.25 + number}
        note(request(number), Decision(0, "preempted", "replica-0", why, numbers), float(number))
    return memory


def told(memory: Recent, after: int | None, limit: int = 200) -> tuple[list[int], int, int]:
    """(numbers, missed, last)."""
    said = memory.after(after, limit, 0.0)
    return [d.sequence for d in said.decisions], said.missed, said.last


def test_who_asks_on_from_the_last_answer_is_told_each_decision_once_and_how_many_it_missed() -> None:
    memory = filled(Recent(decisions_max=4), 3)
    assert told(memory, None) == ([1, 2, 3], 0, 3)
    assert told(memory, 3) == ([], 0, 3)
    filled(memory, 2)
    assert told(memory, 3) == ([4, 5], 0, 5)
    assert told(memory, 0) == ([2, 3, 4, 5], 1, 5), "of five only four are remembered"
    assert told(memory, 1, limit=2) == ([4, 5], 2, 5), "the newest, where there is a limit"
    assert told(memory, None, limit=1) == ([5], 0, 5)
    assert told(memory, 6) == ([2, 3, 4, 5], 0, 5), "a number that was never reached is another memory's"
    assert told(Recent(), 0) == ([], 0, 0)
    assert Recent().feed != Recent().feed


def test_times_are_told_by_the_wall_clock() -> None:
    said = filled(Recent(), 2).after(None, 10, 1_800_000_000.0)
    assert [d.at_unix_s for d in said.decisions] == [1_800_000_001.0, 1_800_000_002.0]


def test_it_is_bounded_in_decisions_and_in_bytes() -> None:
    assert len(filled(Recent(decisions_max=10, bytes_max=10**9), 50)) == 10
    one = recent.BYTES_PER_DECISION + 3 * recent.BYTES_PER_NUMBER + 4 * len(f"for cmpl-{0:032d}: pause")
    assert len(filled(Recent(decisions_max=10**6, bytes_max=7 * one + one // 2), 50)) == 7
    small = Recent(decisions_max=10**6, bytes_max=1)
    assert told(filled(small, 3), 0) == ([], 3, 3), "one that alone is too large is told by nobody, and counted"


def test_what_it_takes_is_no_more_than_what_it_charges() -> None:
    memory = Recent()
    gc.collect()
    tracemalloc.start()
    try:
        filled(memory, DECISIONS_MAX)
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    one = recent.BYTES_PER_DECISION + 3 * recent.BYTES_PER_NUMBER + 4 * len(f"for cmpl-{0:032d}: pause")
    assert len(memory) == DECISIONS_MAX
    assert taken <= DECISIONS_MAX * one <= BYTES_MAX


# --- over HTTP ---


def identify(key: bytes) -> Identity | None:
    return {b"o": Identity("tenant-o", "o", operator=True), b"a": Identity("tenant-a", "a")}.get(key)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_operators_are_told_of_everybodys_requests_and_nobody_else_is(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model, auth=Auth.KEYS, identify=identify) as world, plain_client(world) as http:
        answer = await http.post("/v1/completions", json=TEXT, headers=bearer("a"))
        said = (await http.get(PATH, headers=bearer("o"))).json()
        events = [(d["request_id"], d["tenant"], d["model"], d["event"]) for d in said["decisions"]]
        assert events == [
            (answer.json()["id"], "tenant-a", "tiny-llama", event) for event in ("admitted", "dispatched")
        ]
        assert said["decisions"][1]["replica"] == "r1"
        assert said["decisions"][1]["numbers"]["attempt"] == 1
        assert [d["sequence"] for d in said["decisions"]] == [1, 2]
        assert said["last"] == 2
        refused = await http.get(PATH, headers=bearer("a"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_an_operator")
        assert "forebay keys create --operator" in refused.json()["error"]["message"]
        assert (await http.get(PATH)).status_code == 401
        explained = await http.get(f"/v1/requests/{answer.json()['id']}/explain", headers=bearer("o"))
        assert explained.json()["tenant"] == "tenant-a", "an operator can ask about each of them"


async def test_nothing_of_what_a_request_says_is_told(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model) as world, plain_client(world) as http:
        body = TEXT | {"prompt": "a secret word", "stop": ["another secret"], "user": "a secret name"}
        answer = (await http.post("/v1/completions", json=body)).json()
        said = (await http.get(PATH)).text
        assert answer["id"] in said
        assert "secret" not in said
        assert answer["choices"][0]["text"] not in said


async def test_two_clients_that_ask_on_are_each_told_all(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model) as world, plain_client(world) as http:
        seen: list[list[str]] = [[], []]
        after = [0, 0]

        async def ask_on(client: int) -> None:
            said = (await http.get(PATH, params={"after": after[client]})).json()
            assert said["missed"] == 0
            after[client] = said["last"]
            seen[client] += [d["request_id"] for d in said["decisions"]]

        ids = []
        for number in range(6):
            answers = await asyncio.gather(*(http.post("/v1/completions", json=TEXT) for _ in range(2)))
            ids += [a.json()["id"] for a in answers]
            await ask_on(number % 2)
        await ask_on(0)
        await ask_on(1)
        assert seen[0] == seen[1]
        assert set(seen[0]) == set(ids)
        assert len(seen[0]) == 2 * len(ids)


@pytest.mark.parametrize(
    ("query", "param", "code"),
    [
        ("after=-1", "after", "invalid_value"),
        ("after=x", "after", "invalid_value"),
        ("after=99999999999999999999", "after", "invalid_value"),
        ("limit=0", "limit", "invalid_value"),
        ("limit=1001", "limit", "invalid_value"),
        ("limit=1&limit=2", "limit", "invalid_value"),
        ("tenant=t", "tenant", "unknown_parameter"),
    ],
)
async def test_a_wrong_query_is_refused_by_name(tiny_model: ModelFolder, query: str, param: str, code: str) -> None:
    async with serving(tiny_model, connect=False) as world, plain_client(world) as http:
        answer: httpx.Response = await http.get(f"{PATH}?{query}")
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, param, code)
