"""What goes from a replica that has too much to one that has room: what waits there, and what runs.

Owns: that decision. Pure: it reads a view and returns proposals. Imports the view and the account of its room.
Invariants: nothing is proposed to where it has no room; a replica is the source or the target of one proposal a tick; no
request is proposed twice within its rest; a tick proposes no more than `moves_per_tick`.

First what waits, the most urgent first, and of equals what has kept its blocks: such a one moves with them, and one that
holds none goes back to its router's queue, to its old place, where a replica has room for it now, or, where none has, where
less urgent work that runs would make room for it. What has no place at all goes before: while a demand lasts, nothing takes
room that is less urgent, nor what has not begun and is only as urgent.

Then what runs, in pairs of the fullest and the emptiest, as Llumnix pairs instances (Sun et al., OSDI 24: migration from
the least free to the freest, one request of a pair at a time). Which request, and whether any, is weighed in seconds that
its client gains: the output that is still expected of it, times the difference of a step's time between the two, less its
pause and the time that its blocks are copied. And it goes only where its source is then still no less full than its target,
and less full than before. So of all fullnesses, from the highest on, each move lowers the first that it changes: under
steady load no sequence of moves comes back to where it was, and the moves end.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from operator import itemgetter

from cluster.config import ControlConfig
from cluster.control.room import Room
from cluster.control.view import ClusterView, Proposal, Replica, Stalled, Underway, blocks_of, takes
from cluster.messages import HeldRequest, Standing
from cluster.types import ReplicaId, RequestId

LOOKS_MAX = 4
"""In a tick so many of those that wait are looked after where others would give way."""

_Line = tuple[tuple[int, bool, RequestId], int, int, Replica]
"""What waits on a replica, from one of `stalled` on: its order, the replica's number, its own number there."""


def decide(view: ClusterView, config: ControlConfig, now_s: float) -> tuple[Underway, ...]:
    """What is to leave where it is for its own good or its neighbours'."""
    room = Room(view, config, now_s)
    return _Tick(view, config, now_s, room).decide()


class _Tick:
    def __init__(self, view: ClusterView, config: ControlConfig, now_s: float, room: Room) -> None:
        self._config = config
        self._now_s = now_s
        self._room = room
        self._front = max((demand.told.priority for demand in view.demands), default=None)
        self._paired: set[ReplicaId] = set()
        self._taken: set[RequestId] = set()
        """One that has just moved may be told of by both sides."""
        self._looks_left = LOOKS_MAX
        self._too_much = {True: math.inf, False: math.inf}
        """Blocks for which there was no room, of those that move with what they have kept, and of the others."""
        self._proposed: list[Underway] = []

    def decide(self) -> tuple[Underway, ...]:
        self._what_waits()
        self._what_runs()
        return tuple(self._proposed)

    # --- what waits ---

    def _what_waits(self) -> None:
        lines: list[_Line] = [(r.stalled[0].order, n, 0, r) for n, r in enumerate(self._room.live) if r.stalled]
        heapq.heapify(lines)
        while lines and len(self._proposed) < self._config.moves_per_tick:
            _, number, at, source = heapq.heappop(lines)
            first, line = source.stalled[at], source.stalled
            in_vain = self._may_go(first, source)
            if in_vain and self._place(first, source):
                continue
            at += 1
            # Who may not go now may not later in the tick either.
            while at < len(line) and not self._may_go(line[at], source):
                at += 1
            if at < len(line):
                heapq.heappush(lines, (line[at].order, number, at, source))
            if in_vain:
                lines = self._with_hope(lines, first.held.priority)

    def _with_hope(self, lines: Sequence[_Line], priority: int) -> list[_Line]:
        """Lines of which one may still have a place, now that one of this priority has none: none that follows is more
        urgent. Where much waits everywhere, that is none of thousands."""
        room, gives_way = self._room, self._looks_left > 0
        most = room.most_open(priority, self._is_single)
        hopeful = [
            line
            for line in lines
            if line[3].stalled_takes <= most or (gives_way and room.runs_below(line[3].stalled[line[2]].held.priority))
        ]
        heapq.heapify(hopeful)
        return hopeful

    def _may_go(self, stalled: Stalled, source: Replica) -> bool:
        held = stalled.held
        if source.replica_id in self._paired or self._now_s - stalled.since_s < self._config.stall_s:
            return False
        if stalled.takes >= self._too_much[held.standing is Standing.PAUSED]:
            return False
        return not self._rests(held) and self._is_due(held)

    def _is_due(self, held: HeldRequest) -> bool:
        """Nothing without a place goes before it."""
        if self._front is None or held.priority > self._front:
            return True
        return held.standing is Standing.PAUSED and held.priority == self._front

    def _place(self, stalled: Stalled, source: Replica) -> bool:
        held, blocks = stalled.held, stalled.takes
        target = self._room.best(source, held.priority, blocks, self._is_single)
        moves = held.standing is Standing.PAUSED
        if target is not None and moves:
            why = f"it waits on {source.replica_id}, and {target.replica_id} has room for it"
        elif target is not None:
            why = f"it waits on {source.replica_id} while another replica has room"
        else:
            target = None if moves else self._instead(held, source, blocks)
            if target is None:
                # Who comes later is no more urgent: where there was no room for as little, there is none. For who moves
                # nobody gives way: for others there may be room all the same.
                self._too_much[True] = min(self._too_much[True], blocks)
                if not moves:
                    self._too_much[False] = blocks
                return False
            why = f"it waits on {source.replica_id} while less urgent work runs on another replica"
        numbers = {"blocks": float(blocks), "free_slots": float(self._room.left(target)[0])}
        self._propose(held, source, target, moves, blocks, why, numbers)
        return True

    def _instead(self, held: HeldRequest, source: Replica, blocks: int) -> Replica | None:
        """Where it would run in the place of less urgent work. Its engine would have let it in at once on such work where it
        is: what is left there has been recomputed too often to give way again, or is as urgent."""
        if self._looks_left == 0:
            return None
        self._looks_left -= 1
        return self._room.gives_way(source, held.priority, blocks, self._is_single)

    # --- what runs ---

    def _what_runs(self) -> None:
        room, config = self._room, self._config
        if not room.targets or len(self._proposed) >= config.moves_per_tick:
            return
        least_s = config.move_value_s + config.move_pause_s
        sources = [
            r
            for r in room.live
            if (step_s := r.steps.step_s) is not None  # no calls: this runs for every replica
            and step_s * r.longest_remaining > least_s
            and r.replica_id not in self._paired
            and r.replica_id not in room.made_free
        ]
        sources.sort(key=room.full_at_least, reverse=True)  # equals stay in the order of their ids
        for source in sources:
            if len(self._proposed) >= config.moves_per_tick:
                return
            target = next((t for t in room.targets if self._is_pair(source, t)), None)
            if target is None:
                continue
            if room.full_at_most(target) >= room.full_at_least(source):
                return
            chosen = self._who_gains(source, target)
            if chosen is not None:
                self._move(chosen, source)

    def _who_gains(self, source: Replica, target: Replica) -> HeldRequest | None:
        """Of those who may move there the one that gains most."""
        here_s, config = source.steps.step_s, self._config
        assert here_s is not None
        gain_most_s = source.longest_remaining * (here_s - self._step_s(source, here_s, target)) - config.move_pause_s
        if gain_most_s <= config.move_value_s:
            return None
        gains = []
        for held in source.held:
            if held.standing is Standing.RUNS and self._is_due(held) and not self._rests(held):
                gain_s = self._gain_s(held, source, target)
                if gain_s is not None:
                    gains.append((-gain_s, held.request_id, held))
        gains.sort(key=itemgetter(0, 1))
        return next((held for *_, held in gains if self._evens_out(held, self._full_after(held, source), target)), None)

    def _gain_s(self, held: HeldRequest, source: Replica, target: Replica) -> float | None:
        """What its client gains by the move; None where it is not worth it."""
        here_s = source.steps.step_s
        assert here_s is not None
        step_s = here_s - self._step_s(source, here_s, target)
        gain_s = held.remaining_tokens * step_s - self._config.move_pause_s
        gain_s -= blocks_of(held.tokens, source.load) * self._config.move_block_s
        return gain_s if gain_s > self._config.move_value_s else None

    def _step_s(self, source: Replica, here_s: float, target: Replica) -> float:
        """A step there. Where nothing has run of late it is guessed from the source's: one part of it is fixed, the rest
        goes with the requests that run."""
        if target.steps.step_s is not None:
            return target.steps.step_s
        fixed = self._config.step_fixed_part
        return here_s * (fixed + (1 - fixed) * (target.running + 1) / source.running)

    def _full_after(self, held: HeldRequest, source: Replica) -> float:
        """How full its source is without it: no target may be fuller with it. None may be at all where that is not less."""
        left = self._room.full_without(source, 1, held.blocks)
        return left if left < self._room.full_at_least(source) else -math.inf

    def _evens_out(self, held: HeldRequest, full_after: float, target: Replica) -> bool:
        return self._room.full_with(target, 1, blocks_of(held.tokens, target.load)) <= full_after

    def _is_pair(self, source: Replica, target: Replica) -> bool:
        return (
            target is not source
            and self._is_single(target)
            and not self._room.pair_rests(source.replica_id, target.replica_id)
        )

    def _move(self, held: HeldRequest, source: Replica) -> None:
        full_after = self._full_after(held, source)

        def fits(target: Replica) -> bool:
            return (
                self._is_pair(source, target)
                and self._gain_s(held, source, target) is not None
                and self._evens_out(held, full_after, target)
            )

        blocks = takes(held, source.load)
        target = self._room.best(source, held.priority, blocks, fits)
        if target is None:
            return
        gain_s = self._gain_s(held, source, target)
        here_s = source.steps.step_s
        assert gain_s is not None
        assert here_s is not None
        numbers = {
            "gain_s": gain_s,
            "remaining_tokens": float(held.remaining_tokens),
            "step_here_s": here_s,
            "step_there_s": self._step_s(source, here_s, target),
            "full_here": source.fullness,
            "full_there": target.fullness,
        }
        self._propose(held, source, target, True, blocks, f"it runs sooner on {target.replica_id}", numbers)

    # --- both ---

    def _rests(self, held: HeldRequest) -> bool:
        return held.request_id in self._taken or self._room.rests(held, self._config.proposal_expiry_s)

    def _is_single(self, replica: Replica) -> bool:
        return replica.replica_id not in self._paired

    def _propose(
        self,
        held: HeldRequest,
        source: Replica,
        target: Replica,
        moves: bool,
        blocks: int,
        why: str,
        numbers: dict[str, float],
    ) -> None:
        proposal = Proposal(
            router_id=held.router_id,
            request_id=held.request_id,
            attempt=held.attempt,
            source=source.replica_id,
            source_generation=source.entry.generation,
            target=target.replica_id if moves else None,
            target_generation=target.entry.generation if moves else None,
            for_request_id=None,
            why=why,
            numbers=numbers,
        )
        self._paired |= {source.replica_id, target.replica_id}
        self._taken.add(held.request_id)
        self._proposed.append(Underway(self._now_s, proposal, held.standing, held.blocks, target.replica_id, blocks))
