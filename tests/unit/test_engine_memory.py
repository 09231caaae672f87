"""Keys and values are computed once: prefixes are found again, siblings share, and preempted work keeps what it can."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass

import pytest

from cluster.config import EngineConfig
from cluster.engine.engine import Engine
from cluster.engine.kv_cache import IntegrityError
from cluster.engine.prefix import HASH_BYTES, KEPT_WHILE_WAITING, PrefixHashes, extend, root
from cluster.engine.scheduling.plan import Preemption
from cluster.types import FinishReason, Preempted, PreemptionMeans, PriorityLoad, Request
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

PROMPT = prompt_of("common", 40)


@dataclass
class Bench:
    """An engine, its backend, and all that it has put out."""

    settings: EngineConfig

    def __post_init__(self) -> None:
        self.backend = backend_for(self.settings)
        self.engine: Engine = engine(self.settings, self.backend)
        self.outputs: dict[str, Output] = {}
        self.requests: dict[str, Request] = {}
        self.preempted: list[Preempted] = []

    def add(self, r: Request) -> None:
        self.requests[r.request_id] = r
        assert self.engine.add(r, 0) is None

    def step(self, steps: int = 1) -> None:
        for _ in range(steps):
            result = self.engine.step()
            gather(result, self.outputs)
            self.preempted.extend(result.preempted)
            self.engine.check_integrity()

    def until(self, name: str, tokens: int) -> None:
        while len(self.outputs.setdefault(name, Output()).token_ids) < tokens:
            self.step()

    def finish(self) -> None:
        collect(self.engine, self.outputs)
        for name, r in self.requests.items():
            assert same(self.outputs[name], undisturbed(r, max_model_len=self.settings.max_model_len)), name
        assert self.engine.load().blocks_free == self.settings.blocks

    def preempt(self, name: str, means: PreemptionMeans) -> None:
        """As if a plan had said so."""
        state = self.engine._book.live[self.requests[name].request_id, 0].state
        self.preempted.append(self.engine._preempt(Preemption(state, None, means)))
        self.engine.check_integrity()

    @property
    def prefill_tokens(self) -> int:
        return self.engine.load().prefill_tokens_total

    @property
    def hit_tokens(self) -> int:
        return self.engine.load().prefix_hit_tokens_total


# --- the prefix cache ---


def test_a_prompt_that_was_run_before_is_run_from_its_last_full_block_on() -> None:
    bench = Bench(config(blocks=64))
    bench.add(request("first", prompt=PROMPT))
    bench.finish()
    assert (bench.prefill_tokens, bench.hit_tokens) == (40, 0)
    bench.add(request("again", prompt=PROMPT))
    bench.finish()
    assert (bench.prefill_tokens, bench.hit_tokens) == (40 + 4, 36), "one token at least is run, so its block is"
    bench.add(request("longer", prompt=(*PROMPT, 1, 2, 3)))
    bench.finish()
    assert (bench.prefill_tokens, bench.hit_tokens) == (44 + 3, 36 + 40)


def test_the_output_of_an_earlier_turn_is_found_as_part_of_the_next_prompt() -> None:
    bench = Bench(config(blocks=64))
    bench.add(request("turn1", prompt=PROMPT[:10], max_tokens=15))
    bench.finish()
    told = tuple(bench.outputs["turn1"].token_ids)
    bench.add(request("turn2", prompt=(*PROMPT[:10], *told, 1, 2)))
    bench.finish()
    assert bench.hit_tokens == 24, "24 of the 25 tokens have keys and values, in six blocks"


def test_a_running_requests_prefix_is_shared_before_it_ends() -> None:
    bench = Bench(config(blocks=32, step_token_budget=64))
    bench.add(request("a", prompt=PROMPT, max_tokens=20))
    bench.step(2)
    bench.add(request("b", prompt=PROMPT, max_tokens=20))
    bench.step()
    assert bench.hit_tokens == 36
    assert bench.engine.load().blocks_free == 32 - 11 - 2
    bench.finish()


def test_another_tenants_prefix_is_never_found() -> None:
    bench = Bench(config(blocks=64))
    for n, tenant in enumerate(("acme", "zeta")):
        bench.add(request(f"r{n}", prompt=PROMPT, tenant=tenant))
        bench.finish()
    assert (bench.prefill_tokens, bench.hit_tokens) == (80, 0)
    bench.add(request("r2", prompt=PROMPT, tenant="zeta"))
    bench.finish()
    assert bench.hit_tokens == 36


def test_a_prefix_that_differs_in_one_early_token_is_not_found_behind_it() -> None:
    bench = Bench(config(blocks=64))
    bench.add(request("a", prompt=PROMPT))
    bench.finish()
    bench.add(request("b", prompt=(*PROMPT[:9], PROMPT[9] ^ 1, *PROMPT[10:])))
    bench.finish()
    assert bench.hit_tokens == 8


def test_without_the_prefix_cache_nothing_is_found() -> None:
    bench = Bench(config(blocks=64, prefix_cache=False))
    for n in range(2):
        bench.add(request(f"r{n}", prompt=PROMPT))
        bench.finish()
    assert (bench.prefill_tokens, bench.hit_tokens, bench.engine.load().blocks_cached) == (80, 0, 0)


def test_cached_blocks_count_as_free_and_give_way_to_work() -> None:
    bench = Bench(config(blocks=32, max_model_len=128))
    bench.add(request("a", prompt=PROMPT))
    bench.finish()
    load = bench.engine.load()
    assert (load.blocks_free, load.blocks_cached) == (32, 11)
    bench.add(request("large", prompt=110, max_tokens=10))
    bench.finish()
    bench.add(request("again", prompt=PROMPT))
    bench.finish()
    assert bench.hit_tokens < 12, "the later blocks had to go"


def test_what_comes_in_takes_its_cached_blocks_before_another_takes_fresh_ones_that_could_be_these() -> None:
    """The prefix is the one unused longest, and the pool has no plain block left for all that come in together."""
    bench = Bench(config(blocks=32, slots=8, step_token_budget=128))
    bench.add(request("a", prompt=PROMPT))
    bench.finish()
    bench.add(request("x", prompt=30))
    bench.finish()
    load = bench.engine.load()
    assert load.blocks_free - load.blocks_cached < 16 < load.blocks_free - 10
    bench.add(request("large", prompt=60, max_tokens=4, priority=1))
    for n in range(2):
        bench.add(request(f"b{n}", prompt=(*PROMPT, n), max_tokens=4))
    bench.step()
    assert bench.engine.load().running == (PriorityLoad(1, 1, 16), PriorityLoad(0, 1, 11))
    bench.finish()
    assert bench.hit_tokens == 2 * 40


def test_prompts_that_are_to_be_scored_are_run_whole_but_found_by_others() -> None:
    bench = Bench(config(blocks=64))
    bench.add(request("a", prompt=PROMPT))
    bench.finish()
    bench.add(request("scored", prompt=PROMPT, prompt_logprobs=2))
    bench.finish()
    assert (bench.prefill_tokens, bench.hit_tokens) == (80, 0)
    bench = Bench(config(blocks=64))
    bench.add(request("scored", prompt=PROMPT, prompt_logprobs=2))
    bench.finish()
    bench.add(request("a", prompt=PROMPT))
    bench.finish()
    assert bench.hit_tokens == 36


def test_a_prefix_hash_names_the_tenant_and_every_token_before() -> None:
    tokens = list(range(8))
    chain = PrefixHashes("acme", 4)
    at = lambda start, end: tokens[start:end]  # noqa: E731
    assert chain.of(1, at) == extend(extend(root("acme"), tokens[:4]), tokens[4:])
    assert len(chain.of(0, at)) == HASH_BYTES
    others = {PrefixHashes(tenant, 4).of(1, at) for tenant in ("acme", "zeta", "")}
    assert len(others) == 3
    for changed in range(8):
        other = [*tokens[:changed], 99, *tokens[changed + 1 :]]
        assert PrefixHashes("acme", 4).of(1, lambda start, end: other[start:end]) != chain.of(1, at)  # noqa: B023


def test_a_waiting_request_takes_less_than_four_kilobytes_beyond_its_prompt() -> None:
    settings = config(blocks=4096, block_size_tokens=1, max_model_len=4096, slots=1)
    prompt = prompt_of("p", 1000)
    target = engine(settings)
    target.add(request("a", prompt=prompt, max_tokens=2), 0)
    collect(target)
    requests = [request(f"waits{n}", prompt=prompt, stop=("never",), frequency_penalty=1.0) for n in range(50)]
    tracemalloc.start()
    for r in requests:
        target.add(r, 0)
        assert target._memory.cached_blocks(target._book.live[r.request_id, 0]) == 999, "it has been looked up"
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert KEPT_WHILE_WAITING * HASH_BYTES < taken / 50 < 4096


# --- siblings ---


def siblings(count: int, prompt: tuple[int, ...] = PROMPT, **more: object) -> list[Request]:
    return [
        request(f"c{n}", prompt=prompt, group="g", choice=n, temperature=1.0, seed=3, max_tokens=12, **more)  # type: ignore[arg-type]
        for n in range(count)
    ]


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("prompt_tokens", [1, 2, 4, 5, 37, 40])
def test_choices_compute_their_prompt_once_and_differ_and_repeat(prompt_tokens: int, prefix_cache: bool) -> None:
    texts = []
    for _ in range(2):
        bench = Bench(config(blocks=64, slots=8, prefix_cache=prefix_cache))
        for r in siblings(5, PROMPT[:prompt_tokens]):
            bench.add(r)
        bench.finish()
        assert bench.prefill_tokens == (prompt_tokens + 4 if prompt_tokens > 1 else 5), (
            "each runs the last token itself"
        )
        texts.append([tuple(bench.outputs[f"c{n}"].token_ids) for n in range(5)])
    assert len(set(texts[0])) == 5
    assert texts[0] == texts[1]


def test_a_block_that_is_shared_and_written_to_is_copied_once_per_follower_and_the_leader_keeps_the_original() -> None:
    bench = Bench(config(blocks=64, slots=4, prefix_cache=False))
    prompt = PROMPT[:39]  # the last token is the third of the tenth block
    for r in siblings(3, prompt):
        bench.add(r)
    bench.until("c0", 1)
    leader = bench.engine.pool.table(next(k for k in bench.engine._book.live if k[0] == "c0"))
    bench.step(2)
    tables = {str(k[0]): bench.engine.pool.table(k) for k in bench.engine._book.live}
    assert tables["c0"][:10] == leader[:10]
    for name in ("c1", "c2"):
        assert tables[name][:9] == leader[:9]
        assert tables[name][9] != leader[9]
    assert [source for source, _ in bench.backend.copies] == [leader[9]] * 2
    assert sorted(target for _, target in bench.backend.copies) == sorted(tables[n][9] for n in ("c1", "c2"))
    bench.finish()


def test_nothing_is_copied_where_the_last_prompt_token_begins_a_block() -> None:
    bench = Bench(config(blocks=64, slots=4))
    for r in siblings(3, PROMPT[:37]):
        bench.add(r)
    bench.finish()
    assert bench.backend.copies == []
    assert bench.hit_tokens == 2 * 36


def test_choices_finish_whoever_of_them_is_aborted_and_whenever() -> None:
    for victim in range(3):
        for steps in range(1, 6):
            bench = Bench(config(blocks=64, slots=2, step_token_budget=16))
            for r in siblings(3):
                bench.add(r)
            bench.step(steps)
            name = f"c{victim}"
            aborted = bench.engine.abort(bench.requests.pop(name).request_id, 0)
            assert aborted
            bench.finish()
            assert bench.outputs[name].finish is FinishReason.ABORT
            assert bench.prefill_tokens < 2 * 40, "one of those that are left computes the prompt, or had"


@pytest.mark.parametrize("means", list(PreemptionMeans))
def test_choices_do_not_wait_for_a_leader_that_has_lost_its_blocks(means: PreemptionMeans) -> None:
    for steps in range(1, 6):
        bench = Bench(config(blocks=64, slots=2, step_token_budget=16))
        for r in siblings(4):
            bench.add(r)
        bench.step(steps)
        bench.preempt("c0", means)
        leaders = {s.leader.identity[0] for s in bench.engine._book.states() if s.leader is not None}
        assert ("c0" in leaders) <= (means is not PreemptionMeans.SWAP)
        bench.finish()


def test_groups_of_other_tenants_and_other_prompts_share_nothing() -> None:
    bench = Bench(config(blocks=128, slots=8, prefix_cache=False))
    bench.add(request("a", prompt=PROMPT, group="g", tenant="acme"))
    bench.add(request("b", prompt=PROMPT, group="g", tenant="zeta"))
    bench.add(request("c", prompt=(*PROMPT, 1), group="g", tenant="acme"))
    bench.add(request("d", prompt=PROMPT, tenant="acme"))
    bench.finish()
    assert (bench.prefill_tokens, bench.hit_tokens) == (161, 0)


def test_a_write_to_a_block_that_others_read_is_refused() -> None:
    bench = Bench(config(blocks=64, slots=4))
    bench.add(request("a", prompt=PROMPT[:38], max_tokens=9))
    bench.step(4)
    (identity,) = bench.engine._book.live
    bench.engine.pool.share((request("b").request_id, 0), bench.engine.pool.table(identity))
    with pytest.raises(IntegrityError, match="others read"):
        bench.engine.step()


def test_the_arithmetic_betrays_a_wrong_copy_a_wrong_swap_and_a_stale_prefix() -> None:
    """The checks above can fail: it is what is in the blocks that counts."""

    class Careless(ArithmeticBackend):
        def copy_block(self, source: int, target: int) -> None:
            pass

        def load_blocks(self, blocks: object, saved: memoryview) -> None:
            pass

    settings = config(blocks=64, slots=4)

    def outputs_after(change: str) -> bool:
        backend = Careless(settings.blocks, 4, backend_for(settings).vocab_size)
        bench = Bench(settings)
        bench.backend = backend
        bench.engine = engine(settings, backend)
        for r in siblings(2, PROMPT[:39]) if change == "copy" else [request("c0", prompt=PROMPT)]:
            bench.add(r)
        bench.until("c0", 2)
        if change == "swap":
            bench.preempt("c0", PreemptionMeans.SWAP)
            backend.store = [[bytes(8)] * 4 for _ in range(64)]
        collect(bench.engine, bench.outputs)
        if change == "stale":
            backend.store[3] = [bytes(8)] * 4
            bench.add(request("again", prompt=PROMPT))
            collect(bench.engine, bench.outputs)
        return all(same(bench.outputs[n], undisturbed(r, max_model_len=128)) for n, r in bench.requests.items())

    assert outputs_after("nothing")
    assert not outputs_after("copy")
    assert not outputs_after("swap")
    assert not outputs_after("stale")


# --- preemption ---


@pytest.mark.parametrize(
    ("means", "freed", "again"),
    [(PreemptionMeans.PAUSE, 0, 0), (PreemptionMeans.SWAP, 11, 0), (PreemptionMeans.RECOMPUTE, 11, 42)],
)
def test_only_what_was_dropped_is_computed_again(means: PreemptionMeans, freed: int, again: int) -> None:
    bench = Bench(config(blocks=64, prefix_cache=False))
    bench.add(request("a", prompt=PROMPT, max_tokens=20))
    bench.until("a", 3)
    bench.preempt("a", means)
    (notice,) = bench.preempted
    assert (notice.means, notice.blocks_freed, notice.tokens_to_recompute) == (means, freed, again)
    load = bench.engine.load()
    kept = 11 - freed
    assert (load.blocks_free, load.waiting) == (64 - kept, (PriorityLoad(0, 1, kept, again),))
    assert load.host_blocks_free == 512 - (11 if means is PreemptionMeans.SWAP else 0)
    bench.finish()
    assert bench.prefill_tokens == 40 + (again + 1 if again else 0)
    assert bench.engine.load().host_blocks_free == 512


def test_what_was_dropped_is_found_in_the_prefix_cache_until_it_is_displaced() -> None:
    bench = Bench(config(blocks=64))
    bench.add(request("a", prompt=PROMPT, max_tokens=20))
    bench.until("a", 3)
    bench.preempt("a", PreemptionMeans.RECOMPUTE)
    bench.finish()
    assert bench.hit_tokens == 40


def test_what_was_dropped_and_displaced_can_be_found_again_once_it_has_been_run_again() -> None:
    bench = Bench(config(blocks=32))
    bench.add(request("a", prompt=PROMPT, max_tokens=20))
    bench.until("a", 3)
    bench.preempt("a", PreemptionMeans.RECOMPUTE)
    bench.add(request("large", prompt=124, priority=1, max_tokens=4))
    bench.finish()
    assert bench.hit_tokens == 0
    bench.add(request("again", prompt=PROMPT))
    bench.finish()
    assert bench.hit_tokens == 36


def test_one_that_was_paused_or_swapped_in_mid_prompt_goes_on_where_it_stood() -> None:
    for means in (PreemptionMeans.PAUSE, PreemptionMeans.SWAP):
        for steps in (1, 2, 3):
            bench = Bench(config(blocks=64, step_token_budget=11))
            bench.add(request("a", prompt=PROMPT, prompt_logprobs=1))
            bench.step(steps)
            bench.preempt("a", means)
            bench.finish()
            assert bench.prefill_tokens == 40


def test_what_a_paused_request_keeps_can_still_be_taken() -> None:
    for later in (PreemptionMeans.SWAP, PreemptionMeans.RECOMPUTE):
        bench = Bench(config(blocks=64))
        bench.add(request("a", prompt=PROMPT, max_tokens=20))
        bench.until("a", 3)
        bench.preempt("a", PreemptionMeans.PAUSE)
        bench.preempt("a", later)
        assert [p.blocks_freed for p in bench.preempted] == [0, 11]
        bench.finish()


def test_an_abort_gives_back_what_a_preempted_request_keeps_at_once() -> None:
    for means in PreemptionMeans:
        bench = Bench(config(blocks=64))
        bench.add(request("a", prompt=PROMPT, max_tokens=20))
        bench.until("a", 3)
        bench.preempt("a", means)
        assert bench.engine.abort(bench.requests["a"].request_id, 0)
        bench.engine.check_integrity()
        load = bench.engine.load()
        assert (load.blocks_free, load.host_blocks_free, load.waiting) == (64, 512, ())


def test_urgent_work_pauses_where_a_slot_is_short_and_swaps_where_blocks_are() -> None:
    bench = Bench(config(blocks=32, slots=2, step_token_budget=64))
    bench.add(request("low", prompt=PROMPT, priority=-10, max_tokens=40))
    bench.add(request("other", prompt=3, priority=-10, arrived=1.0, max_tokens=40))
    bench.step(2)
    bench.add(request("quick", prompt=4, priority=10, arrived=2.0, max_tokens=2))
    bench.step()
    assert [(p.request_id, p.means) for p in bench.preempted] == [("other", PreemptionMeans.PAUSE)]
    bench.step(4)
    bench.add(request("large", prompt=80, priority=10, arrived=3.0, max_tokens=2))
    bench.step()
    assert ("low", PreemptionMeans.SWAP) in [(p.request_id, p.means) for p in bench.preempted]
    before = bench.prefill_tokens
    bench.finish()
    assert bench.prefill_tokens <= before + 80, "nobody else's prompt was run again"
