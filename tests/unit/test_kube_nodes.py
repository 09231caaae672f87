"""What on a node says that it goes, and which drains follow, whatever way the words about nodes come."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cluster.config import KubernetesConfig, NodeNotice, NoticeOn
from cluster.control.happenings import LOST_AFTER_S
from cluster.control.leader import SETTLE_S
from cluster.control.nodes import (
    KNOWN_NOTICES,
    REPEAT_S,
    Drain,
    Node,
    NodeBook,
    NodesView,
    Placed,
    Reason,
    Taker,
    Told,
    in_words,
    notices,
    takers,
    wanted,
)
from cluster.types import ReplicaId

CONFIG = KubernetesConfig()
CORDON = frozenset({Reason("it is cordoned", "spec.unschedulable")})
NOTHING: frozenset[Reason] = frozenset()

GOES = {
    # kubernetes.io/docs/reference/labels-annotations-taints
    "cordoned": ("node.kubernetes.io/unschedulable", "", "NoSchedule"),
    "out of service": ("node.kubernetes.io/out-of-service", "nodeshutdown", "NoExecute"),
    "machine shut down": ("node.cloudprovider.kubernetes.io/shutdown", "", "NoSchedule"),
    # cluster-autoscaler: utils/taints, with the time as its value
    "cluster autoscaler": ("ToBeDeletedByClusterAutoscaler", "1764522000", "NoSchedule"),
    # karpenter.sh/docs/concepts/disruption; before 1.0 with a value
    "karpenter": ("karpenter.sh/disrupted", "", "NoSchedule"),
    "karpenter before 1.0": ("karpenter.sh/disruption", "disrupting", "NoSchedule"),
    # aws-node-termination-handler: TAINT_NODE
    "aws spot": ("aws-node-termination-handler/spot-itn", "event-1", "NoSchedule"),
    "aws maintenance": ("aws-node-termination-handler/scheduled-maintenance", "event-1", "NoSchedule"),
    "aws scaling group": ("aws-node-termination-handler/asg-lifecycle-termination", "event-1", "NoExecute"),
    "aws rebalance": ("aws-node-termination-handler/rebalance-recommendation", "event-1", "NoSchedule"),
    # GoogleCloudPlatform/k8s-node-termination-handler, as GKE deploys it
    "gke": ("cloud.google.com/impending-node-termination", "", "NoSchedule"),
    # learn.microsoft.com/azure/aks/node-auto-drain
    "aks": ("remediator.kubernetes.azure.com/unschedulable", "", "NoSchedule"),
}
STAYS = {
    "not ready": ("node.kubernetes.io/not-ready", "", "NoExecute"),
    "not reachable": ("node.kubernetes.io/unreachable", "", "NoExecute"),
    "short of memory": ("node.kubernetes.io/memory-pressure", "", "NoSchedule"),
    "a candidate of the autoscaler": ("DeletionCandidateOfClusterAutoscaler", "1764522000", "PreferNoSchedule"),
    "a pool of AKS for spot machines": ("kubernetes.azure.com/scalesetpriority", "spot", "NoSchedule"),
    "a pool of GKE for spot machines": ("cloud.google.com/gke-spot", "true", "NoSchedule"),
    "GPUs": ("nvidia.com/gpu", "present", "NoSchedule"),
    "a wish": ("karpenter.sh/disrupted", "", "PreferNoSchedule"),
}


@pytest.mark.parametrize("taint", GOES.values(), ids=GOES)
def test_what_each_tool_puts_on_a_node_that_goes_is_a_notice(taint: tuple[str, str, str]) -> None:
    (reason,) = notices(Node("n", taints=(("nvidia.com/gpu", "", "NoSchedule"), taint)), CONFIG)
    assert reason.by == f"taint {taint[0]}"
    assert notices(Node("n", taints=(taint,)), KubernetesConfig(known_notices=False)) == NOTHING


@pytest.mark.parametrize("taint", STAYS.values(), ids=STAYS)
def test_what_a_node_has_that_stays_is_none(taint: tuple[str, str, str]) -> None:
    assert notices(Node("n", taints=(taint,), conditions={"Ready": "False"}), CONFIG) == NOTHING


def test_a_cordon_and_a_deletion_are_notices_whatever_else_is_heeded() -> None:
    node, alone = Node("n", unschedulable=True, deleted=True), KubernetesConfig(known_notices=False)
    assert {reason.by for reason in notices(node, alone)} == {"spec.unschedulable", "metadata.deletionTimestamp"}
    assert notices(replace(node, deleted=False), alone) == CORDON


@pytest.mark.parametrize(
    ("notice", "has", "has_not"),
    [
        (
            {"on": "taint", "key": "k", "value": "v"},
            Node("n", taints=(("k", "v", "NoExecute"),)),
            Node("n", taints=(("k", "w", "NoExecute"),)),
        ),
        ({"on": "label", "key": "k"}, Node("n", labels={"k": ""}), Node("n", labels={"j": "k"})),
        ({"on": "label", "key": "k", "value": "v"}, Node("n", labels={"k": "v"}), Node("n", labels={"k": "w"})),
        ({"on": "annotation", "key": "k"}, Node("n", annotations={"k": "x"}), Node("n", labels={"k": "x"})),
        # learn.microsoft.com/azure/aks/node-problem-detector
        (
            {"on": "condition", "key": "VMEventScheduled"},
            Node("n", conditions={"VMEventScheduled": "True"}),
            Node("n", conditions={"VMEventScheduled": "False"}),
        ),
        (
            {"on": "condition", "key": "Ready", "value": "Unknown"},
            Node("n", conditions={"Ready": "Unknown"}),
            Node("n", conditions={"Ready": "True"}),
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_notice_of_the_profile_is_found_where_it_says(notice: dict[str, str], has: Node, has_not: Node) -> None:
    config = KubernetesConfig.model_validate({"notices": [notice | {"why": "it goes"}]})
    assert notices(has, config) == {Reason("it goes", f"{notice['on']} {notice['key']}")}
    assert notices(has_not, config) == NOTHING


def test_a_notice_that_is_none_is_refused_by_the_name_of_its_key() -> None:
    for wrong, key in (({"on": "name"}, "on"), ({"key": ""}, "key"), ({"why": ""}, "why"), ({"vlaue": "x"}, "vlaue")):
        with pytest.raises(ValidationError) as error:
            NodeNotice.model_validate({"on": "label", "key": "k", "why": "it goes"} | wrong)
        assert [e["loc"] for e in error.value.errors()] == [(key,)]


# --- which drains follow ---

R1, R2, R3 = map(ReplicaId, ("r1", "r2", "r3"))


def drains(
    book: NodeBook, placed: Iterable[Placed], now_s: float, told: dict[ReplicaId, Told] | None = None
) -> list[Drain]:
    """Where another replica takes work on a node that stays."""
    return alone(book, [*placed, Placed(ReplicaId("z"), "m", "", False)], now_s, told)


def alone(
    book: NodeBook, placed: Iterable[Placed], now_s: float, told: dict[ReplicaId, Told] | None = None
) -> list[Drain]:
    return looked(book, placed, now_s, {}, -math.inf, told)[0]


def looked(
    book: NodeBook,
    placed: Iterable[Placed],
    now_s: float,
    before: Mapping[ReplicaId, Taker],
    leads_since_s: float = -math.inf,
    told: dict[ReplicaId, Told] | None = None,
) -> tuple[list[Drain], dict[ReplicaId, Taker]]:
    """One look of several, and what the next is to know of it."""
    placed = list(placed)
    found = takers(before, placed, book.reasons, now_s)
    view = NodesView(book.reasons, book.clear_since_s, placed, told or {}, found, leads_since_s)
    return list(wanted(view, CONFIG, now_s)), found


def test_replicas_of_a_node_that_goes_drain_and_no_others() -> None:
    book = NodeBook()
    book.listed({"a": CORDON, "b": NOTHING}, 0.0)
    placed = [
        Placed(R3, "m", "c", False),
        Placed(R2, "m", "b", False),
        Placed(R1, "m", "a", False),
        Placed(ReplicaId("r0"), "m", "", False),
    ]
    assert drains(book, placed, 0.0) == [Drain(R1, True, "a", tuple(CORDON))]
    assert drains(book, [Placed(R1, "m", "a", True)], 0.0) == [], "it does already"


def test_an_api_server_that_is_away_or_shows_nothing_changes_nothing() -> None:
    placed = [Placed(R1, "m", "a", True), Placed(R2, "m", "b", False)]
    assert drains(NodeBook(), placed, 100.0) == [], "a controller that has not listed yet"
    book = NodeBook()
    book.listed({"a": CORDON, "b": NOTHING}, 0.0)
    book.listed({}, 1.0)
    assert drains(book, placed, 100.0) == [], "nobody knows these nodes any more"


def test_work_returns_once_the_node_has_had_no_notice_for_a_while() -> None:
    book, placed = NodeBook(), [Placed(R1, "m", "a", True)]
    book.changed("a", CORDON, 0.0)
    book.changed("a", NOTHING, 10.0)
    book.changed("a", NOTHING, 12.0)
    assert drains(book, placed, 10.0 + CONFIG.return_after_s - 0.1) == []
    assert drains(book, placed, 10.0 + CONFIG.return_after_s) == [Drain(R1, False, "a", ())]
    book.changed("a", CORDON, 14.0)
    assert drains(book, placed, 100.0) == [], "it came back before that"


def test_a_successor_takes_back_what_is_over_when_it_comes() -> None:
    book = NodeBook()
    book.listed({"a": NOTHING}, 50.0)
    assert drains(book, [Placed(R1, "m", "a", True)], 50.0) == [Drain(R1, False, "a", ())]


def test_who_does_not_do_what_it_was_told_is_told_again_and_not_at_once() -> None:
    book, placed = NodeBook(), [Placed(R1, "m", "a", False)]
    book.listed({"a": CORDON}, 0.0)
    told = {R1: Told(True, 5.0)}
    assert drains(book, placed, 5.0 + REPEAT_S / 2, told) == []
    assert len(drains(book, placed, 5.0 + REPEAT_S, told)) == 1
    assert len(drains(book, placed, 5.0, {R1: Told(False, 5.0)})) == 1, "another word than the last is not held back"


def test_none_drains_where_no_other_of_its_model_takes_work_on_a_node_that_stays() -> None:
    book = NodeBook()
    book.listed({"a": CORDON, "b": CORDON, "stays": NOTHING}, 0.0)
    both = [Placed(R1, "m", "a", False), Placed(R2, "m", "b", False)]
    assert alone(book, both, 0.0) == [], "a pool that is cordoned as a whole serves on"
    assert alone(book, [*both, Placed(R3, "other", "stays", False)], 0.0) == []
    assert alone(book, [*both, Placed(R3, "m", "stays", False, kept=True)], 0.0) == [], "an operator keeps it from work"
    only_itself = [Drain(R3, False, "stays", ())]
    assert alone(book, [*both, Placed(R3, "m", "stays", True)], 0.0) == only_itself, "not before it takes work"
    assert [o.replica_id for o in alone(book, [*both, Placed(R3, "m", "stays", False)], 0.0)] == [R1, R2]
    gone = [one._replace(drains=True) for one in both]
    assert alone(book, gone, 0.0) == [Drain(one.replica_id, False, one.node, tuple(CORDON)) for one in gone], (
        "the one that stayed is lost: they are there still"
    )


A, B = Placed(R1, "m", "a", True), Placed(R2, "m", "b", False)
"""The first drains, for its node goes; the second would take its work."""
BACK = Drain(R1, False, "a", tuple(CORDON))


def one_that_goes() -> NodeBook:
    book = NodeBook()
    book.listed({"a": CORDON, "b": NOTHING}, 0.0)
    return book


@given(st.lists(st.tuples(st.booleans(), st.floats(0.01, 2 * LOST_AFTER_S)), max_size=30))
def test_a_drain_is_taken_back_for_want_of_another_only_once_that_one_is_lost(looks: list[tuple[bool, float]]) -> None:
    """However often it is looked, and however long nobody looked: it counts from when it was missed first."""
    book, now_s, missed_s, known = one_that_goes(), 0.0, None, takers({}, [A, B], {}, 0.0)
    for is_heard, later_s in looks:
        now_s += later_s
        orders, known = looked(book, [A, B] if is_heard else [A], now_s, known)
        missed_s = None if is_heard else now_s if missed_s is None else missed_s
        assert orders == ([BACK] if missed_s is not None and now_s - missed_s >= LOST_AFTER_S else [])
        assert known.keys() <= {R2}


def test_a_drain_is_taken_back_at_once_where_the_other_is_heard_and_takes_no_work() -> None:
    _, known = looked(one_that_goes(), [A, B], 0.0, {})
    assert looked(one_that_goes(), [A, B._replace(kept=True)], 0.1, known)[0] == [BACK]


def test_nobody_begins_to_drain_for_one_that_is_not_heard_now() -> None:
    book = one_that_goes()
    _, known = looked(book, [A, B], 0.0, {})
    assert looked(book, [A._replace(drains=False)], 0.1, known)[0] == []


def test_who_begins_to_lead_orders_nothing_until_it_has_seen_what_there_is() -> None:
    book = one_that_goes()
    come = [A._replace(drains=False), B, Placed(R3, "m", "b", True)]
    assert looked(book, come, SETTLE_S - 0.01, {}, 0.0)[0] == []
    assert {order.replica_id for order in looked(book, come, SETTLE_S, {}, 0.0)[0]} == {R1, R3}
    assert looked(book, [A], LOST_AFTER_S - 0.01, {}, 0.0)[0] == [], "the other may be yet to come"
    assert looked(book, [A], LOST_AFTER_S, {}, 0.0)[0] == [BACK]


replicas = st.builds(
    Placed,
    st.sampled_from([ReplicaId(f"r{n}") for n in range(6)]),
    st.sampled_from(["m", "n"]),
    st.sampled_from(["a", "b", "c", ""]),
    st.booleans(),
    st.booleans(),
)


@given(
    st.dictionaries(st.sampled_from("abc"), st.sampled_from([NOTHING, CORDON])),
    st.lists(replicas, unique_by=lambda r: r[0]),
)
def test_no_order_leaves_a_model_without_a_replica_that_takes_work(
    nodes: dict[str, frozenset[Reason]], placed: list[Placed]
) -> None:
    book = NodeBook()
    book.listed(nodes, 0.0)
    after = {r.replica_id: r for r in placed}
    for order in alone(book, placed, 1000.0):
        after[order.replica_id] = after[order.replica_id]._replace(drains=order.drain)

    def served(replicas: Iterable[Placed]) -> set[str]:
        return {r.model for r in replicas if not (r.drains or r.kept)}

    assert served(after.values()) >= served(placed)


NODES = ("a", "b", "c")
reasons = st.sampled_from([NOTHING, CORDON, frozenset({Reason("it goes", "label x")})])
words = st.one_of(
    st.tuples(st.just("listed"), st.dictionaries(st.sampled_from(NODES), reasons)),
    st.tuples(st.just("changed"), st.tuples(st.sampled_from(NODES), reasons)),
    st.tuples(st.just("gone"), st.sampled_from(NODES)),
    st.tuples(st.just("replica leaves"), st.sampled_from(NODES)),
)


@given(st.lists(words, max_size=30), st.dictionaries(st.sampled_from(NODES), reasons), st.booleans())
def test_whatever_came_before_the_last_listing_alone_settles_who_drains(
    before: list[tuple[str, object]], last: dict[str, frozenset[Reason]], a_successor: bool
) -> None:
    """Changes, listings with gaps, nodes that go and come, a controller that begins anew with its listing: each replica does
    what it is told."""
    book, now_s = NodeBook(), 0.0
    draining = dict.fromkeys(NODES, False)
    told: dict[ReplicaId, Told] = {}

    def act() -> None:
        placed = [Placed(ReplicaId(node), "m", node, drains) for node, drains in draining.items()]
        for order in drains_of(book, placed):
            told[order.replica_id] = Told(order.drain, now_s)
            draining[order.node] = order.drain

    def drains_of(book: NodeBook, placed: list[Placed]) -> list[Drain]:
        return drains(book, placed, now_s, told)

    for kind, what in [*before, ("listed", last)]:
        now_s += 0.7
        if (kind, what) == ("listed", last) and a_successor:
            book = NodeBook()
            told.clear()
        match kind, what:
            case "listed", dict():
                book.listed(what, now_s)
            case "changed", (str() as name, frozenset() as on_it):
                book.changed(name, on_it, now_s)
            case "gone", str():
                book.gone(what)
            case "replica leaves", str():
                draining[what] = False  # and another comes in its place
        act()
    at_last = dict(draining)
    now_s += CONFIG.return_after_s + REPEAT_S
    act()
    for name in NODES:
        assert draining[name] is (bool(last[name]) if name in last else at_last[name])
    act()
    assert drains_of(book, [Placed(ReplicaId(n), "m", n, d) for n, d in draining.items()]) == [], (
        "and nothing is left to say"
    )


def test_reasons_are_told_in_words_always_in_the_same_order() -> None:
    both = [Reason("it is cordoned", "spec.unschedulable"), Reason("Google ends its machine", "taint x")]
    said = "Google ends its machine (taint x); it is cordoned (spec.unschedulable)"
    assert in_words(both) == in_words(both[::-1]) == said


def test_each_place_of_a_notice_is_looked_at() -> None:
    everywhere = Node(
        "n", taints=(("k", "", "NoExecute"),), conditions={"k": "True"}, labels={"k": ""}, annotations={"k": ""}
    )
    for place in NoticeOn:
        config = KubernetesConfig(notices=(NodeNotice(on=place, key="k", why="x"),))
        assert len(notices(everywhere, config)) == 1


def test_the_page_names_every_notice_that_is_known_and_no_other() -> None:
    page = (Path(__file__).parents[2] / "ops" / "docs" / "kubernetes-nodes.md").read_text()
    table = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    told = {key for cell in table for key in re.findall(r"`([^`]+)`", cell)} - {"spec.unschedulable"}
    assert told == {notice.key for notice in KNOWN_NOTICES} == {taint[0] for taint in GOES.values()}
