"""What Forebay writes to Kubernetes' API: a Lease and Events, as the API has them.

Owns: their fields. Imports values, and nothing of Kubernetes. Invariants: what is written passes the API's own validation
(lengths, the form of names and times), whatever a reason or a name holds.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from cluster.config import KubernetesConfig
from cluster.control.happenings import Written
from cluster.control.lease import LeaseSeen, read, written
from cluster.types import Generation, PodRef

COMPONENT = "forebay/controller"
_GENERATION = "forebay/generation"
"""The annotation of the Lease that says as which its holder leads."""
_NOTE_MAX_BYTES = 1024
_ID_MAX = 128
"""Characters of a holder and of who reports."""


def micro_time(unix_s: float) -> str:
    """As Kubernetes writes a MicroTime."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def holder_of(who: str, leads: Generation) -> str:
    """What a controller calls itself as the Lease's holder."""
    own = f"_{leads.number}_{leads.uuid[:8]}"
    return who[: _ID_MAX - len(own)] + own


def seen_lease(lease: dict[str, Any], before: LeaseSeen | None, version_before: str, now_s: float) -> LeaseSeen:
    """What was read, against what was read before it (`before`, at `version_before`)."""
    spec, metadata = lease.get("spec") or {}, lease["metadata"]
    same = before is not None and metadata.get("resourceVersion") == version_before
    return LeaseSeen(
        holder=spec.get("holderIdentity") or "",
        generation=read((metadata.get("annotations") or {}).get(_GENERATION, "")),
        lasts_s=float(spec.get("leaseDurationSeconds") or 0),
        changed_at_s=before.changed_at_s if same and before is not None else now_s,
    )


def lease_body(
    config: KubernetesConfig, lease: dict[str, Any] | None, holder: str, leads: Generation, now_unix_s: float
) -> dict[str, Any]:
    """The Lease, held. `lease`: as it was read, where there is one; what others have put on it stays."""
    before = lease or {}
    metadata = {"name": config.name, "namespace": config.namespace} | before.get("metadata", {})
    spec = before.get("spec") or {}
    now = micro_time(now_unix_s)
    taken = spec.get("holderIdentity") != holder
    transitions = int(spec.get("leaseTransitions") or 0) + (taken and bool(lease))
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": metadata | {"annotations": (metadata.get("annotations") or {}) | {_GENERATION: written(leads)}},
        "spec": spec
        | {
            "holderIdentity": holder,
            "leaseDurationSeconds": round(config.lease_s),
            "acquireTime": now if taken else spec.get("acquireTime") or now,
            "renewTime": now,
            "leaseTransitions": transitions,
        },
    }


def given_back(lease: dict[str, Any], now_unix_s: float) -> dict[str, Any]:
    """The Lease, nobody's."""
    return lease | {"spec": lease["spec"] | {"holderIdentity": "", "renewTime": micro_time(now_unix_s)}}


def event_body(config: KubernetesConfig, event: Written, pod: PodRef | None, holder: str) -> dict[str, Any]:
    """An Event that is new. It is about a replica's pod or, where it has none, the controller's `pod`; outside of a cluster,
    where there is no pod, about the Lease."""
    about = event.happening.pod or pod
    if about is None:
        regarding = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "name": config.name}
    else:
        regarding = {"apiVersion": "v1", "kind": "Pod", "name": about.name} | ({"uid": about.uid} if about.uid else {})
    body: dict[str, Any] = {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": event.name, "namespace": config.namespace},
        "eventTime": micro_time(event.at_unix_s),
        "reportingController": COMPONENT,
        "reportingInstance": holder[:_ID_MAX],
        "action": event.happening.action,
        "reason": event.happening.reason,
        "type": "Warning" if event.happening.warning else "Normal",
        "note": event.happening.note.encode()[:_NOTE_MAX_BYTES].decode(errors="ignore"),
        "regarding": regarding | {"namespace": config.namespace},
    }
    if event.happening.node:
        body["related"] = {"apiVersion": "v1", "kind": "Node", "name": event.happening.node}
    return body
