"""Small clusters and their work, for the tests of the simulator."""

from __future__ import annotations

import random

from cluster.config import EngineConfig, RouterConfig
from cluster.types import RequestId
from ops.sim.values import Arrival, SimConfig, SimResult

CLASSES = ("interactive", "standard", "batch")


def engine(**settings: object) -> EngineConfig:
    """Few slots and blocks, so that a small load is a large one."""
    return EngineConfig.model_validate(
        {"slots": 8, "step_token_budget": 64, "blocks": 96, "max_model_len": 1024, "host_blocks": 0, **settings}
    )


def cluster(replicas: int = 3, **settings: object) -> SimConfig:
    given = {"engine": engine(), "router": RouterConfig(expected_output_tokens=24), "check_every": 200, **settings}
    return SimConfig(replicas=replicas, **given)  # type: ignore[arg-type]


def work(requests: int, rate_per_s: float, seed: int = 0, *, shared: bool = False) -> list[Arrival]:
    """Of all classes and several tenants; `shared` gives half of the prompts one of a few beginnings."""
    rng, at_s, arrivals = random.Random(seed), 0.1, []
    prefixes = [tuple(rng.randrange(2, 1000) for _ in range(64)) for _ in range(3)]
    for number in range(requests):
        at_s += rng.expovariate(rate_per_s)
        prefix = rng.choice(prefixes) if shared and rng.random() < 0.5 else ()
        arrivals.append(
            Arrival(
                at_s,
                RequestId(f"r{number}"),
                len(prefix) + rng.randrange(1, 300),
                rng.randrange(1, 120),
                rng.choices(CLASSES, (2, 5, 3))[0],
                rng.choice(("one", "two", "three")),
                prefix,
            )
        )
    return arrivals


def seen(result: SimResult) -> tuple[object, ...]:
    """All that a simulation says, but for how it was computed."""
    counters = (
        result.steps,
        result.tokens,
        result.prefill_tokens,
        result.hit_tokens,
        result.preemptions,
        result.recomputed_tokens,
        result.urgent_blocked,
    )
    return [repr(record) for record in result.requests], counters, result.virtual_s, result.event_log_sha256
