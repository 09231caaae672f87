"""A live request goes from one engine to another with its keys and values, and goes on there as if nothing had been."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import pytest

from cluster.clock import SystemClock
from cluster.config import EngineConfig
from cluster.engine.engine import Engine
from cluster.engine.runner import EngineRunner
from cluster.engine.scheduling.plan import Preemption
from cluster.ports import NO_KV, ImportRefusal
from cluster.types import EngineState, FinishReason, PreemptionMeans, Request, RequestId
from tests.conformance.arithmetic_backend import ArithmeticBackend
from tests.conformance.engine_kit import (
    Output,
    backend_for,
    collect,
    config,
    engine,
    gather,
    prompt_of,
    request,
    same,
    undisturbed,
)
from tests.move_laws import LAWS, MAX_HELD, Side, ending_fails_every_call_rather_than_letting_it_wait
from tests.move_laws import Pair as Engines

R = RequestId("r")
SETTINGS = config(blocks=64)


def exacting(*, prompt: int = 21, max_tokens: int = 24, **more: object) -> Request:
    fields = {"logprobs": 1, "frequency_penalty": 0.2, "min_tokens": 3, **more}
    return request("r", prompt=prompt, max_tokens=max_tokens, temperature=0.8, seed=3, **fields)  # type: ignore[arg-type]


@dataclass
class Pair:
    """Two engines, and the output of one request on either."""

    settings: EngineConfig = SETTINGS
    outputs: dict[str, Output] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.source = engine(self.settings)
        self.backend = backend_for(self.settings)
        self.target = engine(self.settings, self.backend)

    def step(self, which: Engine, steps: int = 1) -> None:
        for _ in range(steps):
            gather(which.step(), self.outputs)
            which.check_integrity()

    def stream(self, *, decode_on: int = 0) -> None:
        """Send what is full while the source decodes on."""
        source, target = self.source.moves, self.target.moves
        sent = 0
        for step in range(decode_on + 1):
            full = source.exportable_blocks(R, 0)
            if full > sent:
                data = source.export_blocks(R, 0, sent, full - sent)
                assert target.import_blocks(R, 1, sent, data) is None
                sent = full
            self.target.check_integrity()
            if step < decode_on:
                self.step(self.source)

    def stop_and_copy(self) -> EngineState:
        source, target = self.source.moves, self.target.moves
        state = source.freeze(R, 0)
        assert state is not None
        self.source.check_integrity()
        count = source.exportable_blocks(R, 0)
        if count:
            assert target.import_blocks(R, 1, 0, source.export_blocks(R, 0, 0, count)) is None
        assert target.import_commit(state, 1) is None
        assert source.release(R, 0)
        for which in (self.source, self.target):
            which.check_integrity()
        return state


@pytest.mark.parametrize("stop", [(), ("e",)])
def test_moved_after_any_token_it_goes_on_alike_and_no_token_of_it_is_run_again(stop: tuple[str, ...]) -> None:
    r = exacting(stop=stop)
    expected = undisturbed(r, max_model_len=128)
    for cut in range(1, len(expected.token_ids)):
        pair = Pair()
        pair.source.add(r, 0)
        while len(pair.outputs.setdefault("r", Output()).token_ids) < cut:
            pair.step(pair.source)
        if pair.outputs["r"].ends:
            break
        assert pair.target.moves.import_begin(R, 1, "arithmetic", 2) is None
        pair.stream()
        state = pair.stop_and_copy()
        assert state.computed_tokens == 21 + cut - 1
        assert state.request.emitted_ids == tuple(expected.token_ids[:cut])
        assert not pair.source.has_work
        assert pair.source.load().blocks_free == 64
        collect(pair.target, pair.outputs, first={})
        assert same(pair.outputs["r"], expected)
        assert pair.target.load().prefill_tokens_total == 0
        rows = [row for batch in pair.backend.batches for row in batch]
        assert [row.start for row in rows] == list(range(21 + cut - 1, 21 + len(expected.token_ids) - 1))
        assert pair.target.load().blocks_free == 64


def test_full_blocks_travel_while_the_source_decodes_on_and_only_the_tail_waits_for_the_freeze() -> None:
    pair = Pair()
    r = exacting()
    pair.source.add(r, 0)
    pair.step(pair.source, 3)
    assert pair.target.moves.import_begin(R, 1, "arithmetic", 0) is None
    pair.stream(decode_on=9)
    state = pair.source.moves.freeze(R, 0)
    assert state is not None
    full, tail = divmod(state.computed_tokens, 4)
    assert pair.source.moves.exportable_blocks(R, 0) == full + (1 if tail else 0)
    data = pair.source.moves.export_blocks(R, 0, full, 1)
    assert pair.target.moves.import_blocks(R, 1, full, data) is None
    assert pair.target.moves.import_commit(state, 1) is None
    pair.source.moves.release(R, 0)
    collect(pair.target, pair.outputs)
    assert same(pair.outputs["r"], undisturbed(r, max_model_len=128))
    assert pair.target.load().prefill_tokens_total == 0


def test_only_what_did_not_come_is_run_again() -> None:
    pair = Pair()
    r = exacting()
    pair.source.add(r, 0)
    pair.step(pair.source, 6)
    assert pair.target.moves.import_begin(R, 1, "arithmetic", 4) is None
    assert pair.target.moves.import_blocks(R, 1, 0, pair.source.moves.export_blocks(R, 0, 0, 4)) is None
    state = pair.source.moves.freeze(R, 0)
    assert state is not None
    assert pair.target.moves.import_commit(state, 1) is None
    collect(pair.target, pair.outputs)
    assert same(pair.outputs["r"], undisturbed(r, max_model_len=128))
    assert pair.target.load().prefill_tokens_total == state.computed_tokens + 1 - 16


def test_a_request_moves_in_mid_prompt_and_when_nothing_of_it_has_run() -> None:
    for steps in range(4):
        pair = Pair(config(blocks=64, step_token_budget=11))
        r = exacting(prompt=30)
        pair.source.add(r, 0)
        pair.step(pair.source, steps)
        assert pair.target.moves.import_begin(R, 1, "arithmetic", 1) is None
        state = pair.stop_and_copy()
        assert state.computed_tokens == min(30, 11 * steps) + max(0, steps - 3)
        collect(pair.target, pair.outputs)
        assert same(pair.outputs["r"], undisturbed(r, max_model_len=128))
        assert pair.source.load().prefill_tokens_total + pair.target.load().prefill_tokens_total == 30


def test_a_paused_and_a_swapped_out_request_move_with_what_they_have() -> None:
    for means, keeps in (
        (PreemptionMeans.PAUSE, True),
        (PreemptionMeans.SWAP, True),
        (PreemptionMeans.RECOMPUTE, False),
    ):
        pair = Pair()
        r = exacting()
        pair.source.add(r, 0)
        pair.step(pair.source, 6)
        live = pair.source._book.live[R, 0]
        pair.source._preempt(Preemption(live.state, None, means))
        assert pair.target.moves.import_begin(R, 1, "arithmetic", 1) is None
        state = pair.stop_and_copy()
        assert (state.computed_tokens > 21) is keeps
        assert pair.source.load().host_blocks_free == 512
        collect(pair.target, pair.outputs)
        assert same(pair.outputs["r"], undisturbed(r, max_model_len=128))


def test_a_prompt_whose_scores_are_not_told_yet_is_run_where_they_can_be() -> None:
    pair = Pair(config(blocks=64, step_token_budget=11))
    r = exacting(prompt=30, prompt_logprobs=2)
    pair.source.add(r, 0)
    pair.step(pair.source, 2)
    assert pair.source.moves.exportable_blocks(R, 0) == 0
    assert pair.target.moves.import_begin(R, 1, "arithmetic", 1) is None
    assert pair.stop_and_copy().computed_tokens == 0
    collect(pair.target, pair.outputs)
    assert same(pair.outputs["r"], undisturbed(r, max_model_len=128))


def test_a_frozen_request_neither_runs_nor_is_preempted_and_thawed_it_goes_on_at_its_place() -> None:
    settings = config(blocks=32, slots=2)
    target, outputs = engine(settings), dict[str, Output]()
    r, later = exacting(prompt=30), request("later", prompt=30, arrived=5.0, max_tokens=30)
    target.add(r, 0)
    target.add(later, 0)
    for _ in range(6):
        gather(target.step(), outputs)
    state = target.moves.freeze(R, 0)
    assert target.moves.freeze(R, 0) == state, "asked again, the same again"
    heard = len(outputs["r"].token_ids)
    target.add(request("urgent", prompt=40, priority=10, arrived=6.0, max_tokens=4), 0)
    for _ in range(8):
        result = target.step()
        gather(result, outputs)
        target.check_integrity()
        assert all(p.request_id != "r" for p in result.preempted)
    assert len(outputs["r"].token_ids) == heard
    prefill = target.load().prefill_tokens_total
    target.add(request("new", prompt=3, arrived=7.0), 0)
    assert target.moves.thaw(R, 0)
    assert not target.moves.thaw(R, 0)
    assert target._book.waiting.items[0].identity[0] == "r", "it has started: it goes before new work"
    collect(target, outputs)
    assert same(outputs["r"], undisturbed(r, max_model_len=128))
    assert target.load().prefill_tokens_total <= prefill + 3 + 30 + 12, "its own prompt was not run again"


def test_an_engine_with_nothing_but_frozen_requests_has_nothing_to_do() -> None:
    target = engine(SETTINGS)
    target.add(exacting(), 0)
    target.step()
    target.moves.freeze(R, 0)
    assert not target.has_work
    assert target.load().blocks_free < 64
    assert target.abort(R, 0)
    assert [d.finish for d in target.step().deltas] == [FinishReason.ABORT]
    assert target.load().blocks_free == 64
    target.check_integrity()


def test_work_that_needs_the_blocks_of_a_frozen_request_waits_for_it_without_steps() -> None:
    target, outputs = engine(config(blocks=32)), dict[str, Output]()
    target.add(exacting(prompt=60), 0)
    for _ in range(6):
        gather(target.step(), outputs)
    target.moves.freeze(R, 0)
    large = request("large", prompt=80)
    target.add(large, 0)
    collect(target, outputs)
    assert target.load().steps_total == 6
    target.add(request("small", prompt=8, priority=1), 0)
    collect(target, outputs)
    assert outputs["small"].ends == 1
    assert "large" not in outputs
    assert target.moves.release(R, 0)
    collect(target, outputs)
    assert same(outputs["large"], undisturbed(large, max_model_len=128))


def test_work_goes_on_when_one_is_thawed_though_another_is_frozen_in_the_same_moment() -> None:
    """As many are frozen as before, but not the same."""
    target, outputs = engine(config(blocks=32, slots=2)), dict[str, Output]()
    for name in ("a", "b"):
        target.add(request(name, prompt=40, max_tokens=40), 0)
    for _ in range(10):
        gather(target.step(), outputs)
    for name in ("a", "b"):
        target.moves.freeze(RequestId(name), 0)
    target.add(request("large", prompt=100, priority=1), 0)
    collect(target, outputs)
    assert outputs["a"].ends == outputs["b"].ends == 0
    assert target.moves.thaw(RequestId("a"), 0)
    target.moves.freeze(RequestId("large"), 0)
    collect(target, outputs)
    assert outputs["a"].ends == 1


def test_a_frozen_leader_keeps_nobody_waiting() -> None:
    target, outputs = engine(config(blocks=64, slots=2)), dict[str, Output]()
    for n in range(3):
        target.add(request(f"c{n}", prompt=30, group="g", choice=n, max_tokens=3), 0)
    target.moves.freeze(RequestId("c0"), 0)
    collect(target, outputs)
    assert set(outputs) == {"c1", "c2"}
    assert target.moves.thaw(RequestId("c0"), 0)
    collect(target, outputs)
    assert outputs["c0"].ends == 1


def test_what_has_ended_is_not_frozen_and_what_is_not_there_is_not_exported() -> None:
    target = engine(SETTINGS)
    assert target.moves.freeze(R, 0) is None
    assert not target.moves.release(R, 0)
    assert target.moves.exportable_blocks(R, 0) == 0
    target.add(exacting(), 0)
    target.step()
    for first, count in ((0, 99), (-1, 1), (0, 0), (99, 1)):
        with pytest.raises(LookupError):
            target.moves.export_blocks(R, 0, first, count)
    assert target.moves.exportable_blocks(R, 0) == 4, "16 of 21 tokens have been run"
    assert target.moves.export_rest(R, 0, 1) == target.moves.export_blocks(R, 0, 1, 3)
    assert target.moves.export_rest(R, 0, 4).nbytes == 0
    assert not target.moves.release(R, 0), "it is not frozen"


# --- the target's refusals ---


def test_an_import_is_refused_by_reason_and_nothing_is_reserved() -> None:
    target = engine(config(blocks=32, max_held=2))
    begin = target.moves.import_begin
    assert begin(R, 1, "another", 1) is ImportRefusal.KV_FORMAT
    assert begin(R, 1, "arithmetic", 33) is ImportRefusal.NO_ROOM
    assert target.load().blocks_free == 32
    assert begin(R, 1, "arithmetic", 5) is None
    assert begin(R, 1, "arithmetic", 5) is ImportRefusal.KNOWN
    target.add(request("ends at once", max_tokens=0), 0)
    assert begin(RequestId("ends at once"), 0, "arithmetic", 1) is ImportRefusal.KNOWN
    target.step()
    target.add(request("a"), 0)
    assert begin(RequestId("b"), 1, "arithmetic", 1) is ImportRefusal.FULL
    assert target.add(request("c"), 0) is not None, "an import that has begun is one of those that are held"
    target.check_integrity()
    assert target.load().blocks_free == 27
    assert target.moves.import_abort(R, 1)
    assert not target.moves.import_abort(R, 1)
    assert target.load().blocks_free == 32


def test_blocks_that_are_not_whole_or_leave_a_gap_are_refused() -> None:
    backend = backend_for(SETTINGS)
    target = engine(SETTINGS, backend)
    data = memoryview(bytes(3 * backend.kv_block_bytes))
    send = target.moves.import_blocks
    assert send(R, 1, 0, data) is ImportRefusal.UNKNOWN
    assert target.moves.import_begin(R, 1, "arithmetic", 1) is None
    assert send(R, 1, 1, data) is ImportRefusal.MISFIT
    assert send(R, 1, 0, data[:-1]) is ImportRefusal.MISFIT
    assert send(R, 1, 0, data[:0]) is ImportRefusal.MISFIT
    assert send(R, 1, 0, data) is None
    assert send(R, 1, 2, data) is None
    assert send(R, 1, 6, data) is ImportRefusal.MISFIT
    target.check_integrity()
    assert target.load().blocks_free == 64 - 5


def test_where_the_pool_is_full_the_import_keeps_what_it_has_and_the_rest_is_run_again() -> None:
    pair = Pair(config(blocks=32))
    r = exacting(prompt=30)
    pair.source.add(r, 0)
    pair.step(pair.source, 6)
    assert pair.target.moves.import_begin(R, 1, "arithmetic", 4) is None
    holder = RequestId("holder")
    assert pair.target.moves.import_begin(holder, 1, "arithmetic", 28) is None
    export = pair.source.moves.export_blocks
    assert pair.target.moves.import_blocks(R, 1, 0, export(R, 0, 0, 4)) is None
    assert pair.target.moves.import_blocks(R, 1, 4, export(R, 0, 4, 2)) is ImportRefusal.NO_ROOM
    state = pair.source.moves.freeze(R, 0)
    assert state is not None
    assert pair.target.moves.import_abort(holder, 1)
    assert pair.target.moves.import_commit(state, 1) is None
    collect(pair.target, pair.outputs)
    assert same(pair.outputs["r"], undisturbed(r, max_model_len=128))


def test_a_commit_without_a_beginning_or_of_another_format_is_refused() -> None:
    target = engine(SETTINGS)
    state = EngineState(request=exacting(), computed_tokens=0, kv_format="arithmetic")
    assert target.moves.import_commit(state, 1) is ImportRefusal.UNKNOWN
    assert target.moves.import_begin(R, 1, "arithmetic", 1) is None
    other = msgspec.structs.replace(state, kv_format="other")
    assert target.moves.import_commit(other, 1) is ImportRefusal.KV_FORMAT
    assert target.moves.import_commit(state, 1) is None
    assert collect(target)["r"].finish is FinishReason.LENGTH


def test_a_request_comes_without_bytes_from_any_engine_and_goes_on_alike() -> None:
    pair = Pair()
    r = exacting()
    pair.source.add(r, 0)
    pair.step(pair.source, 6)
    target = pair.target.moves
    assert target.import_begin(R, 1, NO_KV, 9) is None
    assert pair.target.load().blocks_free == 64, "none are to come"
    block = memoryview(bytes(pair.backend.kv_block_bytes))
    assert target.import_blocks(R, 1, 0, block) is ImportRefusal.MISFIT
    assert target.import_abort(R, 1)
    assert target.import_begin(R, 1, NO_KV, 0) is None
    state = pair.source.moves.freeze(R, 0)
    assert state is not None
    foreign = msgspec.structs.replace(state, kv_format="another", kv_handle=b"another's")
    assert target.import_commit(foreign, 1) is None
    assert pair.source.moves.release(R, 0)
    pair.target.check_integrity()
    pair.target.add(request("new", prompt=3, arrived=0.0), 0)
    assert pair.target._book.waiting.items[0].identity == (R, 1), "it goes on before new work"
    collect(pair.target, pair.outputs)
    assert same(pair.outputs["r"], undisturbed(r, max_model_len=128))


def test_an_abort_ends_an_import_without_a_word_for_nothing_was_accepted() -> None:
    target = engine(SETTINGS)
    assert target.moves.import_begin(R, 1, "arithmetic", 3) is None
    assert target.abort(R, 1)
    assert not target.has_work
    assert target.load().blocks_free == 64
    target.check_integrity()


@pytest.mark.parametrize(
    "change",
    [
        lambda r: msgspec.structs.replace(r, prompt_ids=tuple(range(200))),
        lambda r: msgspec.structs.replace(r, emitted_ids=(10**9,)),
        lambda r: msgspec.structs.replace(r, emitted_ids=tuple(range(1, 25))),
    ],
    ids=["too long", "unknown token", "had ended"],
)
def test_an_imported_request_that_cannot_run_ends_with_the_next_result(change: Callable[[Request], Request]) -> None:
    target = engine(SETTINGS)
    assert target.moves.import_begin(R, 1, "arithmetic", 3) is None
    state = EngineState(request=change(exacting()), computed_tokens=12, kv_format="arithmetic")
    assert target.moves.import_commit(state, 1) is None
    (delta,) = target.step().deltas
    assert delta.finish in (FinishReason.ERROR, FinishReason.LENGTH)
    assert (delta.index, delta.token_ids) == (len(state.request.emitted_ids), ())
    assert target.load().blocks_free == 64
    target.check_integrity()


def test_an_imported_prefix_can_be_found_by_others_once_it_has_run() -> None:
    pair = Pair()
    r = exacting(prompt=40)
    pair.source.add(r, 0)
    pair.step(pair.source, 5)
    assert pair.target.moves.import_begin(R, 1, "arithmetic", 1) is None
    pair.stop_and_copy()
    collect(pair.target, pair.outputs)
    pair.target.add(request("other", prompt=prompt_of("r", 40)), 0)
    collect(pair.target)
    assert pair.target.load().prefix_hit_tokens_total == 36


def test_blocks_of_a_careless_source_are_seen_in_the_output() -> None:
    """The checks above can fail: it is what came that is read."""

    class Careless(ArithmeticBackend):
        def load_blocks(self, blocks: object, saved: memoryview) -> None:
            pass

    pair = Pair()
    pair.target = engine(SETTINGS, Careless(64, 4, pair.backend.vocab_size))
    r = exacting()
    pair.source.add(r, 0)
    pair.step(pair.source, 4)
    assert pair.target.moves.import_begin(R, 1, "arithmetic", 1) is None
    pair.stop_and_copy()
    collect(pair.target, pair.outputs)
    assert not same(pair.outputs["r"], undisturbed(r, max_model_len=128))


# --- the laws of moves between any two engines ---


class Other(ArithmeticBackend):
    """Computes the same, and keeps it in a form of its own."""

    kv_format = "arithmetic, otherwise"


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("kind", [ArithmeticBackend, Other], ids=["bytes travel", "formats differ"])
def test_between_two_engines_in_their_own_threads(
    kind: type[ArithmeticBackend], law: Callable[[Engines], None]
) -> None:
    settings = config(max_held=MAX_HELD, max_model_len=256)
    backends = (
        backend_for(settings),
        kind(settings.blocks, settings.block_size_tokens, backend_for(settings).vocab_size),
    )
    sides = [Side(EngineRunner(engine(settings, backend), SystemClock()), stands_still=True) for backend in backends]
    source, target = sides
    for side in sides:
        side.start()
    try:
        law(Engines(source, target, lambda r: undisturbed(r, max_model_len=256).token_ids, tokens=30))
        for side in sides:
            assert side.port.progress().alive
    finally:
        for side in sides:
            ending_fails_every_call_rather_than_letting_it_wait(side)
