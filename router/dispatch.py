"""The way of a request from the queue to a replica and back, and what is charged and measured on it.

Owns: the queue, the tenants' counters, the minimum shares and the choice of a replica for what is next.
Single writer, driven by `core`. Invariants: nothing is sent out before a more urgent request that waits, nor before what
its band's order puts in front, but for what a minimum share lets pass; each open attempt has its reservation and is
counted open for its tenant, and what it was charged is kept or taken back once.

The head of the queue is never overtaken: where it cannot be placed nothing behind it is, so that small or lesser work
does not take the room that it waits for. What a minimum share puts before it does not stand in its way either.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping

from cluster.config import RouterConfig, WithinTenant
from cluster.control.gates import DEMAND_PERIOD_S
from cluster.lengths import LengthPredictor
from cluster.messages import Gate, Gates, RouterDemand
from cluster.types import Preempted, PrefixChange, ReplicaId, Request, RequestId
from router.affinity import Affinity
from router.arrivals import Arrivals
from router.bands import FairShares
from router.fairness import TenantBand
from router.fleet import SCAN_REPLICAS, Fleet
from router.gates import GateKeeper, Place
from router.live import Account, Live
from router.metrics_sink import RouterMetrics
from router.prefixes import Prefixes
from router.queue import BandQueue, Waiting
from router.rank import rank_of
from router.routing import NO_FAVOUR, Need, Placement, prompts_ahead, steps_of
from router.share import MinimumShares
from router.slo import in_time
from router.suspects import Trial
from router.terms import Terms
from router.view import Condition, Replica, Reservation

HABIT = 1e-6
"""Of a capacity: what decides between equals alone."""
SPARED = 2
"""Steps that a replica need not run of a prompt are worth so many steps of waiting there: they are spared to the request, and to
whoever comes behind it; and who waits leaves no second copy, which would push others' beginnings out of a cache."""


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
        self.gates = GateKeeper(self.queue, self._tenants, self._prompt_charge, now_s)
        self._held: set[RequestId] = set()
        """Of those that wait, the ones that have been told that a gate holds them back."""
        self.arrivals = Arrivals(
            config, now_s, rng, metrics, fleet, self.queue, self.gates, self._place_arrival, self._prompt_left
        )
        self.judge, self.retry_after_s = self.arrivals.judge, self.arrivals.retry_after_s
        self.drain_per_s = self.arrivals.drain_per_s
        self._affinity = Affinity(config.affinity_entries)
        self._prefixes = Prefixes(config.prefix_entries, SCAN_REPLICAS)
        by_urgency = sorted(config.classes, key=lambda c: -c.priority)
        bounds = [math.inf, *(c.priority for c in by_urgency)]
        self._bands_of_classes = [(c.name, below) for c, below in zip(by_urgency, bounds, strict=False)]
        """Each class, most urgent first, with the priority below which its own are."""
        lowest = [*(c.priority for c in by_urgency[:-1]), -math.inf]
        self._bounds = {c.name: (low, below) for c, low, below in zip(by_urgency, lowest, bounds, strict=False)}
        """The priorities of each class, from the lowest to below the next class's."""
        self._shown_front = -math.inf
        self._judged: tuple[Live, Placement | None] | None = None
        """Where a request that has just been let in can go: asked for once, by admission, and used up by the next look."""
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
        self.arrivals.waits(live.priority_class.name, now_s)

    def withdraw(self, live: Live, now_s: float) -> None:
        """It waits no longer, and was not sent out."""
        self.queue.remove(live.request.request_id)
        self._held.discard(live.request.request_id)
        self.arrivals.waits(live.priority_class.name, now_s)

    def next(self, now_s: float) -> Iterator[tuple[Live, Placement | None, bool]]:
        """What can be sent out next and whether a minimum share puts it first, as long as the caller sends it out or
        takes it away; last, what cannot be placed and must wait. Nothing more where a gate holds the next one back."""
        gate = self.gates.gate(now_s)
        front = -math.inf if gate is None else gate.priority
        while self.queue:
            several = self.queue.has_several_bands or gate is not None
            due = self._shares.due(self._heads(), now_s, front) if several else None
            if due is not None:
                live, placement = self._place(due, now_s)
                if placement is not None:
                    yield live, placement, True
                    continue
            head = self.queue.peek()
            assert head is not None
            if gate is not None and not self.gates.lets_out(head.priority, now_s):
                self._hold(head, gate, now_s)
                return
            live, placement = self._place(head, now_s)
            yield live, placement, False
            if placement is None and head.request_id in self.queue:
                return

    def _hold(self, head: Waiting, gate: Gate, now_s: float) -> None:
        """Say that a gate holds it back; once while it waits."""
        if head.request_id in self._held:
            return
        self._held.add(head.request_id)
        live = self._lives[head.request_id]
        self._metrics.held_by_gate(head.priority_class)
        live.decided(
            now_s,
            "held",
            why="gate",
            band=head.priority,
            front=gate.priority,
            sent=live.band.sent,
            sent_max=gate.sent_max,
        )

    def _place(self, waiting: Waiting, now_s: float) -> tuple[Live, Placement | None]:
        live, judged, self._judged = self._lives[waiting.request_id], self._judged, None
        if judged is not None and judged[0] is live:
            return judged
        return live, self.place(live, now_s)

    def place(self, live: Live, now_s: float) -> Placement | None:
        """Where it can go now, if anywhere; where it has erred only if no other replica takes it."""
        need = live.need(self._config.expected_output_tokens)
        favour = self._favour(live, need, now_s)
        placement = self._fleet.place(need, now_s, self._rng, favour)
        if placement is None or placement.replica_id not in live.erred_on:
            return placement
        others = self._fleet.place_among(lambda r: r.replica_id not in live.erred_on, need, now_s, self._rng, favour)
        return others or placement

    def _place_arrival(
        self, live: Live, need: Need, now_s: float, among: Callable[[Replica], bool] | None = None
    ) -> Placement | None:
        favour = self._favour(live, need, now_s)
        if among is None:
            placement = self._fleet.place(need, now_s, self._rng, favour)
        else:
            placement = self._fleet.place_among(among, need, now_s, self._rng, favour)
        self._judged = None if placement is None else (live, placement)
        return placement

    def _favour(self, live: Live, need: Need, now_s: float) -> Mapping[ReplicaId, float]:
        """By the part of its prompt that need not be computed there, and the steps that it would fill: what a replica tells
        that it holds, or what it is about to compute for others. Of equals, where its session was last."""
        weight, prompt = self._config.affinity_weight, len(live.request.prompt_ids)
        if not weight:
            return NO_FAVOUR
        favour: dict[ReplicaId, float] = {}
        if live.chain is None:
            live.chain = self._prefixes.chain(live.request)
        if live.chain is not None:
            block_size = live.chain.block_size_tokens
            for replica_id, blocks in self._prefixes.found(live.chain).items():
                favour[replica_id] = self._spared(replica_id, block_size * blocks, need, now_s)
        seen = self._affinity.expected(live.affinity_keys, prompt) if live.affinity_keys else None
        if seen is not None and self._fleet.current(seen.replica_id, seen.generation) is not None:
            held = favour.get(seen.replica_id, 0.0)
            expected = 0.0 if seen.settled else self._spared(seen.replica_id, seen.tokens, need, now_s)
            favour[seen.replica_id] = held + HABIT if seen.settled else max(held, expected)
        return favour

    def _spared(self, replica_id: ReplicaId, tokens: int, need: Need, now_s: float) -> float:
        """What it is worth that a replica need not run so many tokens of a prompt."""
        replica = self._fleet.known(replica_id)
        steps = 0.0 if replica is None else steps_of(tokens, need, replica.view(self._config, now_s))
        return SPARED * steps + self._config.affinity_weight * tokens / need.prompt_tokens

    # --- the other routers ---

    def demand(self, model: str, now_s: float) -> RouterDemand | None:
        """What the controller is to be told now, if anything."""
        self._show_gate(now_s)
        return self.gates.demand(model, lambda waiting: self._room_for(waiting, now_s), now_s)

    def hear(self, gates: Gates, now_s: float) -> None:
        """Take what the controller says of the others."""
        sent = self.gates.hear(gates, now_s)
        if sent:
            self._shares.sent(sent, self._heads(), self._sharers)
        self._show_gate(now_s)

    def without_place(self, now_s: float) -> Live | None:
        """The first, where no replica has room for it; None where it waits for anything else: a gate, or a replica that it
        may be tried on, or any at all."""
        head = self.queue.peek()
        if head is None or not self.gates.lets_out(head.priority, now_s):
            return None
        live, placement = self._place(head, now_s)
        if placement is not None or live.suspicion is not None:
            return None
        views = (replica.view(self._config, now_s) for replica in self._fleet)
        takes_work = any(v.condition is Condition.ROUTABLE and v.trial is not Trial.ALONE for v in views)
        return live if takes_work else None

    def _room_for(self, waiting: Waiting, now_s: float) -> Place:
        if not self._fleet.routable(now_s):
            return Place(False, False, False)
        placement = self._place(waiting, now_s)[1]
        # What is sent while a step runs is in the report after it: until then there may seem to be room.
        step_age_s = None if placement is None else self._fleet[placement.replica_id].step_age_s
        room = placement is not None and (step_age_s or 0.0) <= DEMAND_PERIOD_S
        return Place(True, room, self._fleet.has_slot(now_s))

    def _sharers(self, priority_class: str) -> int:
        """How many routers, with this one, have work of a class waiting, to share its minimum share."""
        lowest, below = self._bounds[priority_class]
        return 1 + self.gates.routers_waiting(lowest, below)

    def _prompt_charge(self, waiting: Waiting) -> float:
        live = self._lives[waiting.request_id]
        return 0.0 if live.prompt_charged else live.prompt_charge

    def _show_gate(self, now_s: float) -> None:
        """Tell the metrics which classes are shut, where that has changed."""
        gate = self.gates.gate(now_s)
        front = -math.inf if gate is None else gate.priority
        if front != self._shown_front:
            self._shown_front = front
            for name, (_, below) in self._bounds.items():
                self._metrics.gate(name, shut=below <= front)

    # --- what replicas hold ---

    def told(self, replica: Replica, change: PrefixChange) -> None:
        """A replica has told of its prefix cache."""
        if self._config.affinity_weight:
            self._prefixes.tell(replica.replica_id, replica.generation, replica.block_size_tokens, change)

    def lost(self, replica: Replica) -> None:
        """An incarnation is gone, with all that it held."""
        self._prefixes.drop(replica.replica_id, replica.generation)

    # --- attempts ---

    def send(self, live: Live, placement: Placement, now_s: float, *, by_share: bool) -> None:
        """Begin an attempt of what `next` gave."""
        request, name = live.to_send(), live.priority_class.name
        replica = self._fleet[placement.replica_id]
        waiting = self.queue.remove(request.request_id)
        self._held.discard(request.request_id)
        counter, least = live.band.counters(request.tenant)
        self._charge(live, waiting, now_s)
        attempt = live.journal.begin()
        suspicion, trial = live.suspicion, Trial.NONE
        if suspicion is None:
            sequence = replica.port.add(request, attempt, shared=by_share)
        else:
            trial = replica.trial_of(suspicion.trial)
            tokens = suspicion.cleared_at
            sequence = replica.port.add(request, attempt, shared=by_share, trial=trial, trial_tokens=tokens)
        reservation = Reservation(attempt, sequence, request.priority, placement.blocks, trial=trial)
        reservation.prompt_tokens = self._prompt_left(live, replica)
        ahead = prompts_ahead(request.priority, replica.view(self._config, now_s))
        live.prompt_steps = replica.steps(ahead + reservation.prompt_tokens)
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
            prompt_blocks_held=self._blocks_held(live, replica),
            prompts_ahead=ahead,
            tenant_counter=round(counter),
            least_counter=round(least),
        )

    def _blocks_held(self, live: Live, replica: Replica) -> int:
        """Blocks at the beginning of its prompt that the replica has told of."""
        return 0 if live.chain is None else self._prefixes.held(live.chain, replica.replica_id)

    def _prompt_left(self, live: Live, replica: Replica) -> int:
        """Tokens of it that are to be run there before its next one."""
        known = len(live.request.prompt_ids) + live.journal.next_index
        return max(1, known - self._blocks_held(live, replica) * replica.block_size_tokens)

    def _charge(self, live: Live, waiting: Waiting, now_s: float) -> None:
        name = live.priority_class.name
        live.drained = 0
        if now_s > waiting.since_s:
            live.drained = waiting.service
            self.arrivals.left(name, waiting.service, now_s)
        self.arrivals.waits(name, now_s)
        if self.queue or self._shares.any_saved:
            self._shares.spend(waiting)
            self._shares.sent(waiting.service, self._heads(), self._sharers)
        self.gates.sent(waiting, live.band.weight(waiting.tenant))
        charge = 0.0 if live.prompt_charged else live.prompt_charge
        live.prompt_charged = True
        live.band.begin(waiting.tenant, charge)

    def transfer(self, live: Live, source: Replica, target: Replica, number: int, now_s: float) -> None:
        """Close its attempt and begin `number` with what has moved to `target`. It was sent out once and is charged for
        once, wherever it runs: its tenant, its class and the gates have no part in it."""
        request_id = live.request.request_id
        before = source.reservations[request_id]
        source.release(request_id)
        live.journal.close()
        live.journal.begin(number)
        sequence = target.port.grant(request_id, number, live.journal.next_index)
        block_size = target.block_size_tokens
        blocks = live.need(self._config.expected_output_tokens).blocks(block_size)
        target.reserve(request_id, Reservation(number, sequence, before.priority, blocks, shared_s=before.shared_s))
        live.replica_id, live.sent_s = target.replica_id, now_s
        live.prompt_steps = 0.0  # what it found when it was sent out is no measure of what is left of its prompt here
        live.reserved_tokens = blocks * block_size
        live.steady_below = 0
        self._settle(live, source)
        if live.affinity_keys:
            prompt_tokens = len(live.request.prompt_ids)
            self._affinity.served(live.affinity_keys, target.replica_id, target.generation, prompt_tokens)

    def _settle(self, live: Live, replica: Replica) -> None:
        """No attempt of it is there any more."""
        if self._prefixes.follows(replica.replica_id, replica.generation):
            self._affinity.settle(live.affinity_keys, replica.replica_id, replica.generation)

    def release(self, live: Live, replica: Replica, now_s: float, *, taken_back: bool) -> None:
        """Close the open attempt and give back what was reserved for it. `taken_back`: the request goes on, and where
        it has had no token of any attempt so far its tenant has had nothing."""
        request = live.request
        replica.release(request.request_id)
        self.gates.ended(request.request_id)
        live.replica_id = None
        live.steady_below = 0
        live.journal.close()
        refund = 0.0
        if taken_back and live.first_token_s is None:
            refund, live.prompt_charged = live.prompt_charge, False
            if live.drained:
                self.arrivals.came_back(live.priority_class.name, live.drained, now_s)
        elif live.first_token_s is None:
            live.band.keep(request.tenant, live.prompt_charge)
        live.band.end(request.tenant, refund)
        self._settle(live, replica)

    def first_token(self, live: Live, cached_tokens: int, now_s: float) -> None:
        """The request has had its first token: its prompt was worth its charge, but for what was not computed of it."""
        assert live.sent_s is not None
        live.first_token_s = now_s
        live.cached_tokens = min(cached_tokens, len(live.request.prompt_ids))
        saved = self._config.prompt_token_weight * live.cached_tokens
        live.band.keep(live.request.tenant, live.prompt_charge, saved)
        live.prompt_charge -= saved
        self.arrivals.times.first_token(len(live.request.prompt_ids), now_s - live.sent_s)
        if live.prompt_steps:
            self.arrivals.times.prompts(live.priority_class.name, live.prompt_steps, now_s - live.sent_s)
        self._metrics.first_token(live.priority_class.name, now_s - live.arrived_s)
        slo_s = live.priority_class.first_token_slo_s
        if slo_s is not None:
            attained = in_time(now_s - live.arrived_s, slo_s)
            self.gates.first_token(live.priority_class.name, in_time=attained)
            self._metrics.promised(live.priority_class.name, attained=attained)

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
            self.arrivals.times.next_tokens((now_s - live.first_token_s) / (tokens - 1))

    # --- inner workings ---

    def _heads(self) -> list[Waiting]:
        """The next one of each class that has any, most urgent first."""
        heads = []
        for name, below in self._bands_of_classes:
            head = self.queue.peek_below(below)
            if head is not None and head.priority_class == name:
                heads.append(head)
        return heads
