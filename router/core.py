"""The router's core: every live request, from submission to its one ending.

Owns: the order of events (admission, queue, placement, deltas, losses, cancels) and the commitment of what admission,
queue, routing and journal decide. Imports no socket and no web framework. Single writer: all calls come on one event
loop, none awaits, and none is made from within another. Invariants: each request ends exactly once; it is queued or
open on one replica, and the reservation exists exactly while it is open; nothing is dispatched before a more urgent or
an older request of its priority that waits.

The head of the queue is never overtaken: where it cannot be placed nothing behind it is, so that small or lesser work
does not take the room that it waits for.
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
from router.admission import (
    AdmissionView,
    Admit,
    DrainRate,
    Queue,
    Reject,
    RequestFacts,
    backlog_seconds,
    decide,
    retry_after_s,
)
from router.fleet import Fleet, Known, New, Old
from router.journal import Accepted, Broken, Gap, Repeat, Stale
from router.live import Live, size_bytes
from router.metrics_sink import RouterMetrics
from router.outcomes import Ending
from router.queue import BandQueue
from router.routing import Placement, choose, too_large
from router.status import band_statuses, show_classes
from router.stream import Pushed, Stream
from router.view import Condition, Replica, Reservation

RESEND_ASKS = 3
"""Times that one gap is asked for, `silent_after_s` apart, before the attempt is given up."""

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
        self._drain_rates = {c.name: DrainRate(now_s) for c in config.classes}
        self._fleet = Fleet(config)
        self._queue = BandQueue()
        self._live: dict[RequestId, Live] = {}
        self._unstarted: dict[RequestId, float] = {}
        """When each request without a token since it last began to wait must have left the queue; in that order."""
        self._gaps: dict[RequestId, tuple[int, float]] = {}
        """Open gaps: times asked, and when last."""
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    # --- the HTTP side ---

    @property
    def ready(self) -> bool:
        """Whether new work has somewhere to go."""
        return not self._draining and any(
            v.condition is Condition.ROUTABLE for v in self._fleet.views(self.clock.monotonic())
        )

    def submit(self, members: Sequence[tuple[Request, Stream]]) -> None:
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
        lives = [Live(request, priority_class, stream, arrived_s) for request, stream in members]
        decision = decide(self._facts(lives), self._admission_view(first, now_s), self._rng)
        self._live.update((live.request.request_id, live) for live in lives)
        self._idle.clear()
        match decision:
            case Reject(outcome, retry_after):
                for live in lives:
                    self._finalize(live, outcome, retry_after=retry_after)
                return
            case Admit():
                for live in lives:
                    live.decided(now_s, "admitted")
            case Queue(ahead_requests):
                for live in lives:
                    live.decided(now_s, "queued", ahead=ahead_requests)
            case _:
                assert_never(decision)
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
        return band_statuses(self._config.classes, self._queue, self._live.values())

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
        for delta in frame.deltas:
            self._delta(replica, delta, now_s)
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
        for request_id, (asked, asked_at_s) in list(self._gaps.items()):
            if now_s - asked_at_s > self._config.silent_after_s:
                self._ask_again(self._live[request_id], asked, now_s)
        self._expire(now_s)
        self._pump(now_s)
        show_classes(self._metrics, self._config.classes, self._queue, self._live.values())
        self._metrics.replicas(self._fleet.views(now_s))

    def _expire(self, now_s: float) -> None:
        due = []
        for request_id, deadline_s in self._unstarted.items():
            if deadline_s > now_s:
                break
            if request_id in self._queue:
                due.append(request_id)
        for request_id in due:
            live = self._live[request_id]
            self._finalize(live, Outcome.EXPIRED_IN_QUEUE, retry_after=self._retry_after(live, now_s))

    # --- queue and placement ---

    def _enqueue(self, live: Live, now_s: float) -> None:
        self._queue.push(live.waiting())
        self._unstarted.setdefault(live.request.request_id, now_s + self._config.max_queue_s)

    def _pump(self, now_s: float) -> None:
        """Dispatch from the head of the queue until the head must wait."""
        while (head := self._queue.peek()) is not None:
            live = self._live[head.request_id]
            need = live.need(self._config.expected_output_tokens)
            views = self._fleet.views(now_s)
            placement = choose(need, views, self._rng)
            if placement is not None:
                self._dispatch(live, placement, now_s)
            elif too_large(need, views):
                self._finalize(live, Outcome.REJECTED_TOO_LARGE)
            else:
                return

    def _dispatch(self, live: Live, placement: Placement, now_s: float) -> None:
        request, replica = live.to_send(), self._fleet[placement.replica_id]
        self._queue.remove(request.request_id)
        self._drain_rates[live.priority_class.name].left(now_s)
        attempt = live.journal.begin()
        sequence = replica.port.add(request, attempt)
        replica.reserve(request.request_id, Reservation(attempt, sequence, request.priority, placement.blocks))
        live.replica_id = replica.replica_id
        live.reserved_tokens = placement.blocks * replica.block_size_tokens
        if live.dispatched_s is None:
            live.dispatched_s = now_s
            self._metrics.first_dispatch(live.priority_class.name, now_s - live.arrived_s)
        live.decided(
            now_s,
            "dispatched",
            replica=replica.replica_id,
            attempt=attempt,
            blocks=placement.blocks,
            victims=placement.victims,
            emitted=live.journal.next_index,
        )

    def _release(self, live: Live, replica: Replica) -> None:
        """Close the open attempt and give back what was reserved for it."""
        replica.release(live.request.request_id)
        live.replica_id = None
        live.journal.close()
        self._gaps.pop(live.request.request_id, None)

    def _continue(
        self, live: Live, replica: Replica, why: str, now_s: float, *, abort: bool, lost: bool = True
    ) -> None:
        """The open attempt is over and the request is not: back to its place, unless it has lost too many engines.

        `abort`: the replica may still run the attempt. `lost`: it counts against `max_attempts`.
        """
        attempt = live.journal.attempt
        assert attempt is not None
        self._release(live, replica)
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
                if delta.request_id not in self._gaps:
                    self._metrics.gap()
                    live.decided(now_s, "gap", replica=replica.replica_id, index=index, got=delta.index)
                    self._gaps[delta.request_id] = (1, now_s)
                    replica.port.resend_from(delta.request_id, delta.attempt, index)
            case Broken(why):
                _log.error("replica %s sent a delta that cannot be: %s", replica.replica_id, why)
                self._continue(live, replica, "broken", now_s, abort=True)
            case _:
                assert_never(verdict)

    def _accepted(self, live: Live, replica: Replica, new: Accepted, now_s: float, *, error: str) -> None:
        request_id, count, scores = live.request.request_id, len(new.token_ids), new.scores
        if self._gaps:
            self._gaps.pop(request_id, None)
        if count:
            self._metrics.tokens(live.priority_class.name, count)
            self._unstarted.pop(request_id, None)
            if live.first_token_s is None:
                live.first_token_s = now_s
                self._metrics.first_token(live.priority_class.name, now_s - live.arrived_s)
            self._grow(live, replica)
        if (count or scores is not None) and live.stream.push(new.text, count, scores) is Pushed.OVERFLOW:
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

    def _grow(self, live: Live, replica: Replica) -> None:
        """Keep the reservation no smaller than what the attempt fills; a token also says that it runs."""
        reservation = replica.reservations[live.request.request_id]
        if reservation.parked:
            replica.park(live.request.request_id, False)
        tokens = len(live.request.prompt_ids) + live.journal.next_index
        if tokens > live.reserved_tokens:
            block_size = replica.block_size_tokens
            blocks = -(-tokens // block_size)
            replica.grow(live.request.request_id, blocks)
            live.reserved_tokens = blocks * block_size

    def _preempted(self, replica: Replica, preempted: Preempted, now_s: float) -> None:
        live = self._live.get(preempted.request_id)
        if live is None or live.replica_id != replica.replica_id or live.journal.attempt != preempted.attempt:
            return
        replica.park(preempted.request_id, True)
        live.preemptions += 1
        urgent, means = preempted.for_request_id is not None, preempted.means
        self._metrics.preempted(live.priority_class.name, means, for_urgent=urgent)
        why = f"for {preempted.for_request_id}" if urgent else "the KV pool ran out"
        live.decided(
            now_s,
            "preempted",
            replica=replica.replica_id,
            why=f"{why}: {means.value}",
            blocks_freed=preempted.blocks_freed,
            tokens_to_recompute=preempted.tokens_to_recompute,
        )

    def _refused(self, replica: Replica, refusal: Refusal, now_s: float) -> None:
        live = self._live.get(refusal.request_id)
        if live is None or live.replica_id != replica.replica_id or live.journal.attempt != refusal.attempt:
            return
        self._metrics.refused(refusal.reason)
        replica.backing_off |= refusal.reason in (RefusalReason.FULL, RefusalReason.DRAINING)
        # An attempt that the replica does not know was lost with a link: no engine died of it.
        lost = refusal.reason is RefusalReason.OVERFLOW
        self._continue(live, replica, refusal.reason.value, now_s, abort=False, lost=lost)

    def _ask_again(self, live: Live, asked: int, now_s: float) -> None:
        assert live.replica_id is not None
        assert live.journal.attempt is not None
        replica = self._fleet[live.replica_id]
        if asked >= RESEND_ASKS:
            self._continue(live, replica, "gap", now_s, abort=True)
            return
        if replica.link_up:
            self._gaps[live.request.request_id] = (asked + 1, now_s)
            replica.port.resend_from(live.request.request_id, live.journal.attempt, live.journal.next_index)

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
        self._unstarted.pop(request_id, None)
        if request_id in self._queue:
            self._queue.remove(request_id)
            self._drain_rates[live.priority_class.name].left(now_s)
        elif live.replica_id is not None:
            replica, attempt = self._fleet[live.replica_id], live.journal.attempt
            assert attempt is not None
            self._release(live, replica)
            if not engine_ended:
                replica.abort(request_id, attempt)
        tokens = live.journal.next_index
        ending = Ending(outcome, len(live.request.prompt_ids), tokens, finish, error, retry_after)
        live.stream.end(ending)
        live.count_end(self._metrics, ending, now_s)
        live.log_end(ending, now_s)
        if not self._live:
            self._idle.set()

    # --- small reads ---

    def _facts(self, lives: Sequence[Live]) -> RequestFacts:
        live = lives[0]
        need = live.need(self._config.expected_output_tokens)
        return RequestFacts(need, size_bytes(live.request), live.priority_class, len(lives))

    def _admission_view(self, request: Request, now_s: float) -> AdmissionView:
        charge = self._queue.of_class(request.priority_class)
        return AdmissionView(
            draining=self._draining,
            replicas=self._fleet.views(now_s),
            ahead_requests=self._queue.at_or_above(request.priority),
            class_requests=charge.requests,
            class_bytes=charge.size_bytes,
            drain_per_s=self._drain_rates[request.priority_class].per_s(now_s),
        )

    def _retry_after(self, live: Live, now_s: float) -> int:
        name = live.priority_class.name
        backlog_s = backlog_seconds(self._queue.of_class(name).requests, self._drain_rates[name].per_s(now_s))
        return retry_after_s(backlog_s, self._rng)


def _drop_stale(delta: TokenDelta, replica: Replica, metrics: RouterMetrics) -> None:
    """A delta of an attempt that is not open there. A copy that still runs is ended; that may have been said already."""
    metrics.fenced("stale")
    if delta.finish is None:
        replica.abort(delta.request_id, delta.attempt)
