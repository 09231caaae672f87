"""All alerts, in the order of the rendered file.

Owns: that order. Pure. Invariant: no two alerts have one name.
"""

from __future__ import annotations

from ops.alerts.control import control_group, journal_group
from ops.alerts.replicas import replicas_group
from ops.alerts.rules import Alert, Group
from ops.alerts.serving import serving_group
from ops.alerts.settings import AlertSettings
from ops.alerts.slo import slo_group


def all_groups(settings: AlertSettings) -> tuple[Group, ...]:
    makers = (slo_group, serving_group, replicas_group, control_group, journal_group)
    return tuple(make(settings) for make in makers)


def all_alerts(settings: AlertSettings) -> tuple[Alert, ...]:
    return tuple(rule for group in all_groups(settings) for rule in group.rules if isinstance(rule, Alert))
