"""Which nodes are about to go, and whose work leaves them. Pure.

Owns: what on a Kubernetes Node is a notice that it goes (`notices`), what is known of all nodes (`NodeBook`), and which
replicas are told to drain, or to take work again, because of that (`wanted`). Imports the config, ids, after how long a
replica is lost and how long a new leader waits; no Kubernetes, no clock and no socket: who drives it says what time it is.

Invariants: the same last word about each node gives the same orders, however it came (listed whole, as changes, twice, or
after a gap); a node that nobody has listed, or that has gone from the listing, says nothing, so that an API server that is
away, or shows nothing, changes nothing; what somebody else has asked of a replica is never taken back: each drain is its
asker's, and the replica keeps them apart (deployments/replica_process.py). No replica drains for its node where no other of
its model takes work on a node that stays: the work would have nowhere to go, and a whole pool may be cordoned for days. But
one that drains goes on as long as another that would take its work may only be out of sight, for its link broke or this
controller has just begun to lead: what moved would come back to a node that goes, and move again.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from cluster.config import KubernetesConfig, NodeNotice, NoticeOn
from cluster.control.happenings import LOST_AFTER_S
from cluster.control.leader import SETTLE_S
from cluster.types import ReplicaId

REPEAT_S = 1.0
"""A replica that does not say that it does what it was told is told again, no sooner."""
_EFFECTS = frozenset({"NoSchedule", "NoExecute"})
"""Of taints; PreferNoSchedule is a wish."""
_NOTHING: Mapping[str, str] = MappingProxyType({})

KNOWN_NOTICES: tuple[NodeNotice, ...] = (
    NodeNotice(on=NoticeOn.TAINT, key="node.kubernetes.io/unschedulable", why="it is cordoned"),
    NodeNotice(on=NoticeOn.TAINT, key="node.kubernetes.io/out-of-service", why="it is out of service"),
    NodeNotice(on=NoticeOn.TAINT, key="node.cloudprovider.kubernetes.io/shutdown", why="its machine is shut down"),
    NodeNotice(on=NoticeOn.TAINT, key="ToBeDeletedByClusterAutoscaler", why="the cluster autoscaler removes it"),
    NodeNotice(on=NoticeOn.TAINT, key="karpenter.sh/disrupted", why="Karpenter replaces it"),
    NodeNotice(on=NoticeOn.TAINT, key="karpenter.sh/disruption", why="Karpenter replaces it"),  # before 1.0
    NodeNotice(on=NoticeOn.TAINT, key="aws-node-termination-handler/spot-itn", why="AWS ends its spot instance"),
    NodeNotice(
        on=NoticeOn.TAINT,
        key="aws-node-termination-handler/scheduled-maintenance",
        why="AWS is to maintain its machine",
    ),
    NodeNotice(
        on=NoticeOn.TAINT,
        key="aws-node-termination-handler/asg-lifecycle-termination",
        why="its AWS scaling group ends it",
    ),
    NodeNotice(
        on=NoticeOn.TAINT,
        key="aws-node-termination-handler/rebalance-recommendation",
        why="AWS is likely to end its spot instance",
    ),
    NodeNotice(on=NoticeOn.TAINT, key="cloud.google.com/impending-node-termination", why="Google ends its machine"),
    NodeNotice(on=NoticeOn.TAINT, key="remediator.kubernetes.azure.com/unschedulable", why="Azure drains it"),
)
"""What schedulers, autoscalers and clouds put on a node whose work is to leave. A node that is not ready or not reachable is
not among them: its replicas say themselves how they are, and one that hears nothing could not be told. Nor are taints that
a node has for good (that of AKS' spot pools, of GPUs)."""


@dataclass(frozen=True, slots=True)
class Node:
    """As far as notices go."""

    name: str
    unschedulable: bool = False
    deleted: bool = False
    """It has been, and is kept until what must be done before is."""
    taints: tuple[tuple[str, str, str], ...] = ()
    """(key, value, effect)."""
    conditions: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    """Their status by their type."""
    labels: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    annotations: Mapping[str, str] = field(default_factory=lambda: _NOTHING)


class Reason(NamedTuple):
    """Why a node's work is to leave it."""

    why: str
    by: str
    """What on the node says so."""


def notices(node: Node, config: KubernetesConfig) -> frozenset[Reason]:
    """All that say that the node is about to go."""
    found = {Reason(n.why, f"{n.on} {n.key}") for n in (*_known(config), *config.notices) if _is_on(node, n)}
    if node.unschedulable:
        found.add(Reason("it is cordoned", "spec.unschedulable"))
    if node.deleted:
        found.add(Reason("it has been deleted", "metadata.deletionTimestamp"))
    return frozenset(found)


def _known(config: KubernetesConfig) -> tuple[NodeNotice, ...]:
    return KNOWN_NOTICES if config.known_notices else ()


def _is_on(node: Node, notice: NodeNotice) -> bool:
    """Whether the node has it."""
    match notice.on:
        case NoticeOn.TAINT:
            return any(
                key == notice.key and effect in _EFFECTS and notice.value in (None, value)
                for key, value, effect in node.taints
            )
        case NoticeOn.CONDITION:
            return node.conditions.get(notice.key) == (notice.value or "True")
        case NoticeOn.LABEL:
            return notice.key in node.labels and notice.value in (None, node.labels[notice.key])
        case NoticeOn.ANNOTATION:
            return notice.key in node.annotations and notice.value in (None, node.annotations[notice.key])


class NodeBook:
    """What was last said of each node. Single writer."""

    def __init__(self) -> None:
        self.reasons: dict[str, frozenset[Reason]] = {}
        """Of each node that is listed."""
        self.clear_since_s: dict[str, float] = {}
        """Of those that had a notice, since when they have none."""

    def listed(self, nodes: Mapping[str, frozenset[Reason]], now_s: float) -> None:
        """These are all that there are."""
        for name in self.reasons.keys() - nodes.keys():
            self.gone(name)
        for name, reasons in nodes.items():
            self.changed(name, reasons, now_s)

    def changed(self, name: str, reasons: frozenset[Reason], now_s: float) -> None:
        """One is new, or another than it was."""
        if reasons:
            self.clear_since_s.pop(name, None)
        elif self.reasons.get(name):
            self.clear_since_s[name] = now_s
        self.reasons[name] = reasons

    def gone(self, name: str) -> None:
        """One is not there any more."""
        self.reasons.pop(name, None)
        self.clear_since_s.pop(name, None)

    @property
    def going(self) -> dict[str, frozenset[Reason]]:
        """The nodes with a notice."""
        return {name: reasons for name, reasons in self.reasons.items() if reasons}


class Placed(NamedTuple):
    """A replica that is heard of."""

    replica_id: ReplicaId
    model: str
    node: str
    """Empty: it does not know."""
    drains: bool
    """Because of its node, as it said last."""
    kept: bool = False
    """Somebody else keeps it from work."""


class Taker(NamedTuple):
    """A replica that takes work on a node that stays, or did when it was heard last."""

    model: str
    away_since_s: float | None
    """When it was first missed; None: it is heard."""


class Told(NamedTuple):
    """What a replica was told last."""

    drain: bool
    at_s: float


@dataclass(frozen=True, slots=True)
class NodesView:
    """What is decided by."""

    reasons: Mapping[str, frozenset[Reason]]
    """Of each node that is listed."""
    clear_since_s: Mapping[str, float]
    placed: Sequence[Placed]
    told: Mapping[ReplicaId, Told]
    takers: Mapping[ReplicaId, Taker]
    """As `takers` has made them of `placed`."""
    leads_since_s: float
    """When this controller began to."""


class Drain(NamedTuple):
    """A replica is to drain because of its node, or is not to any more."""

    replica_id: ReplicaId
    drain: bool
    node: str
    reasons: tuple[Reason, ...]
    """Of its node, sorted."""


def takers(
    before: Mapping[ReplicaId, Taker],
    placed: Sequence[Placed],
    reasons: Mapping[str, frozenset[Reason]],
    now_s: float,
) -> dict[ReplicaId, Taker]:
    """Who takes work on a node that stays, with those of `before` that are not heard of now and do not count as lost yet."""
    found = {r.replica_id: Taker(r.model, None) for r in placed if not (r.drains or r.kept or reasons.get(r.node))}
    heard = {r.replica_id for r in placed}
    for replica_id, taker in before.items():
        away_since_s = now_s if taker.away_since_s is None else taker.away_since_s
        if replica_id not in heard and now_s - away_since_s < LOST_AFTER_S:
            found[replica_id] = taker._replace(away_since_s=away_since_s)
    return found


def wanted(view: NodesView, config: KubernetesConfig, now_s: float) -> tuple[Drain, ...]:
    """Whom to tell what, now. Whoever says that it does what it should is told nothing."""
    leads_for_s = now_s - view.leads_since_s
    if leads_for_s < SETTLE_S:
        return ()
    orders = []
    served = {taker.model for taker in view.takers.values() if taker.away_since_s is None}
    perhaps = {taker.model for taker in view.takers.values()}
    for replica in sorted(view.placed):
        reasons = view.reasons.get(replica.node)
        drain = bool(reasons) and replica.model in served
        if reasons is None or drain == replica.drains:
            continue
        # Another that would take its work may be away for a moment, or be yet to come.
        if reasons and not drain and (replica.model in perhaps or leads_for_s < LOST_AFTER_S):
            continue
        # A notice that comes and goes does not have the work move each time.
        if not reasons and now_s - view.clear_since_s.get(replica.node, -math.inf) < config.return_after_s:
            continue
        told = view.told.get(replica.replica_id)
        if told is not None and told.drain == drain and now_s - told.at_s < REPEAT_S:
            continue
        orders.append(Drain(replica.replica_id, drain, replica.node, tuple(sorted(reasons))))
    return tuple(orders)


def in_words(reasons: Collection[Reason]) -> str:
    """All of them, with what says so."""
    return "; ".join(f"{reason.why} ({reason.by})" for reason in sorted(reasons))
