"""The replicas that this router has links to, one incarnation of each, and which of them a placement looks at.

Owns: which incarnation counts, the views that decisions see, and the index that spares looking at all of them. Imports
the view and routing. Invariants: per replica id there is at most one incarnation, the latest that was linked; what an
earlier one says is not heard. `place` finds a place where there is one.

Up to SCAN_REPLICAS every replica is looked at for every placement: also those where less urgent work gives way, where prompts
would be waited for at the place that is free. Of more, two are drawn from those with a free slot,
and the one that is favoured is added: the better of two drawn is nearly as good as the best of all (Mitzenmacher, "The
Power of Two Choices in Randomized Load Balancing"). Only where these do not hold the request freely two are drawn from those
with a free slot that have the blocks for it, as far as an index tells, and then all of these are looked at; then two drawn from
those that run the least urgent work, beside the first; then all. Those two are looked at too where prompts would be waited for at
the place that was found: few replicas may have a free slot, and all would go there. A request for which there was no place
anywhere is held against those replicas only that have changed since. (Looked at all with a free slot, a pick took 6 ms where
lesser work filled the blocks of 1,000 replicas.)
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from cluster.config import RouterConfig
from cluster.ports import ReplicaPort
from cluster.types import Generation, ReplicaId
from router.outliers import let_in
from router.routing import NO_FAVOUR, Need, Placement, Pool, choose, pool_of, prompts_ahead, too_large
from router.suspects import Trial
from router.view import Condition, Replica, ReplicaView

SCAN_REPLICAS = 64
_USABLE = frozenset((Condition.ROUTABLE, Condition.BACKING_OFF, Condition.EJECTED))
BLOCKED_MAX = 16
"""Needs that are remembered as having no place, one a priority and kind of trial."""


@dataclass(frozen=True, slots=True)
class Known:
    """The link of an incarnation that is known is up again."""

    replica: Replica


@dataclass(frozen=True, slots=True)
class New:
    """A new incarnation; `replaced` is the one that it ends."""

    replica: Replica
    replaced: Replica | None


@dataclass(frozen=True, slots=True)
class Old:
    """An incarnation that a later one has replaced."""


class IdSet:
    """Replica ids from which any can be drawn. Equal calls in equal order draw alike."""

    __slots__ = ("_at", "_ids")

    def __init__(self) -> None:
        self._ids: list[ReplicaId] = []
        self._at: dict[ReplicaId, int] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[ReplicaId]:
        return iter(self._ids)

    def __contains__(self, replica_id: ReplicaId) -> bool:
        return replica_id in self._at

    def add(self, replica_id: ReplicaId) -> None:
        if replica_id not in self._at:
            self._at[replica_id] = len(self._ids)
            self._ids.append(replica_id)

    def discard(self, replica_id: ReplicaId) -> None:
        at = self._at.pop(replica_id, None)
        if at is None:
            return
        last = self._ids.pop()
        if last != replica_id:
            self._ids[at] = last
            self._at[last] = at

    def two(self, rng: random.Random) -> tuple[ReplicaId, ...]:
        """Two different ones, or as many as there are."""
        count = len(self._ids)
        if count <= 2:
            return tuple(self._ids)
        first, second = int(rng.random() * count), int(rng.random() * (count - 1))
        return self._ids[first], self._ids[second + (second >= first)]


@dataclass(slots=True)
class _Blocked:
    """There was no place for this need."""

    need: Need
    changed: dict[ReplicaId, None] = field(default_factory=dict)
    """Replicas that have changed since."""


class Fleet:
    """The current incarnation of each replica."""

    def __init__(self, config: RouterConfig, *, wakes: bool = False) -> None:
        """`wakes`: where there is none, one is started for a request that waits."""
        self._config = config
        self._wakes = wakes
        self._replicas: dict[ReplicaId, Replica] = {}
        self._changed: dict[ReplicaId, None] = {}
        """Replicas that have changed since anybody asked."""
        self._unindexed: dict[ReplicaId, None] = {}
        """Replicas that have changed since the index was looked at, beside these."""
        self._open = IdSet()
        """Those with a slot that nothing runs in."""
        self._roomy: dict[int, IdSet] = {}
        """These by the room of the blocks that may be free there, as it was when anybody asked for it."""
        self._room: dict[ReplicaId, int] = {}
        """In which of them each is."""
        self._unroomed: dict[ReplicaId, None] = {}
        """Replicas that have changed since. Room changes with each step, and is seldom asked for."""
        self._running: dict[int, IdSet] = {}
        """By the priority of the least urgent work that runs there."""
        self._indexed: dict[ReplicaId, _IndexPlace] = {}
        """Where each stands in the index, if anywhere."""
        self._pools: Counter[Pool] = Counter()
        """How many replicas have each size."""
        self._blocked: dict[tuple[int, Trial], _Blocked] = {}
        self._took_work_s = -math.inf
        """When any was last seen to take work."""

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas.values())

    def __getitem__(self, replica_id: ReplicaId) -> Replica:
        return self._replicas[replica_id]

    # --- who is there ---

    def current(self, replica_id: ReplicaId, generation: Generation) -> Replica | None:
        """That incarnation, if it is the current one."""
        replica = self._replicas.get(replica_id)
        return replica if replica is not None and replica.generation == generation else None

    def known(self, replica_id: ReplicaId) -> Replica | None:
        """Its current incarnation."""
        return self._replicas.get(replica_id)

    def linked(self, port: ReplicaPort, now_s: float) -> Known | New | Old:
        """Take note of a link that is up."""
        replica = self._replicas.get(port.replica_id)
        if replica is not None and replica.generation == port.generation:
            replica.port, replica.link_up = port, True
            return Known(replica)
        if replica is not None and port.generation.number < replica.generation.number:
            return Old()
        new = self._replicas[port.replica_id] = Replica(port, now_s, self._changed)
        return New(new, replica)

    def forget(self, replica: Replica) -> None:
        """It is gone for good; one that has been replaced is forgotten already."""
        if self._replicas.get(replica.replica_id) is replica:
            del self._replicas[replica.replica_id]
            self._changed[replica.replica_id] = None
            self._index()  # whoever is gone is in no list

    def views(self, now_s: float) -> list[ReplicaView]:
        return [replica.view(self._config, now_s) for replica in self]

    def fenced(self, now_s: float) -> list[Replica]:
        """Those whose work must go on elsewhere."""
        return [r for r in self if r.reservations and r.condition(self._config, now_s) is Condition.FENCED]

    def draining(self, now_s: float) -> list[Replica]:
        """Those that can be reached and take nothing new because they are to become empty."""
        return [r for r in self if r.condition(self._config, now_s) is Condition.DRAINING]

    def may_put_out(self, now_s: float) -> bool:
        """Whether at most half of those that could take work would be out with one more of them."""
        usable, out = self._usable(now_s)
        return 2 * (len(out) + 1) <= usable

    def reopen(self, now_s: float) -> None:
        """Let in again what is out beyond half now that others are gone, and look anew at those whose time may be over."""
        if not any(replica.record.out_until_s is not None for replica in self):
            return
        usable, out = self._usable(now_s)
        too_many = len(out) - usable // 2
        for number, replica in enumerate(out):
            replica.record = let_in(replica.record, now_s) if number < too_many else replica.record

    def _usable(self, now_s: float) -> tuple[int, list[Replica]]:
        """How many could take work if none was put out, and those that are, whose time is over first in front."""
        usable = [r for r in self if r.condition(self._config, now_s) in _USABLE]
        out = [(r.record.out_until_s, k, r) for k, r in enumerate(usable) if r.record.out_until_s is not None]
        return len(usable), [replica for _, _, replica in sorted(out)]

    def routable(self, now_s: float) -> bool:
        """Whether new work can be sent to any."""
        return any(r.condition(self._config, now_s) is Condition.ROUTABLE for r in self)

    def asleep(self, now_s: float) -> bool:
        """Whether none takes work until one is started, or comes back."""
        return self._wakes and not self.routable(now_s)

    def look(self, now_s: float) -> None:
        """Every 100 ms: take note of whether any takes work."""
        if self.routable(now_s):
            self._took_work_s = now_s

    def has_slot(self, now_s: float) -> bool:
        """Whether any that takes work has a slot that nothing runs in."""
        self._index()
        replicas, routable = self._replicas, Condition.ROUTABLE
        return any(replicas[i].condition(self._config, now_s) is routable for i in self._open)

    def leaving(self, now_s: float) -> bool:
        """Whether none takes work or may come back to taking it, and none that may replace them has come for a while: in a
        rollout the next may be known to others already."""
        if self._wakes or not all(r.condition(self._config, now_s) is Condition.DRAINING for r in self):
            return False
        return now_s - self._took_work_s >= self._config.no_replica_grace_s

    # --- where work goes ---

    def too_large(self, need: Need) -> bool:
        """Whether some pool sizes are known and not one of them could ever hold it. Nothing known says nothing."""
        self._index()
        return too_large(need, self._pools)

    def place(
        self, need: Need, now_s: float, rng: random.Random, favour: Mapping[ReplicaId, float] = NO_FAVOUR
    ) -> Placement | None:
        """Where `need` goes now, by `routing.choose`; None where no replica has a place for it."""
        self._note_changes()
        key = need.priority, need.trial
        blocked = self._blocked.get(key)
        if blocked is not None and blocked.need.implies(need):
            placement = choose(need, self._views_of(blocked.changed, now_s), rng, favour)
            if need.implies(blocked.need):
                blocked.changed.clear()
        elif len(self._replicas) <= SCAN_REPLICAS:
            placement = self._of_all(need, now_s, rng, favour)
        else:
            placement = self._drawn(need, now_s, rng, favour)
        if placement is not None:
            self._took_work_s = now_s
            self._blocked.pop(key, None)
        elif blocked is None or not blocked.need.implies(need):
            if len(self._blocked) >= BLOCKED_MAX:
                self._blocked.clear()
            self._blocked[key] = _Blocked(need)
        return placement

    def place_among(
        self,
        among: Callable[[Replica], bool],
        need: Need,
        now_s: float,
        rng: random.Random,
        favour: Mapping[ReplicaId, float] = NO_FAVOUR,
    ) -> Placement | None:
        """Where `need` goes now of the replicas that `among` holds for, by `routing.choose`; None where none of these has a
        place. Of more than SCAN_REPLICAS so many are drawn and looked at, and those that are favoured: where one in twenty
        has a place, 96 of 100 looks find one."""
        ids: Iterable[ReplicaId] = self._replicas
        if len(self._replicas) > SCAN_REPLICAS:
            ids = dict.fromkeys((*favour, *rng.sample(tuple(self._replicas), SCAN_REPLICAS)))
        replicas = (replica for i in ids if (replica := self._replicas.get(i)) is not None)
        return choose(need, [r.view(self._config, now_s) for r in replicas if among(r)], rng, favour)

    def _of_all(
        self, need: Need, now_s: float, rng: random.Random, favour: Mapping[ReplicaId, float]
    ) -> Placement | None:
        views = self.views(now_s)
        placement = choose(need, views, rng, favour)
        if placement is None or not placement.free or self._begins_soon(need, placement, now_s):
            return placement
        pushing = choose(need, views, rng, favour, pushing=True)
        return pushing if pushing is not None and pushing.score < placement.score else placement

    def _drawn(
        self, need: Need, now_s: float, rng: random.Random, favour: Mapping[ReplicaId, float]
    ) -> Placement | None:
        self._index()
        drawn = dict.fromkeys((*self._open.two(rng), *favour))
        placement = choose(need, self._views_of(drawn, now_s), rng, favour, free=True)
        if placement is None:
            placement = self._of_roomy(need, now_s, rng, favour)
        if placement is not None and self._begins_soon(need, placement, now_s):
            return placement
        beside = drawn if placement is None else ()
        for priority in sorted(p for p in self._running if p < need.priority):
            two = self._running[priority].two(rng)
            pushing = choose(need, self._views_of(dict.fromkeys((*beside, *two)), now_s), rng, favour)
            if pushing is not None:
                return pushing if placement is None or pushing.score < placement.score else placement
        return choose(need, self.views(now_s), rng, favour) if placement is None else placement

    def _of_roomy(
        self, need: Need, now_s: float, rng: random.Random, favour: Mapping[ReplicaId, float]
    ) -> Placement | None:
        """A place that is free, if there is any: the better of two drawn, or else the best of the first that have one."""
        if not len(self._open):
            return None
        self._index_rooms()
        least = _room_of(need.tokens)
        ids = [i for room, roomy in self._roomy.items() if room >= least for i in roomy]
        two = rng.sample(ids, min(2, len(ids)))
        for some in (two, *(ids[k : k + SCAN_REPLICAS] for k in range(0, len(ids), SCAN_REPLICAS))):
            placement = choose(need, self._views_of(some, now_s), rng, favour, free=True)
            if placement is not None:
                return placement
        return None

    def _begins_soon(self, need: Need, placement: Placement, now_s: float) -> bool:
        """Whether the prompts that go before it there are run within a step."""
        return self.steps_ahead(placement.replica_id, need.priority, now_s) <= 1

    def steps_ahead(self, replica_id: ReplicaId, priority: int, now_s: float) -> float:
        """How many steps the prompts fill that are run there before one of `priority` that comes now."""
        replica = self._replicas[replica_id]
        return replica.steps(prompts_ahead(priority, replica.view(self._config, now_s)))

    def _views_of(self, replica_ids: Iterable[ReplicaId], now_s: float) -> list[ReplicaView]:
        replicas = self._replicas
        return [replicas[i].view(self._config, now_s) for i in replica_ids if i in replicas]

    def _note_changes(self) -> None:
        """Hold what has changed against what is remembered as having no place."""
        if not self._changed:
            return
        for blocked in self._blocked.values():
            blocked.changed.update(self._changed)
        self._unindexed.update(self._changed)
        self._changed.clear()

    def _index(self) -> None:
        """Bring the index up to what has changed; few replicas are all looked at, without it."""
        self._note_changes()
        for replica_id in self._unindexed:
            replica = self._replicas.get(replica_id)
            place = _index_place(replica) if replica is not None else _NOWHERE
            before = self._indexed.get(replica_id, _NOWHERE)
            if place != before:
                self._drop(replica_id, before)
                self._put(replica_id, place)
        self._unroomed.update(self._unindexed)
        self._unindexed.clear()

    def _index_rooms(self) -> None:
        """Bring these up to the index."""
        for replica_id in self._unroomed:
            before, room = self._room.pop(replica_id, None), None
            if replica_id in self._open:
                replica = self._replicas[replica_id]
                room = self._room[replica_id] = _room_of(replica.blocks_free_most() * replica.block_size_tokens)
            if room == before:
                continue
            if before is not None:
                self._roomy[before].discard(replica_id)
                if not len(self._roomy[before]):
                    del self._roomy[before]
            if room is not None:
                self._roomy.setdefault(room, IdSet()).add(replica_id)
        self._unroomed.clear()

    def _drop(self, replica_id: ReplicaId, place: _IndexPlace) -> None:
        is_open, lowest, pool = place
        if is_open:
            self._open.discard(replica_id)
        if lowest is not None:
            self._running[lowest].discard(replica_id)
            if not len(self._running[lowest]):
                del self._running[lowest]
        if pool is not None:
            self._pools[pool] -= 1
            if not self._pools[pool]:
                del self._pools[pool]
        self._indexed.pop(replica_id, None)

    def _put(self, replica_id: ReplicaId, place: _IndexPlace) -> None:
        is_open, lowest, pool = place
        if is_open:
            self._open.add(replica_id)
        if lowest is not None:
            self._running.setdefault(lowest, IdSet()).add(replica_id)
        if pool is not None:
            self._pools[pool] += 1
            self._indexed[replica_id] = place


_IndexPlace = tuple[bool, int | None, Pool | None]
"""Whether it has a slot that nothing runs in, the priority of the least urgent work that runs there, and its size."""
_NOWHERE: _IndexPlace = (False, None, None)


def _room_of(tokens: int) -> int:
    """Of so many tokens' blocks: more is never less room, and of two with the same the larger is less than an eighth larger."""
    shift = max(0, tokens.bit_length() - 4)
    return 8 * shift + (tokens >> shift)


def _index_place(replica: Replica) -> _IndexPlace:
    if replica.report is None:
        return _NOWHERE
    load = replica.report.load
    slots_taken, lowest = 0, None
    for level in load.running:
        slots_taken += level.requests
        if lowest is None or level.priority < lowest:
            lowest = level.priority
    for level in replica.unreported():
        slots_taken += level.requests
        if lowest is None or level.priority < lowest:
            lowest = level.priority
    return slots_taken < load.slots_total, lowest, pool_of(load)
