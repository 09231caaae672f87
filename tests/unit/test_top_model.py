"""What `forebay top` shows is the arithmetic of what routers said."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.top.model import DECISIONS_KEPT, ClassRow, Picture, ReplicaRow, Watch, cells, increase, quantile
from ops.top.said import Answer, Move, RouterOfCluster, Trouble, read_metrics
from tests.unit.top_kit import answer, band, cluster, decisions, page, replica, said, told


def look(watch: Watch, *found: Answer | Trouble) -> Picture:
    picture = watch.take(found, 1.0)
    assert picture is not None
    return picture


def row(picture: Picture, name: str) -> ClassRow:
    (found,) = [row for row in picture.models[0].classes if row.priority_class == name]
    return found


# --- the queue ---


def test_the_queue_is_the_sum_over_all_routers_and_its_oldest_the_oldest_of_them() -> None:
    first = said(band("interactive", 1, 2, 0.5), band("batch", 4, 1, 7.0))
    second = said(band("batch", 3, 5, 9.0), band("batch", 1, 0, 2.0))
    picture = look(Watch(), answer(first, of=cluster(routers=[[first], [second]])))
    assert [(r.priority_class, r.priority, r.queued, r.running, r.oldest_s) for r in picture.models[0].classes] == [
        ("interactive", 10, 1, 2, 0.5),
        ("standard", 0, 0, 0, None),
        ("batch", -10, 8, 6, 9.0),
    ]
    assert (len(picture.urls), picture.routers) == (1, 2), "two queues are shown, and one router was asked"


def test_routers_that_were_asked_are_told_of_by_themselves_and_not_twice() -> None:
    models = said(band("batch", 3, 0))
    both = [answer(models, url=url, of=cluster(routers=[[models], [models]])) for url in ("http://a", "http://b")]
    assert row(look(Watch(), *both), "batch").queued == 6
    one_feed = [answer(models, url=f"http://{n}", recent=decisions(feed="same")) for n in range(2)]
    picture = look(Watch(), *one_feed)
    assert (row(picture, "batch").queued, len(picture.urls)) == (3, 1), "two addresses of one router"


def test_a_router_that_stands_by_is_not_one_that_is_missing() -> None:
    models = said(band("batch", 3, 0))
    there = cluster(routers=[[models]])
    standing_by = RouterOfCluster("", (said(),))
    there = msgspec.structs.replace(there, routers=(*there.routers, standing_by))
    assert look(Watch(), answer(models, of=there)).routers == 1


def test_without_a_controller_there_is_still_a_queue() -> None:
    picture = look(Watch(), answer(said(band("batch", 3, 0))))
    assert (row(picture, "batch").queued, picture.controller, picture.models[0].replicas) == (3, None, ())


# --- replicas ---


def test_blocks_are_those_of_the_class_that_a_priority_reaches_running_and_paused() -> None:
    there = replica(
        "r", running=[(10, 1, 5), (12, 2, 7), (3, 1, 11)], waiting=[(-10, 3, 20), (-99, 1, 2)], free=40, cached=9
    )
    (shown,) = look(Watch(), answer(of=cluster(there))).models[0].replicas
    assert shown == ReplicaRow(
        replica_id="r", host="host", state="ready", running=4, slots=8, waiting=4, blocks_total=100, blocks_free=40,
        blocks_cached=9, blocks_by_class={"interactive": 12, "standard": 11, "batch": 22},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("there", "unroutable", "state"),
    [
        (replica("r"), {}, "ready"),
        (replica("r", state="draining"), {"r": "draining"}, "draining"),
        (replica("r"), {"r": "backing_off"}, "backing off"),
        (replica("r", age_s=3.2), {"r": "silent"}, "silent 3 s"),
    ],
)
def test_the_state_of_a_replica_is_what_routers_make_of_it(
    there: object, unroutable: dict[str, str], state: str
) -> None:
    models = said(unroutable=unroutable)
    (shown,) = look(Watch(), answer(models, of=cluster(there))).models[0].replicas  # type: ignore[arg-type]
    assert shown.state == state


def test_without_a_controller_replicas_are_those_that_the_router_knows() -> None:
    gauges = {
        "slots": 8, "running_requests": 5, "waiting_requests": 2, "kv_blocks": 100, "kv_blocks_free": 40,
        "kv_blocks_cached": 9, "host_blocks_free": 77,
    }  # fmt: skip
    lines = []
    for name, value in gauges.items():
        lines += [f"# TYPE forebay_replica_{name} gauge", f'forebay_replica_{name}{{model="m",replica="r"}} {value}']
    held = 'forebay_replica_class_kv_blocks{{model="m",replica="r",priority_class="{}"}} {}'
    lines += ["# TYPE forebay_replica_class_kv_blocks gauge", held.format("interactive", 12), held.format("batch", 22)]
    there = replica("r", running=[(10, 5, 12)], waiting=[(-10, 2, 22)], free=40, cached=9)
    for unroutable in ({}, {"r": "backing_off"}):
        models = said(unroutable=unroutable)
        (known,) = look(Watch(), answer(models, of=cluster(there))).models[0].replicas
        (seen,) = look(Watch(), answer(models, metrics=page(more=lines))).models[0].replicas
        assert seen == msgspec.structs.replace(known, host=""), "the same figures, by another way"


def test_each_model_has_its_own_replicas_and_moves() -> None:
    moves = [Move(f"cmpl-{age}", "batch", "r1", "r2", "asked", float(age), "it drains") for age in (1, 3)]
    models = (said(band("batch", 1, 0)), said(band("batch", 5, 0), model="n", moves=moves))
    picture = look(Watch(), answer(*models, of=cluster(replica("z"), replica("b", model="n"), replica("a"))))
    assert [[r.replica_id for r in m.replicas] for m in picture.models] == [["a", "z"], ["b"]]
    assert [m.classes[2].queued for m in picture.models] == [1, 5]
    assert [[move.request_id for move in m.moves] for m in picture.models] == [[], ["cmpl-3", "cmpl-1"]]


# --- rates ---


def test_tokens_per_second_are_what_has_come_over_the_time_that_has_passed() -> None:
    watch = Watch()
    assert row(look(watch, answer(at_s=100.0, metrics=page(tokens=1000))), "standard").tokens_per_s is None
    picture = look(watch, answer(at_s=102.0, metrics=page(tokens=1300)))
    assert row(picture, "standard").tokens_per_s == 150.0
    assert row(picture, "batch").tokens_per_s == 0.0
    for second in range(3, 9):
        look(watch, answer(at_s=100.0 + second, metrics=page(tokens=1300)))
    assert row(look(watch, answer(at_s=109.0, metrics=page(tokens=1310))), "standard").tokens_per_s == 2.0, "of 5 s"


def test_a_counter_that_fell_began_anew() -> None:
    watch = Watch()
    look(watch, answer(at_s=0.0, metrics=page(tokens=1000)))
    assert row(look(watch, answer(at_s=2.0, metrics=page(tokens=50))), "standard").tokens_per_s == 25.0
    assert increase({("n", ()): 5.0}, {("n", ()): 7.0, ("new", ()): 3.0}) == {("n", ()): 2.0, ("new", ()): 3.0}


def test_rates_of_several_routers_add_up_whichever_came_when() -> None:
    watch = Watch()
    look(watch, answer(at_s=0.0, metrics=page(tokens=100)))
    second = answer(url="http://b", at_s=1.0, metrics=page(tokens=10**6))
    picture = look(watch, answer(at_s=1.0, metrics=page(tokens=110)), second)
    assert row(picture, "standard").tokens_per_s == 10.0, (
        "what the second did before it was asked is not of this second"
    )
    second = answer(url="http://b", at_s=2.0, metrics=page(tokens=10**6 + 30))
    picture = look(watch, answer(at_s=2.0, metrics=page(tokens=120)), second)
    assert row(picture, "standard").tokens_per_s == pytest.approx(20 / 2 + 30 / 1), "each over its own time"


def test_first_tokens_are_those_of_the_last_minute_and_of_the_first_look_those_since_the_start() -> None:
    watch = Watch()
    picture = look(watch, answer(at_s=0.0, metrics=page(first_tokens={0.1: 90, 0.5: 100, 1.0: 100})))
    assert picture.window_s is None
    assert row(picture, "standard").first_tokens == 100
    assert row(picture, "standard").ttft_p50_s == pytest.approx(0.1 * 50 / 90)
    picture = look(watch, answer(at_s=30.0, metrics=page(first_tokens={0.1: 90, 0.5: 104, 1.0: 108})))
    shown = row(picture, "standard")
    assert (picture.window_s, shown.first_tokens) == (30.0, 8)
    assert shown.ttft_p50_s == pytest.approx(0.5), "the fourth of eight is the last in its bucket"
    assert shown.ttft_p99_s == pytest.approx(0.5 + 0.5 * (0.99 * 8 - 4) / 4)
    for at_s in (60.0, 90.0, 120.0):
        picture = look(watch, answer(at_s=at_s, metrics=page(first_tokens={0.1: 90, 0.5: 104, 1.0: 108})))
    shown = row(picture, "standard")
    assert (picture.window_s, shown.first_tokens, shown.ttft_p50_s) == (60.0, 0, None)
    picture = look(Watch(window_s=None), answer(metrics=page(first_tokens={0.1: 7})), answer(url="http://b"))
    assert (picture.window_s, row(picture, "standard").first_tokens) == (None, 7)


def test_a_quantile_is_where_its_rank_falls_in_its_bucket() -> None:
    buckets = [(0.1, 2.0), (0.2, 2.0), (1.0, 10.0), (math.inf, 12.0)]
    assert quantile(buckets, 0.5) == pytest.approx(0.2 + 0.8 * (6 - 2) / 8)
    assert quantile(buckets, 1 / 12) == pytest.approx(0.05)
    assert quantile(buckets, 0.99) == 1.0, "beyond the highest bound nothing is known"
    assert quantile([(0.1, 0.0), (math.inf, 0.0)], 0.5) is None
    assert quantile([], 0.5) is None


@given(
    st.lists(st.floats(0.0, 4.0, allow_nan=False), min_size=1, max_size=60),
    st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]),
)
def test_a_quantile_lies_in_the_bucket_of_the_value_that_it_estimates(values: list[float], q: float) -> None:
    bounds = [0.5, 1.0, 2.0, 3.0, 4.0, math.inf]
    estimate = quantile([(le, float(sum(v <= le for v in values))) for le in bounds], q)
    exact = sorted(values)[math.ceil(q * len(values)) - 1]
    upper = min(le for le in bounds if exact <= le)
    lower = max((le for le in [0.0, *bounds] if le < exact), default=0.0)
    assert estimate is not None
    assert lower <= estimate <= upper


def test_preemptions_and_moves_are_counted_by_what_became_of_them() -> None:
    lines = [
        "# TYPE forebay_preemptions counter",
        'forebay_preemptions_total{model="m",priority_class="batch",cause="urgent",means="pause"} 4',
        'forebay_preemptions_total{model="m",priority_class="standard",cause="kv_full",means="pause"} 1',
        'forebay_preemptions_total{model="m",priority_class="batch",cause="urgent",means="swap"} 0',
        'forebay_preemptions_total{model="n",priority_class="batch",cause="urgent",means="swap"} 9',
        "# TYPE forebay_moves counter",
        'forebay_moves_total{model="m",outcome="moved"} 2',
    ]
    (shown,) = look(Watch(), answer(metrics=page(more=lines))).models
    assert (shown.preempted, shown.moved) == ({"pause": 5}, {"moved": 2})


def test_of_a_page_of_metrics_what_is_not_shown_is_not_read() -> None:
    samples, gauges = read_metrics(page(tokens=3) + '# TYPE other counter\nother_total{a="b"} 1\nother_total{broken\n')
    assert {name for name, _ in samples} == {
        "forebay_output_tokens_total", "forebay_ttft_seconds_bucket", "forebay_ttft_seconds_count",
    }  # fmt: skip
    assert not gauges


# --- decisions ---


def test_decisions_of_all_routers_are_in_order_of_time_each_once_and_those_missed_are_counted() -> None:
    watch = Watch()
    assert watch.after("http://a") is None
    first = answer(recent=decisions(told(1, 10.0), told(2, 12.0), feed="a"))
    second = answer(url="http://b", recent=decisions(told(7, 11.0), feed="b"))
    picture = look(watch, first, second)
    assert [(d.told.sequence, d.url) for d in picture.decisions] == [(2, "http://a"), (7, "http://b"), (1, "http://a")]
    assert (watch.after("http://a"), watch.after("http://b")) == (2, 7)
    picture = look(watch, answer(recent=decisions(told(9, 13.0), feed="a", missed=6)), second)
    assert ([d.told.sequence for d in picture.decisions], picture.missed) == ([9, 2, 7, 1], 6)


def test_a_router_that_started_anew_is_asked_from_the_beginning() -> None:
    watch = Watch()
    look(watch, answer(recent=decisions(told(50, 1.0), feed="old")))
    look(watch, answer(recent=decisions(told(60, 5.0), feed="new", last=60)))
    assert watch.after("http://a") is None, "what it had decided before the fiftieth was not told"
    picture = look(watch, answer(recent=decisions(told(59, 4.0), told(60, 5.0), feed="new")))
    assert [d.told.sequence for d in picture.decisions] == [60, 59, 50]
    assert watch.after("http://a") == 60


def test_decisions_and_samples_that_are_remembered_are_bounded() -> None:
    watch = Watch()
    for number in range(20):
        made = [told(100 * number + k, 100.0 * number + k) for k in range(100)]
        picture = look(watch, answer(at_s=float(number), recent=decisions(*made)))
    assert [d.told.sequence for d in picture.decisions] == list(range(1999, 1999 - DECISIONS_KEPT, -1))
    for number in range(2000):
        look(watch, answer(at_s=100 + 0.01 * number))
    assert len(watch._sampled["http://a"]) <= 600


# --- what is wrong ---


def test_one_router_of_two_that_does_not_answer_is_said_and_none_is_no_picture() -> None:
    gone = Trouble("http://b", "http://b does not answer")
    assert look(Watch(), answer(), gone).notes == ("http://b does not answer",)
    assert Watch().take([gone], 1.0) is None


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=7), st.integers(7, 200))
def test_a_bar_is_filled_by_size_and_what_is_not_nothing_is_seen(parts: list[int], width: int) -> None:
    given_cells = cells(parts, width)
    assert sum(given_cells) == (width if sum(parts) else 0)
    for part, count in zip(parts, given_cells, strict=True):
        assert count >= 0
        assert (count > 0) == (part > 0)
        assert abs(count - width * part / max(1, sum(parts))) <= len(parts)
