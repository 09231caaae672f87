"""Live moves: who is moved, and what is done at every word of it.

Owns: the course of each move, by what `relocate` and `moving` decide. Single writer, driven by `core`. Invariants: no
suspect moves, none that misses tokens or the logprobs of its prompt; a live request is open on one replica, queued or set
aside, at every stage; every stage but the last ends by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import assert_never

from cluster.messages import MoveNotice
from cluster.types import RequestId
from router.live import Live
from router.losses import Losses
from router.moves import NO_FIGURES, Move
from router.moving import MoveOutcome, Stage, Standing, Then, judge
from router.parts import Parts
from router.relocate import Resident, place_to_go, who_leaves
from router.returns import Return
from router.suspects import Trial
from router.view import Condition, Replica, Reservation

REST_S = 1.0
"""After a move that came to nothing, no other of the request is tried for so long."""
_NOT_SENT = 2**63
"""The place in the order of sends of what is not sent yet: no report counts it."""


class Mover:
    def __init__(self, parts: Parts, losses: Losses) -> None:
        self._config, self._rng, self._metrics = parts.config, parts.rng, parts.metrics
        self._fleet, self._dispatcher, self._lives = parts.fleet, parts.dispatcher, parts.lives
        self._gaps, self._book = parts.endings.gaps, parts.endings.moves
        self._losses = losses

    # --- who moves ---

    def relocate(self, now_s: float) -> None:
        """Empty the replicas that drain, as far as there is room elsewhere. Where nobody takes work, all stays that may yet
        be finished where it is."""
        draining = self._fleet.draining(now_s)
        for source in draining if draining and self._fleet.routable(now_s) else ():
            if source.reservations:
                self._empty(source, now_s)

    def _empty(self, source: Replica, now_s: float) -> None:
        head = self._dispatcher.queue.peek()
        residents = [self._resident(source, name, held) for name, held in source.reservations.items()]
        load = None if source.report is None else source.report.load
        leaving = who_leaves(residents, load, None if head is None else head.priority)
        for request_id in leaving.called_back:
            self._losses.go_on(self._lives[request_id], source, Return.DRAINED, now_s, abort=True, lost=False)
        room = self._config.moves_at_once - self._book.leaving(source)
        for request_id in leaving.to_move:
            if room <= 0:
                break
            live = self._lives[request_id]
            need = live.need(self._config.expected_output_tokens)
            views, most = self._fleet.views(now_s), self._config.moves_at_once
            arriving = self._book.arriving()
            placement = place_to_go(need, views, arriving, most, self._rng, live.erred_on)
            if placement is not None:
                self.begin(live, self._fleet[placement.replica_id], placement.blocks, "it drains", now_s)
                room -= 1

    def _resident(self, source: Replica, request_id: RequestId, held: Reservation) -> Resident:
        live = self._lives[request_id]
        assert source.report is not None
        return Resident(
            request_id,
            live.request.priority,
            live.request.arrived_unix_s,
            begun=live.first_token_s is not None,
            reported=held.sequence <= source.report.applied_sequence,
            parked=held.parked,
            movable=self._book.of(request_id) is None and self.is_whole(live) and not live.journal.complete,
        )

    def is_whole(self, live: Live) -> bool:
        """Whether nothing else is open about it."""
        return live.suspicion is None and live.request.request_id not in self._gaps and not live.journal.awaits_prompt

    def begin(
        self,
        live: Live,
        target: Replica,
        blocks: int,
        why: str,
        now_s: float,
        figures: Mapping[str, float] = NO_FIGURES,
        for_request_id: RequestId | None = None,
    ) -> None:
        """Have its attempt moved to `target`, which has room for it. `figures` are what that was decided by."""
        request_id, attempt = live.request.request_id, live.journal.attempt
        assert live.replica_id is not None
        assert attempt is not None
        source, number = self._fleet[live.replica_id], live.journal.promise()
        until_s = now_s + self._config.move_timeout_s
        self._book.add(Move(live, source, target, attempt, number, why, figures, for_request_id, now_s, until_s))
        target.expect(request_id, Reservation(number, _NOT_SENT, live.request.priority, blocks))
        source.port.move(request_id, attempt, number, target.port.entry)

    # --- what is heard ---

    def heard(self, replica: Replica, notices: Sequence[MoveNotice], now_s: float) -> None:
        for notice in notices:
            self._heard(replica, notice, now_s)
        self.relocate(now_s)  # one that is over makes room for the next

    def _heard(self, replica: Replica, notice: MoveNotice, now_s: float) -> None:
        request_id = notice.request_id
        live, move = self._lives.get(request_id), self._book.of(request_id)
        if move is not None and (replica, notice.attempt) not in (
            (move.source, move.attempt),
            (move.target, move.number),
        ):
            move = None
        found = Standing(
            stage=None if move is None else move.stage,
            from_target=move is not None and replica is move.target,
            is_open=live is not None and live.is_open(replica.replica_id, notice.attempt),
            tokens=0 if live is None else live.journal.next_index,
            whole=live is not None and self.is_whole(live),
            target_takes=move is not None and self._takes(move.target, now_s),
        )
        then = judge(notice, found)
        match then:
            case Then.NOTHING:
                pass
            case Then.END_COPY:
                replica.abort(request_id, notice.attempt)
            case Then.CALL_OFF:
                if move is not None and move.stage is Stage.ASKED:
                    self._call_off(move, "it cannot be granted", now_s)
                else:
                    replica.port.call_off(request_id, notice.attempt)
            case Then.GRANT:
                assert move is not None
                self._grant(move, now_s)
            case Then.STAY:
                assert move is not None
                self._stays(move, MoveOutcome.REFUSED, notice.why, now_s)
            case Then.ARRIVE:
                assert move is not None
                self._taken(move)
            case Then.GIVE_UP:
                assert move is not None
                self._give_up(move, now_s, abort=False)
            case _:
                assert_never(then)

    def _takes(self, target: Replica, now_s: float) -> bool:
        """Whether what moves there may still go there. That it refused something just now says nothing of what it has
        reserved."""
        view = target.view(self._config, now_s)
        return view.condition in (Condition.ROUTABLE, Condition.BACKING_OFF) and view.trial is not Trial.ALONE

    def _grant(self, move: Move, now_s: float) -> None:
        self._book.proceed(move, Stage.GRANTED, now_s + self._config.move_taken_s)
        move.frozen_s = now_s
        self._dispatcher.transfer(move.live, move.source, move.target, move.number, now_s)

    def _taken(self, move: Move) -> None:
        self._book.proceed(move, Stage.TAKEN, math.inf)
        self._metrics.moved(MoveOutcome.MOVED)
        move.source.let_go(move.live.request.request_id, move.attempt)

    def arrived(self, live: Live, now_s: float) -> None:
        """A delta of its open attempt was taken: the first from where it moved says that it is there."""
        move = self._book.of(live.request.request_id)
        if move is None or move.stage not in (Stage.GRANTED, Stage.TAKEN):
            return
        if move.stage is Stage.GRANTED:
            self._taken(move)
        self._book.done(move)
        pause_s = now_s - move.frozen_s
        self._metrics.move_paused(pause_s)
        live.decided(
            now_s,
            "moved",
            move.figures,
            replica=move.target.replica_id,
            why=f"from {move.source.replica_id}: {move.why}",
            attempt=move.number,
            emitted=live.journal.next_index,
            pause_ms=round(pause_s * 1000),
        )

    # --- what goes wrong ---

    def _stays(self, move: Move, outcome: MoveOutcome, why: str, now_s: float) -> None:
        self._book.off(move, outcome, now_s + REST_S)
        replica = move.source.replica_id
        whither = f"to {move.target.replica_id}: {move.why}; {why}"
        move.live.decided(
            now_s, "stays", move.figures, replica=replica, why=whither, emitted=move.live.journal.next_index
        )

    def _call_off(self, move: Move, why: str, now_s: float) -> None:
        self._stays(move, MoveOutcome.CALLED_OFF, why, now_s)
        if move.source.link_up:
            move.source.port.call_off(move.live.request.request_id, move.attempt)
        else:
            move.unsaid, move.until_s = True, math.inf

    def _give_up(self, move: Move, now_s: float, *, abort: bool) -> None:
        """The target does not have what it was granted: no engine died of it."""
        self._book.over(move.live.request.request_id, MoveOutcome.FAILED)
        self._losses.go_on(move.live, move.target, Return.MOVE, now_s, abort=abort, lost=False)

    def link_down(self, replica: Replica, now_s: float) -> None:
        """Its link is down already."""
        for move in self._book:
            if move.stage is Stage.ASKED and replica in (move.source, move.target):
                self._call_off(move, f"the link to {replica.replica_id} broke", now_s)

    def link_up(self, replica: Replica, now_s: float) -> None:
        for move in self._book:
            if move.unsaid and move.source is replica:
                move.unsaid, move.until_s = False, now_s + REST_S
                replica.port.call_off(move.live.request.request_id, move.attempt)

    def replica_gone(self, replica: Replica, why: Return, now_s: float) -> None:
        """An incarnation is over. What was granted to it and not taken did not die with it."""
        for move in self._book:
            if move.target is replica and move.stage is Stage.GRANTED:
                self._give_up(move, now_s, abort=False)
            elif move.target is replica and move.stage is Stage.ASKED:
                self._call_off(move, f"{replica.replica_id} is gone", now_s)
        self._losses.replica_gone(replica, why, now_s)

    def tick(self, now_s: float) -> None:
        """What waiting too long means, and a target that takes nothing any more."""
        for move in self._book:
            due = move.until_s <= now_s
            match move.stage:
                case Stage.ASKED:
                    if due or not self._takes(move.target, now_s):
                        why = "it took too long" if due else f"{move.target.replica_id} takes nothing now"
                        self._call_off(move, why, now_s)
                case Stage.GRANTED:
                    if due:
                        self._give_up(move, now_s, abort=True)
                case Stage.OFF:
                    if due:
                        self._book.done(move)
                case Stage.TAKEN:
                    pass
                case _:
                    assert_never(move.stage)
        self.relocate(now_s)
