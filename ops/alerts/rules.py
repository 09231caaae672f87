"""What a rule of Prometheus is, as values.

Owns: alerts, recordings and their groups, and how they look in a file of rules. Imports the base of our configs only.
Invariant: every alert has a severity, a time that it must hold for, texts and a page of its own name.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, TypeAlias

from pydantic import Field, PositiveInt

from cluster.config import Config

_UNITS_S = (("d", 86_400), ("h", 3_600), ("m", 60))


class Severity(StrEnum):
    CRITICAL = "critical"
    """People notice: somebody is to look at once."""
    WARNING = "warning"
    """It will not mend itself: somebody is to look today."""


class Recording(Config):
    """A query that others repeat, kept under a name of its own."""

    name: str = Field(description="level:metric:operation, as Prometheus has it.")
    expression: str = Field(description="PromQL.")

    def rendered(self) -> dict[str, Any]:
        return {"record": self.name, "expr": self.expression}


class Alert(Config):
    """One condition. Its texts are templates of Prometheus: `$value` is what the expression says, `$labels` whose."""

    name: str = Field(pattern=r"^Forebay[A-Za-z]+$", description="Also that of its page under ops/runbooks.")
    severity: Severity
    expression: str = Field(description="PromQL; true of every series that it returns.")
    for_s: PositiveInt = Field(description="It must have been true for so long; in whole seconds.")
    summary: str = Field(description="One line: what is wrong, and where.")
    description: str = Field(description="With the figure, and what it is judged by.")

    def rendered(self, runbooks: str) -> dict[str, Any]:
        """`runbooks` is what the link to its page begins with."""
        return {
            "alert": self.name,
            "expr": self.expression,
            "for": duration(self.for_s),
            "labels": {"severity": self.severity.value},
            "annotations": {
                "summary": self.summary,
                "description": self.description,
                "runbook_url": f"{runbooks.rstrip('/')}/{self.name}.md",
            },
        }


Rule: TypeAlias = Recording | Alert


class Group(Config):
    """Rules that are evaluated together, in their order."""

    name: str
    rules: tuple[Rule, ...]

    def rendered(self, runbooks: str) -> dict[str, Any]:
        rules = [rule.rendered(runbooks) if isinstance(rule, Alert) else rule.rendered() for rule in self.rules]
        return {"name": self.name, "rules": rules}


def duration(seconds: int) -> str:
    """As Prometheus writes it, in the largest unit that fits: 30s, 5m, 1h, 3d."""
    for unit, size_s in _UNITS_S:
        if seconds % size_s == 0:
            return f"{seconds // size_s}{unit}"
    return f"{seconds}s"
