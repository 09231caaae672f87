"""A router knows which leading blocks of a prompt each replica holds, exactly as the replicas tell it, and sends it there."""

from __future__ import annotations

from collections import Counter
from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config import RouterConfig
from cluster.engine.prefix import PrefixHashes, number_of, told_of
from cluster.messages import StepFrame
from cluster.types import FinishReason, Generation, PrefixChange, ReplicaId, Request, RequestId, Sampling, TokenDelta
from router.prefixes import CHAIN_BLOCKS, FAVOURED, Chain, Prefixes
from router.terms import Terms
from tests.unit.fake_replica import Bench, FakeReplica, token_id

BLOCK = 4
FIRST = Generation(1, "a")


def request(prompt: tuple[int, ...], *, tenant: str = "t", name: str = "q") -> Request:
    return Request(
        request_id=RequestId(name),
        tenant=tenant,
        priority=0,
        priority_class="standard",
        arrived_unix_s=0.0,
        prompt_ids=prompt,
        sampling=Sampling(max_tokens=1, seed=0),
    )


def hashes(prompt: tuple[int, ...], *, tenant: str = "t", block: int = BLOCK) -> list[int]:
    """Of the prompt's full blocks, as an engine makes them."""
    made = PrefixHashes(tenant, block)
    return [number_of(made.of(i, lambda start, end: prompt[start:end])) for i in range(len(prompt) // block)]


def held(numbers: list[int], *, afresh: bool = False) -> PrefixChange:
    return PrefixChange(told_of(numbers), b"", afresh)


def gone(numbers: list[int]) -> PrefixChange:
    return PrefixChange(b"", told_of(numbers))


def found(prefixes: Prefixes, r: Request) -> dict[str, int]:
    chain = prefixes.chain(r)
    return {} if chain is None else {str(name): blocks for name, blocks in prefixes.found(chain).items()}


def prompt_of(*families: int, blocks: int = 1, more: int = 1) -> tuple[int, ...]:
    """`blocks` blocks of each family's tokens, one after the other, and then `more` tokens of nobody's."""
    return tuple(1000 * family + k for family in families for k in range(blocks * BLOCK)) + (9999,) * more


# --- what is known ---


Deed = tuple[str, int, int, int]


@settings(deadline=None)
@given(
    deeds=st.lists(
        st.tuples(
            st.sampled_from(("hold", "hold", "hold", "lose", "afresh", "drop", "successor")),
            st.integers(0, 6),
            st.integers(0, 3),
            st.integers(1, 5),
        ),
        max_size=60,
    ),
    scan=st.sampled_from([2, 64]),
)
def test_what_is_found_is_the_longest_run_that_each_incarnation_has_told_and_not_taken_back(
    deeds: list[Deed], scan: int
) -> None:
    """Against a set for each replica, for prompts of four families that share their beginnings."""
    prefixes = Prefixes(10_000, scan)
    model: dict[str, set[int]] = {}
    numbers = Counter[str]()
    prompts = [prompt_of(0, family, blocks=3, more=2) for family in range(1, 5)]
    chains = [lookable(p) for p in prompts]
    for what, who, family, count in deeds:
        name = f"r{who}"
        replica_id, generation = ReplicaId(name), Generation(1 + numbers[name], "x")
        told = chains[family][-count:]
        if what == "hold":
            prefixes.tell(replica_id, generation, BLOCK, held(told))
            if name in model:
                model[name] |= set(told)
        elif what == "lose":
            prefixes.tell(replica_id, generation, BLOCK, gone(told))
            model.get(name, set()).difference_update(told)
        elif what == "afresh":
            prefixes.tell(replica_id, generation, BLOCK, held(chains[family][:count], afresh=True))
            model[name] = set(chains[family][:count])
        elif what == "drop":
            prefixes.drop(replica_id, generation)
            model.pop(name, None)
        else:
            numbers[name] += 1
            prefixes.drop(replica_id, generation)
            prefixes.tell(replica_id, generation, BLOCK, held(told))
            model.pop(name, None)
        assert len(prefixes) == sum(map(len, model.values()))
        for k, prompt in enumerate(prompts):
            r = request(prompt, name=f"{k}{what}{who}")
            runs = {n: len(list(takewhile(mine.__contains__, chains[k]))) for n, mine in model.items()}
            expected = {n: run for n, run in runs.items() if run}
            told_runs = found(prefixes, r)
            if len(expected) <= scan:
                assert told_runs == expected
            else:
                assert told_runs.items() <= expected.items()
                assert sorted(told_runs.values()) == sorted(expected.values())[-FAVOURED:]
            chain = Chain(r, BLOCK)
            assert {n: prefixes.held(chain, ReplicaId(n)) for n in model if runs[n]} == expected


def lookable(prompt: tuple[int, ...]) -> list[int]:
    """The hashes of a prompt that may be found: not that of its last token's block."""
    return hashes(prompt)[: (len(prompt) - 1) // BLOCK]


def test_block_of_the_last_token_is_never_found_because_that_token_is_always_computed() -> None:
    prefixes = Prefixes(100, 64)
    prompt = prompt_of(1, blocks=3, more=0)
    prefixes.tell(ReplicaId("r"), FIRST, BLOCK, held(hashes(prompt), afresh=True))
    assert found(prefixes, request(prompt)) == {"r": 2}
    assert found(prefixes, request((*prompt, 7))) == {"r": 3}


def test_a_tenants_prompt_finds_nothing_of_what_another_tenants_left() -> None:
    prefixes = Prefixes(100, 64)
    prompt = prompt_of(1, blocks=3)
    prefixes.tell(ReplicaId("r"), FIRST, BLOCK, held(hashes(prompt, tenant="a"), afresh=True))
    assert found(prefixes, request(prompt, tenant="a")) == {"r": 3}
    assert found(prefixes, request(prompt, tenant="b")) == {}


def test_an_incarnation_is_heard_once_it_has_begun_afresh_and_never_after_its_successor_has() -> None:
    prefixes = Prefixes(100, 64)
    prompt, second = prompt_of(1, blocks=2), Generation(2, "b")
    prefixes.tell(ReplicaId("r"), FIRST, BLOCK, held(hashes(prompt)))
    assert prefixes.chain(request(prompt)) is None, "nobody holds anything, so nothing need be hashed"
    assert not prefixes.follows(ReplicaId("r"), FIRST)
    prefixes.tell(ReplicaId("r"), second, BLOCK, held([], afresh=True))
    prefixes.tell(ReplicaId("r"), FIRST, BLOCK, held(hashes(prompt)))
    prefixes.drop(ReplicaId("r"), FIRST)
    assert found(prefixes, request(prompt)) == {}
    assert prefixes.follows(ReplicaId("r"), second)


def test_what_is_remembered_is_bounded_and_what_goes_makes_room() -> None:
    prefixes = Prefixes(5, 64)
    long, other = prompt_of(1, blocks=8), prompt_of(2, blocks=2)
    prefixes.tell(ReplicaId("r"), FIRST, BLOCK, held(hashes(long), afresh=True))
    assert (len(prefixes), found(prefixes, request(long))) == (5, {"r": 5})
    prefixes.tell(ReplicaId("r"), FIRST, BLOCK, gone(hashes(long)))
    prefixes.tell(ReplicaId("s"), FIRST, BLOCK, held(hashes(other), afresh=True))
    assert (len(prefixes), found(prefixes, request(other))) == (2, {"s": 2})


def test_blocks_of_another_size_than_the_pools_are_not_followed() -> None:
    prefixes = Prefixes(100, 64)
    prompt = prompt_of(1, blocks=4)
    prefixes.tell(ReplicaId("r"), FIRST, BLOCK, held(hashes(prompt), afresh=True))
    prefixes.tell(ReplicaId("s"), FIRST, 8, held(hashes(prompt, block=8), afresh=True))
    assert found(prefixes, request(prompt)) == {"r": 4}
    assert not prefixes.follows(ReplicaId("s"), FIRST)
    chain = prefixes.chain(request(prompt))
    assert chain is not None
    prefixes.drop(ReplicaId("r"), FIRST)
    prefixes.tell(ReplicaId("s"), FIRST, 8, held(hashes(prompt, block=8), afresh=True))
    assert found(prefixes, request(prompt)) == {"s": 2}
    assert prefixes.found(chain) == {}, "an old chain means nothing to blocks of another size"


def test_of_a_very_long_prompt_a_bounded_part_is_hashed() -> None:
    prefixes = Prefixes(10 * CHAIN_BLOCKS, 64)
    prompt = tuple(range(BLOCK * (CHAIN_BLOCKS + 50)))
    prefixes.tell(ReplicaId("r"), FIRST, BLOCK, held(hashes(prompt), afresh=True))
    assert found(prefixes, request(prompt)) == {"r": CHAIN_BLOCKS}


def test_of_many_that_hold_a_prompt_each_is_named_to_some_requests() -> None:
    prefixes = Prefixes(10_000, 64)
    prompt = prompt_of(1, blocks=2)
    for k in range(100):
        prefixes.tell(ReplicaId(f"r{k}"), FIRST, BLOCK, held(hashes(prompt), afresh=True))
    named = Counter(name for k in range(400) for name in found(prefixes, request(prompt, name=f"q{k}")))
    assert len(named) == 100
    assert max(named.values()) < 60, "1,600 names over 100 replicas: 16 each"


# --- where it leads ---


def tell(bench: Bench, replica: FakeReplica, change: PrefixChange) -> None:
    bench.core.frame(replica.replica_id, replica.generation, StepFrame(replica.report(), prefixes=change))


def where(replicas: list[FakeReplica], r: Request) -> str:
    (name,) = (x.replica_id for x in replicas if any(a.request_id == r.request_id for a, _ in x.added))
    return name


PROMPT = 100
"""Six full blocks of the fake replica's sixteen, and four tokens more."""


def three(affinity_weight: float = 0.5, **settings: int) -> tuple[Bench, list[FakeReplica]]:
    bench = Bench(RouterConfig(expected_output_tokens=1, affinity_weight=affinity_weight))
    replicas = [bench.replica(f"r{k}", **{"slots": 50, "blocks": 10_000, **settings}) for k in range(3)]
    for replica in replicas:
        tell(bench, replica, PrefixChange(afresh=True))
    return bench, replicas


def blocks_of(prompt: int = PROMPT, tenant: str = "t") -> list[int]:
    return hashes(tuple(range(1, prompt + 1)), tenant=tenant, block=16)


def test_request_goes_to_the_replica_that_holds_most_of_its_prompt_and_elsewhere_once_that_is_evicted() -> None:
    bench, replicas = three()
    blocks = blocks_of()
    tell(bench, replicas[1], held(blocks[:2]))
    tell(bench, replicas[2], held(blocks))
    went = [where(replicas, bench.submit(f"q{k}", tokens=1, prompt=PROMPT)) for k in range(3)]
    assert went == ["r2"] * 3
    replicas[2].turn()
    tell(bench, replicas[2], gone(blocks[1:]))
    assert where(replicas, bench.submit("late", tokens=1, prompt=PROMPT)) == "r1"
    explained = bench.core.explain(RequestId("late"), "t")
    assert explained is not None
    (sent,) = (d for d in explained.decisions if d.event == "dispatched")
    assert sent.numbers["prompt_blocks_held"] == 2


def test_a_block_in_the_middle_that_is_gone_ends_what_a_prompt_finds() -> None:
    bench, replicas = three()
    blocks = blocks_of()
    tell(bench, replicas[0], held(blocks[:1] + blocks[2:]))
    tell(bench, replicas[1], held(blocks[:2]))
    assert where(replicas, bench.submit("q", tokens=1, prompt=PROMPT)) == "r1"


def test_held_blocks_weigh_against_load() -> None:
    """All of the prompt but 4 of 100 tokens is worth 0.48 of a capacity at the default weight: five of ten slots more
    are too many, four are not."""
    bench, replicas = three(slots=10)
    tell(bench, replicas[2], held(blocks_of()))
    went = [where(replicas, bench.submit(f"q{k}", tokens=9, prompt=PROMPT)) for k in range(6)]
    assert went[:5] == ["r2"] * 5
    assert went[5] != "r2"


def test_with_affinity_off_what_replicas_tell_is_not_even_kept() -> None:
    bench, replicas = three(affinity_weight=0.0)
    tell(bench, replicas[2], held(blocks_of()))
    went = {where(replicas, bench.submit(f"q{k}", tokens=9, prompt=PROMPT)) for k in range(3)}
    assert went == {"r0", "r1", "r2"}
    assert len(bench.core._dispatcher._prefixes) == 0


def test_burst_of_one_prompt_goes_together_before_any_of_it_is_computed() -> None:
    bench, replicas = three()
    went = {where(replicas, bench.submit(f"q{k}", tokens=9, prompt=PROMPT)) for k in range(5)}
    assert len(went) == 1


def test_once_a_request_is_over_only_what_its_replica_tells_draws_others_there() -> None:
    """Nothing of the prompt is told as held: it was evicted already, so that the least full is as good."""
    bench, replicas = three()
    bench.submit("q0", tokens=1, prompt=PROMPT)
    for replica in replicas:
        replica.turn()
    went = set()
    for k in range(40):
        r = bench.submit(f"q{k + 1}", tokens=1, prompt=PROMPT)
        went.add(where(replicas, r))
        bench.core.cancel(r.request_id)
    assert went == {"r0", "r1", "r2"}


def test_session_decides_between_replicas_that_are_equal_and_never_against_held_blocks() -> None:
    bench, replicas = three()
    terms = Terms(session="talk")
    first = where(replicas, bench.submit("q0", tokens=1, prompt=8, terms=terms))
    for k in range(20):
        for replica in replicas:
            replica.turn()
        assert where(replicas, bench.submit(f"s{k}", tokens=1, prompt=8, terms=terms)) == first
    for replica in replicas:
        replica.turn()
    other = next(r for r in replicas if r.replica_id != first)
    tell(bench, other, held(blocks_of()))
    r = bench.submit("long", tokens=1, prompt=PROMPT, terms=terms)
    assert where(replicas, r) == other.replica_id


@pytest.mark.parametrize("how", ["lost", "replaced"])
def test_what_an_incarnation_held_is_forgotten_with_it(how: str) -> None:
    bench, replicas = three()
    tell(bench, replicas[2], held(blocks_of()))
    if how == "lost":
        replicas[2].die()
    successor = FakeReplica(bench.core, ReplicaId("r2"), Generation(2, "b"), slots=50, blocks=10_000).connect()
    tell(bench, successor, PrefixChange(afresh=True))
    went = set()
    for k in range(40):
        r = bench.submit(f"q{k}", tokens=1, prompt=PROMPT)
        went.add(where([*replicas[:2], successor], r))
        bench.core.cancel(r.request_id)
    assert went == {"r0", "r1", "r2"}
    assert len(bench.core._dispatcher._prefixes) == 0


# --- what was not computed ---


def first_delta(r: Request, attempt: int, cached: int, count: int = 1) -> TokenDelta:
    ids = tuple(token_id(r.request_id, k) for k in range(count))
    return TokenDelta(r.request_id, attempt, 0, ids, ("x",) * count, cached_tokens=cached)


def test_tenant_is_charged_for_what_was_computed_of_its_prompt() -> None:
    bench = Bench(RouterConfig(expected_output_tokens=1))
    replica = bench.replica()
    r = bench.submit("q", tokens=4, prompt=PROMPT)
    replica.send(first_delta(r, 1, 96))
    live = bench.core._live[r.request_id]
    config = bench.config
    expected = config.prompt_token_weight * 4 + config.output_token_weight * 1
    assert live.served == pytest.approx(expected)
    assert live.band.counters("t")[0] == pytest.approx(expected)


def test_usage_and_explanation_say_what_the_attempt_with_the_first_token_found_whatever_follows() -> None:
    bench = Bench(RouterConfig(expected_output_tokens=1))
    first, second = bench.replica("r1"), None
    r = bench.submit("q", tokens=3, prompt=PROMPT)
    queued = bench.core.explain(r.request_id, "t")
    assert queued is not None
    assert queued.cached_tokens is None, "before the first token nothing is known"
    first.send(first_delta(r, 1, 32))
    second = bench.replica("r2")
    first.die()
    (continued, attempt) = second.added[-1]
    ids = tuple(token_id(r.request_id, k) for k in (1, 2))
    begins, end = len(continued.emitted_ids), FinishReason.LENGTH
    second.send(TokenDelta(r.request_id, attempt, begins, ids, ("y", "z"), end, cached_tokens=96))
    ending = bench.streams[r.request_id].ending
    assert ending is not None
    assert ending.cached_tokens == 32
    explained = bench.core.explain(r.request_id, "t")
    assert explained is not None
    assert explained.cached_tokens == 32


def test_no_more_than_the_prompt_is_ever_called_cached() -> None:
    bench = Bench(RouterConfig(expected_output_tokens=1))
    replica = bench.replica()
    r = bench.submit("q", tokens=4, prompt=8)
    replica.send(first_delta(r, 1, 10_000))
    live = bench.core._live[r.request_id]
    assert live.cached_tokens == 8
    assert live.served == pytest.approx(bench.config.output_token_weight)
