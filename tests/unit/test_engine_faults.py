"""A backend that fails: whoever makes it fail ends alone, and the batch goes on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from cluster.config import EngineConfig
from cluster.engine.batch_run import ALONE_MAX, REPEATS_MAX, run_batch
from cluster.engine.engine import FAILURES_IN_A_ROW_MAX, Engine, EngineBrokenError
from cluster.engine.limits import PATIENCE_STEPS, FittingLimits
from cluster.ports import OutOfMemoryError, Row, RowOutput
from cluster.types import FinishReason, PreemptionMeans
from tests.conformance.arithmetic_backend import ArithmeticBackend
from tests.conformance.engine_kit import (
    EOS,
    Output,
    byte_level_codec,
    collect,
    config,
    gather,
    request,
    same,
    undisturbed,
    vocab_size,
)

POISON = vocab_size() - 1


class Fragile(ArithmeticBackend):
    """Fails on every batch with a request that has the token POISON among its first three, after it has written half of
    the batch; and does not fit more than `tokens_max` tokens at once."""

    def __init__(self, settings: EngineConfig) -> None:
        super().__init__(settings.blocks, settings.block_size_tokens, vocab_size())
        self.failures = 0
        self.misfits = 0
        self.tokens_max = 10**6

    def run(self, rows: Sequence[Row], padding_tokens: int = 0) -> list[RowOutput]:
        if sum(len(row.token_ids) for row in rows) > self.tokens_max:
            self.misfits += 1
            raise OutOfMemoryError("too many tokens")
        if any(row.start == 0 and POISON in row.token_ids[:3] for row in rows):
            self.failures += 1
            super().run(rows[: len(rows) // 2], padding_tokens)
            raise ValueError("out of range")
        return super().run(rows, padding_tokens)


def fragile(settings: EngineConfig) -> tuple[Engine, Fragile]:
    backend = Fragile(settings)
    return Engine(settings, backend, byte_level_codec(), (EOS,)), backend


def clean(name: str, tokens: int = 3) -> tuple[int, ...]:
    """A prompt without the poison."""
    return tuple(i % POISON for i in request(name, prompt=tokens).prompt_ids)


# --- a request that makes the backend raise ---


@pytest.mark.parametrize("place", [0, 10, 20])
def test_a_poison_request_ends_alone_and_twenty_others_in_flight_finish_unchanged(place: int) -> None:
    """Public report: a malformed request failed inside the engine's loop and took all users down."""
    settings = config(slots=21, step_token_budget=64, blocks=1024)
    target, _ = fragile(settings)
    others = [request(f"r{n:02}", prompt=clean(f"r{n}"), arrived=float(n), max_tokens=12) for n in range(20)]
    for r in others:
        target.add(r, 0)
    outputs: dict[str, Output] = {}
    for _ in range(4):
        gather(target.step(), outputs)
    assert all(0 < len(outputs[r.request_id].token_ids) < 12 for r in others)
    target.add(request("poison", prompt=(1, 2, POISON), arrived=place - 0.5), 0)
    collect(target, outputs)
    expected = {r.request_id: undisturbed(r, max_model_len=128) for r in others}
    assert all(same(outputs[name], alone) for name, alone in expected.items())
    assert outputs["poison"].finish is FinishReason.ERROR
    assert "ValueError" in outputs["poison"].error
    assert target.load().blocks_free == settings.blocks


def rows_of(poisoned: set[int], count: int) -> list[Row]:
    return [Row((POISON if i in poisoned else 1,), 0, (i,), None) for i in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 16, 31, 32])
def test_any_one_failing_row_is_found_with_few_runs(count: int) -> None:
    settings = config(blocks=64, block_size_tokens=4)
    for guilty in range(count):
        backend = Fragile(settings)
        runs = 0

        class Counting(Fragile):
            def run(self, rows: Sequence[Row], padding_tokens: int = 0) -> list[RowOutput]:
                nonlocal runs
                runs += 1
                return super().run(rows, padding_tokens)

        backend = Counting(settings)
        ran = run_batch(backend, rows_of({guilty}, count), range(count))
        assert (set(ran.failed), set(ran.outputs)) == ({guilty}, set(range(count)) - {guilty})
        assert runs <= 1 + 2 * (count - 1).bit_length()


def test_rows_that_there_are_no_runs_left_for_are_neither_ended_nor_run() -> None:
    poisoned = set(range(1, 64, 2))
    backend = Fragile(config(blocks=64))
    ran = run_batch(backend, rows_of(poisoned, 64), range(64))
    assert set(ran.failed) < poisoned
    assert set(ran.outputs).isdisjoint(poisoned)
    assert backend.failures <= 1 + REPEATS_MAX
    assert len(ran.failed) + len(ran.outputs) < 64


def test_many_poison_requests_among_others_end_one_by_one_over_several_steps() -> None:
    settings = config(slots=32, step_token_budget=256, blocks=1024)
    target, _ = fragile(settings)
    good = [request(f"good{n}", prompt=clean(f"g{n}"), max_tokens=12, arrived=float(2 * n)) for n in range(16)]
    for n, r in enumerate(good):
        target.add(r, 0)
        target.add(request(f"bad{n}", prompt=(POISON,), arrived=float(2 * n + 1)), 0)
    outputs = collect(target)
    assert all(same(outputs[r.request_id], undisturbed(r, max_model_len=128)) for r in good)
    assert all(outputs[f"bad{n}"].finish is FinishReason.ERROR for n in range(16))


def test_when_nothing_can_be_run_only_a_few_end_before_the_engine_gives_up() -> None:
    """A device that is lost fails every row: the requests are not to blame, and go on elsewhere."""
    settings = config(slots=16, step_token_budget=64, blocks=256)
    target, _ = fragile(settings)
    for n in range(16):
        target.add(request(f"r{n}", prompt=(POISON, 1), arrived=float(n)), 0)
    for _ in range(FAILURES_IN_A_ROW_MAX - 1):
        assert [d.finish for d in target.step().deltas] == [FinishReason.ERROR] * ALONE_MAX
    with pytest.raises(EngineBrokenError):
        target.step()


def test_a_backend_that_fails_again_and_again_breaks_the_engine_and_nothing_is_said_of_its_last_batch() -> None:
    target, _ = fragile(config(slots=1))
    for n in range(FAILURES_IN_A_ROW_MAX):
        target.add(request(f"p{n}", prompt=(POISON,), arrived=float(n)), 0)
    for _ in range(FAILURES_IN_A_ROW_MAX - 1):
        assert [d.finish for d in target.step().deltas] == [FinishReason.ERROR]
    with pytest.raises(EngineBrokenError, match="ValueError"):
        target.step()


def test_a_batch_so_large_that_no_row_could_be_tried_alone_breaks_the_engine_and_ends_nobody() -> None:
    settings = config(slots=256, step_token_budget=256, blocks=1024)
    target, backend = fragile(settings)
    for n in range(256):
        target.add(request(f"r{n}", prompt=(POISON,), arrived=float(n)), 0)
    for _ in range(FAILURES_IN_A_ROW_MAX - 1):
        assert not target.step().deltas
    with pytest.raises(EngineBrokenError, match="ValueError"):
        target.step()
    assert backend.failures <= FAILURES_IN_A_ROW_MAX * (1 + REPEATS_MAX)


def test_failures_with_a_good_step_between_do_not_break_the_engine() -> None:
    target, backend = fragile(config(slots=1))
    for n in range(2 * FAILURES_IN_A_ROW_MAX):
        prompt = (POISON,) if n % 2 else clean(f"r{n}")
        target.add(request(f"r{n}", prompt=prompt, arrived=float(n), max_tokens=2), 0)
    outputs = collect(target)
    assert backend.failures == FAILURES_IN_A_ROW_MAX
    assert [outputs[f"r{n}"].finish for n in range(4)] == [FinishReason.LENGTH, FinishReason.ERROR] * 2


class Silent(ArithmeticBackend):
    """Leaves out a part of its answer."""

    part = ""

    def run(self, rows: Sequence[Row], padding_tokens: int = 0) -> list[RowOutput]:
        outputs = super().run(rows, padding_tokens)
        match self.part:
            case "row":
                return outputs[1:]
            case "scores":
                return [RowOutput(o.token_id, o.logprob) for o in outputs]
            case _:
                return [RowOutput(o.token_id, None, o.scores) for o in outputs]


@pytest.mark.parametrize("part", ["row", "scores", "logprob"])
def test_a_backend_that_leaves_out_a_part_of_its_answer_has_failed(part: str) -> None:
    settings = config()
    backend = Silent(settings.blocks, settings.block_size_tokens, vocab_size())
    backend.part = part
    target = Engine(settings, backend, byte_level_codec(), ())
    target.add(request("r", logprobs=1, prompt_logprobs=1), 0)
    assert collect(target)["r"].finish is FinishReason.ERROR


def test_a_request_whose_next_token_cannot_be_drawn_ends_alone_with_an_error_and_its_blocks_are_not_found_again() -> (
    None
):
    class Overflowing(ArithmeticBackend):
        """Computes no numbers after the 21st token of a request that is drawn by chance."""

        def run(self, rows: Sequence[Row], padding_tokens: int = 0) -> list[RowOutput]:
            outputs = super().run(rows, padding_tokens)
            none = [row.sample is not None and row.sample.temperature > 0 and row.start == 20 for row in rows]
            return [RowOutput() if no else o for no, o in zip(none, outputs, strict=True)]

    settings = config(block_size_tokens=7, blocks=64)
    backend = Overflowing(settings.blocks, settings.block_size_tokens, vocab_size())
    target = Engine(settings, backend, byte_level_codec(), (EOS,))
    bystander = request("bystander")
    target.add(request("overflows", prompt=19, temperature=1.0), 0)
    target.add(bystander, 0)
    outputs = collect(target)
    assert (outputs["overflows"].finish, len(outputs["overflows"].token_ids)) == (FinishReason.ERROR, 2)
    assert same(outputs["bystander"], undisturbed(bystander, max_model_len=settings.max_model_len))
    load = target.load()
    assert (load.blocks_free, load.tokens_total) == (settings.blocks, 2 + len(outputs["bystander"].token_ids))
    assert load.blocks_cached == (5 + 8 - 1) // 7, "the bystander's only: not those that were full before it failed"


# --- keys and values that cannot be copied ---


class Uncopied(ArithmeticBackend):
    """Fails to copy between blocks, from them or to them, after it has spoiled half of the target."""

    fails: frozenset[str] = frozenset()

    def copy_block(self, source: int, target: int) -> None:
        if "copy" in self.fails:
            half = self.block_size_tokens // 2
            self.store[target][:half] = self.store[source][:half]
            raise RuntimeError("no copy")
        super().copy_block(source, target)

    def save_blocks(self, blocks: Sequence[int]) -> memoryview:
        if "save" in self.fails:
            raise MemoryError("no host memory")
        return super().save_blocks(blocks)

    def load_blocks(self, blocks: Sequence[int], saved: memoryview) -> None:
        if "load" in self.fails:
            super().load_blocks(blocks[:1], saved[: self.kv_block_bytes])
            raise RuntimeError("no copy")
        super().load_blocks(blocks, saved)


def uncopied(settings: EngineConfig, *fails: str) -> tuple[Engine, Uncopied]:
    backend = Uncopied(settings.blocks, settings.block_size_tokens, vocab_size())
    backend.fails = frozenset(fails)
    return Engine(settings, backend, byte_level_codec(), (EOS,)), backend


@pytest.mark.parametrize(("fails", "means"), [("save", PreemptionMeans.RECOMPUTE), ("load", PreemptionMeans.SWAP)])
def test_what_cannot_be_swapped_out_or_in_is_computed_again_and_all_end_as_if_alone(
    fails: str, means: PreemptionMeans
) -> None:
    settings = config(slots=2, blocks=32)
    target, _ = uncopied(settings, fails)
    low, bystander = request("low", prompt=40, priority=-10, max_tokens=30), request("bystander", max_tokens=12)
    urgent = request("urgent", prompt=90, priority=10)
    outputs: dict[str, Output] = {}
    target.add(low, 0)
    target.add(bystander, 0)
    for _ in range(6):
        gather(target.step(), outputs)
    target.add(urgent, 0)
    result = target.step()
    gather(result, outputs)
    told = {p.request_id: p for p in result.preempted}[low.request_id]
    assert (told.means, told.tokens_to_recompute > 0) == (means, means is PreemptionMeans.RECOMPUTE)
    target.check_integrity()
    collect(target, outputs)
    for r in (low, bystander, urgent):
        assert same(outputs[r.request_id], undisturbed(r, max_model_len=128))
    load = target.load()
    assert (load.blocks_free, load.host_blocks_free) == (settings.blocks, settings.host_blocks)


def test_a_recompute_because_a_swap_failed_counts_against_the_bound_like_any_other() -> None:
    settings = config(slots=2, blocks=32, max_recomputes=1)
    target, _ = uncopied(settings, "save")
    target.add(request("low", prompt=40, priority=-10, max_tokens=30), 0)
    for _ in range(4):
        target.step()
    target.add(request("urgent", prompt=100, priority=10), 0)
    assert [p.means for p in target.step().preempted] == [PreemptionMeans.RECOMPUTE]
    (low,) = target._book.waiting.items
    assert low.pushed_out == 1


def test_a_choice_whose_copy_of_the_prompts_last_block_fails_computes_the_prompt_itself() -> None:
    settings = config(block_size_tokens=8, blocks=32)
    target, _ = uncopied(settings, "copy")
    prompt = clean("c", 14)
    choices = [request(f"c{n}", prompt=prompt, group="g", choice=n, temperature=1.0, seed=3) for n in range(3)]
    for r in choices:
        target.add(r, 0)
    outputs = collect(target)
    for r in choices:
        assert same(outputs[r.request_id], undisturbed(r, max_model_len=128))
    assert target.load().blocks_free == settings.blocks


# --- out of memory ---


def test_out_of_memory_sheds_the_youngest_of_the_lowest_class_and_all_finish_as_if_alone() -> None:
    settings = config(slots=6, step_token_budget=64, blocks=256)
    target, backend = fragile(settings)
    requests = [
        request(f"r{n}", prompt=clean(f"r{n}", 4), priority=0 if n < 3 else -10, arrived=float(n), max_tokens=6)
        for n in range(6)
    ]
    for r in requests:
        target.add(r, 0)
    backend.tokens_max = 16
    result = target.step()
    assert [p.request_id for p in result.preempted] == ["r5", "r4"]
    assert {(p.for_request_id, p.means) for p in result.preempted} == {(None, PreemptionMeans.RECOMPUTE)}
    assert result.load.preemptions_total == 2
    outputs: dict[str, Output] = {}
    gather(result, outputs)
    assert set(outputs) == {"r0", "r1", "r2", "r3"}
    collect(target, outputs)
    for r in requests:
        assert same(outputs[r.request_id], undisturbed(r, max_model_len=128))


def test_one_that_does_not_fit_even_alone_ends_with_an_error() -> None:
    settings = config(slots=2, step_token_budget=64, blocks=256)
    target, backend = fragile(settings)
    backend.tokens_max = 16
    small = request("small", prompt=clean("s"), arrived=1.0)
    target.add(request("large", prompt=clean("l", 40)), 0)
    target.add(small, 0)
    outputs = collect(target)
    assert outputs["large"].finish is FinishReason.ERROR
    assert "OutOfMemoryError" in outputs["large"].error
    assert same(outputs["small"], undisturbed(small, max_model_len=128))


def test_an_engine_settles_at_what_fits_and_seldom_tries_more() -> None:
    settings = config(slots=8, step_token_budget=64, blocks=4096, max_model_len=4000)
    target, backend = fragile(settings)
    backend.tokens_max = 6
    for n in range(8):
        target.add(request(f"r{n}", prompt=(1, 2, 3), max_tokens=1400, arrived=float(n)), 0)
    tokens = [len(target.step().deltas) for _ in range(20 * PATIENCE_STEPS)]
    target.check_integrity()
    assert backend.misfits <= 16
    assert sum(tokens[-PATIENCE_STEPS:]) >= 5 * PATIENCE_STEPS


def test_steps_that_did_not_fit_are_tried_again_rarer_and_rarer() -> None:
    """Full size is never to be had: each try comes after twice the patience of the one before."""
    limits = FittingLimits(config(slots=5, step_token_budget=16))
    failed_at: list[int] = []
    for step in range(100 * PATIENCE_STEPS):
        if limits.config.slots == 5:
            limits.did_not_fit(4, 4)
            failed_at.append(step)
        else:
            limits.fitted()
    gaps = [b - a for a, b in pairwise(failed_at)]
    assert gaps == [1 + PATIENCE_STEPS * 2**k for k in range(len(gaps))]
    assert len(gaps) == 6


def test_limits_rise_to_what_is_configured_again_and_the_patience_is_forgotten() -> None:
    full = config(slots=16, step_token_budget=64)
    limits = FittingLimits(full)
    limits.did_not_fit(4, 10)
    assert (limits.config.slots, limits.config.step_token_budget) == (4, 10)
    for _ in range(PATIENCE_STEPS - 1):
        limits.fitted()
    assert limits.config.slots == 4
    limits.fitted()
    assert (limits.config.slots, limits.config.step_token_budget) == (5, 12)
    for _ in range(20 * PATIENCE_STEPS):
        limits.fitted()
    assert limits.config is full
    limits.did_not_fit(0, 0)
    assert (limits.config.slots, limits.config.step_token_budget) == (1, 1)
    for _ in range(PATIENCE_STEPS):
        limits.fitted()
    assert limits.config.slots == 2
