"""What has happened that people are told of in Kubernetes' Events, and how often. Pure.

Owns: what one picture of the cluster has that the one before had not (`Chronicle`), and which Events are written for it
(`EventBook`): like ones are one that is counted, and their rate has an end. Imports ids; no Kubernetes, no clock.

Invariants: nothing of what requests say, and no secret, is in a picture, so none is in an Event; memory is bounded by the
replicas and by KEPT; what is not written is counted.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from cluster.types import DrainedBy, Generation, PodRef, ReplicaId

LOST_AFTER_S = 5.0
"""A replica whose link ends is lost once it has not come again for so long: links break, and are made again."""
LIKE_S = 360.0
"""What happens again within so long of the last time is the same Event, counted."""
TELL_COUNT_S = 60.0
"""And its count is written so often."""
KEPT = 256
"""Events that are remembered, the latest."""
WAITING = 64
"""Events that are yet to be written; beyond that the oldest are not."""
BURST = 10
"""Events that may be written at once."""


@dataclass(frozen=True, slots=True)
class ReplicaSeen:
    generation: Generation
    model: str
    node: str
    pod: PodRef | None
    drained_by: frozenset[DrainedBy]


@dataclass(frozen=True, slots=True)
class ScaleSeen:
    wanted: int
    why: str


@dataclass(frozen=True, slots=True)
class Picture:
    """The cluster, as the controller that leads sees it."""

    leads: Generation
    replicas: Mapping[ReplicaId, ReplicaSeen]
    """Those that have reported."""
    scale: Mapping[str, ScaleSeen]
    """By model."""
    going: Mapping[str, str]
    """Nodes with a notice, and why, in words."""


@dataclass(frozen=True, slots=True)
class Happening:
    """As an Event has it."""

    reason: str
    action: str
    note: str
    warning: bool = False
    pod: PodRef | None = None
    """What it is about; None: the controller."""
    node: str = ""
    """What else it has to do with."""


_DRAIN_WHY = {
    DrainedBy.OPERATOR: "an operator asked for it",
    DrainedBy.SCALE: "fewer replicas are needed",
}


class Chronicle:
    """What one controller has seen while it leads. Single writer."""

    def __init__(self) -> None:
        self._before: Picture | None = None
        self._missing: dict[ReplicaId, tuple[ReplicaSeen, float]] = {}
        """Replicas that are not linked any more, and since when."""

    def observe(self, picture: Picture, now_s: float) -> tuple[Happening, ...]:
        """What is new in it. What was so when this controller began to lead is not."""
        before, self._before = self._before, picture
        if before is None or before.leads != picture.leads:
            self._missing.clear()
            note = f"this controller leads, as generation {picture.leads.number}"
            return (Happening("ControllerLeads", "Lead", note),)
        happened = [h for replica_id in sorted(picture.replicas) for h in self._drains(replica_id, before, picture)]
        happened += self._losses(before, picture, now_s)
        for model, scale in sorted(picture.scale.items()):
            was = before.scale.get(model)
            if was is not None and was.wanted != scale.wanted:
                note = f"{model}: {was.wanted} -> {scale.wanted} replicas wanted: {scale.why}"
                happened.append(Happening("Scaled", "Scale", note))
        return tuple(happened)

    def _drains(self, replica_id: ReplicaId, before: Picture, after: Picture) -> list[Happening]:
        now = after.replicas[replica_id]
        was = before.replicas.get(replica_id)
        if was is None or was.generation != now.generation:
            return []
        made = []
        for by in sorted(now.drained_by - was.drained_by):
            why = _DRAIN_WHY.get(by) or f"node {now.node}: {after.going.get(now.node, 'it had a notice')}"
            note = f"{replica_id} of {now.model} takes nothing new and its work goes elsewhere: {why}"
            made.append(Happening("DrainBegan", "Drain", note, pod=now.pod, node=now.node))
        for by in sorted(was.drained_by - now.drained_by):
            rest = " once nothing else keeps it from work" if now.drained_by else ""
            why = "it was asked for"
            if by is DrainedBy.NODE:
                goes = now.node in after.going
                why = "no other would take its work" if goes else f"node {now.node} has no notice any more"
            note = f"{replica_id} of {now.model} takes work again{rest}: {why}"
            made.append(Happening("DrainEnded", "Drain", note, pod=now.pod, node=now.node))
        return made

    def _losses(self, before: Picture, after: Picture, now_s: float) -> list[Happening]:
        for replica_id, seen in before.replicas.items():
            if replica_id not in after.replicas:
                self._missing[replica_id] = seen, now_s
        made = []
        for replica_id, (seen, since_s) in list(self._missing.items()):
            again = after.replicas.get(replica_id)
            if again is not None and again.generation == seen.generation:
                del self._missing[replica_id]
            elif again is not None or now_s - since_s >= LOST_AFTER_S:
                del self._missing[replica_id]
                made.append(_gone(replica_id, seen))
        return made


def _gone(replica_id: ReplicaId, seen: ReplicaSeen) -> Happening:
    where = f" on node {seen.node}" if seen.node else ""
    if seen.drained_by:
        note = f"{replica_id} of {seen.model}{where} has left; it was draining"
        return Happening("ReplicaLeft", "Leave", note, pod=seen.pod, node=seen.node)
    note = f"{replica_id} of {seen.model}{where} is lost; its requests go on elsewhere"
    return Happening("ReplicaLost", "Resume", note, warning=True, pod=seen.pod, node=seen.node)


# --- which Events are written ---


@dataclass(frozen=True, slots=True)
class Written:
    """An Event that is to be written, or whose count is."""

    happening: Happening
    name: str
    """Of the object; no two Events of a cluster have one."""
    at_unix_s: float
    """When it last happened."""
    count: int
    """1: it is new."""


@dataclass(frozen=True, slots=True)
class _Known:
    name: str
    count: int
    last_s: float
    last_unix_s: float
    told_s: float
    told: int
    """As many as its count was written to be; 0: it is yet to be written."""


class EventBook:
    """What is to be written of what has happened. Single writer."""

    def __init__(self, per_minute: float, name: str) -> None:
        """
        Args:
            per_minute: So many are written at most, beside BURST at once.
            name: Begins the names of Events, and differs between controllers and their generations.
        """
        self._per_s = per_minute / 60
        self._name = name
        self._made = 0
        self._known: OrderedDict[Happening, _Known] = OrderedDict()
        self._waiting: deque[Happening] = deque()
        self._tokens, self._filled_s = float(BURST), 0.0
        self.dropped = 0
        """Events that were not written."""

    def note(self, happening: Happening, now_s: float, now_unix_s: float) -> None:
        """It has happened."""
        known = self._known.get(happening)
        if known is not None and now_s - known.last_s <= LIKE_S:
            self._known[happening] = replace(known, count=known.count + 1, last_s=now_s, last_unix_s=now_unix_s)
            self._known.move_to_end(happening)
            return
        self._made += 1
        self._known[happening] = _Known(f"{self._name}.{self._made}", 1, now_s, now_unix_s, now_s, 0)
        self._known.move_to_end(happening)
        self._waiting.append(happening)
        while len(self._waiting) > WAITING:
            self._forget(self._waiting.popleft())
        while len(self._known) > KEPT:
            self._forget(next(iter(self._known)))

    def _forget(self, happening: Happening) -> None:
        known = self._known.pop(happening, None)
        if known is not None and not known.told:
            self.dropped += 1

    def due(self, now_s: float) -> Written | None:
        """The next that is to be written now, if any. Each is given out once."""
        self._tokens = min(BURST, self._tokens + (now_s - self._filled_s) * self._per_s)
        self._filled_s = now_s
        if self._tokens < 1:
            return None
        happening = self._next(now_s)
        if happening is None:
            return None
        self._tokens -= 1
        known = self._known[happening]
        count = known.count if known.told else 1
        self._known[happening] = replace(known, told_s=now_s, told=count)
        return Written(happening, known.name, known.last_unix_s, count)

    def _next(self, now_s: float) -> Happening | None:
        while self._waiting:
            happening = self._waiting.popleft()
            known = self._known.get(happening)
            if known is not None and not known.told:
                return happening
        for happening, known in self._known.items():
            if known.told and known.count > known.told and now_s - known.told_s >= TELL_COUNT_S:
                return happening
        return None

    def again(self, written: Written) -> None:
        """It could not be written now, and is the next."""
        known = self._known.get(written.happening)
        if known is None:
            return
        self._known[written.happening] = replace(known, told=written.count - 1)
        if written.count == 1:
            self._waiting.appendleft(written.happening)

    def failed(self, written: Written) -> None:
        """It is not taken: what happens next has an Event of its own."""
        self._known.pop(written.happening, None)
        self.dropped += 1
