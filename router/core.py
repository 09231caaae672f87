"""The router's core: every live request, from submission to its one ending.

Owns: the order of events (admission, queue, placement, deltas, losses, cancels, deadlines) and the commitment of what
admission, dispatch and journal decide. Imports no socket and no web framework. Single writer: all calls come on one event
loop, none awaits, and none is made from within another. Invariants: each request ends exactly once; it is queued, set
aside as a suspect, or open on one replica, and the reservation exists exactly while it is open; what is sent out, and in
which order, is `dispatch`'s; what a loss means is `losses`'.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import assert_never

import msgspec

from cluster.config import RouterConfig
from cluster.messages import (
    BandStatus,
    Gates,
    Left,
    MoveStatus,
    Propose,
    RouterDemand,
    ScaleStatus,
    Stays,
    StepFrame,
    Unplaced,
    Unroutable,
)
from cluster.ports import Clock, ReplicaPort
from cluster.types import (
    FinishReason,
    Generation,
    Outcome,
    Preempted,
    Refusal,
    RefusalReason,
    ReplicaId,
    ReplicaReport,
    Request,
    RequestId,
    TokenDelta,
)
from router.admission import Reject
from router.controlled import Controlled
from router.dispatch import Dispatcher
from router.endings import Endings
from router.explain import Explanation
from router.fleet import Fleet, Known, New, Old
from router.journal import Accepted, Broken, Gap, Repeat, Stale
from router.live import Account, Live
from router.losses import Losses
from router.metrics_sink import RouterMetrics
from router.mover import Mover
from router.outliers import Fault
from router.parts import Parts
from router.proposals import Verdict
from router.recent import Note
from router.returns import Return
from router.status import band_statuses, move_statuses, show, unroutable
from router.stream import Pushed, Stream
from router.terms import NO_TERMS, Terms
from router.view import Replica

_log = logging.getLogger("forebay.router")


class RouterCore:
    """Implements `ports.ReplicaListener`."""

    def __init__(
        self, config: RouterConfig, clock: Clock, rng: random.Random, metrics: RouterMetrics, *, wakes: bool = False
    ) -> None:
        """`wakes`: where the model has no replica, one is started for a request that waits."""
        self._config = config
        self.clock = clock
        self._rng = rng
        self._metrics = metrics
        now_s = clock.monotonic()
        self._classes = {c.name: c for c in config.classes}
        metrics.begin(config, self._show)
        self._fleet = Fleet(config, wakes=wakes)
        self._live: dict[RequestId, Live] = {}
        self._dispatcher = Dispatcher(config, now_s, rng, metrics, self._fleet, self._live)
        self._endings = Endings(config, clock, metrics, self._fleet, self._dispatcher, self._live)
        self._finalize = self._endings.finalize
        self._deadlines, self._gaps = self._endings.deadlines, self._endings.gaps
        self._trials = self._endings.trials
        parts = Parts(config, rng, metrics, self._fleet, self._dispatcher, self._endings, self._live)
        self._losses = Losses(parts)
        self._moves, self._mover = self._endings.moves, Mover(parts, self._losses)
        self._controlled = Controlled(parts, self._losses, self._mover)
        self._retiring = self._refusing = False
        self._of_one_per_s: float | None = None
        """What one replica does at its full batch, as a controller has measured it."""
        self._steady: dict[Account, int] = {}
        """Tokens that have come, and are not counted yet."""
        self._note: Note | None = None

    def watch(self, note: Note) -> None:
        """Have it told of each decision about the requests that come from now on."""
        self._note = note

    # --- the HTTP side ---

    @property
    def ready(self) -> bool:
        """Whether new work has somewhere to go."""
        now_s = self.clock.monotonic()
        return not self._retiring and (self._fleet.routable(now_s) or self._fleet.asleep(now_s))

    def submit(self, members: Sequence[tuple[Request, Stream]], terms: Terms = NO_TERMS) -> None:
        """Take the choices of one client's request, which are alike but for their ids: all are let in, or none.

        Whatever becomes of each, a rejection too, is told on its stream.

        Raises:
            ValueError: an id is live already, or the class is not configured.
        """
        first = members[0][0]
        if live_ids := [request.request_id for request, _ in members if request.request_id in self._live]:
            raise ValueError(f"{live_ids[0]} is already live")
        if first.priority_class not in self._classes:
            raise ValueError(f"no priority class {first.priority_class!r}")
        priority_class, now_s = self._classes[first.priority_class], self._begin()
        arrived_s = now_s - max(0.0, self.clock.unix() - first.arrived_unix_s)
        rank, band = self._dispatcher.rank(first, terms), self._dispatcher.band(first.priority)
        gaps = self._metrics.gaps(priority_class.name)
        lives = [
            Live(request, priority_class, stream, arrived_s, self._config, terms, rank, band, gaps, self._note)
            for request, stream in members
        ]
        decision = self._dispatcher.judge(lives, now_s, draining=self._refusing)
        self._metrics.arrival_s.observe(self.clock.monotonic() - now_s)
        self._live.update((live.request.request_id, live) for live in lives)
        self._endings.idle.clear()
        if isinstance(decision, Reject):
            for live in lives:
                self._finalize(live, decision.outcome, error=decision.error, retry_after=decision.retry_after_s)
            return
        self._metrics.accepted(priority_class.name, len(first.prompt_ids))
        self._losses.retries.let_in(len(lives))
        for live in lives:
            self._losses.enqueue(live, now_s)
        self._pump(now_s)

    def cancel(self, *request_ids: RequestId) -> None:
        """The client is gone. All end before any room is given away, or one would be sent to a replica in the place of
        another. What has ended already is left alone."""
        now_s = self._begin()
        lives = [live for request_id in request_ids if (live := self._live.get(request_id)) is not None]
        for live in lives:
            self._finalize(live, Outcome.CANCELLED)
        if lives:
            self._pump(now_s)

    def retire(self) -> None:
        """Be not ready, for a balancer to see; what comes all the same is served."""
        self._retiring = True

    def shut_down(self) -> None:
        """Refuse what is new, and end what is queued or runs: each client is told, and no replica works on for it."""
        self._begin()
        self._retiring = self._refusing = True
        for live in list(self._live.values()):
            begun = live.first_token_s is not None
            self._finalize(live, Outcome.SHUT_DOWN if begun else Outcome.REJECTED_DRAINING)

    async def drained(self) -> None:
        """Return once nothing is live."""
        await self._endings.idle.wait()

    def bands(self) -> tuple[BandStatus, ...]:
        """Queued and running work by priority, most urgent first."""
        now_s = self.clock.monotonic()
        return band_statuses(self._config.classes, self._dispatcher.queue, self._live.values(), now_s)

    def unroutable(self) -> tuple[Unroutable, ...]:
        """Replicas that are sent nothing new, and why."""
        return unroutable(self._fleet.views(self.clock.monotonic()))

    def moves(self) -> tuple[MoveStatus, ...]:
        """The live moves that are under way, those that began first."""
        return move_statuses(self._moves, self.clock.monotonic())

    def explain(self, request_id: RequestId, tenant: str | None) -> Explanation | None:
        """What was decided about a request, live or lately ended. None: unknown, forgotten or of another tenant, where one
        is named."""
        live = self._live.get(request_id)
        explanation = self._endings.ended.get(request_id) if live is None else live.explain(self.clock.monotonic())
        return explanation if explanation is not None and tenant in (None, explanation.tenant) else None

    # --- the other routers ---

    def demand(self, model: str) -> RouterDemand | None:
        """Every 50 ms: what the controller is to be told; None for nothing. `told` says that it was."""
        now_s = self._begin()
        self._pump(now_s)  # a gate may have expired
        demand = self._dispatcher.demand(model, now_s)
        if demand is None:
            return None
        return msgspec.structs.replace(demand, observed_unix_s=self.clock.unix(), of_one_per_s=self._of_one_per_s)

    def told(self, demand: RouterDemand) -> None:
        self._dispatcher.gates.told(demand)

    def hear(self, gates: Gates) -> None:
        """What the controller says of the other routers, with the gate that is in force from now on."""
        now_s = self._begin()
        self._dispatcher.hear(gates, now_s)
        self._pump(now_s)

    # --- the controller ---

    def unplaced(self, model: str) -> Unplaced | None:
        """With each demand, after it: the first of the queue, while no replica has room for it."""
        return self._controlled.unplaced(model, self.clock.monotonic())

    def settled(self) -> tuple[Stays | Left, ...]:
        """With each demand: what has become of the controller's proposals."""
        return self._controlled.settled()

    def propose(self, propose: Propose) -> Verdict | None:
        """The controller would have a request leave its replica. None where that is none of this core's."""
        source = self._fleet.current(propose.source, propose.source_generation)
        if source is None:
            return None
        now_s = self._begin()
        verdict = self._controlled.heard(propose, source, now_s)
        self._pump(now_s)
        return verdict

    def scaled(self, status: ScaleStatus) -> None:
        """How many replicas there are to be, for the metrics; and what one does, for the next controller."""
        self._metrics.scaled(status)
        self._of_one_per_s = status.now.numbers.get("of_one_per_s", self._of_one_per_s)

    # --- the replicas' side ---

    def link_up(self, port: ReplicaPort, report: ReplicaReport | None) -> bool:
        """A replica can be reached. Of a known incarnation, all that is open there is asked for again."""
        now_s = self._begin()
        linked = self._fleet.linked(port, now_s)
        match linked:
            case Old():
                return False
            case New(replica, replaced):
                if replaced is not None:
                    self._mover.replica_gone(replaced, Return.REPLACED, now_s)
            case Known(replica):
                for request_id, attempt in replica.take_left_behind():
                    port.abort(request_id, attempt)
                for request_id, open_attempt in replica.reservations.items():
                    port.resend_from(request_id, open_attempt.attempt, self._live[request_id].journal.next_index)
                self._mover.link_up(replica, now_s)
            case _:
                assert_never(linked)
        if report is not None:
            replica.observe(report, now_s)
        self._pump(now_s)
        return True

    def link_down(self, replica_id: ReplicaId, generation: Generation) -> None:
        replica = self._fleet.current(replica_id, generation)
        if replica is not None:
            now_s = self._begin()
            self._losses.fault(replica, Fault.LINK, now_s)
            replica.link_up = False
            self._mover.link_down(replica, now_s)

    def replica_lost(self, replica_id: ReplicaId, generation: Generation, why: str) -> None:
        replica = self._fleet.current(replica_id, generation)
        if replica is not None:
            _log.warning("replica %s is lost with %d requests: %s", replica_id, len(replica.reservations), why)
            now_s = self._begin()
            self._mover.replica_gone(replica, Return.LOST, now_s)
            self._pump(now_s)

    def frame(self, replica_id: ReplicaId, generation: Generation, frame: StepFrame) -> None:
        replica = self._fleet.current(replica_id, generation)
        if replica is None:
            self._metrics.fenced("stale", len(frame.deltas))
            return
        now_s = self._begin() if frame.preempted else self.clock.monotonic()
        replica.observe(frame.report, now_s)
        if frame.prefixes is not None:
            self._dispatcher.told(replica, frame.prefixes)
        for preempted in frame.preempted:
            self._preempted(replica, preempted, now_s)
        self._deltas(replica, frame.deltas, now_s)
        if frame.refusals:
            self._count()
            for refusal in frame.refusals:
                self._refused(replica, refusal, now_s)
        if frame.moves:
            self._count()
            self._mover.heard(replica, frame.moves, now_s)
        self._pump(now_s)

    # --- time ---

    def tick(self) -> None:
        """Every 100 ms: what silence, age and lost answers mean."""
        now_s = self._begin()
        for replica in self._fleet.fenced(now_s):
            for request_id in list(replica.reservations):
                # Silence is no death: nobody is suspect for it.
                self._losses.go_on(self._live[request_id], replica, Return.FENCED, now_s, abort=True)
        for request_id in self._gaps.unanswered(now_s - self._config.silent_after_s):
            self._losses.ask_again(self._live[request_id], now_s)
        self._expire(now_s)
        self._fleet.reopen(now_s)
        self._fleet.look(now_s)
        self._dispatcher.arrivals.look(now_s)
        self._mover.tick(now_s)
        self._pump(now_s)

    def _show(self) -> None:
        """Somebody asks for the metrics."""
        now_s = self._begin()
        lives, views = self._live.values(), self._fleet.views(now_s)
        show(self._metrics, self._config.classes, self._dispatcher, lives, views, now_s)
        self._metrics.suspects(len(self._trials))

    def _expire(self, now_s: float) -> None:
        for request_id in self._deadlines.over(now_s):
            live = self._live[request_id]
            queued = live.replica_id is None
            self._finalize(live, Outcome.EXPIRED_IN_QUEUE if queued else Outcome.TIMED_OUT)
        for request_id in self._deadlines.late(now_s):
            live = self._live[request_id]
            if live.replica_id is None:
                retry_after = self._dispatcher.retry_after_s(live, now_s)
                live.decided(now_s, "expired", queued_s=round(now_s - live.queued_s, 2))
                self._finalize(live, Outcome.EXPIRED_IN_QUEUE, retry_after=retry_after)

    # --- queue and placement ---

    def _pump(self, now_s: float) -> None:
        """Send out what can be, from the head of the queue on, until the head must wait."""
        more = bool(self._dispatcher.queue or self._trials.waiting)
        if not more:
            return
        self._count()
        began_s = self.clock.monotonic()
        while more:
            more = self._trials.waiting > 0 and self._losses.bring_back(now_s)
            if self._dispatcher.queue:
                self._send_out(now_s)
        self._metrics.dispatch_s.observe(self.clock.monotonic() - began_s)

    def _send_out(self, now_s: float) -> None:
        for live, placement, by_share in self._dispatcher.next(now_s):
            if placement is not None:
                self._dispatcher.send(live, placement, now_s, by_share=by_share)
            elif self._fleet.too_large(live.need(self._config.expected_output_tokens)):
                self._finalize(live, Outcome.REJECTED_TOO_LARGE)
            elif live.suspicion is not None:
                self._losses.make_way(live, now_s)

    # --- what a frame says ---

    def _deltas(self, replica: Replica, deltas: Sequence[TokenDelta], now_s: float) -> None:
        """Most bring the next token of a steady stream and nothing else. Those are counted later, together: before
        anything is decided that the counts have a part in, and at the latest with the next tick."""
        lives, steady, replica_id = self._live, self._steady, replica.replica_id
        for delta in deltas:
            live = lives.get(delta.request_id)
            if live is not None and live.replica_id == replica_id and live.journal.take_next(delta, live.steady_below):
                steady[live.account] = steady.get(live.account, 0) + 1
                live.gaps.observe(now_s - live.token_s)
                live.token_s = now_s
                if live.stream.push(delta.pieces[0], 1) is Pushed.OVERFLOW:
                    self._count()
                    self._finalize(live, Outcome.SLOW_CLIENT)
            else:
                self._count()
                self._delta(replica, delta, now_s)

    def _count(self) -> None:
        """Count the steady tokens of each account."""
        for account, count in self._steady.items():
            self._metrics.tokens(account.priority_class, count)
            self._dispatcher.steady_tokens(account, count)
        self._steady.clear()

    def _begin(self) -> float:
        """The time, before anything is decided: all that has come is counted then."""
        self._count()
        return self.clock.monotonic()

    def _delta(self, replica: Replica, delta: TokenDelta, now_s: float) -> None:
        live = self._live.get(delta.request_id)
        if live is None or live.replica_id != replica.replica_id:
            _drop_stale(delta, replica, self._metrics)
            return
        verdict = live.journal.accept(delta)
        match verdict:
            case Accepted():
                self._accepted(live, replica, verdict, now_s, error=delta.error, cached_tokens=delta.cached_tokens)
            case Stale():
                _drop_stale(delta, replica, self._metrics)
            case Repeat():
                self._metrics.fenced("repeat")
            case Gap(index):
                live.steady_below = 0
                if delta.request_id not in self._gaps:
                    self._metrics.gap()
                    live.decided(now_s, "gap", replica=replica.replica_id, index=index, got=delta.index)
                    self._gaps.ask(delta.request_id, now_s)
                    replica.port.resend_from(delta.request_id, delta.attempt, index)
            case Broken(why):
                _log.error("replica %s sent a delta that cannot be: %s", replica.replica_id, why)
                self._losses.fault(replica, Fault.BROKEN, now_s, live)
                self._losses.go_on(live, replica, Return.BROKEN, now_s, abort=True)
            case _:
                assert_never(verdict)

    def _accepted(
        self, live: Live, replica: Replica, new: Accepted, now_s: float, *, error: str, cached_tokens: int
    ) -> None:
        request_id, count, scores = live.request.request_id, len(new.token_ids), new.scores
        if self._gaps:
            self._gaps.close(request_id)
        if self._moves:
            self._mover.arrived(live, now_s)
        if count:
            self._metrics.tokens(live.priority_class.name, count)
            self._deadlines.started(request_id)
            if live.first_token_s is None:
                self._dispatcher.first_token(live, cached_tokens, now_s)
            else:
                live.gaps.observe(now_s - live.token_s)
            live.token_s = now_s
            self._dispatcher.tokens(live, replica, count)
            if live.suspicion is not None:
                self._losses.progressed(live, now_s)
            if replica.probe == request_id:
                self._losses.worked(replica, now_s, probe=True)
        if count or scores is not None:
            pushed = live.stream.push(new.text, count, scores, last=new.finish is not None)
            if pushed is Pushed.OVERFLOW:
                self._finalize(live, Outcome.SLOW_CLIENT)
                return
        match new.finish:
            case None:
                pass
            case FinishReason.STOP | FinishReason.LENGTH:
                if replica.record.marks:
                    self._losses.worked(replica, now_s, probe=False)
                self._finalize(live, Outcome.FINISHED, finish=new.finish, engine_ended=True)
            case FinishReason.ERROR:
                self._losses.erred(live, replica, error, now_s)
            case FinishReason.ABORT:
                self._losses.go_on(live, replica, Return.ABORTED, now_s, abort=False)
            case _:
                assert_never(new.finish)

    def _preempted(self, replica: Replica, preempted: Preempted, now_s: float) -> None:
        live = self._live.get(preempted.request_id)
        if live is None or not live.is_open(replica.replica_id, preempted.attempt):
            return
        self._dispatcher.preempted(live, replica, preempted, now_s)
        if live.suspicion is not None:  # paused it would hold up the trials of all others
            self._losses.go_on(live, replica, Return.PREEMPTED, now_s, abort=True, lost=False)

    def _refused(self, replica: Replica, refusal: Refusal, now_s: float) -> None:
        live = self._live.get(refusal.request_id)
        if live is None or not live.is_open(replica.replica_id, refusal.attempt):
            return
        self._metrics.refused(refusal.reason)
        if refusal.reason in (RefusalReason.FULL, RefusalReason.DRAINING):
            replica.back_off()
        # An attempt that the replica does not know was lost with a link: no engine died of it.
        lost = refusal.reason is RefusalReason.OVERFLOW
        if lost:
            self._losses.fault(replica, Fault.OVERFLOW, now_s, live)
        self._losses.go_on(live, replica, refusal.reason, now_s, abort=False, lost=lost, refused=not lost)


def _drop_stale(delta: TokenDelta, replica: Replica, metrics: RouterMetrics) -> None:
    """A delta of an attempt that is not open there. A copy that still runs is ended; that may have been said already."""
    metrics.fenced("stale")
    if delta.finish is None:
        replica.abort(delta.request_id, delta.attempt)
