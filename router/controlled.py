"""What this router tells the controller of a first that has no place, and what it does with the controller's proposals.

Owns: since when the first has had no place, and who left a replica on a proposal lately. Imports the parts that the core
is made of and the messages; no socket. Single writer, driven by `core`. Invariants: what is done with a proposal is what
`proposals` decides, at most once; of those that left lately as many are remembered as were proposed in `request_rest_s`.
"""

from __future__ import annotations

from collections import OrderedDict

from cluster.messages import Left, Propose, Stays, Unplaced
from cluster.types import Generation, RequestId
from router.live import Live
from router.losses import Losses
from router.mover import Mover
from router.parts import Parts
from router.proposals import Demand, Found, Verdict, judge
from router.relocate import place_to_go
from router.returns import Return
from router.routing import Placement
from router.view import Replica


class Controlled:
    def __init__(self, parts: Parts, losses: Losses, mover: Mover) -> None:
        self._config, self._rng, self._metrics = parts.config, parts.rng, parts.metrics
        self._fleet, self._dispatcher, self._lives = parts.fleet, parts.dispatcher, parts.lives
        self._moves, self._ended = parts.endings.moves, parts.endings.ended
        self._losses = losses
        self._mover = mover
        self._newest: Generation | None = None
        self._left_s: OrderedDict[RequestId, float] = OrderedDict()
        """When a proposal made each leave, the longest ago first."""
        self._unplaced: tuple[RequestId, float] | None = None
        """Who has no place, and since when."""

    # --- what has no place ---

    def unplaced(self, model: str, now_s: float) -> Unplaced | None:
        """With each demand: the first, where no replica has a place for it, for want of room and of nothing else."""
        live = self._dispatcher.without_place(now_s)
        if live is None:
            self._unplaced = None
            return None
        request_id = live.request.request_id
        if self._unplaced is None or self._unplaced[0] != request_id:
            self._unplaced = request_id, now_s
        need = live.need(self._config.expected_output_tokens)
        sizes = (replica.block_size_tokens for replica in self._fleet if replica.report is not None)
        return Unplaced(
            model=model,
            request_id=request_id,
            priority=need.priority,
            blocks=need.blocks(next(sizes)),  # the replicas of a model have blocks of one size
            waits_s=now_s - self._unplaced[1],
        )

    # --- what is proposed ---

    def heard(self, propose: Propose, source: Replica, now_s: float) -> Verdict:
        """Do it, if it still fits."""
        self._forget_rested(now_s)
        live = self._lives.get(propose.request_id)
        demand, urgency = self._demand(propose.for_request_id, now_s)
        found, placement = Found(self._newest, demand), None
        if live is not None and live.is_open(source.replica_id, propose.attempt):
            placement = self._place(propose, live, source, now_s)
            found = Found(
                newest=self._newest,
                demand=demand,
                is_open=True,
                busy=self._is_busy(live),
                whole=self._mover.is_whole(live) and source.link_up,
                rests=propose.request_id in self._left_s,
                below_demand=urgency is not None and live.request.priority < urgency,
                waits=not live.steady_below,
                has_place=placement is not None,
            )
        verdict = judge(propose, found)
        self._metrics.proposed(verdict)
        if verdict is not Verdict.STALE:
            self._newest = propose.generation
        if verdict is Verdict.MOVES:
            assert live is not None
            assert placement is not None
            self._left_s[propose.request_id] = now_s
            target = self._fleet[placement.replica_id]
            figures, demand_id = propose.numbers, propose.for_request_id
            self._mover.begin(live, target, placement.blocks, propose.why, now_s, figures, demand_id)
        elif verdict is Verdict.CALLED_BACK:
            assert live is not None
            self._left_s[propose.request_id] = now_s
            live.decided(now_s, "called_back", propose.numbers, replica=propose.source, why=propose.why)
            self._losses.go_on(live, source, Return.CALLED_BACK, now_s, abort=True, lost=False)
            if propose.for_request_id is not None:
                self._moves.settle(Left(propose.request_id, propose.attempt, propose.for_request_id))
        return verdict

    def settled(self) -> tuple[Stays | Left, ...]:
        """What has become of proposals for another request's sake since this was asked last."""
        return self._moves.take_settled()

    def _is_busy(self, live: Live) -> bool:
        moves = self._moves.of(live.request.request_id) is not None
        return moves or live.suspicion is not None or live.journal.complete

    def _demand(self, request_id: RequestId | None, now_s: float) -> tuple[Demand, int | None]:
        """How what it makes room for stands, and its priority. Where it waits on another router, the gate says that such
        urgent work does: with none, it is over."""
        if request_id is None:
            return Demand.NONE, None
        live = self._lives.get(request_id)
        if live is not None:
            waits = request_id in self._dispatcher.queue
            return (Demand.WAITS if waits else Demand.OVER), live.request.priority
        gate = self._dispatcher.gates.gate(now_s)
        if gate is None or self._ended.get(request_id) is not None:
            return Demand.OVER, None
        return Demand.WAITS, gate.priority

    def _place(self, propose: Propose, live: Live, source: Replica, now_s: float) -> Placement | None:
        """Where it goes: where it moves, nobody is to give way for it; where it is called back and waits, who is less
        urgent may, as for any that is next."""
        need = live.need(self._config.expected_output_tokens)
        if propose.target is None:
            head = self._dispatcher.queue.peek()
            if head is not None and head.priority > need.priority:
                return None
            if not self._dispatcher.gates.lets_out(need.priority, now_s):
                return None
            placement = self._fleet.place(need, now_s, self._rng)
            elsewhere = placement is not None and placement.replica_id != source.replica_id
            return placement if elsewhere else None
        assert propose.target_generation is not None
        target = self._fleet.current(propose.target, propose.target_generation)
        most = self._config.moves_at_once
        if target is None or target is source or self._moves.leaving(source) >= most:
            return None
        if target.replica_id in live.erred_on:  # which the controller does not know
            return None
        return place_to_go(need, [target.view(self._config, now_s)], self._moves.arriving(), most, self._rng)

    def _forget_rested(self, now_s: float) -> None:
        while self._left_s:
            request_id, left_s = next(iter(self._left_s.items()))
            if now_s - left_s < self._config.request_rest_s:
                break
            del self._left_s[request_id]
