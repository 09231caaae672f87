"""Which Events are written: what is new, in words, like ones counted, and no more than people can read."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from cluster.config import KubernetesConfig
from cluster.control.happenings import (
    BURST,
    KEPT,
    LIKE_S,
    LOST_AFTER_S,
    TELL_COUNT_S,
    WAITING,
    Chronicle,
    EventBook,
    Happening,
    Picture,
    ReplicaSeen,
    ScaleSeen,
    Written,
)
from cluster.types import DrainedBy, Generation, PodRef, ReplicaId
from deployments.kube.objects import event_body

LEADS = Generation(3, "c")
POD = PodRef("pod-1", "uid-1")
NONE: frozenset[DrainedBy] = frozenset()
ONE = ReplicaSeen(Generation(1, "r"), "m", "node-1", POD, NONE)
ID = ReplicaId("r1")


def picture(drained_by: frozenset[DrainedBy] | None = NONE, leads: Generation = LEADS, wanted: int = 2) -> Picture:
    """`drained_by` None: the replica is not there."""
    replicas = {} if drained_by is None else {ID: replace(ONE, drained_by=drained_by)}
    return Picture(leads, replicas, {"m": ScaleSeen(wanted, "a request waits")}, {"node-1": "it is cordoned (x)"})


def begun(drained_by: frozenset[DrainedBy] | None = NONE) -> Chronicle:
    chronicle = Chronicle()
    (leads,) = chronicle.observe(picture(drained_by), 0.0)
    assert (leads.reason, leads.note) == ("ControllerLeads", "this controller leads, as generation 3")
    return chronicle


def test_what_was_so_before_this_controller_led_is_not_told_as_new() -> None:
    chronicle = begun(frozenset({DrainedBy.NODE}))
    assert chronicle.observe(picture(frozenset({DrainedBy.NODE})), 1.0) == ()
    (leads,) = chronicle.observe(picture(NONE, Generation(9, "c")), 2.0)
    assert leads.reason == "ControllerLeads"


def test_each_drain_is_told_with_who_asked_for_it_and_so_is_its_end() -> None:
    chronicle, by = begun(), DrainedBy
    (began,) = chronicle.observe(picture(frozenset({by.NODE})), 1.0)
    assert (began.reason, began.pod, began.node, began.warning) == ("DrainBegan", POD, "node-1", False)
    assert began.note.endswith("node node-1: it is cordoned (x)")
    (operators,) = chronicle.observe(picture(frozenset({by.NODE, by.OPERATOR})), 2.0)
    assert operators.note.endswith("an operator asked for it")
    stays = replace(picture(frozenset({by.OPERATOR})), going={})
    (ended,) = chronicle.observe(stays, 3.0)
    assert ended.note == (
        "r1 of m takes work again once nothing else keeps it from work: node node-1 has no notice any more"
    )
    (ended,) = chronicle.observe(picture(NONE), 4.0)
    assert (ended.reason, ended.note) == ("DrainEnded", "r1 of m takes work again: it was asked for")
    (scaled,) = chronicle.observe(picture(frozenset({by.SCALE})), 5.0)
    assert scaled.note.endswith("fewer replicas are needed")


def test_one_that_works_on_although_its_node_goes_is_told_with_that_why() -> None:
    chronicle = begun(frozenset({DrainedBy.NODE}))
    (ended,) = chronicle.observe(picture(NONE), 1.0)
    assert ended.note == "r1 of m takes work again: no other would take its work"


def test_a_replica_is_lost_once_it_stays_away_and_has_left_where_it_drained() -> None:
    chronicle = begun()
    assert chronicle.observe(picture(None), 1.0) == ()
    assert chronicle.observe(picture(NONE), 2.0) == (), "its link was made again"
    assert chronicle.observe(picture(None), 3.0) == ()
    assert chronicle.observe(picture(None), 3.0 + LOST_AFTER_S - 0.1) == ()
    (lost,) = chronicle.observe(picture(None), 3.0 + LOST_AFTER_S)
    assert (lost.reason, lost.warning, lost.pod) == ("ReplicaLost", True, POD)
    assert chronicle.observe(picture(None), 60.0) == (), "told once"

    chronicle = begun(frozenset({DrainedBy.SCALE}))
    chronicle.observe(picture(None), 1.0)
    (left,) = chronicle.observe(picture(None), 1.0 + LOST_AFTER_S)
    assert (left.reason, left.warning) == ("ReplicaLeft", False)


def test_another_incarnation_by_the_same_name_means_that_the_first_is_lost() -> None:
    chronicle = begun()
    chronicle.observe(picture(None), 1.0)
    other = Picture(LEADS, {ID: replace(ONE, generation=Generation(2, "s"))}, {}, {})
    assert [h.reason for h in chronicle.observe(other, 2.0)] == ["ReplicaLost"]


def test_a_decision_about_scale_is_told_with_its_why() -> None:
    (scaled,) = begun().observe(picture(wanted=4), 1.0)
    assert (scaled.reason, scaled.note) == ("Scaled", "m: 2 -> 4 replicas wanted: a request waits")


# --- which are written ---


def happening(number: int = 0) -> Happening:
    return Happening("Reason", "Act", f"note {number}", pod=POD, node="node-1")


def all_due(book: EventBook, now_s: float) -> list[Written]:
    made = []
    while (written := book.due(now_s)) is not None:
        made.append(written)
    return made


def test_what_happens_again_is_one_event_whose_count_is_written_now_and_then() -> None:
    book = EventBook(60, "f.c")
    book.note(happening(), 0.0, 1000.0)
    (first,) = all_due(book, 0.0)
    assert (first.count, first.at_unix_s) == (1, 1000.0)
    for second in range(1, 10):
        book.note(happening(), float(second), 1000.0 + second)
    assert all_due(book, 10.0) == []
    (again,) = all_due(book, TELL_COUNT_S)
    assert (again.name, again.count, again.at_unix_s) == (first.name, 10, 1009.0)
    assert all_due(book, 10 * TELL_COUNT_S) == [], "nothing has happened since"
    later_s = 10 * TELL_COUNT_S + LIKE_S
    book.note(happening(), later_s, 2000.0)
    (new,) = all_due(book, later_s)
    assert (new.count, new.name != first.name) == (1, True), "so late it is another"


def test_what_happens_twice_before_it_is_written_is_written_once_and_then_counted() -> None:
    book = EventBook(60, "f.c")
    book.note(happening(), 0.0, 1000.0)
    book.note(happening(), 0.1, 1000.1)
    (first,) = all_due(book, 1.0)
    assert first.count == 1
    (counted,) = all_due(book, 1.0 + TELL_COUNT_S)
    assert counted.count == 2


def test_the_rate_and_what_waits_have_an_end_and_what_is_not_written_is_counted() -> None:
    book = EventBook(30, "f.c")
    for number in range(1000):
        book.note(happening(number), 0.0, 1000.0)
    assert book.dropped == 1000 - WAITING
    assert len(all_due(book, 0.0)) == BURST
    assert len(all_due(book, 20.0)) == 10, "30 a minute"
    assert len(all_due(book, 3600.0)) == BURST, "no more are saved up"
    rest = [len(all_due(book, 3600.0 * hours)) for hours in range(2, 6)]
    assert book.dropped + BURST + 10 + BURST + sum(rest) == 1000


@given(st.lists(st.tuples(st.integers(0, 400), st.floats(0, 30), st.booleans(), st.booleans())))
def test_whatever_happens_memory_is_bounded_and_no_two_events_have_one_name(
    steps: list[tuple[int, float, bool, bool]],
) -> None:
    book, now_s, new = EventBook(600, "f.c"), 0.0, []
    for number, pause_s, write, fails in steps:
        now_s += pause_s
        for more in range(number, number + 40):
            book.note(happening(more), now_s, now_s)
        if write and (written := book.due(now_s)) is not None:
            if written.count == 1:
                new.append(written.name)
            if fails:
                book.failed(written)
        assert len(book._known) <= KEPT
        assert len(book._waiting) <= WAITING
    assert len(set(new)) == len(new)


def test_one_that_fails_is_dropped_and_the_next_like_it_is_new() -> None:
    book = EventBook(60, "f.c")
    book.note(happening(), 0.0, 1000.0)
    (first,) = all_due(book, 0.0)
    book.failed(first)
    assert book.dropped == 1
    book.note(happening(), 1.0, 1001.0)
    (second,) = all_due(book, 1.0)
    assert (second.count, second.name != first.name) == (1, True)


def test_one_that_could_not_be_written_now_is_the_next_and_keeps_its_name() -> None:
    book = EventBook(60, "f.c")
    book.note(happening(1), 0.0, 1000.0)
    book.note(happening(2), 0.0, 1000.0)
    first = book.due(0.0)
    assert first is not None
    book.again(first)
    assert [w.name for w in all_due(book, 0.0)] == [first.name, "f.c.2"]
    book.note(happening(1), 1.0, 1001.0)
    (counted,) = all_due(book, TELL_COUNT_S)
    book.again(counted)
    assert all_due(book, 2 * TELL_COUNT_S) == [counted]
    assert book.dropped == 0


# --- as the API has it ---

CONFIG = KubernetesConfig(namespace="ns", name="f")


def test_an_event_is_about_the_pod_and_fits_what_the_api_takes() -> None:
    long = replace(happening(), note="ü" * 2000, warning=True)
    body = event_body(CONFIG, Written(long, "f.c.1", 0.0, 1), PodRef("controller"), "h" * 500)
    assert body["regarding"] == {"apiVersion": "v1", "kind": "Pod", "name": "pod-1", "uid": "uid-1", "namespace": "ns"}
    assert body["related"] == {"apiVersion": "v1", "kind": "Node", "name": "node-1"}
    assert (body["type"], body["eventTime"]) == ("Warning", "1970-01-01T00:00:00.000000Z")
    assert body["note"] == "ü" * 512, "1024 bytes, and no half of a letter"
    assert len(body["reportingInstance"]) == 128


def test_where_there_is_no_replicas_pod_it_is_about_the_controllers_and_else_about_the_lease() -> None:
    event = Written(replace(happening(), pod=None, node=""), "f.c.1", 0.0, 1)
    assert event_body(CONFIG, event, PodRef("controller"), "h")["regarding"]["name"] == "controller"
    outside = event_body(CONFIG, event, None, "h")
    assert (outside["regarding"]["kind"], outside["regarding"]["name"]) == ("Lease", "f")
    assert "related" not in outside
