"""vLLM's engine core under our scheduler: the laws that hold for every engine, on the real thing."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from cluster.clock import SystemClock
from cluster.config import EngineConfig, EngineKind, VllmConfig
from cluster.engine.text import TextCodec
from cluster.engine.vllm.build import build_vllm_engine
from cluster.model import ModelFolder
from cluster.types import FinishReason, PreemptionMeans, Request
from tests.vllm.vllm_kit import Listener, Reference, request

CONFIG = EngineConfig(
    kind=EngineKind.VLLM,
    slots=4,
    step_token_budget=64,
    block_size_tokens=32,
    blocks=24,
    max_model_len=512,
    vllm=VllmConfig(eager=True),
)


@pytest.fixture(scope="module")
def reference(tiny_model: ModelFolder) -> Reference:
    return Reference(tiny_model)


@pytest.fixture(scope="module")
def codec(tiny_model: ModelFolder) -> TextCodec:
    return TextCodec.from_file(tiny_model.tokenizer_path)


@pytest.fixture(scope="module")
def shared_engine(tiny_model: ModelFolder) -> Iterator[Listener]:
    listener = Listener(build_vllm_engine(tiny_model, CONFIG, SystemClock()))
    listener.start()
    yield listener
    listener.engine.stop()


@pytest.fixture
def engine(shared_engine: Listener) -> Iterator[Listener]:
    """Idle before and after, with every block free, and alive."""
    shared_engine.outputs.clear()
    shared_engine.preempted.clear()
    yield shared_engine
    load = shared_engine.until_idle()
    assert load.blocks_free == load.blocks_total == CONFIG.blocks
    assert shared_engine.places() == {}
    assert shared_engine.engine.progress().alive


def low(name: str, **changes: object) -> Request:
    return request(name, **{"priority": -10, "max_tokens": 60, **changes})  # type: ignore[arg-type]


def test_greedy_output_is_that_of_transformers(engine: Listener, reference: Reference, codec: TextCodec) -> None:
    requests = [request(f"greedy {n}", prompt=n * 17 + 1, max_tokens=32) for n in range(6)]
    for r, got in zip(requests, engine.run(*requests), strict=True):
        assert got.token_ids == reference.output_ids(r)
        assert got.text == codec.text(got.token_ids)
        assert got.finish is FinishReason.LENGTH


def test_an_urgent_request_starts_at_once_and_whom_it_displaces_is_paused_and_ends_as_if_undisturbed(
    engine: Listener, reference: Reference
) -> None:
    victims = [low(f"low {n}") for n in range(4)]
    urgent = request("urgent", prompt=40, priority=10, max_tokens=12)
    engine.add(*victims)
    engine.until_tokens(8, *victims)
    assert sorted(engine.places().values()) == ["running"] * 4

    engine.add(urgent)
    engine.until_tokens(1, urgent)
    own_prefill_steps = 1  # 40 tokens, and a budget of 64
    assert engine.steps_to_first_token(urgent) <= 2 + own_prefill_steps
    places = engine.places()
    running = {name for name, place in places.items() if place == "running"}
    assert urgent.request_id in running
    assert len(running & {v.request_id for v in victims}) == 3
    (paused,) = [name for name, place in places.items() if place == "paused"]
    assert not engine.outputs[paused].ends

    engine.until_ended(urgent, *victims)
    assert [(p.request_id, p.for_request_id, p.means) for p in engine.preempted] == [
        (paused, urgent.request_id, PreemptionMeans.PAUSE)
    ]
    for r in (urgent, *victims):
        assert engine.outputs[r.request_id].token_ids == reference.output_ids(r), r.request_id
        assert engine.outputs[r.request_id].finish is FinishReason.LENGTH


def test_the_victim_is_the_last_in_order(engine: Listener) -> None:
    victims = [low(f"v {n}", priority=p) for n, p in enumerate((0, -10, -5, -10))]
    engine.add(*victims)
    engine.until_tokens(4, *victims)
    urgent = request("urgent", priority=10, max_tokens=4)
    engine.run(urgent)
    engine.until_ended(*victims)
    assert [p.request_id for p in engine.preempted] == [victims[3].request_id]


def test_equal_priority_never_preempts(engine: Listener) -> None:
    running = [request(f"r {n}", max_tokens=30) for n in range(4)]
    engine.add(*running)
    engine.until_tokens(4, *running)
    late = request("late", max_tokens=4, arrived=1.0)  # the earliest of all, and still it waits
    engine.add(late)
    engine.until_tokens(1, late)
    assert any(engine.outputs[r.request_id].ends for r in running)
    engine.until_ended(late, *running)
    assert engine.preempted == []


def test_an_urgent_request_takes_blocks_and_who_lost_them_ends_as_if_undisturbed(
    engine: Listener, reference: Reference
) -> None:
    """Three hold 18 of 24 blocks. The urgent prompt needs 10."""
    holders = [low(f"holder {n}", prompt=170, max_tokens=20) for n in range(3)]
    urgent = request("big urgent", prompt=300, priority=10, max_tokens=6)
    engine.add(*holders)
    engine.until_tokens(4, *holders)
    engine.run(urgent)
    engine.until_ended(*holders)
    assert {p.means for p in engine.preempted} == {PreemptionMeans.RECOMPUTE}
    assert {p.for_request_id for p in engine.preempted} == {urgent.request_id}
    assert all(p.blocks_freed > 0 for p in engine.preempted)
    for r in (urgent, *holders):
        assert engine.outputs[r.request_id].token_ids == reference.output_ids(r), r.request_id


def test_when_the_pool_runs_out_all_still_end_as_if_undisturbed(engine: Listener, reference: Reference) -> None:
    """Four that grow to 9 blocks each, in a pool of 24."""
    requests = [request(f"growing {n}", prompt=150, max_tokens=120) for n in range(4)]
    outputs = engine.run(*requests)
    assert engine.preempted
    for r, got in zip(requests, outputs, strict=True):
        assert got.token_ids == reference.output_ids(r), r.request_id


def test_preempted_work_goes_on_before_new_work_of_its_priority(engine: Listener) -> None:
    victims = [low(f"old {n}", max_tokens=40) for n in range(4)]
    engine.add(*victims)
    engine.until_tokens(4, *victims)
    urgent = request("urgent", priority=10, max_tokens=6)
    new = low("new", max_tokens=4, arrived=1.0)
    engine.add(urgent, new)
    engine.until_tokens(1, urgent)
    (paused,) = {p.request_id for p in engine.preempted}
    made = len(engine.outputs[paused].token_ids)
    engine.until(lambda: len(engine.outputs[paused].token_ids) > made)
    assert not engine.outputs[new.request_id].token_ids
    engine.until_ended(new, *victims)


def test_a_long_urgent_prompt_is_not_slowed_by_a_long_prompt_of_less_urgent_work(engine: Listener) -> None:
    slow = low("slow", prompt=400, max_tokens=2)
    urgent = request("urgent", prompt=128, priority=10, max_tokens=2)
    engine.add(slow)
    engine.until(lambda: engine.load is not None and bool(engine.load.running))
    engine.add(urgent)
    engine.until_tokens(1, urgent)
    assert engine.steps_to_first_token(urgent) <= 2 + 2  # 128 tokens are two steps of 64
    engine.until_ended(slow, urgent)


def test_an_abort_ends_an_attempt_and_frees_its_blocks(engine: Listener) -> None:
    requests = [low(f"abort {n}", prompt=100, max_tokens=300) for n in range(2)]
    engine.add(*requests)
    engine.until_tokens(3, *requests)
    for r in requests:
        engine.engine.abort(r.request_id, 0)
    engine.until_ended(*requests)
    assert {engine.outputs[r.request_id].finish for r in requests} == {FinishReason.ABORT}
    assert engine.load is not None
    assert engine.load.blocks_free == CONFIG.blocks


def test_a_preempted_request_can_be_aborted(engine: Listener) -> None:
    victims = [low(f"low {n}", max_tokens=200) for n in range(4)]
    engine.add(*victims)
    engine.until_tokens(2, *victims)
    urgent = request("urgent", priority=10, max_tokens=40)
    engine.add(urgent)
    engine.until_tokens(1, urgent)
    (paused,) = {p.request_id for p in engine.preempted}
    for v in victims:
        engine.engine.abort(v.request_id, 0)
    engine.until_ended(urgent, *victims)
    assert engine.outputs[paused].finish is FinishReason.ABORT


CHANCE = {"temperature": 0.9, "top_p": 0.95, "top_k": 60}
PENALTIES = {"presence_penalty": 0.4, "frequency_penalty": 0.6, "repetition_penalty": 1.3}


@pytest.mark.parametrize(
    "sampling",
    [
        CHANCE,
        {"temperature": 1.0, "min_p": 0.02, "logit_bias": ((7, 6.0), (9, -5.0))},
        {"temperature": 0.0, **PENALTIES},
        {**CHANCE, **PENALTIES},
    ],
)
def test_tokens_are_drawn_by_seed_choice_and_index_whatever_else_runs(
    engine: Listener, reference: Reference, sampling: dict[str, object]
) -> None:
    requests = [low("seeded", max_tokens=24, seed=5, choice=n, **sampling) for n in range(4)]
    urgent = request("urgent", priority=10, max_tokens=3)
    engine.add(*requests)
    engine.until_tokens(5, *requests)
    engine.add(urgent)
    engine.until_ended(urgent, *requests)
    assert engine.preempted
    for r in requests:
        assert engine.outputs[r.request_id].token_ids == reference.output_ids(r)
    if sampling.get("temperature"):
        assert len({tuple(engine.outputs[r.request_id].token_ids) for r in requests}) == 4


@pytest.mark.parametrize("cut", [1, 7, 20])
def test_a_request_cut_anywhere_and_resumed_from_its_emitted_tokens_goes_on_as_if_nothing_had_happened(
    engine: Listener, cut: int
) -> None:
    whole = low("whole", max_tokens=26, seed=11, ignore_eos=False, min_tokens=23, **CHANCE, **PENALTIES)
    (expected,) = engine.run(whole)
    assert len(expected.token_ids) >= 23
    rest = msgspec.structs.replace(whole, request_id="rest", emitted_ids=tuple(expected.token_ids[:cut]))
    (got,) = engine.run(rest)
    assert got.token_ids == expected.token_ids[cut:]
    assert got.finish is expected.finish
    assert expected.text.endswith(got.text)


def test_a_stop_string_ends_a_request_and_none_of_it_is_told(engine: Listener, codec: TextCodec) -> None:
    free = request("stops", max_tokens=40)
    (whole,) = engine.run(free)
    stop = whole.text[20:23]
    stopped = request("stops", max_tokens=40, stop=(stop,))
    (got,) = engine.run(stopped)
    assert got.finish is FinishReason.STOP
    assert got.text == whole.text[: whole.text.index(stop)]
    assert len(got.token_ids) < 40


def test_logprobs_are_those_of_the_models_own_distribution(engine: Listener, reference: Reference) -> None:
    plain = request("logprobs", max_tokens=6, logprobs=3, prompt_logprobs=2)
    (got,) = engine.run(plain)
    ids = [*plain.prompt_ids, *got.token_ids]
    expected = reference.logprobs(ids)
    first = len(plain.prompt_ids)
    for k, given in enumerate(got.logprobs):
        row = expected[first + k - 1]
        assert given.logprob == pytest.approx(float(row[got.token_ids[k]]), abs=1e-4)
        assert [i for i, _ in given.top] == row.topk(3).indices.tolist()
    assert got.prompt_logprobs is not None
    assert len(got.prompt_logprobs) == first - 1
    for k, given in enumerate(got.prompt_logprobs):
        assert given.logprob == pytest.approx(float(expected[k][ids[k + 1]]), abs=1e-4)
        assert [i for i, _ in given.top] == expected[k].topk(2).indices.tolist()


def test_a_prompt_is_shared_within_a_tenant_and_with_no_other(engine: Listener) -> None:
    def hits() -> int:
        return engine.until_idle().prefix_hit_tokens_total

    engine.run(request("shared", prompt=100, max_tokens=2, tenant="a"))
    before = hits()
    engine.run(request("shared", prompt=100, max_tokens=2, tenant="b"))
    assert hits() == before
    engine.run(request("shared", prompt=100, max_tokens=2, tenant="a"))
    assert hits() == before + 96


def test_a_parked_request_stands_still_until_it_is_unparked(engine: Listener, reference: Reference) -> None:
    parked, other = request("parked", max_tokens=40), request("other", max_tokens=20)
    engine.add(parked)
    engine.until_tokens(5, parked)
    assert engine.engine.park(parked.request_id, 0).result(30)
    assert engine.places() == {parked.request_id: "parked"}
    engine.run(other)
    made = len(engine.outputs[parked.request_id].token_ids)
    assert made < 40
    assert engine.until_idle().blocks_free == CONFIG.blocks
    assert engine.engine.unpark(parked.request_id, 0).result(30)
    engine.until_ended(parked)
    assert engine.outputs[parked.request_id].token_ids == reference.output_ids(parked)


def test_a_parked_request_can_be_aborted(engine: Listener) -> None:
    parked = request("parked", max_tokens=300)
    engine.add(parked)
    engine.until_tokens(2, parked)
    assert engine.engine.park(parked.request_id, 0).result(30)
    engine.engine.abort(parked.request_id, 0)
    engine.until_ended(parked)
    assert engine.outputs[parked.request_id].finish is FinishReason.ABORT


def test_what_can_never_run_ends_with_an_error_and_hurts_nobody(engine: Listener) -> None:
    bad = [request("too long", prompt=512), request("no such token", prompt=(5, 4000))]
    good = request("good", max_tokens=4)
    outputs = engine.run(*bad, good)
    assert [o.finish for o in outputs] == [FinishReason.ERROR, FinishReason.ERROR, FinishReason.LENGTH]
    assert all(o.error for o in outputs[:2])


def test_a_prompt_that_is_only_scored_draws_nothing(engine: Listener) -> None:
    (got,) = engine.run(request("scored", prompt=30, max_tokens=0, prompt_logprobs=0))
    assert (got.token_ids, got.finish) == ([], FinishReason.LENGTH)
    assert got.prompt_logprobs is not None
    assert len(got.prompt_logprobs) == 29
