"""The bound on goodput: no schedule of steps takes less than the least times, and no choice of requests beats the bound."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from ops.sim.bound import Job, LeastTimes, most_good
from ops.sim.step_time import Prefill, StepTimes, a100, step_ms

MODELS = sorted(a100().models)


def random_schedule_s(rng: random.Random, times: StepTimes, budget: int, lengths: Sequence[tuple[int, int]]) -> float:
    """All steps of these requests, in chunks and batches at random."""
    computed, made, total_ms = [0] * len(lengths), [0] * len(lengths), 0.0
    while any(made[k] < output for k, (_, output) in enumerate(lengths)):
        prefills: list[Prefill] = []
        decodes: list[int] = []
        left = rng.choice((1, 2, 100, budget, budget))
        for k in rng.sample(range(len(lengths)), len(lengths)):
            prompt, output = lengths[k]
            if left == 0 or made[k] == output:
                continue
            if computed[k] < prompt:
                chunk = min(left, prompt - computed[k])
                # A row of one token is a decode to the model of step times, as it is to ops/sim/backend.py.
                if chunk == 1:
                    decodes.append(computed[k])
                else:
                    prefills.append(Prefill(chunk, computed[k]))
                computed[k] += chunk
                made[k] += computed[k] == prompt
                left -= chunk
            else:
                decodes.append(prompt + made[k] - 1)
                made[k] += 1
                left -= 1
        total_ms += step_ms(times, prefills, decodes)
    return total_ms / 1000


@pytest.mark.parametrize("model", MODELS)
def test_no_schedule_of_steps_takes_less_than_the_least_times_of_its_requests(model: str) -> None:
    rng, times = random.Random(1), a100().models[model]
    for _ in range(150):
        budget = rng.choice((256, 512, 2048))
        least = LeastTimes(times, budget, 4096)
        lengths = [(rng.choice((1, 2, 30, 600, 4096)), rng.choice((1, 2, 40))) for _ in range(rng.randint(1, 40))]
        needed_s = sum(least.prompt_s(p) + least.decode_s(p, o) for p, o in lengths)
        assert needed_s <= random_schedule_s(rng, times, budget, lengths)


@pytest.mark.parametrize("model", MODELS)
def test_the_least_time_is_nearly_reached_by_full_steps(model: str) -> None:
    """Prompts that fill the best of steps exactly, and nothing else."""
    times = a100().models[model]
    least = LeastTimes(times, 512, 512)
    best_s = min(step_ms(times, [Prefill(n)], ()) / n for n in times.tokens if n <= 512) * 512 / 1000
    assert least.prompt_s(512) == pytest.approx(best_s, rel=0.02)


def in_time(jobs: Sequence[Job], gpus: int) -> bool:
    """Whether one machine as fast as all GPUs together can do all of this: earliest due date first, which is optimal."""
    parts = [(j.arrived_s, j.prompt_due_s, j.prompt_s / gpus) for j in jobs]
    parts += [(j.arrived_s, j.due_s, j.decode_s / gpus) for j in jobs]
    moments = sorted({arrived for arrived, _, _ in parts})
    waiting: list[list[float]] = []
    for now_s, next_s in itertools.zip_longest(moments, moments[1:], fillvalue=float("inf")):
        waiting += [[due, needed] for arrived, due, needed in parts if arrived == now_s]
        waiting.sort()
        at_s = now_s
        while waiting and at_s < next_s:
            due, needed = waiting[0]
            done = min(needed, next_s - at_s)
            at_s += done
            if done == needed:
                waiting.pop(0)
                if at_s > due + 1e-9:
                    return False
            else:
                waiting[0][1] -= done
    return True


def most_in_time(jobs: Sequence[Job], gpus: int) -> int:
    """By trying all."""
    return max(
        size for size in range(len(jobs) + 1) if any(in_time(some, gpus) for some in itertools.combinations(jobs, size))
    )


def random_job(rng: random.Random) -> Job:
    arrived_s, prompt_due_s = rng.uniform(0, 5), rng.uniform(0.2, 2)
    return Job(
        arrived_s,
        rng.uniform(0.05, 1.5),
        rng.uniform(0, 1),
        arrived_s + prompt_due_s,
        arrived_s + prompt_due_s + rng.uniform(0, 2),
    )


def test_no_choice_of_requests_that_can_be_in_time_is_larger_than_the_bound() -> None:
    rng = random.Random(2)
    for _ in range(150):
        jobs, gpus = [random_job(rng) for _ in range(rng.randint(1, 8))], rng.randint(1, 2)
        assert most_in_time(jobs, gpus) <= most_good(jobs, gpus) + 1e-9


def test_of_requests_that_come_and_are_due_together_the_bound_is_what_can_be_done() -> None:
    rng = random.Random(3)
    for _ in range(150):
        jobs = [Job(1.0, rng.uniform(0.1, 1), rng.uniform(0, 1), 3.0, 3.0) for _ in range(rng.randint(1, 8))]
        assert int(most_good(jobs, 1) + 1e-9) == most_in_time(jobs, 1)


def test_twice_what_the_gpus_can_do_halves_what_can_be_good() -> None:
    """200 requests of a second each within 100 s on one GPU, due 1 s after they come: at most 101 by then."""
    jobs = [Job(k / 2, 1.0, 0.0, k / 2 + 1, k / 2 + 1) for k in range(200)]
    assert 100 <= most_good(jobs, 1) <= 101


def test_of_nothing_nothing_is_good() -> None:
    assert most_good([], 4) == 0.0
