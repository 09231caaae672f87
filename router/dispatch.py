"""The way of a request from the queue to a replica and back, and what is charged and measured on it.

Owns: the queue, the tenants' counters, the minimum shares, the drain rates and the choice of a replica for what is next.
Single writer, driven by `core`. Invariants: nothing is sent out before a more urgent request that waits, nor before what
its band's order puts in front, but for what a minimum share lets pass; each open attempt has its reservation and is
counted open for its tenant, and what it was charged is kept or taken back once.

The head of the queue is never overtaken: where it cannot be placed nothing behind it is, so that small or lesser work
does not take the room that it waits for. What a minimum share puts before it does not stand in its way either.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import assert_never

from cluster.config import RouterConfig, WithinTenant
from cluster.lengths import LengthPredictor
from cluster.types import Preempted, ReplicaId, Request, RequestId
from router.admission import (
    AdmissionView,
    Admit,
    Pace,
    Queue,
    Reject,
    RequestFacts,
    backlog_seconds,
    decide,
    evenly_ahead,
    retry_after_s,
)
from router.affinity import Affinity
from router.fairness import FairShares, TenantBand, rank_of
from router.fleet import Fleet
from router.live import Account, Live, size_bytes
from router.metrics_sink import RouterMetrics
from router.pace import DrainRate, ServiceTimes
from router.queue import BandQueue, Waiting
from router.routing import NO_FAVOUR, Placement
from router.share import MinimumShares
from router.terms import Terms
from router.view import Replica, Reservation


class Dispatcher:
    """Who is sent where, and when."""

    def __init__(
        self,
        config: RouterConfig,
        now_s: float,
        rng: random.Random,
        metrics: RouterMetrics,
        fleet: Fleet,
        lives: Mapping[RequestId, Live],
    ) -> None:
        """`lives` are the core's, to be read."""
        self._config = config
        self._rng = rng
        self._metrics = metrics
        self._fleet = fleet
        self._lives = lives
        self._tenants = FairShares(config)
        self.queue = BandQueue(self._tenants.band)
        self._shares = MinimumShares(config.minimum_share, config.ageing_after_s)
        self._drains = {c.name: DrainRate(now_s) for c in config.classes}
        self._drain_of_all = DrainRate(now_s)
        self._times = ServiceTimes()
        self._affinity = Affinity(config.affinity_entries)
        by_urgency = sorted(config.classes, key=lambda c: -c.priority)
        bounds = [math.inf, *(c.priority for c in by_urgency)]
        self._bands_of_classes = [(c.name, below) for c, below in zip(by_urgency, bounds, strict=False)]
        """Each class, most urgent first, with the priority below which its own are."""
        self._lengths = LengthPredictor() if config.within_tenant is WithinTenant.SJF else None

    # --- the queue ---

    def band(self, priority: int) -> TenantBand:
        """The tenants' band of a priority."""
        return self._tenants.band(priority)

    def rank(self, request: Request, terms: Terms) -> float:
        """Where a new request stands among its tenant's own."""
        expected = 0.0
        if self._lengths is not None:
            expected = self._lengths.predict(
                request.tenant,
                request.priority_class,
                len(request.prompt_ids),
                max_tokens=request.sampling.max_tokens,
                stated=request.stated_output_tokens,
            )
        return rank_of(self._config, request, terms, expected)

    def enqueue(self, live: Live, now_s: float) -> None:
        """It begins to wait, or waits again; one that has had no token has never ceased to."""
        if live.first_token_s is not None or not live.journal.attempts:
            live.queued_s = now_s
        self.queue.push(live.waiting(self._config.expected_output_tokens))
        self._drains[live.priority_class.name].waits(now_s, True)
        self._drain_of_all.waits(now_s, True)

    def withdraw(self, live: Live, now_s: float) -> None:
        """It waits no longer, and was not sent out."""
        self.queue.remove(live.request.request_id)
        self._waits_on(live.priority_class.name, now_s)

    def next(self, now_s: float) -> Iterator[tuple[Live, Placement | None, bool]]:
        """What can be sent out next and whether a minimum share puts it first, as long as the caller sends it out or
        takes it away; last, what cannot be placed and must wait."""
        while self.queue:
            heads = self._heads()
            due = self._shares.due(heads, now_s)
            if due is not None:
                live, placement = self._place(due, now_s)
                if placement is not None:
                    yield live, placement, True
                    continue
            head = self.queue.peek()
            assert head is not None
            live, placement = self._place(head, now_s)
            yield live, placement, False
            if placement is None and head.request_id in self.queue:
                return

    def _place(self, waiting: Waiting, now_s: float) -> tuple[Live, Placement | None]:
        live = self._lives[waiting.request_id]
        need = live.need(self._config.expected_output_tokens)
        return live, self._fleet.place(need, now_s, self._rng, self._favour(live))

    def _favour(self, live: Live) -> Mapping[ReplicaId, float]:
        prompt = len(live.request.prompt_ids)
        seen = self._affinity.expected(live.affinity_keys, prompt) if live.affinity_keys else None
        if seen is None or self._fleet.current(seen.replica_id, seen.generation) is None:
            return NO_FAVOUR
        return {seen.replica_id: self._config.affinity_weight * seen.tokens / prompt}

    # --- attempts ---

    def send(self, live: Live, placement: Placement, now_s: float, *, by_share: bool) -> None:
        """Begin an attempt of what `next` gave."""
        request, name = live.to_send(), live.priority_class.name
        replica = self._fleet[placement.replica_id]
        waiting = self.queue.remove(request.request_id)
        counter, least = live.band.counters(request.tenant)
        self._charge(live, waiting, now_s)
        attempt = live.journal.begin()
        sequence = replica.port.add(request, attempt)
        reservation = Reservation(attempt, sequence, request.priority, placement.blocks)
        if by_share:
            reservation.shared_s = now_s
            self._metrics.shared(name)
        replica.reserve(request.request_id, reservation)
        live.replica_id, live.sent_s = replica.replica_id, now_s
        live.reserved_tokens = placement.blocks * replica.block_size_tokens
        if live.affinity_keys:
            self._affinity.served(live.affinity_keys, replica.replica_id, replica.generation, len(request.prompt_ids))
        if live.dispatched_s is None:
            live.dispatched_s = now_s
            self._metrics.first_dispatch(name, now_s - live.arrived_s)
        live.decided(
            now_s,
            "dispatched",
            replica=replica.replica_id,
            why="minimum share" if by_share else "",
            attempt=attempt,
            blocks=placement.blocks,
            victims=placement.victims,
            emitted=live.journal.next_index,
            score=round(placement.score, 4),
            tenant_counter=round(counter),
            least_counter=round(least),
        )

    def _charge(self, live: Live, waiting: Waiting, now_s: float) -> None:
        name = live.priority_class.name
        live.drained = 0
        if now_s > waiting.since_s:
            live.drained = waiting.service
            self._drains[name].left(now_s, waiting.service)
            self._drain_of_all.left(now_s, waiting.service)
        self._waits_on(name, now_s)
        self._shares.spend(waiting)
        self._shares.sent(waiting.service, self._heads())
        charge = 0.0 if live.prompt_charged else live.prompt_charge
        live.prompt_charged = True
        live.band.begin(waiting.tenant, charge)

    def release(self, live: Live, replica: Replica, now_s: float, *, taken_back: bool) -> None:
        """Close the open attempt and give back what was reserved for it. `taken_back`: the request goes on, and where
        it has had no token of any attempt so far its tenant has had nothing."""
        request = live.request
        replica.release(request.request_id)
        live.replica_id = None
        live.steady_below = 0
        live.journal.close()
        refund = 0.0
        if taken_back and live.first_token_s is None:
            refund, live.prompt_charged = live.prompt_charge, False
            if live.drained:
                self._drains[live.priority_class.name].came_back(now_s, live.drained)
                self._drain_of_all.came_back(now_s, live.drained)
        elif live.first_token_s is None:
            live.band.keep(request.tenant, live.prompt_charge)
        live.band.end(request.tenant, refund)

    def first_token(self, live: Live, now_s: float) -> None:
        """The request has had its first token: its prompt was worth its charge."""
        assert live.sent_s is not None
        live.first_token_s = now_s
        live.band.keep(live.request.tenant, live.prompt_charge)
        self._times.first_token(len(live.request.prompt_ids), now_s - live.sent_s)
        self._metrics.first_token(live.priority_class.name, now_s - live.arrived_s)

    def tokens(self, live: Live, replica: Replica, count: int) -> None:
        """So many tokens of it have come: it runs, and its reservation is no smaller than what it fills."""
        request_id = live.request.request_id
        if replica.reservations[request_id].parked:
            replica.park(request_id, False)
        held = len(live.request.prompt_ids) + live.journal.next_index
        if held > live.reserved_tokens:
            block_size = replica.block_size_tokens
            blocks = -(-held // block_size)
            replica.grow(request_id, blocks)
            live.reserved_tokens = blocks * block_size
        live.band.add(live.request.tenant, live.output_weight * count)
        live.steady_below = live.reserved_tokens - len(live.request.prompt_ids)

    def steady_tokens(self, account: Account, count: int) -> None:
        """So many tokens have come, each below the `steady_below` of its request."""
        account.band.add(account.tenant, self._config.output_token_weight * count)

    def preempted(self, live: Live, replica: Replica, preempted: Preempted, now_s: float) -> None:
        """Its engine took it out of the running batch; it keeps its place there."""
        replica.park(preempted.request_id, True)
        live.steady_below = 0
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

    def finished(self, live: Live, now_s: float) -> None:
        """It has ended by itself."""
        request, tokens = live.request, live.journal.next_index
        if self._lengths is not None:
            self._lengths.observe(request.tenant, request.priority_class, len(request.prompt_ids), tokens)
        if tokens > 1 and live.first_token_s is not None:
            self._times.next_tokens((now_s - live.first_token_s) / (tokens - 1))

    # --- what admission and explanations need to know ---

    def judge(self, lives: Sequence[Live], now_s: float, *, draining: bool) -> Admit | Queue | Reject:
        """Decide about requests that arrive as one, by the first, and say so to each."""
        facts = self._facts(lives[0], len(lives), now_s)
        view = self._admission_view(facts, lives[0], now_s, draining=draining)
        decision = decide(facts, view, self._rng)
        match decision:
            case Reject(outcome, _, _, numbers):
                event, why, figures = "rejected", outcome.value, numbers
            case Admit():
                event, why, figures = "admitted", "", {}
            case Queue(ahead_requests):
                ahead = {"ahead": ahead_requests, "ahead_service": round(view.pace.ahead)}
                event, why, figures = "queued", "", ahead | self._place_in_line(lives[0])
            case _:
                assert_never(decision)
        for live in lives:
            live.decided(now_s, event, figures, why=why)
        return decision

    def _facts(self, live: Live, count: int, now_s: float) -> RequestFacts:
        request, expected = live.request, self._config.expected_output_tokens
        return RequestFacts(
            need=live.need(expected),
            size_bytes=size_bytes(request),
            priority_class=live.priority_class,
            count=count,
            service=live.service(expected),
            output_tokens=max(1, min(request.sampling.max_tokens, request.stated_output_tokens or 0)),
            age_s=now_s - live.arrived_s,
            terms=live.terms,
        )

    def _admission_view(self, facts: RequestFacts, live: Live, now_s: float, *, draining: bool) -> AdmissionView:
        request, name = live.request, live.priority_class.name
        charge, own = self.queue.of_class(name), self.queue.of_tenant(name, request.tenant)
        pace = self._pace(facts, live, charge.service, own.service, now_s)
        ahead_requests = self.queue.at_or_above(request.priority)
        return AdmissionView(
            draining=draining,
            leaving=self._fleet.leaving(now_s),
            too_large=self._fleet.too_large(facts.need),
            room=not ahead_requests and self._fleet.place(facts.need, now_s, self._rng, self._favour(live)) is not None,
            ahead_requests=ahead_requests,
            class_requests=charge.requests,
            class_bytes=charge.size_bytes,
            tenant_requests=own.requests,
            tenant_bytes=own.size_bytes,
            longest_wait_s=live.priority_class.longest_wait_s or self._config.max_queue_s,
            pace=pace,
        )

    def _pace(self, facts: RequestFacts, live: Live, backlog: int, own: int, now_s: float) -> Pace:
        """`own`: of the backlog, what the request's tenant has there."""
        request, name = live.request, live.priority_class.name
        outranked = self.queue.at_or_above(request.priority + 1) > 0
        of_all = self._drain_of_all.per_s(now_s) if outranked else None
        weights = live.band.waiting_weight(request.tenant)
        return Pace(
            backlog=backlog,
            ahead=evenly_ahead(backlog, own + facts.service, *weights),
            drain_per_s=self._drains[name].per_s(now_s),
            share_per_s=None if of_all is None else of_all * self._config.minimum_share,
            ageing_after_s=self._config.ageing_after_s,
            first_token_s=self._times.first_token_s(len(request.prompt_ids)),
            next_token_s=self._times.next_token_s,
        )

    def retry_after_s(self, live: Live, now_s: float) -> int:
        name = live.priority_class.name
        backlog = self.queue.of_class(name).service
        return retry_after_s(backlog_seconds(backlog, self._drains[name].per_s(now_s)), self._rng)

    def drain_per_s(self, priority_class: str, now_s: float) -> float | None:
        return self._drains[priority_class].per_s(now_s)

    def _place_in_line(self, live: Live) -> dict[str, float]:
        """Where it stands, in numbers."""
        name = live.priority_class.name
        counter, least = live.band.counters(live.request.tenant)
        return {
            "band": live.request.priority,
            "backlog": self.queue.of_class(name).service,
            "tenant_counter": round(counter),
            "least_counter": round(least),
        }

    # --- inner workings ---

    def _waits_on(self, priority_class: str, now_s: float) -> None:
        self._drains[priority_class].waits(now_s, self.queue.of_class(priority_class).requests > 0)
        self._drain_of_all.waits(now_s, len(self.queue) > 0)

    def _heads(self) -> list[Waiting]:
        """The next one of each class that has any, most urgent first."""
        heads = []
        for name, below in self._bands_of_classes:
            head = self.queue.peek_below(below)
            if head is not None and head.priority_class == name:
                heads.append(head)
        return heads
