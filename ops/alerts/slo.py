"""Burn rates of the error budget of first tokens, by class.

Owns: the windows and factors, after the multi-window, multi-burn-rate alerts of Google's SRE workbook, chapter 5. Pure.

A burn rate of 1 spends the budget of 30 days in 30 days. Each pair fires while both windows burn faster than its factor: the
long one says that it matters, the short one, a twelfth, that it goes on.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.metrics import SLO_FIRST_TOKENS
from ops.alerts.query import OF_CLASS, Part, labels_of, series, total_of
from ops.alerts.rules import Alert, Group, Recording, Severity, duration
from ops.alerts.settings import AlertSettings

_M, _H, _D = 60, 3_600, 86_400
LATE = series(SLO_FIRST_TOKENS, Part.TOTAL, attained="false")


@dataclass(frozen=True, slots=True)
class Burn:
    """A pair of windows."""

    long_s: int
    short_s: int
    factor: float
    """Times the rate that spends the budget in 30 days."""


FAST = (Burn(_H, 5 * _M, 14.4), Burn(6 * _H, 30 * _M, 6.0))
"""2 % of the budget in an hour, 5 % in six."""
SLOW = (Burn(_D, 2 * _H, 3.0), Burn(3 * _D, 6 * _H, 1.0))
"""10 % of the budget in a day, 10 % in three."""
WINDOWS_S = tuple(sorted({window_s for burn in (*FAST, *SLOW) for window_s in (burn.long_s, burn.short_s)}))


def late_part(window_s: int) -> str:
    """The name under which the part of late first tokens is recorded."""
    return f"model_class:{SLO_FIRST_TOKENS.name}_late:ratio_rate{duration(window_s)}"


def slo_group(settings: AlertSettings) -> Group:
    every = series(SLO_FIRST_TOKENS, Part.TOTAL)
    recorded = [
        Recording(
            name=late_part(window_s),
            expression=f"{total_of(OF_CLASS, LATE, window_s)}\n/\n{total_of(OF_CLASS, every, window_s)}",
        )
        for window_s in WINDOWS_S
    ]
    budget = f"{100 * (1 - settings.objective):.4g}%"
    where = "of {{ $labels.priority_class }} requests for {{ $labels.model }}"
    told = "{{ $value | humanizePercentage }} of first tokens " + where + " came late"
    fast = Alert(
        name="ForebaySloBurnFast",
        severity=Severity.CRITICAL,
        expression=_burns(FAST, settings),
        for_s=2 * _M,
        summary=f"First tokens {where} come late, and soon the error budget is spent",
        description=f"{told} in the last hour or six. The budget is {budget}; {_factors(FAST)} times that is too fast.",
    )
    slow = Alert(
        name="ForebaySloBurnSlow",
        severity=Severity.WARNING,
        expression=_burns(SLOW, settings),
        for_s=15 * _M,
        summary=f"First tokens {where} come late more often than the error budget allows",
        description=f"{told} in the last day or three. The budget is {budget}; {_factors(SLOW)} times that is too fast.",
    )
    return Group(name="forebay-slo", rules=(*recorded, fast, slow))


def _burns(burns: tuple[Burn, ...], settings: AlertSettings) -> str:
    return "\nor\n".join(_burn(burn, settings) for burn in burns)


def _burn(burn: Burn, settings: AlertSettings) -> str:
    most = f"{burn.factor * (1 - settings.objective):.6g}"
    return (
        f"{late_part(burn.long_s)} > {most}\n"
        f"and\n{late_part(burn.short_s)} > {most}\n"
        f"and on {labels_of(OF_CLASS)}\n{total_of(OF_CLASS, LATE, burn.long_s)} >= {settings.late_min}"
    )


def _factors(burns: tuple[Burn, ...]) -> str:
    return " or ".join(f"{burn.factor:g}" for burn in burns)
