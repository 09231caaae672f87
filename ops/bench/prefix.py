"""What the prefix cache is worth: the time to the first token of a prompt that the engine has seen, and of one it has not.

Owns: the measurement on the embedded engine. Imports the engine and the report. Invariant: each repetition has a prompt
of its own, and nothing else runs beside it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from cluster.config import EngineConfig
from cluster.engine.engine import Engine
from cluster.model import ModelFolder
from cluster.types import Request, RequestId, Sampling
from ops.report import Report, ReportRow, machine_context


@dataclass(frozen=True, slots=True)
class PrefixSettings:
    prompt_tokens: int
    rounds: int
    seed: int


@dataclass(frozen=True, slots=True)
class PrefixRound:
    """One prompt, twice."""

    first_ttft_ms: float
    second_ttft_ms: float
    hit_tokens: int
    """Prompt tokens of the second that were not computed again."""
    same_token: bool
    """Whether both drew the same first token, greedily."""


def measure(engine: Engine, vocab_size: int, settings: PrefixSettings, show: Callable[[], None]) -> list[PrefixRound]:
    """Run every round; `show` is called after each.

    Raises:
        RuntimeError: a request failed.
    """
    draw = random.Random(settings.seed)
    rounds: list[PrefixRound] = []
    for number in range(settings.rounds):
        prompt = tuple(draw.randrange(vocab_size) for _ in range(settings.prompt_tokens))
        first_ttft_ms, first_token = _first_token(engine, RequestId(f"{number}-first"), prompt)
        hits_before = engine.load().prefix_hit_tokens_total
        second_ttft_ms, second_token = _first_token(engine, RequestId(f"{number}-second"), prompt)
        hit_tokens = engine.load().prefix_hit_tokens_total - hits_before
        rounds.append(PrefixRound(first_ttft_ms, second_ttft_ms, hit_tokens, first_token == second_token))
        show()
    return rounds


def _first_token(engine: Engine, request_id: RequestId, prompt: tuple[int, ...]) -> tuple[float, int]:
    """Run a request of one token alone; returns the time from `add` in ms and the token."""
    request = Request(
        request_id=request_id,
        tenant="bench",
        priority=0,
        priority_class="standard",
        arrived_unix_s=time.time(),
        prompt_ids=prompt,
        sampling=Sampling(max_tokens=1, seed=0, temperature=0.0, ignore_eos=True),
    )
    begin_s = time.perf_counter()
    engine.add(request, 0)
    while engine.has_work:
        for delta in engine.step().deltas:
            if delta.error:
                raise RuntimeError(f"a request failed: {delta.error}")
            if delta.token_ids:
                return (time.perf_counter() - begin_s) * 1000, delta.token_ids[0]
    raise RuntimeError("a request ended without a token")


def build_report(
    rounds: list[PrefixRound], settings: PrefixSettings, model: ModelFolder, config: EngineConfig
) -> Report:
    """Medians of both times, and their ratio."""
    first_ms = median(r.first_ttft_ms for r in rounds)
    second_ms = median(r.second_ttft_ms for r in rounds)
    context = machine_context(("torch",)) | {
        "model": model.name,
        "dtype": str(config.dtype),
        "prompt_tokens": settings.prompt_tokens,
        "rounds": settings.rounds,
        "seed": settings.seed,
        "step_token_budget": config.step_token_budget,
        "block_size_tokens": config.block_size_tokens,
    }
    rows = (
        ReportRow("ttft_ratio", second_ms / first_ms, "ratio"),
        ReportRow("first.ttft_ms", first_ms, "ms"),
        ReportRow("second.ttft_ms", second_ms, "ms"),
        ReportRow("second.hit_tokens", median(r.hit_tokens for r in rounds), "tokens"),
        ReportRow("rounds_with_another_token", sum(not r.same_token for r in rounds), "rounds"),
    )
    return Report("bench prefix", context, rows)
