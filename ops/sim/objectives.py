"""What a request's client may expect, and whether it got it.

Owns: the objectives of each class and their form on the command line, the time of a prompt alone, and the judgement of one
record. Imports the step times. Pure. TTFT may take a fixed time and twice the request's own prefill: a longer prompt is allowed
longer. Its own prefill is that of its prompt alone, in chunks of a step's budget, on an engine that does nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.types import Outcome
from ops.errors import CommandError
from ops.sim.step_time import Prefill, StepTimes, step_ms
from ops.sim.values import RequestRecord

PREFILLS = 2.0


@dataclass(frozen=True, slots=True)
class Objective:
    ttft_s: float
    """Beside `PREFILLS` times its own prefill."""
    tpot_s: float
    """The mean over a request's tokens after the first."""


OBJECTIVES: Mapping[str, Objective] = {"interactive": Objective(0.5, 0.03), "standard": Objective(2.0, 0.1)}
"""By class, where no others are asked for; batch work has none."""


def parse_objectives(texts: Sequence[str]) -> dict[str, Objective]:
    """From `class=ttft:tpot`, milliseconds, several with commas between; a class that is not named keeps its own.

    Raises:
        CommandError: an entry has another form, or its class is none that has objectives.
    """
    objectives = dict(OBJECTIVES)
    for entry in (e.strip() for text in texts for e in text.split(",")):
        name, _, times = entry.partition("=")
        ttft_ms, _, tpot_ms = times.partition(":")
        if name not in OBJECTIVES:
            raise CommandError(f"--slo: unknown class {name!r} in {entry!r}; one of {', '.join(OBJECTIVES)}")
        try:
            objectives[name] = Objective(float(ttft_ms) / 1000, float(tpot_ms) / 1000)
        except ValueError as error:
            raise CommandError(f"--slo: {entry!r}: write {name}=TTFT_MS:TPOT_MS, as {name}=500:30") from error
        if not (0 < objectives[name].ttft_s < math.inf and 0 < objectives[name].tpot_s < math.inf):
            raise CommandError(f"--slo: the times in {entry!r} must be above 0")
    return objectives


class OwnPrefill:
    """The time of a prompt alone, by its length."""

    def __init__(self, times: StepTimes, budget_tokens: int) -> None:
        self._times = times
        self._budget_tokens = budget_tokens
        self._known: dict[int, float] = {}

    def seconds(self, prompt_tokens: int) -> float:
        known = self._known.get(prompt_tokens)
        if known is None:
            budget = self._budget_tokens
            chunks = [Prefill(min(budget, prompt_tokens - at), at) for at in range(0, prompt_tokens, budget)]
            known = self._known[prompt_tokens] = sum(step_ms(self._times, [chunk], ()) for chunk in chunks) / 1000
        return known


def ttft_s(record: RequestRecord) -> float | None:
    """None: it had no token."""
    return None if record.first_token_s is None else record.first_token_s - record.arrived_s


def tpot_s(record: RequestRecord) -> float | None:
    """None: it had fewer than two tokens, or has not ended."""
    if record.first_token_s is None or record.end_s is None or record.tokens < 2:
        return None
    return (record.end_s - record.first_token_s) / (record.tokens - 1)


def is_good(record: RequestRecord, objective: Objective, own_prefill_s: float) -> bool:
    """Whether it finished and met both objectives."""
    first_s, each_s = ttft_s(record), tpot_s(record)
    return (
        record.outcome is Outcome.FINISHED
        and first_s is not None
        and first_s <= objective.ttft_s + PREFILLS * own_prefill_s
        and (each_s is None or each_s <= objective.tpot_s)
    )
