"""The laws of the choice of a replica, on literal views."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from cluster.types import EngineLoad, PriorityLoad, ReplicaId
from router.routing import LESSER, MEMO_MAX, Need, Placement, choose, pool_of, too_large
from router.view import Condition, OwnLoad, ReplicaView, SharedLoad

BLOCK = 16


def load(slots: int = 4, blocks: int = 100, used: int = 0, **rest: Any) -> EngineLoad:
    return EngineLoad(
        slots_total=slots, blocks_total=blocks, blocks_free=blocks - used, block_size_tokens=BLOCK, **rest
    )


def view(name: str, engine: EngineLoad | None, condition: Condition = Condition.ROUTABLE, **rest: Any) -> ReplicaView:
    return ReplicaView(replica_id=ReplicaId(name), condition=condition, load=engine, **rest)


def need(priority: int = 0, tokens: int = BLOCK, tokens_max: int | None = None) -> Need:
    return Need(priority, tokens, tokens if tokens_max is None else tokens_max)


def place(wanted: Need, *views: ReplicaView, seed: int = 0) -> Placement | None:
    return choose(wanted, views, random.Random(seed))


def running(*levels: tuple[int, int, int]) -> tuple[PriorityLoad, ...]:
    return tuple(PriorityLoad(*level) for level in levels)


@pytest.mark.parametrize("condition", [c for c in Condition if c is not Condition.ROUTABLE])
def test_only_a_routable_replica_is_chosen(condition: Condition) -> None:
    assert place(need(), view("bad", load(), condition), view("good", load(used=90))) == Placement(ReplicaId("good"), 1)
    assert place(need(), view("bad", load(), condition)) is None


def test_missing_load_is_not_zero_load() -> None:
    assert place(need(), view("unknown", None)) is None


def test_blocks_are_rounded_up_to_the_replica_s_own_size() -> None:
    assert place(need(tokens=BLOCK + 1), view("r", load())) == Placement(ReplicaId("r"), 2)


def test_least_loaded_by_its_scarcer_resource_wins() -> None:
    few_slots = view("slots", load(slots=4, running=running((0, 3, 3)), used=3))
    few_blocks = view("blocks", load(slots=4, running=running((0, 1, 60)), used=60))
    chosen = place(need(), few_slots, few_blocks)
    assert chosen is not None
    assert chosen.replica_id == "blocks"


def test_ties_are_drawn_and_every_one_can_win() -> None:
    views = [view(name, load()) for name in ("b", "a", "c")]
    won = {p.replica_id for seed in range(40) if (p := place(need(), *views, seed=seed)) is not None}
    assert won == {"a", "b", "c"}
    assert place(need(), *views, seed=7) == place(need(), *reversed(views), seed=7)


def test_own_unreported_attempts_take_slots_and_blocks() -> None:
    full = load(slots=2, running=running((0, 1, 1)), used=1)
    assert place(need(), view("r", full)) is not None
    assert place(need(), view("r", full, unreported=running((0, 1, 1)))) is None
    assert place(need(tokens=BLOCK * 99), view("r", load(blocks=100), unreported=running((0, 1, 2)))) is None


def test_predicted_blocks_of_own_attempts_count_though_the_report_has_not_seen_them_filled() -> None:
    early = load(running=running((0, 1, 1)), used=1)
    assert place(need(tokens=BLOCK * 60), view("r", early)) is not None
    assert place(need(tokens=BLOCK * 60), view("r", early, own=(OwnLoad(0, 50, 0),))) is None


def test_waiting_work_of_the_same_or_higher_priority_is_ahead_and_lower_is_not() -> None:
    engine = load(slots=2, running=running((0, 1, 1)), waiting=running((0, 1, 0)), used=1)
    assert place(need(priority=0), view("r", engine)) is None
    assert place(need(priority=1), view("r", engine)) == Placement(ReplicaId("r"), 1)
    assert place(need(priority=-1), view("r", engine)) is None


def test_parked_blocks_of_the_same_priority_are_demand_ahead_and_lower_ones_are_not() -> None:
    parked = view("r", load(slots=9), own=(OwnLoad(0, 0, 95),))
    assert place(need(priority=0, tokens=BLOCK * 10), parked) is None
    assert place(need(priority=1, tokens=BLOCK * 10), parked) is not None


def test_lower_work_that_waits_there_unstarted_holds_no_blocks_against_urgent_work() -> None:
    """It was sent in the same moment as urgent work and never ran, so no preemption of it was ever reported."""
    engine = load(slots=2, blocks=20, running=running((10, 1, 12)), waiting=running((-10, 1, 12)), used=12)
    both = view("r", engine, own=(OwnLoad(-10, 12, 0), OwnLoad(10, 12, 0)))
    assert place(need(priority=10, tokens=BLOCK * 6), both) == Placement(ReplicaId("r"), 6)
    assert place(need(priority=-10, tokens=BLOCK * 6), both) is None


def test_pool_full_of_blocks_that_paused_lower_work_keeps_takes_urgent_work_and_no_victim() -> None:
    """Two slots are free, but no block: what the paused ones keep is taken before anybody who runs."""
    engine = load(slots=4, blocks=20, running=running((-10, 1, 2)), waiting=running((-10, 3, 18)), used=20)
    assert place(need(priority=10, tokens=BLOCK * 18), view("r", engine)) == Placement(ReplicaId("r"), 18, victims=0)
    assert place(need(priority=10, tokens=BLOCK * 19), view("r", engine)) == Placement(ReplicaId("r"), 19, victims=1)


def test_blocks_kept_by_paused_work_are_taken_by_strictly_more_urgent_work_only() -> None:
    engine = load(slots=4, blocks=20, waiting=running((0, 2, 20)), used=20)
    assert place(need(priority=-10), view("r", engine)) is None
    assert place(need(priority=0), view("r", engine)) is None
    assert place(need(priority=1), view("r", engine)) == Placement(ReplicaId("r"), 1)


def test_kept_blocks_make_no_room_in_what_this_router_s_own_work_will_fill() -> None:
    """The report still counts little of the own prompts of this priority, and much that lower paused work keeps."""
    engine = load(slots=9, blocks=20, running=running((10, 1, 2)), waiting=running((-10, 1, 18)), used=20)
    own = (OwnLoad(-10, 0, 18), OwnLoad(10, 16, 0))
    assert place(need(priority=10, tokens=BLOCK * 4), view("r", engine, own=own)) == Placement(ReplicaId("r"), 4)
    assert place(need(priority=10, tokens=BLOCK * 5), view("r", engine, own=own)) is None


def test_replica_whose_blocks_are_free_is_preferred_to_one_that_paused_work_fills() -> None:
    paused = view("paused", load(slots=9, blocks=20, waiting=running((-10, 2, 19)), used=19))
    free = view("free", load(slots=9, blocks=20, running=running((-10, 1, 5)), used=5))
    for seed in range(5):
        assert place(need(priority=10, tokens=BLOCK * 2), paused, free, seed=seed) == Placement(ReplicaId("free"), 2)


def test_lower_work_alone_never_keeps_a_request_from_a_replica_that_could_hold_it() -> None:
    rng = random.Random(5)

    def some() -> tuple[PriorityLoad, ...]:
        return running(*((p, rng.randint(1, 4), rng.randint(0, 30)) for p in (-10, -5) if rng.random() < 0.5))

    for _ in range(2000):
        slots, blocks = rng.randint(1, 6), rng.randint(6, 40)
        count = rng.randint(0, slots)
        used = rng.randint(count, blocks) if count else 0
        kept = rng.randint(0, blocks - used)
        runs = running((-10, count, used)) if count else ()
        engine = load(
            slots, blocks, used + kept, running=runs, waiting=running((-10, 2, kept), (-5, rng.randint(0, 4), 0))
        )
        own = tuple(OwnLoad(p, rng.randint(0, 60), rng.randint(0, 60)) for p in (-10, -5) if rng.random() < 0.7)
        wanted = need(priority=0, tokens=BLOCK * rng.randint(1, blocks))
        assert place(wanted, view("r", engine, own=own, unreported=some())) is not None


def test_free_room_is_preferred_to_victims() -> None:
    full = view("full", load(slots=1, running=running((-10, 1, 1)), used=1))
    busy = view("busy", load(slots=10, running=running((0, 9, 90)), used=90))
    assert place(need(priority=10), full, busy) == Placement(ReplicaId("busy"), 1)


def test_of_free_replicas_the_one_with_least_work_that_is_as_urgent_is_taken_however_much_lesser_work_it_has() -> None:
    urgent = view("urgent", load(slots=10, running=running((10, 3, 30)), used=30))
    lesser = view("lesser", load(slots=10, running=running((0, 9, 90)), used=90))
    assert place(need(priority=10), urgent, lesser) == Placement(ReplicaId("lesser"), 1)
    assert place(need(priority=0), urgent, lesser) == Placement(ReplicaId("urgent"), 1)
    own = (OwnLoad(10, 20, 20),)
    sent = view("sent", load(slots=10, running=running((10, 1, 1)), used=1), own=own)
    assert place(need(priority=10), urgent, sent) == Placement(ReplicaId("urgent"), 1), "its prompts are yet to be read"


def test_of_equally_urgent_ones_the_replica_with_least_lesser_work_is_taken() -> None:
    more = view("more", load(slots=10, running=running((0, 3, 30), (10, 2, 20)), used=50))
    less = view("less", load(slots=10, running=running((0, 2, 20), (10, 2, 20)), used=40))
    assert place(need(priority=10), more, less) == Placement(ReplicaId("less"), 1)


def test_where_lesser_work_must_give_way_the_least_urgent_replica_is_taken_before_fewest_victims() -> None:
    urgent = view("urgent", load(slots=4, blocks=100, running=running((10, 3, 60), (0, 1, 40)), used=100))
    lesser = view("lesser", load(slots=4, blocks=100, running=running((10, 1, 20), (0, 3, 80)), used=100))
    wanted = need(priority=10, tokens=BLOCK * 30)
    assert place(wanted, urgent, lesser) == Placement(ReplicaId("lesser"), 30, victims=2)


def test_equal_priority_is_never_a_victim() -> None:
    assert place(need(priority=0), view("r", load(slots=1, running=running((0, 1, 1)), used=1))) is None


def test_fewest_victims_then_the_least_urgent() -> None:
    two = view("two", load(slots=9, blocks=20, running=running((-10, 2, 20)), used=20))
    one = view("one", load(slots=9, blocks=20, running=running((0, 1, 20)), used=20))
    lower = view("lower", load(slots=9, blocks=20, running=running((-10, 1, 20)), used=20))
    wanted = need(priority=10, tokens=BLOCK * 15)
    assert place(wanted, two) == Placement(ReplicaId("two"), 15, victims=2)
    assert place(wanted, two, one) == Placement(ReplicaId("one"), 15, victims=1)
    assert place(wanted, two, one, lower) == Placement(ReplicaId("lower"), 15, victims=1)


def test_where_others_give_way_it_is_the_replica_that_a_look_at_every_plan_finds_best() -> None:
    """Brute force over replicas without a free slot, which all run work of one block each: what stands ahead, then how many give
    way, then the most urgent of them, then the score."""
    rng = random.Random(4)
    made = 0
    for seed in range(1500):
        views: list[ReplicaView] = []
        costs: dict[str, tuple[float, int, int, float]] = {}
        wanted = need(0, BLOCK * rng.randint(1, 4))
        for number in range(rng.randint(2, 8)):
            counts = {p: rng.randint(0, 3) for p in (-10, -5, 0)}
            slots = sum(counts.values()) or 1
            counts[-10] += not any(counts.values())
            blocks, lower = slots + rng.randint(0, 3), counts[-10] + counts[-5]
            levels = running(*((p, n, n) for p, n in counts.items() if n))
            views.append(view(f"r{number}", load(slots, blocks, used=slots, running=levels)))
            taken = max(1, wanted.tokens // BLOCK - (blocks - slots))
            if taken > lower or wanted.tokens // BLOCK > blocks:
                continue
            ahead = max((counts[0] + 1) / slots, (counts[0] + wanted.tokens // BLOCK) / blocks)
            full = max((slots + 1) / slots, (slots + wanted.tokens // BLOCK) / blocks)
            top = -10 if taken <= counts[-10] else -5
            costs[f"r{number}"] = (ahead, taken, top, ahead + LESSER * (full - ahead))
        placed = place(wanted, *views, seed=seed)
        assert (placed is None) is (not costs)
        if placed is not None:
            assert costs[placed.replica_id] == min(costs.values())
            assert not placed.free
            made += 1
        assert choose(wanted, views, rng, free=True) is None
    assert made > 1000


def test_victims_must_free_enough_blocks_together() -> None:
    mixed = load(slots=4, blocks=20, running=running((-10, 1, 5), (10, 3, 15)), used=20)
    assert place(need(priority=10, tokens=BLOCK * 5), view("r", mixed)) == Placement(ReplicaId("r"), 5, victims=1)
    assert place(need(priority=10, tokens=BLOCK * 6), view("r", mixed)) is None


def test_victims_that_more_urgent_work_has_claimed_are_not_counted_again() -> None:
    """Two lower ones run; one more urgent request waits there and one was just sent: both victims are spoken for."""
    engine = load(slots=2, running=running((-10, 2, 2)), waiting=running((10, 1, 0)), used=2)
    assert place(need(priority=10), view("r", engine)) == Placement(ReplicaId("r"), 1, victims=1)
    assert place(need(priority=10), view("r", engine, unreported=running((10, 1, 1)))) is None


def test_lower_work_just_sent_can_be_a_victim() -> None:
    placed = place(need(priority=10), view("r", load(slots=1), unreported=running((-10, 1, 1))))
    assert placed == Placement(ReplicaId("r"), 1, victims=1)


def test_replica_that_could_never_hold_all_of_it_is_not_chosen() -> None:
    small_load, large_load = load(blocks=4), load(blocks=5, used=4)
    small, large = view("small", small_load), view("large", large_load)
    wanted = need(tokens=BLOCK, tokens_max=BLOCK * 4 + 1)
    assert place(wanted, small, large) == Placement(ReplicaId("large"), 1)
    assert too_large(wanted, [pool_of(small_load)])
    assert not too_large(wanted, [pool_of(small_load), pool_of(large_load)])
    assert not too_large(wanted, []), "nothing known says nothing"


def test_placements_never_exceed_what_a_replica_has_over_random_views() -> None:
    """Brute force: take the victims one by one, each of its level's mean size, and see whether it fits."""
    rng = random.Random(3)
    free_seen = victims_seen = 0
    for _ in range(3000):
        slots, blocks = rng.randint(1, 6), rng.randint(4, 40)
        levels = []
        left_slots, left_blocks = slots, blocks
        for priority in (-10, 0, 10):
            count = rng.randint(0, left_slots)
            each = rng.randint(1, max(1, left_blocks // count)) if count else 0
            if count and count * each <= left_blocks:
                levels.append((priority, count, count * each))
                left_slots, left_blocks = left_slots - count, left_blocks - count * each
        engine = load(slots, blocks, used=blocks - left_blocks, running=running(*levels))
        wanted = need(rng.choice([-10, 0, 10]), BLOCK * rng.randint(1, blocks + 2))
        placed = place(wanted, view("r", engine))
        victims = sorted((p, b // n) for p, n, b in levels for _ in range(n) if p < wanted.priority)
        free_slots, free_blocks, taken = left_slots, left_blocks, 0
        while victims and not (free_slots >= 1 and free_blocks >= wanted.blocks(BLOCK)):
            free_slots, free_blocks, taken = free_slots + 1, free_blocks + victims.pop(0)[1], taken + 1
        if free_slots >= 1 and free_blocks >= wanted.blocks(BLOCK):
            assert placed == Placement(ReplicaId("r"), wanted.blocks(BLOCK), taken)
            free_seen, victims_seen = free_seen + (not taken), victims_seen + bool(taken)
        else:
            assert placed is None
    assert free_seen > 200
    assert victims_seen > 100


def test_a_view_that_was_looked_at_before_is_judged_like_a_fresh_one() -> None:
    """By needs of more priorities than it remembers, where arrivals stand before and behind what a share has sent."""
    rng = random.Random(5)
    placed = 0
    for k in range(60):
        views = []
        for number in range(3):
            counts = [(p, rng.randint(1, 2), rng.randint(2, 30)) for p in (-5, 0, 5) if rng.random() < 0.6]
            engine = load(
                slots=5,
                used=sum(c[2] for c in counts),
                running=running(*counts),
                waiting=running((-5, rng.randint(0, 2), 0)),
            )
            shared = (SharedLoad(-5, 1, 4, since_s=10.0),) if rng.random() < 0.5 else ()
            own = (OwnLoad(-5, rng.randint(0, 40), 0),) if rng.random() < 0.5 else ()
            views.append(view(f"r{number}", engine, shared=shared, own=own))
        for _ in range(8 * MEMO_MAX):
            tokens = BLOCK * rng.randint(1, 60)
            wanted = Need(rng.randint(-MEMO_MAX, MEMO_MAX), tokens, tokens, rng.choice((9.0, 11.0)))
            fresh = [msgspec.structs.replace(v, memo={}) for v in views]
            again, anew = place(wanted, *views, seed=k), place(wanted, *fresh, seed=k)
            assert again == anew
            if again is not None and anew is not None:
                assert (again.score, again.free) == (anew.score, anew.free)
                placed += 1
        assert all(len(v.memo) <= MEMO_MAX for v in views)
    assert placed > 500


# --- what stands before the first token ---


def with_prompts(tokens: int, priority: int = 0, **rest: Any) -> EngineLoad:
    """10 slots, one of which runs; a step has 100 tokens."""
    level = PriorityLoad(priority, 1, 1, tokens)
    return load(slots=10, used=1, running=(level,), step_tokens=100, **rest)


def test_a_whole_step_of_prompts_ahead_outweighs_any_fullness_and_a_part_of_one_its_part() -> None:
    full = load(slots=10, used=90, running=running((0, 9, 90)), step_tokens=1000)
    waits = msgspec.structs.replace(with_prompts(1001), step_tokens=1000)
    assert place(need(), view("full", full), view("waits", waits)) == Placement(ReplicaId("full"), 1)
    soon = msgspec.structs.replace(with_prompts(100), step_tokens=1000)
    assert place(need(), view("full", full), view("soon", soon)) == Placement(ReplicaId("soon"), 1)


def test_prompts_of_less_urgent_work_are_nothing_that_is_waited_for() -> None:
    lesser, equal = view("lesser", with_prompts(5000, priority=-1)), view("equal", with_prompts(100))
    assert place(need(priority=0), lesser, equal) == Placement(ReplicaId("lesser"), 1)
    assert place(need(priority=-1), lesser, equal) == Placement(ReplicaId("equal"), 1)


def test_prompts_that_are_sent_and_not_reported_yet_are_waited_for_too() -> None:
    sent = view("sent", with_prompts(100), unreported=(PriorityLoad(0, 1, 1, 300),))
    assert place(need(), sent, view("other", with_prompts(300))) == Placement(ReplicaId("other"), 1)


def test_a_long_prompt_goes_where_others_decode_least_and_a_short_one_where_least_is_ahead() -> None:
    """Of a step of 100 tokens, 60 less urgent decodes take 60 in every second one: 70 are left, of the other's 95."""
    crowded = view("crowded", load(slots=100, blocks=10_000, running=running((-10, 60, 60)), used=60, step_tokens=100))
    ahead = PriorityLoad(0, 1, 1, 100)
    behind = view(
        "behind", load(slots=100, blocks=10_000, running=(*running((-10, 9, 9)), ahead), used=10, step_tokens=100)
    )
    short, long = (msgspec.structs.replace(need(), prompt_tokens=tokens) for tokens in (100, 2000))
    assert place(short, crowded, behind) == Placement(ReplicaId("crowded"), 1)
    assert place(long, crowded, behind) == Placement(ReplicaId("behind"), 1)


def test_what_is_held_of_a_prompt_outweighs_as_many_tokens_ahead_and_no_more() -> None:
    rng = random.Random(0)
    for more, taken in ((250, "held"), (350, "free")):
        views = (view("held", with_prompts(100 + more)), view("free", with_prompts(100)))
        placed = choose(need(), views, rng, {ReplicaId("held"): 300 / 100})
        assert placed is not None
        assert placed.replica_id == taken


def test_where_steps_are_not_told_prompts_do_not_count() -> None:
    many = msgspec.structs.replace(with_prompts(5000), step_tokens=0)
    fuller = load(slots=10, used=2, running=running((0, 2, 2)))
    assert place(need(), view("many", many), view("fuller", fuller)) == Placement(ReplicaId("many"), 1)


def test_more_prompt_tokens_never_make_a_replica_preferred() -> None:
    """Over random views: what was not taken is not taken for having more to run."""
    rng = random.Random(8)
    compared = 0
    for seed in range(1500):
        views = []
        for number in range(3):
            counts = [(p, rng.randint(1, 2), rng.randint(2, 30)) for p in (-5, 0, 5) if rng.random() < 0.7]
            levels = tuple(PriorityLoad(*c, rng.choice((0, rng.randint(1, 900)))) for c in counts)
            waits = (PriorityLoad(0, 1, 0, rng.randint(1, 900)),) if rng.random() < 0.3 else ()
            engine = load(6, 100, sum(c[2] for c in counts), running=levels, waiting=waits, step_tokens=64)
            views.append(view(f"r{number}", engine))
        wanted = Need(rng.choice((-5, 0, 5)), BLOCK * 4, BLOCK * 4, prompt_tokens=rng.randint(1, 500))
        before = place(wanted, *views, seed=seed)
        if before is None:
            continue
        other = rng.choice([v for v in views if v.replica_id != before.replica_id])
        more = (PriorityLoad(rng.choice((-5, 0, 5)), 0, 0, rng.randint(1, 900)),)
        assert other.load is not None
        heavier = msgspec.structs.replace(other.load, waiting=other.load.waiting + more)
        changed = [view(v.replica_id, heavier if v is other else v.load) for v in views]
        after = place(wanted, *changed, seed=seed)
        assert after is not None
        assert after.replica_id != other.replica_id
        compared += 1
    assert compared > 1000
