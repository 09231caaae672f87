"""How large a step may be after one did not fit in memory.

Owns: the configuration that the planner is given. Imports cluster.config. Invariant: it never exceeds what is
configured, and never says that nothing may run.

The rule. When a step did not fit, slots and token budget fall to what did fit (slots never below what runs, so that a
plan is never over its limits). After PATIENCE_STEPS steps that fitted, both rise by a quarter, and so on up to what is
configured. Each further failure doubles the patience, up to 64 times; it is forgotten when a patience has passed
at full size. So a step of a size that fails is tried rarer and rarer, while a passing shortage costs little.
"""

from __future__ import annotations

from cluster.config import EngineConfig

PATIENCE_STEPS = 64
PATIENCE_STEPS_MAX = 64 * PATIENCE_STEPS


class FittingLimits:
    """`config` is what the next plan is made with."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._full = config
        self._patience_steps = PATIENCE_STEPS
        self._good_steps = 0
        self._failed_before = False

    def did_not_fit(self, running: int, fitted_tokens: int) -> None:
        """A step did not fit; `fitted_tokens` of it did, and `running` requests have a slot still."""
        if self._failed_before:
            self._patience_steps = min(2 * self._patience_steps, PATIENCE_STEPS_MAX)
        self._failed_before = True
        self._good_steps = 0
        slots = min(max(1, running), self.config.slots)
        self._set(slots, min(max(slots, fitted_tokens), self.config.step_token_budget))

    def fitted(self) -> None:
        """A step ran as it was planned."""
        if not self._failed_before:
            return
        self._good_steps += 1
        if self._good_steps < self._patience_steps:
            return
        self._good_steps = 0
        full = self._full
        if self.config is full:
            self._failed_before, self._patience_steps = False, PATIENCE_STEPS
            return
        self._set(
            min(full.slots, _raised(self.config.slots)),
            min(full.step_token_budget, _raised(self.config.step_token_budget)),
        )

    def _set(self, slots: int, budget: int) -> None:
        full = self._full
        slots = min(slots, budget)
        if (slots, budget) == (full.slots, full.step_token_budget):
            self.config = full
        else:
            self.config = full.model_copy(update={"slots": slots, "step_token_budget": budget})


def _raised(limit: int) -> int:
    return limit + max(1, limit // 4)
