"""What comes, judged at its arrival: what admission looks at, and what is said of its decision.

Owns: the reading of queue, fleet and rates for `admission.decide`, and the rates. Imports the queue, the fleet and admission.
Single writer, driven by `dispatch`. Invariant: what is not needed for a decision is not computed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Protocol, assert_never

from cluster.config import RouterConfig
from router.admission import (
    ADMIT,
    AdmissionView,
    Admit,
    Pace,
    Prompts,
    Queue,
    Reject,
    RequestFacts,
    backlog_seconds,
    begins_freely,
    begins_in_time,
    decide,
    evenly_ahead,
    retry_after_s,
)
from router.fleet import Fleet
from router.gates import GateKeeper
from router.live import Live
from router.metrics_sink import ADMITTED, QUEUED, RouterMetrics
from router.pace import DrainRate, ServiceTimes
from router.queue import BandQueue
from router.routing import Need, Placement, prompts_ahead, steps_of
from router.view import Replica


class _Place(Protocol):
    def __call__(
        self, live: Live, need: Need, now_s: float, among: Callable[[Replica], bool] | None = None
    ) -> Placement | None:
        """Where a request can go now, if anywhere; of the replicas that `among` holds for."""
        ...


class Arrivals:
    """Whether a request is let in."""

    def __init__(
        self,
        config: RouterConfig,
        now_s: float,
        rng: random.Random,
        metrics: RouterMetrics,
        fleet: Fleet,
        queue: BandQueue,
        gates: GateKeeper,
        place: _Place,
        prompt_left: Callable[[Live, Replica], int],
    ) -> None:
        """`place`: the placement that it is asked for last is where the request goes. `prompt_left`: tokens of it that are to
        be run there."""
        self._config = config
        self._rng = rng
        self._metrics = metrics
        self._fleet = fleet
        self._queue = queue
        self._gates = gates
        self._place = place
        self._prompt_left = prompt_left
        self._drains = {c.name: DrainRate(now_s) for c in config.classes}
        self._drain_of_all = DrainRate(now_s)
        self._asleep = False
        self.times = ServiceTimes()

    # --- what is measured ---

    def waits(self, priority_class: str, now_s: float) -> None:
        """The queue has changed."""
        waits = not self._asleep and self._queue.of_class(priority_class).requests > 0
        self._drains[priority_class].waits(now_s, waits)
        self._drain_of_all.waits(now_s, not self._asleep and len(self._queue) > 0)

    def look(self, now_s: float) -> None:
        """Every 100 ms: what waits for a replica to be started does not say how fast a queue drains."""
        asleep = self._fleet.asleep(now_s)
        if asleep is not self._asleep:
            self._asleep = asleep
            for name in self._drains:
                self.waits(name, now_s)

    def left(self, priority_class: str, service: int, now_s: float) -> None:
        """Something that had waited has been sent out."""
        self._drains[priority_class].left(now_s, service)
        self._drain_of_all.left(now_s, service)

    def came_back(self, priority_class: str, service: int, now_s: float) -> None:
        """What had left returned unserved."""
        self._drains[priority_class].came_back(now_s, service)
        self._drain_of_all.came_back(now_s, service)

    # --- the decision ---

    def judge(self, lives: Sequence[Live], now_s: float, *, draining: bool) -> Admit | Queue | Reject:
        """Decide about requests that arrive as one, by the first, and say so to each."""
        first = lives[0]
        need = first.need(self._config.expected_output_tokens)
        placement = self._room(first, need, now_s)
        room, longest_wait_s = placement is not None, first.priority_class.longest_wait_s
        if not draining and begins_freely(len(lives), first.terms, longest_wait_s, starts=room):
            decision: Admit | Queue | Reject = ADMIT
        else:
            facts = self._facts(first, need, len(lives), now_s)
            prompts = None if placement is None else self._prompts(first, need, placement, now_s)
            view = self._admission_view(facts, first, prompts, now_s, room=room, draining=draining)
            decision = decide(facts, view, self._rng)
        match decision:
            case Reject(outcome, _, _, numbers):
                event, why, figures = "rejected", outcome.value, numbers
            case Admit():
                event, why, figures = ADMITTED, "", {}
            case Queue(ahead_requests):
                ahead = {"ahead": ahead_requests, "ahead_service": round(view.pace.ahead)}
                event, why, figures = QUEUED, "", ahead | self._place_in_line(first)
            case _:
                assert_never(decision)
        self._metrics.judged(first.priority_class.name, why or event, len(lives))
        for live in lives:
            live.decided(now_s, event, figures, why=why)
        return decision

    def _room(self, live: Live, need: Need, now_s: float) -> Placement | None:
        """Where it goes now, if nobody stands before it, here or elsewhere, and a replica holds it."""
        priority = live.request.priority
        if self._queue.at_or_above(priority) or not self._gates.lets_out(priority, now_s):
            return None
        return self._place(live, need, now_s)

    def _prompts(self, live: Live, need: Need, placement: Placement, now_s: float) -> Prompts | None:
        """Where it is placed; where that is too late and another replica would begin it in time, it is placed there.
        None: its class states no wait, or how long they take has not been measured."""
        longest_wait_s, step_s = live.priority_class.longest_wait_s, self.times.prompt_step_s(live.priority_class.name)
        if longest_wait_s is None or step_s is None:
            return None

        preferred = self._fleet[placement.replica_id]
        steps_a_token = steps_of(1, need, preferred.view(self._config, now_s))
        # What is measured is the mean of all, by the most that a step runs. It is taken to hold where the request is placed; where
        # more decode beside a prompt than there, it takes longer.
        each_s = step_s * preferred.steps(1) / steps_a_token if steps_a_token else step_s

        def on(replica: Replica) -> Prompts:
            view = replica.view(self._config, now_s)
            ahead, left = prompts_ahead(need.priority, view), self._prompt_left(live, replica)
            return Prompts(steps_of(ahead, need, view) * each_s, steps_of(left, need, view) * each_s)

        prompts = on(preferred)
        if begins_in_time(prompts, longest_wait_s):
            return prompts
        other = self._place(live, need, now_s, lambda replica: begins_in_time(on(replica), longest_wait_s))
        return prompts if other is None else on(self._fleet[other.replica_id])

    def _facts(self, live: Live, need: Need, count: int, now_s: float) -> RequestFacts:
        request = live.request
        return RequestFacts(
            need=need,
            size_bytes=live.size_bytes,
            priority_class=live.priority_class,
            count=count,
            service=live.service(self._config.expected_output_tokens),
            output_tokens=max(1, min(request.sampling.max_tokens, request.stated_output_tokens or 0)),
            age_s=now_s - live.arrived_s,
            terms=live.terms,
        )

    def _admission_view(
        self, facts: RequestFacts, live: Live, prompts: Prompts | None, now_s: float, *, room: bool, draining: bool
    ) -> AdmissionView:
        request, name = live.request, live.priority_class.name
        charge, own = self._queue.of_class(name), self._queue.of_tenant(name, request.tenant)
        return AdmissionView(
            draining=draining,
            leaving=not room and self._fleet.leaving(now_s),
            too_large=not room and self._fleet.too_large(facts.need),
            room=room,
            ahead_requests=self._queue.at_or_above(request.priority),
            class_requests=charge.requests,
            class_bytes=charge.size_bytes,
            tenant_requests=own.requests,
            tenant_bytes=own.size_bytes,
            longest_wait_s=live.priority_class.longest_wait_s or self._config.max_queue_s,
            pace=self._pace(facts, live, prompts, charge.service, own.service, now_s),
        )

    def _pace(
        self, facts: RequestFacts, live: Live, prompts: Prompts | None, backlog: int, own: int, now_s: float
    ) -> Pace:
        """`own`: of the backlog, what the request's tenant has there."""
        request, name = live.request, live.priority_class.name
        outranked = self._queue.at_or_above(request.priority + 1) > 0
        of_all = self._drain_of_all.per_s(now_s) if outranked else None
        weights = live.band.waiting_weight(request.tenant)
        return Pace(
            backlog=backlog,
            ahead=evenly_ahead(backlog, own + facts.service, *weights),
            drain_per_s=self._drains[name].per_s(now_s),
            share_per_s=None if of_all is None else of_all * self._config.minimum_share,
            ageing_after_s=self._config.ageing_after_s,
            first_token_s=self.times.first_token_s(len(request.prompt_ids)),
            next_token_s=self.times.next_token_s,
            prompts=prompts,
        )

    def retry_after_s(self, live: Live, now_s: float) -> int:
        name = live.priority_class.name
        backlog = self._queue.of_class(name).service
        return retry_after_s(backlog_seconds(backlog, self._drains[name].per_s(now_s)), self._rng)

    def drain_per_s(self, priority_class: str, now_s: float) -> float | None:
        return self._drains[priority_class].per_s(now_s)

    def _place_in_line(self, live: Live) -> dict[str, float]:
        """Where it stands, in numbers."""
        name = live.priority_class.name
        counter, least = live.band.counters(live.request.tenant)
        return {
            "band": live.request.priority,
            "backlog": self._queue.of_class(name).service,
            "tenant_counter": round(counter),
            "least_counter": round(least),
        }
