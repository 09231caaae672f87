"""What one cache would find: by all choices that there are, and by a list that is kept in order."""

from __future__ import annotations

import random
from functools import cache
from itertools import combinations

import pytest

from cluster.types import Outcome
from ops.bench.trace import TraceRequest
from ops.sim.ideal import found, most_found
from ops.sim.report import prefix_figures
from ops.sim.study import Run, run
from ops.sim.values import default_engine
from ops.sim.workload import parse_mix
from tests.unit.test_sim_report import MODEL, study, values

Prompt = list[tuple[int, int]]


def blocks_of(prompt: Prompt) -> list[tuple[int, int]]:
    return [(name, k) for name, blocks in prompt for k in range(blocks)]


def most_by_trying_all(prompts: list[Prompt], room: int) -> int:
    """Whatever is kept of what was held and what has come. A block counts where all before it were held too."""
    wanted = [blocks_of(prompt) for prompt in prompts]

    @cache
    def best(number: int, held: frozenset[tuple[int, int]]) -> int:
        if number == len(wanted):
            return 0
        hits = 0
        for block in wanted[number]:
            if block not in held:
                break
            hits += 1
        there = sorted(held | set(wanted[number]))
        kept = combinations(there, min(room, len(there)))
        return hits + max(best(number + 1, frozenset(choice)) for choice in kept)

    return best(0, frozenset())


def found_by_a_list(prompts: list[Prompt], room: int) -> list[int]:
    """Used last is last; a prompt's blocks from its end on."""
    held: list[tuple[int, int]] = []
    told: list[int] = []
    for prompt in prompts:
        wanted = blocks_of(prompt)
        told.append(sum(block in held for block in wanted))
        held = [block for block in held if block not in wanted] + wanted[::-1]
        held = held[max(0, len(held) - room) :]
    return told


def tree(rng: random.Random, prompts: int, longest: int, names: int) -> list[Prompt]:
    """Prompts whose runs are named by what is before them, the last one often in part."""
    made: list[Prompt] = []
    for _ in range(prompts):
        path: tuple[int, ...] = ()
        prompt: Prompt = []
        for _ in range(rng.randint(1, longest)):
            path = (*path, rng.randrange(names))
            prompt.append((hash(path), 2))
        prompt[-1] = (prompt[-1][0], rng.randint(0, 2))
        made.append(prompt)
    return made


@pytest.mark.parametrize("seed", range(40))
def test_no_choice_of_what_is_kept_finds_more_and_one_finds_as_much(seed: int) -> None:
    rng = random.Random(seed)
    prompts = tree(rng, 6, 2, 2)
    for room in (1, 2, 3, 5):
        assert sum(most_found(prompts, room)) == most_by_trying_all(prompts, room)


@pytest.mark.parametrize("seed", range(40))
def test_the_ideal_finds_what_a_list_in_the_order_of_use_does_and_no_more_than_the_most(seed: int) -> None:
    rng = random.Random(seed)
    prompts = tree(rng, 60, 4, 3)
    for room in (0, 1, 4, 9, 20, 1000):
        assert found(prompts, room) == found_by_a_list(prompts, room)
        assert sum(found(prompts, room)) <= sum(most_found(prompts, room))
    assert found(prompts, 1000) == most_found(prompts, 1000)


def test_two_conversations_that_take_turns_where_there_is_room_for_one() -> None:
    turns: list[Prompt] = [[(1, 4)], [(2, 4)], [(1, 4)], [(2, 4)], [(1, 4)]]
    assert found(turns, 4) == [0, 0, 0, 0, 0]
    assert most_found(turns, 4) == [0, 0, 4, 0, 4]
    assert most_found(turns, 6) == [0, 0, 4, 2, 4]
    assert found(turns, 8) == [0, 0, 4, 4, 4]


def test_one_replica_with_one_request_at_a_time_finds_what_the_ideal_does_but_for_the_block_of_its_answer() -> None:
    """A pool of 70 blocks: 32 of one conversation, 32 of another, one of the answer that nobody shares, and 5 of a third."""
    blocks = {1: (11,), 2: (12,), 3: (13,)}
    order = (1, 2, 1, 3, 3, 1, 2, 2, 1)
    trace = tuple(TraceRequest(20.0 * k, "mooncake", 520, 3, blocks[name]) for k, name in enumerate(order))
    engine = default_engine(MODEL).model_copy(update={"blocks": 70, "max_model_len": 1024})
    one = study(requests=trace, mix=parse_mix([]), duration_s=20.0 * len(order), engine=engine)
    asked = Run(1, "forebay", 0)
    done = run(one, asked)
    assert all(r.outcome is Outcome.FINISHED for r in done.requests)
    # The trace is turned, so that it begins anywhere.
    names = [arrival.prefix_ids[0] for arrival in one.arrivals(asked)]
    conversations: list[Prompt] = [[(name, 32)] for name in names]
    expected, ideal = found_by_a_list(conversations, 69), found_by_a_list(conversations, 70)
    assert [r.cached_tokens for r in done.requests] == [16 * n for n in expected]
    told = values(prefix_figures(one, asked, done))
    assert told["ideal_cached_token_pct"] == pytest.approx(100 * 16 * sum(ideal) / (520 * len(names)))
    assert told["prefix_hit_over_ideal"] == pytest.approx(sum(expected) / sum(ideal))
    assert told["prefix_hit_over_most"] <= 1.0
