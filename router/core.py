"""The router's core: every live request, from submission to its one ending.

Owns: the order of events (admission, queue, placement, deltas, losses, cancels, deadlines) and the commitment of what
admission, dispatch and journal decide. Imports no socket and no web framework. Single writer: all calls come on one event
loop, none awaits, and none is made from within another. Invariants: each request ends exactly once; it is queued or
open on one replica, and the reservation exists exactly while it is open; what is sent out, and in which order, is
`dispatch`'s.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from typing import assert_never

from cluster.config import RouterConfig
from cluster.messages import BandStatus, StepFrame
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
from router.deadlines import Deadlines
from router.dispatch import Dispatcher
from router.explain import Ended, Explanation
from router.fleet import Fleet, Known, New, Old
from router.gaps import Gaps
from router.journal import Accepted, Broken, Gap, Repeat, Stale
from router.live import Account, Live, log_end
from router.metrics_sink import RouterMetrics
from router.outcomes import Ending
from router.status import band_statuses, show_classes
from router.stream import Pushed, Stream
from router.terms import NO_TERMS, Terms
from router.view import Replica

_log = logging.getLogger("forebay.router")


class RouterCore:
    """Implements `ports.ReplicaListener`."""

    def __init__(self, config: RouterConfig, clock: Clock, rng: random.Random, metrics: RouterMetrics) -> None:
        self._config = config
        self.clock = clock
        self._rng = rng
        self._metrics = metrics
        now_s = clock.monotonic()
        self._classes = {c.name: c for c in config.classes}
        metrics.name_tenants(t.name for t in config.tenants)
        self._fleet = Fleet(config)
        self._live: dict[RequestId, Live] = {}
        self._dispatcher = Dispatcher(config, now_s, rng, metrics, self._fleet, self._live)
        self._deadlines = Deadlines()
        self._ended = Ended(config.explained_requests, config.explained_bytes)
        self._gaps = Gaps()
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    # --- the HTTP side ---

    @property
    def ready(self) -> bool:
        """Whether new work has somewhere to go."""
        return not self._draining and self._fleet.routable(self.clock.monotonic())

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
        priority_class, now_s = self._classes[first.priority_class], self.clock.monotonic()
        arrived_s = now_s - max(0.0, self.clock.unix() - first.arrived_unix_s)
        rank, band = self._dispatcher.rank(first, terms), self._dispatcher.band(first.priority)
        lives = [
            Live(request, priority_class, stream, arrived_s, self._config, terms, rank, band)
            for request, stream in members
        ]
        decision = self._dispatcher.judge(lives, now_s, draining=self._draining)
        self._live.update((live.request.request_id, live) for live in lives)
        self._idle.clear()
        if isinstance(decision, Reject):
            for live in lives:
                self._finalize(live, decision.outcome, error=decision.error, retry_after=decision.retry_after_s)
            return
        self._metrics.accepted(priority_class.name, len(first.prompt_ids))
        for live in lives:
            self._enqueue(live, now_s)
        self._pump(now_s)

    def cancel(self, *request_ids: RequestId) -> None:
        """The client is gone. All end before any room is given away, or one would be sent to a replica in the place of
        another. What has ended already is left alone."""
        lives = [live for request_id in request_ids if (live := self._live.get(request_id)) is not None]
        for live in lives:
            self._finalize(live, Outcome.CANCELLED)
        if lives:
            self._pump(self.clock.monotonic())

    def begin_drain(self) -> None:
        """Refuse what is new; what is queued or runs goes on."""
        self._draining = True

    async def drained(self) -> None:
        """Return once nothing is live."""
        await self._idle.wait()

    def bands(self) -> tuple[BandStatus, ...]:
        """Queued and running work by priority, most urgent first."""
        return band_statuses(self._config.classes, self._dispatcher.queue, self._live.values())

    def explain(self, request_id: RequestId, tenant: str) -> Explanation | None:
        """What was decided about a request, live or lately ended. None: unknown, forgotten or of another tenant."""
        live = self._live.get(request_id)
        explanation = self._ended.get(request_id) if live is None else live.explain(self.clock.monotonic())
        return explanation if explanation is not None and explanation.tenant == tenant else None

    # --- the replicas' side ---

    def link_up(self, port: ReplicaPort, report: ReplicaReport | None) -> None:
        """A replica can be reached. Of a known incarnation, all that is open there is asked for again."""
        now_s = self.clock.monotonic()
        linked = self._fleet.linked(port, now_s)
        match linked:
            case Old():
                _log.warning("ignored a link to %s: %s is an old incarnation", port.replica_id, port.generation)
                return
            case New(replica, replaced):
                if replaced is not None:
                    self._lose(replaced, "replaced", now_s)
            case Known(replica):
                for request_id, attempt in replica.take_left_behind():
                    port.abort(request_id, attempt)
                for request_id, open_attempt in replica.reservations.items():
                    port.resend_from(request_id, open_attempt.attempt, self._live[request_id].journal.next_index)
            case _:
                assert_never(linked)
        if report is not None:
            replica.observe(report, now_s)
        self._pump(now_s)

    def link_down(self, replica_id: ReplicaId, generation: Generation) -> None:
        replica = self._fleet.current(replica_id, generation)
        if replica is not None:
            replica.link_up = False

    def replica_lost(self, replica_id: ReplicaId, generation: Generation, why: str) -> None:
        replica = self._fleet.current(replica_id, generation)
        if replica is not None:
            _log.warning("replica %s is lost with %d requests: %s", replica_id, len(replica.reservations), why)
            now_s = self.clock.monotonic()
            self._lose(replica, "lost", now_s)
            self._pump(now_s)

    def frame(self, replica_id: ReplicaId, generation: Generation, frame: StepFrame) -> None:
        replica = self._fleet.current(replica_id, generation)
        if replica is None:
            self._metrics.fenced("stale", len(frame.deltas))
            return
        now_s = self.clock.monotonic()
        replica.observe(frame.report, now_s)
        for preempted in frame.preempted:
            self._preempted(replica, preempted, now_s)
        self._deltas(replica, frame.deltas, now_s)
        for refusal in frame.refusals:
            self._refused(replica, refusal, now_s)
        self._pump(now_s)

    # --- time ---

    def tick(self) -> None:
        """Every 100 ms: what silence, age and lost answers mean, and the gauges."""
        now_s = self.clock.monotonic()
        for replica in self._fleet.fenced(now_s):
            for request_id in list(replica.reservations):
                # Silence is no death: what an engine may have died of is counted when it is lost.
                self._continue(self._live[request_id], replica, "fenced", now_s, abort=True, lost=False)
        for request_id in self._gaps.unanswered(now_s - self._config.silent_after_s):
            self._ask_again(self._live[request_id], now_s)
        self._expire(now_s)
        self._pump(now_s)
        show_classes(self._metrics, self._config.classes, self._dispatcher, self._live.values(), now_s)
        self._metrics.replicas(self._fleet.views(now_s))

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

    def _enqueue(self, live: Live, now_s: float) -> None:
        self._dispatcher.enqueue(live, now_s)
        self._deadlines.waits(live.request.request_id, *live.deadlines_s(now_s, self._config.max_queue_s))

    def _pump(self, now_s: float) -> None:
        """Send out what can be, from the head of the queue on, until the head must wait."""
        if not self._dispatcher.queue:
            return
        for live, placement, by_share in self._dispatcher.next(now_s):
            if placement is not None:
                self._dispatcher.send(live, placement, now_s, by_share=by_share)
            elif self._fleet.too_large(live.need(self._config.expected_output_tokens)):
                self._finalize(live, Outcome.REJECTED_TOO_LARGE)

    def _release(self, live: Live, replica: Replica, now_s: float, *, taken_back: bool) -> None:
        self._dispatcher.release(live, replica, now_s, taken_back=taken_back)
        self._gaps.close(live.request.request_id)

    def _continue(
        self,
        live: Live,
        replica: Replica,
        why: str,
        now_s: float,
        *,
        abort: bool,
        lost: bool = True,
        refused: bool = False,
    ) -> None:
        """The open attempt is over and the request is not: back to its place, unless it has lost too many engines.

        `abort`: the replica may still run the attempt. `lost`: it counts against `max_attempts`. `refused`: the attempt
        was never begun there.
        """
        attempt = live.journal.attempt
        assert attempt is not None
        self._release(live, replica, now_s, taken_back=True)
        live.continued |= not refused or live.first_token_s is not None
        if abort:
            replica.abort(live.request.request_id, attempt)
        live.decided(now_s, "returned", replica=replica.replica_id, why=why, emitted=live.journal.next_index)
        if live.journal.complete:
            self._finalize(live, Outcome.FINISHED, finish=FinishReason.LENGTH)
            return
        self._metrics.continued(why)
        if lost:
            live.losses += 1
            if live.losses >= self._config.max_attempts:
                self._finalize(live, Outcome.REPLICA_LOST)
                return
        self._enqueue(live, now_s)

    def _lose(self, replica: Replica, why: str, now_s: float) -> None:
        for request_id in list(replica.reservations):
            self._continue(self._live[request_id], replica, why, now_s, abort=False)
        self._fleet.forget(replica)

    # --- what a frame says ---

    def _deltas(self, replica: Replica, deltas: Sequence[TokenDelta], now_s: float) -> None:
        """Most bring the next token of a steady stream and nothing else. Those are counted together, before anything is
        decided that the counts have a part in."""
        counts: dict[Account, int] = {}
        for delta in deltas:
            live = self._live.get(delta.request_id)
            if (
                live is not None
                and live.replica_id == replica.replica_id
                and live.journal.take_next(delta, live.steady_below)
            ):
                counts[live.account] = counts.get(live.account, 0) + 1
                if live.stream.push(delta.pieces[0], 1) is Pushed.OVERFLOW:
                    self._count(counts)
                    self._finalize(live, Outcome.SLOW_CLIENT)
            else:
                self._count(counts)
                self._delta(replica, delta, now_s)
        self._count(counts)

    def _count(self, counts: dict[Account, int]) -> None:
        """Count the tokens of each account, and empty `counts`."""
        for account, count in counts.items():
            self._metrics.tokens(account.priority_class, count)
            self._dispatcher.steady_tokens(account, count)
        counts.clear()

    def _delta(self, replica: Replica, delta: TokenDelta, now_s: float) -> None:
        live = self._live.get(delta.request_id)
        if live is None or live.replica_id != replica.replica_id:
            _drop_stale(delta, replica, self._metrics)
            return
        verdict = live.journal.accept(delta)
        match verdict:
            case Accepted():
                self._accepted(live, replica, verdict, now_s, error=delta.error)
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
                self._continue(live, replica, "broken", now_s, abort=True)
            case _:
                assert_never(verdict)

    def _accepted(self, live: Live, replica: Replica, new: Accepted, now_s: float, *, error: str) -> None:
        request_id, count, scores = live.request.request_id, len(new.token_ids), new.scores
        if self._gaps:
            self._gaps.close(request_id)
        if count:
            self._metrics.tokens(live.priority_class.name, count)
            self._deadlines.started(request_id)
            if live.first_token_s is None:
                self._dispatcher.first_token(live, now_s)
            self._dispatcher.tokens(live, replica, count)
        if count or scores is not None:
            pushed = live.stream.push(new.text, count, scores, last=new.finish is not None)
            if pushed is Pushed.OVERFLOW:
                self._finalize(live, Outcome.SLOW_CLIENT)
                return
        match new.finish:
            case None:
                pass
            case FinishReason.STOP | FinishReason.LENGTH:
                self._finalize(live, Outcome.FINISHED, finish=new.finish, engine_ended=True)
            case FinishReason.ERROR:
                self._finalize(live, Outcome.ENGINE_ERROR, error=error, engine_ended=True)
            case FinishReason.ABORT:
                self._continue(live, replica, "aborted", now_s, abort=False)
            case _:
                assert_never(new.finish)

    def _preempted(self, replica: Replica, preempted: Preempted, now_s: float) -> None:
        live = self._live.get(preempted.request_id)
        if live is None or live.replica_id != replica.replica_id or live.journal.attempt != preempted.attempt:
            return
        self._dispatcher.preempted(live, replica, preempted, now_s)

    def _refused(self, replica: Replica, refusal: Refusal, now_s: float) -> None:
        live = self._live.get(refusal.request_id)
        if live is None or live.replica_id != replica.replica_id or live.journal.attempt != refusal.attempt:
            return
        self._metrics.refused(refusal.reason)
        if refusal.reason in (RefusalReason.FULL, RefusalReason.DRAINING):
            replica.back_off()
        # An attempt that the replica does not know was lost with a link: no engine died of it.
        lost = refusal.reason is RefusalReason.OVERFLOW
        self._continue(live, replica, refusal.reason.value, now_s, abort=False, lost=lost, refused=not lost)

    def _ask_again(self, live: Live, now_s: float) -> None:
        request_id, attempt = live.request.request_id, live.journal.attempt
        assert live.replica_id is not None
        assert attempt is not None
        replica = self._fleet[live.replica_id]
        if not replica.link_up:  # it will be asked when the link is up
            return
        if self._gaps.ask(request_id, now_s):
            replica.port.resend_from(request_id, attempt, live.journal.next_index)
        else:
            self._continue(live, replica, "gap", now_s, abort=True)

    # --- the end ---

    def _finalize(
        self,
        live: Live,
        outcome: Outcome,
        *,
        finish: FinishReason | None = None,
        error: str = "",
        retry_after: int | None = None,
        engine_ended: bool = False,
    ) -> None:
        """End a request, once: `del` fails for one that is not live. `engine_ended`: there is nothing to abort."""
        request_id, now_s = live.request.request_id, self.clock.monotonic()
        del self._live[request_id]
        self._deadlines.forget(request_id)
        if request_id in self._dispatcher.queue:
            self._dispatcher.withdraw(live, now_s)
        elif live.replica_id is not None:
            replica, attempt = self._fleet[live.replica_id], live.journal.attempt
            assert attempt is not None
            self._release(live, replica, now_s, taken_back=False)
            if not engine_ended:
                replica.abort(request_id, attempt)
        if outcome is Outcome.FINISHED:
            self._dispatcher.finished(live, now_s)
        tokens = live.journal.next_index
        ending = Ending(outcome, len(live.request.prompt_ids), tokens, finish, error, retry_after)
        live.stream.end(ending)
        live.count_end(self._metrics, ending, now_s)
        self._metrics.served(live.request.tenant, live.served)
        explanation = live.explain(now_s, ending)
        self._ended.add(request_id, explanation)
        log_end(explanation, ending.meaning.log_level)
        if not self._live:
            self._idle.set()


def _drop_stale(delta: TokenDelta, replica: Replica, metrics: RouterMetrics) -> None:
    """A delta of an attempt that is not open there. A copy that still runs is ended; that may have been said already."""
    metrics.fenced("stale")
    if delta.finish is None:
        replica.abort(delta.request_id, delta.attempt)
