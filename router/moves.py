"""The live moves that are under way, one a request at most.

Owns: that book, and what a move's end says to its two replicas. Imports `live`, the view and the pure decision. Single
writer. Invariants: a target counts a request that moves there until it is open there or the move is off; where an attempt
is over, so is its move; a source is told when what it keeps is of no more use.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cluster.messages import Left, Stays
from cluster.types import ReplicaId, RequestId
from router.live import Live
from router.metrics_sink import RouterMetrics
from router.moving import MoveOutcome, Stage
from router.view import Replica

NO_FIGURES: Mapping[str, float] = {}
_SETTLED = 256
"""Ends of which the controller has not been told; beyond that it waits until their proposals expire."""
_UNDER_WAY = (Stage.ASKED, Stage.GRANTED)


@dataclass(slots=True)
class Move:
    """One request's."""

    live: Live
    source: Replica
    target: Replica
    attempt: int
    """On the source."""
    number: int
    """Of the attempt that it becomes on the target."""
    why: str
    figures: Mapping[str, float]
    """What it was decided by."""
    for_request_id: RequestId | None
    """Whom it makes room for, where it does."""
    begun_s: float
    until_s: float
    """What is awaited comes by then, or the move ends; once it is off, no other is tried before."""
    stage: Stage = Stage.ASKED
    frozen_s: float = math.inf
    """When it was told to stand still."""
    unsaid: bool = False
    """It is off, and the source could not be told."""


class MoveBook:
    """Moves by their request."""

    __slots__ = ("_metrics", "_moves", "_settled")

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics
        self._moves: dict[RequestId, Move] = {}
        self._settled: deque[Stays | Left] = deque(maxlen=_SETTLED)

    def __len__(self) -> int:
        return len(self._moves)

    def __iter__(self) -> Iterator[Move]:
        """As it is now, whatever is done to the book meanwhile."""
        return iter(list(self._moves.values()))

    def of(self, request_id: RequestId) -> Move | None:
        return self._moves.get(request_id)

    def leaving(self, replica: Replica) -> int:
        """How many are under way from there."""
        return sum(move.source is replica and move.stage in _UNDER_WAY for move in self._moves.values())

    def arriving(self) -> Counter[ReplicaId]:
        """How many are under way to each."""
        return Counter(move.target.replica_id for move in self._moves.values() if move.stage in _UNDER_WAY)

    def add(self, move: Move) -> None:
        self._moves[move.live.request.request_id] = move

    def proceed(self, move: Move, stage: Stage, until_s: float) -> None:
        if move.stage is Stage.ASKED:
            move.target.expect_no_more(move.live.request.request_id)
        move.stage, move.until_s = stage, until_s
        if stage is Stage.OFF:
            self._settle(Stays, move)
        elif stage is Stage.TAKEN:
            self._settle(Left, move)

    def off(self, move: Move, outcome: MoveOutcome, until_s: float) -> None:
        """Its attempt stays."""
        self.proceed(move, Stage.OFF, until_s)
        self._metrics.moved(outcome)

    def over(self, request_id: RequestId, outcome: MoveOutcome = MoveOutcome.ENDED) -> None:
        """The attempt that is open is over, if it moves or not."""
        move = self._moves.pop(request_id, None)
        if move is None:
            return
        if move.stage is Stage.ASKED:
            move.target.expect_no_more(request_id)
        elif move.stage is Stage.GRANTED:
            move.source.abort(request_id, move.attempt)
        if move.stage in _UNDER_WAY:
            self._metrics.moved(outcome)
            self._settle(Left, move)

    def _settle(self, become: type[Stays | Left], move: Move) -> None:
        if move.for_request_id is not None:
            self.settle(become(move.live.request.request_id, move.attempt, move.for_request_id))

    def settle(self, told: Stays | Left) -> None:
        """The controller is to know what became of its proposal."""
        self._settled.append(told)

    def take_settled(self) -> tuple[Stays | Left, ...]:
        """All that it is yet to be told."""
        settled = tuple(self._settled)
        self._settled.clear()
        return settled

    def done(self, move: Move) -> None:
        """There is no more to wait for."""
        del self._moves[move.live.request.request_id]
