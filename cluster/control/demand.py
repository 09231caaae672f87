"""How much is asked of one model, and how much one of its replicas does: measured from what routers and replicas tell.

Owns: the rates, and what a decision about the number of replicas looks at (`ModelLoad`). Imports the messages; no clock.
Single writer. Invariants: nothing here is needed by a successor, which is told or measures anew and until then knows less,
never something else; what is missing is None; memory is bounded by the replicas and routers that are connected.

All is in service, as tenants are charged it (router/fairness.py): so much for a prompt token that is computed, so much for
one of output. What replicas do is counted in real tokens. What arrives is counted by its routers as they expect it, which
may be wrong for all requests alike (a client that states no length): it is multiplied by what the service that was sent
out lately has really taken. So the demand is known before its tokens are made, and without a bias.

What one replica can do is its rate while it is full: next to no slot or block free, something waiting in it, or in the
routers although it has been there for a while. It is remembered, by the routers too, which are told of it and tell a
successor until that has seen a full replica itself. Before any was full there is only how much of their slots is in use to
go by.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from cluster.messages import FirstTokens, RosterEntry, RouterDemand
from cluster.types import EngineLoad, Generation, ReplicaId, ReplicaReport, ReplicaState, RouterId

SAMPLE_S = 1.0
SLOW_S = 300.0
"""Time constant of what the service that was sent out has really taken."""
FULL_S = 60.0
"""Of what a full replica does, counted in time for which any was full."""
KNOWN_AFTER_S = 3.0
"""A rate of less time is not known yet."""
STALE_AFTER_S = 3.0
"""A replica that has not reported for so long, and what a router said to wait so long ago, does not count."""
FEW = 0.1
"""Of its slots or its blocks: with less free a replica is full."""
FULL_PART = 0.8
"""Of the reports in a sample: where so many say so, it was full throughout. Between two requests a slot is free."""
COUNTED_MIN = 10
"""First tokens; of fewer no part is told."""
NEW_S = 5.0
"""What waits in the routers may not have come to a replica that is younger."""


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """One that reports."""

    replica_id: ReplicaId
    generation: Generation
    machine: str
    """As `RosterEntry.machine`."""
    zone: str
    state: ReplicaState
    retiring: bool
    requests: int
    """That run or wait there."""
    slots: int
    """Requests that run at once."""
    blocks: int
    """KV blocks that these hold."""


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """What is asked of a model and what there is for it."""

    replicas: tuple[ReplicaLoad, ...]
    """By id."""
    routers: int
    """That are connected. With none of them nothing is known of what waits."""
    demand_per_s: float | None
    """Service; None: not measured for long enough."""
    full_per_s: float | None
    """What one replica does at its full batch; None: none has been full."""
    occupied: float | None
    """Replicas whose slots what runs and waits in all of them would fill; None as with demand."""
    queued: int
    """Requests that wait in the routers."""
    queued_service: float
    attained: float | None
    """Of the class that stands worst, the part of its requests that lately had their first token in time; None: too few
    since a replica came, or no class has an aim."""
    idle_s: float
    """Since there was any work."""


class _Rate:
    """A rate over about `tau_s`, right from its first second on: the mean of what was counted, older time counting less."""

    def __init__(self, tau_s: float) -> None:
        self._tau_s = tau_s
        self._amount = 0.0
        self.over_s = 0.0

    def add(self, amount: float, over_s: float) -> None:
        keep = math.exp(-over_s / self._tau_s)
        self._amount = keep * self._amount + amount
        self.over_s = keep * self.over_s + over_s

    @property
    def per_s(self) -> float | None:
        return self._amount / self.over_s if self.over_s >= KNOWN_AFTER_S * (1 - 1e-9) else None


class _Share:
    """Which part of what is counted is in time, older counts counting less."""

    def __init__(self, tau_s: float) -> None:
        self._tau_s = tau_s
        self._in_time = self._all = 0.0

    def add(self, in_time: int, late: int) -> None:
        self._in_time += in_time
        self._all += in_time + late

    def fade(self, over_s: float) -> None:
        keep = math.exp(-over_s / self._tau_s)
        self._in_time *= keep
        self._all *= keep

    @property
    def part(self) -> float | None:
        return self._in_time / self._all if self._all >= COUNTED_MIN else None


class _Replica:
    """Its last report, and where its count stood when a sample began."""

    def __init__(self, entry: RosterEntry, load: ReplicaLoad, done: float, now_s: float) -> None:
        self.entry = entry
        self.load = load
        self.first_s = self.heard_s = self.since_s = now_s
        self.done_then = done
        self.reports = self.full_reports = 0


class _Router:
    def __init__(self, demand: RouterDemand, now_s: float) -> None:
        self.sent, self.queued, self.queued_service = demand.sent_service, demand.queued, demand.queued_service
        self.first_tokens = {f.priority_class: f for f in demand.first_tokens}
        self.heard_s = now_s


class Meter:
    """Of one model."""

    def __init__(self, prompt_token_weight: float, output_token_weight: float, now_s: float, average_s: float) -> None:
        """`average_s`: time constant of what is demanded and done now."""
        self._weights = prompt_token_weight, output_token_weight
        self._replicas: dict[ReplicaId, _Replica] = {}
        self._routers: dict[RouterId, _Router | None] = {}
        """None: connected, and has told nothing."""
        self._arrived = self._sent = self._done = 0.0
        """Since the last sample."""
        self._sampled_s = self._busy_s = now_s
        self._arriving, self._doing = _Rate(average_s), _Rate(average_s)
        self._sent_lately, self._done_lately = _Rate(SLOW_S), _Rate(SLOW_S)
        self._full = _Rate(FULL_S)
        self._full_before: float | None = None
        """As a controller before this one had measured it, if a router says so."""
        self._occupied = _Rate(average_s)
        self._average_s = average_s
        self._in_time: dict[str, _Share] = {}
        """By class."""

    # --- what is heard ---

    def replica(self, entry: RosterEntry, report: ReplicaReport, *, retiring: bool, now_s: float) -> None:
        """A replica's status."""
        load = _load_of(entry, report, retiring=retiring)
        done = self._done_in_all(report.load)
        if load.requests:
            self._busy_s = now_s
        known = self._replicas.get(entry.replica_id)
        if known is None or known.entry.generation != entry.generation or now_s - known.heard_s > STALE_AFTER_S:
            self._replicas[entry.replica_id] = _Replica(entry, load, done, now_s)
            self._in_time.clear()  # what was late before says nothing of how it is with one more
            return
        known.load, known.heard_s = load, now_s
        known.reports += 1
        known.full_reports += _is_full(report.load) or (now_s - known.first_s >= NEW_S and self._queued(now_s) > 0)
        over_s = now_s - known.since_s
        if over_s >= SAMPLE_S:
            self._sample(known, done - known.done_then, over_s)
            known.since_s, known.done_then, known.reports, known.full_reports = now_s, done, 0, 0

    def replica_gone(self, replica_id: ReplicaId, generation: Generation) -> None:
        known = self._replicas.get(replica_id)
        if known is not None and known.entry.generation == generation:
            del self._replicas[replica_id]

    def router_here(self, router_id: RouterId) -> None:
        self._routers[router_id] = None

    def router(self, router_id: RouterId, demand: RouterDemand, now_s: float) -> None:
        """What a router that is here tells."""
        known, new = self._routers.get(router_id), _Router(demand, now_s)
        self._routers[router_id] = new
        if demand.of_one_per_s is not None:
            self._full_before = demand.of_one_per_s
        if demand.queued:
            self._busy_s = now_s
        if known is not None:  # what it had before it was first heard has not come just now
            sent = max(0.0, new.sent - known.sent)
            self._sent += sent
            self._arrived += sent + new.queued_service - known.queued_service
            for name, now in new.first_tokens.items():
                before = known.first_tokens.get(name, FirstTokens(name, 0, 0))
                share = self._in_time.setdefault(name, _Share(self._average_s))
                share.add(max(0, now.in_time - before.in_time), max(0, now.late - before.late))

    def router_gone(self, router_id: RouterId) -> None:
        self._routers.pop(router_id, None)

    # --- what is known ---

    def load(self, now_s: float) -> ModelLoad:
        replicas = [r.load for r in self._replicas.values() if now_s - r.heard_s <= STALE_AFTER_S]
        self._advance(now_s, sum(r.requests / (r.slots or 1) for r in replicas))
        return ModelLoad(
            replicas=tuple(sorted(replicas, key=lambda r: r.replica_id)),
            routers=len(self._routers),
            demand_per_s=self._demand_per_s(),
            full_per_s=self._full_before if self._full.per_s is None else self._full.per_s,
            occupied=self._occupied.per_s,
            queued=self._queued(now_s),
            queued_service=sum(r.queued_service for r in self._telling(now_s)) * self._really,
            attained=min((part for s in self._in_time.values() if (part := s.part) is not None), default=None),
            idle_s=now_s - self._busy_s,
        )

    def _telling(self, now_s: float) -> Iterator[_Router]:
        return (r for r in self._routers.values() if r is not None and now_s - r.heard_s <= STALE_AFTER_S)

    def _queued(self, now_s: float) -> int:
        return sum(r.queued for r in self._telling(now_s))

    def _done_in_all(self, load: EngineLoad) -> float:
        prompt, output = self._weights
        return prompt * load.prefill_tokens_total + output * load.tokens_total

    def _sample(self, replica: _Replica, done: float, over_s: float) -> None:
        self._done += done
        if (
            done and replica.full_reports >= FULL_PART * replica.reports
        ):  # one that does nothing at all is stuck, which is no measure
            self._full.add(done, over_s)

    def _advance(self, now_s: float, occupied: float) -> None:
        over_s = now_s - self._sampled_s
        if over_s < SAMPLE_S:
            return
        self._arriving.add(self._arrived, over_s)
        self._doing.add(self._done, over_s)
        self._occupied.add(occupied * over_s, over_s)
        self._sent_lately.add(self._sent, over_s)
        self._done_lately.add(self._done, over_s)
        for share in self._in_time.values():
            share.fade(over_s)
        self._arrived = self._sent = self._done = 0.0
        self._sampled_s = now_s

    def _demand_per_s(self) -> float | None:
        """What is done now, or what arrives now where that is more: it is done later."""
        arriving, doing = self._arriving.per_s, self._doing.per_s
        return None if arriving is None or doing is None else max(doing, arriving * self._really)

    @property
    def _really(self) -> float:
        """What service that was expected takes."""
        sent, done = self._sent_lately.per_s, self._done_lately.per_s
        return done / sent if sent and done else 1.0


def _load_of(entry: RosterEntry, report: ReplicaReport, *, retiring: bool) -> ReplicaLoad:
    load = report.load
    return ReplicaLoad(
        replica_id=entry.replica_id,
        generation=entry.generation,
        machine=entry.machine,
        zone=entry.zone,
        state=report.state,
        retiring=retiring,
        requests=sum(level.requests for level in (*load.running, *load.waiting)),
        slots=load.slots_total,
        blocks=sum(level.blocks for level in (*load.running, *load.waiting)),
    )


def _is_full(load: EngineLoad) -> bool:
    running = sum(level.requests for level in load.running)
    free_slots, few_blocks = load.slots_total - running, load.blocks_free < FEW * load.blocks_total
    return bool(load.waiting) or free_slots < max(1, FEW * load.slots_total) or (running > 0 and few_blocks)
