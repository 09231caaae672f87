"""What goes wrong in a simulated cluster, and when.

Owns: the faults. Imports nothing of ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FaultKind(StrEnum):
    REPLICA_DEATH = "replica_death"
    """Its process ends: its links break at once, and nobody listens there any more. A new incarnation follows."""
    NODE_LOSS = "node_loss"
    """All replicas of a node fall silent; no link says so. New incarnations follow."""
    LINK_BREAK = "link_break"
    """Between one replica and all routers; what is under way is lost, and the links are made again."""
    REPORTS_LOST = "reports_lost"
    """Frames of one replica that carry a report alone do not arrive; `share` of them."""
    REPORTS_LATE = "reports_late"
    """All frames of one replica arrive `delay_s` later, in order."""
    REPORTS_DOUBLED = "reports_doubled"
    """Frames of one replica arrive twice, but for those with a refusal or a preemption; `share` of them."""
    CONTROLLER_RESTART = "controller_restart"
    """There is none, and then one that knows nothing."""
    SLOW_CLIENTS = "slow_clients"
    """`share` of the clients that come read nothing."""


@dataclass(frozen=True, slots=True)
class Fault:
    at_s: float
    kind: FaultKind
    for_s: float
    number: int = 0
    """Of the replica, or the node."""
    share: float = 1.0
    delay_s: float = 0.0

    def __post_init__(self) -> None:
        """
        Raises:
            ValueError: a time is negative, or the share is no share.
        """
        if min(self.at_s, self.for_s, self.delay_s) < 0 or self.number < 0:
            raise ValueError(f"{self.kind.value}: times and numbers must not be negative")
        if not 0 < self.share <= 1:
            raise ValueError(f"{self.kind.value}: share must be above 0 and at most 1, got {self.share}")

    @property
    def over_s(self) -> float:
        return self.at_s + self.for_s
