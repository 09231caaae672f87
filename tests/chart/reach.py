"""What NetworkPolicies let through, by the rules of their reference (kubernetes.io, "Network Policies").

Owns: the rules, as far as they concern traffic into pods over TCP; a key that it does not know is an error, so that no
policy is judged by half of what it says. A pod that no policy selects is open. Those that select it add up. A rule without
`from`, or with an empty one, is for everybody; without `ports`, or with an empty list, for every port.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Labels = Mapping[str, str]
ALL_PORTS = frozenset(range(1, 65536))


@dataclass(frozen=True)
class Peer:
    """Who asks: a pod of a namespace, or an address outside of the cluster."""

    namespace: str | None = None
    namespace_labels: Labels = field(default_factory=dict)
    labels: Labels = field(default_factory=dict)
    ip: str = "10.0.0.1"


@dataclass(frozen=True)
class Target:
    """A pod that is asked, and its named ports."""

    namespace: str
    labels: Labels
    ports: Mapping[str, int]


def ports_open_to(policies: Iterable[Mapping[str, Any]], target: Target, peer: Peer) -> frozenset[int]:
    """The TCP ports of a pod that a peer reaches, listened on or not.

    Args:
        policies: Manifests, each with its namespace; other kinds of traffic than into pods are left out.
    """
    mine = [p["spec"] for p in policies if p["metadata"]["namespace"] == target.namespace and _is_ingress(p["spec"])]
    mine = [spec for spec in mine if matches(spec["podSelector"], target.labels)]
    if not mine:
        return ALL_PORTS
    rules = [rule for spec in mine for rule in spec.get("ingress") or ()]
    return frozenset().union(
        *(_ports(rule, target) for rule in rules if _is_from(rule, target.namespace, peer)), frozenset()
    )


def _is_ingress(spec: Mapping[str, Any]) -> bool:
    _known(spec, "podSelector", "policyTypes", "ingress", "egress")
    return "Ingress" in spec.get("policyTypes", ["Ingress"])


def _is_from(rule: Mapping[str, Any], namespace: str, peer: Peer) -> bool:
    _known(rule, "from", "ports")
    return not rule.get("from") or any(_is_peer(one, namespace, peer) for one in rule["from"])


def _is_peer(one: Mapping[str, Any], namespace: str, peer: Peer) -> bool:
    _known(one, "ipBlock", "namespaceSelector", "podSelector")
    if block := one.get("ipBlock"):
        _known(block, "cidr", "except")
        # Of pods, too: what a plugin makes of their addresses differs, so that a policy must hold either way.
        return _within(peer.ip, block["cidr"]) and not any(_within(peer.ip, but) for but in block.get("except", ()))
    if peer.namespace is None:
        return False
    if "namespaceSelector" in one:
        in_it = matches(one["namespaceSelector"], peer.namespace_labels)
    else:
        in_it = peer.namespace == namespace
    return in_it and matches(one.get("podSelector", {}), peer.labels)


def _within(ip: str, cidr: str) -> bool:
    address, network = ipaddress.ip_address(ip), ipaddress.ip_network(cidr)
    return address.version == network.version and address in network


def _ports(rule: Mapping[str, Any], target: Target) -> frozenset[int]:
    if not rule.get("ports"):
        return ALL_PORTS
    found: set[int] = set()
    for one in rule["ports"]:
        _known(one, "protocol", "port", "endPort")
        if one.get("protocol", "TCP") != "TCP":
            continue
        first = one.get("port")
        if first is None:
            return ALL_PORTS
        if isinstance(first, str):  # a name: nothing of a pod that has no such port
            found |= {target.ports[first]} & ALL_PORTS if first in target.ports else set()
        else:
            found |= set(range(first, one.get("endPort", first) + 1))
    return frozenset(found)


def matches(selector: Mapping[str, Any], labels: Labels) -> bool:
    """Whether a label selector selects such labels; an empty one selects all."""
    _known(selector, "matchLabels", "matchExpressions")
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        _holds(expression, labels) for expression in selector.get("matchExpressions", ())
    )


def _holds(expression: Mapping[str, Any], labels: Labels) -> bool:
    value, values = labels.get(expression["key"]), expression.get("values", [])
    match expression["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case operator:
            raise ValueError(f"no operator of label selectors: {operator}")


def _known(of: Mapping[str, Any], *keys: str) -> None:
    if more := of.keys() - set(keys):
        raise ValueError(f"not known: {sorted(more)}")
