"""What goes wrong in a simulated cluster, and when.

Owns: the faults. Imports nothing of ours.
"""

from __future__ import annotations

import math
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
    """Frames of one replica that carry a report alone, and what it tells the controller, do not arrive; `share` of them."""
    REPORTS_LATE = "reports_late"
    """All that one replica tells routers and the controller arrives `delay_s` later, in order."""
    REPORTS_DOUBLED = "reports_doubled"
    """What one replica tells arrives twice, but for frames with a refusal or a preemption; `share` of it."""
    CONTROLLER_RESTART = "controller_restart"
    """There is none, and then one that knows nothing."""
    SLOW_CLIENTS = "slow_clients"
    """`share` of the clients that come read nothing."""
    DRAIN = "drain"
    """A replica takes nothing new and lets go of what it has, until it takes work again."""
    NODE_DRAIN = "node_drain"
    """All replicas of a node do."""
    MOVE_SOURCE_DEATH = "move_source_death"
    """At the first move from then on that comes to `point`: the process of its source ends."""
    MOVE_TARGET_DEATH = "move_target_death"
    MOVE_LINK_BREAK = "move_link_break"
    """The link between source and target breaks; what is under way is lost."""
    MOVE_SOURCE_UNLINKED = "move_source_unlinked"
    """The links between the source and all routers break, and are made again."""
    MOVE_TARGET_UNLINKED = "move_target_unlinked"
    MOVE_CLIENT_LEAVES = "move_client_leaves"
    """The client of the request that moves goes away."""
    MOVE_TARGET_DRAIN = "move_target_drain"
    """The target is to take nothing new itself."""
    MOVE_TURN_BACK = "move_turn_back"
    """Its source takes work again, and its target drains in its stead."""
    MOVE_CONTROLLER_RESTART = "move_controller_restart"
    MOVE_RUSH = "move_rush"
    """Urgent requests come, as many as run on two replicas: whatever is less urgent there is preempted."""


class MovePoint(StrEnum):
    """How far a move has come."""

    ASKED = "asked"
    """Its router has told the source."""
    BEGUN = "begun"
    """The target has been asked for room."""
    COPIED = "copied"
    """Blocks have come to the target."""
    STATED = "stated"
    """So has the frozen request."""
    FROZEN = "frozen"
    """The source tells its router that it stands still."""
    GRANTED = "granted"
    """Its router has told the target that its copy counts."""
    TAKEN = "taken"
    """The target tells the router that it has it."""
    RELEASED = "released"
    """Its router has told the source to forget it."""


OF_MOVES = frozenset(kind for kind in FaultKind if kind.name.startswith("MOVE_"))


@dataclass(frozen=True, slots=True)
class Fault:
    at_s: float
    kind: FaultKind
    for_s: float
    number: int = 0
    """Of the replica, or the node."""
    share: float = 1.0
    delay_s: float = 0.0
    point: MovePoint | None = None
    """Of the move that goes wrong; others have none."""

    def __post_init__(self) -> None:
        """
        Raises:
            ValueError: a time is negative or endless, the share is no share, or a move goes wrong nowhere.
        """
        if not all(map(math.isfinite, (self.at_s, self.for_s, self.delay_s))):
            raise ValueError(f"{self.kind.value}: times must be finite")
        if min(self.at_s, self.for_s, self.delay_s) < 0 or self.number < 0:
            raise ValueError(f"{self.kind.value}: times and numbers must not be negative")
        if not 0 < self.share <= 1:
            raise ValueError(f"{self.kind.value}: share must be above 0 and at most 1, got {self.share}")
        if (self.kind in OF_MOVES) is (self.point is None):
            points = ", ".join(MovePoint)
            raise ValueError(
                f"{self.kind.value}: needs the point of a move at which it happens, one of {points}"
                if self.point is None
                else f"{self.kind.value}: it does not happen to a move, and has no point"
            )

    @property
    def over_s(self) -> float:
        return self.at_s + self.for_s
