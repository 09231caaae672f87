"""What arrives at a simulated cluster: so much as is asked, with recorded lengths, the same for the same seed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from cluster.types import Outcome, RequestId
from ops.bench.lengths import Lengths
from ops.bench.trace import TraceRequest
from ops.errors import CommandError
from ops.sim.values import Arrival, RequestRecord
from ops.sim.workload import Backlog, Mix, Span, fitting, held_to_fill, parse_mix, read_lengths, recorded_rate_rps
from ops.sim.workload import arrivals as taken_one_by_one

MIX = parse_mix([])


def arrivals(requests: list[TraceRequest], mix: Mix, span: Span, seed: int) -> list[Arrival]:
    return list(taken_one_by_one(requests, mix, span, seed))


def steady(count: int = 200, gap_s: float = 0.5) -> list[TraceRequest]:
    """One in four is code; each has lengths of its own."""
    return [TraceRequest(k * gap_s, "code" if k % 4 == 0 else "conversation", 100 + k, 10 + k) for k in range(count)]


def burst(count: int = 200) -> list[TraceRequest]:
    """All within a second of every hundred."""
    return [
        *(TraceRequest(k / count, "conversation", 100, 10) for k in range(count)),
        TraceRequest(99.5, "conversation", 100, 10),
    ]


def busiest_second(coming: list[Arrival]) -> float:
    """The share of all that came within the second in which most came."""
    return max(Counter(int(a.at_s) for a in coming).values()) / len(coming)


@pytest.mark.parametrize("synchronised", [False, True])
def test_so_many_arrive_as_the_rate_asks_in_order_and_within_the_span(synchronised: bool) -> None:
    coming = arrivals(steady(), MIX, Span(30.0, 40.0, synchronised), seed=1)
    assert len(coming) == 1200
    assert [a.at_s for a in coming] == sorted(a.at_s for a in coming)
    assert all(0 <= a.at_s < 30 for a in coming)
    assert len({a.request_id for a in coming}) == 1200


def test_each_arrival_has_the_lengths_and_the_class_of_a_recorded_request() -> None:
    recorded = {(r.prompt_tokens, r.output_tokens, MIX.classes[r.service]) for r in steady()}
    coming = arrivals(steady(), MIX, Span(20.0, 20.0), seed=2)
    assert {(a.prompt_tokens, a.output_tokens, a.priority_class) for a in coming} <= recorded


def test_without_a_share_a_service_keeps_its_recorded_part() -> None:
    classes = Counter(a.priority_class for a in arrivals(steady(), MIX, Span(50.0, 8.0), seed=3))
    assert classes == {"interactive": 100, "standard": 300}


def test_a_share_is_the_part_of_all_requests_that_a_service_is_thinned_to() -> None:
    mix = parse_mix(["code=interactive:0.1,conversation=standard"])
    classes = Counter(a.priority_class for a in arrivals(steady(), mix, Span(50.0, 8.0), seed=3))
    assert classes == {"interactive": 40, "standard": 360}


def test_the_same_seed_gives_the_same_arrivals_and_another_others() -> None:
    first, again, other = (arrivals(steady(), MIX, Span(20.0, 10.0), seed=seed) for seed in (4, 4, 5))
    assert first == again
    assert first != other


def test_synchronised_copies_burst_together_and_shifted_ones_do_not() -> None:
    """The trace is one burst in a hundred seconds: synchronised so is what arrives, shifted it is spread."""
    together = arrivals(burst(), MIX, Span(100.5, 40.0, synchronised=True), seed=6)
    shifted = arrivals(burst(), MIX, Span(100.5, 40.0), seed=6)
    assert busiest_second(together) > 0.4
    assert busiest_second(shifted) < 0.2


def test_the_recorded_rate_is_requests_by_mean_gap() -> None:
    assert recorded_rate_rps(steady()) == pytest.approx(2.0)


def test_equal_blocks_are_equal_tokens_in_one_copy_alone_and_the_last_token_is_the_requests_own() -> None:
    trace = [
        TraceRequest(0.0, "mooncake", 1024, 5, (1, 2)),
        TraceRequest(1.0, "mooncake", 1000, 5, (1, 3)),
    ]
    coming = arrivals(trace, MIX, Span(2.0, 4.0), seed=0)
    by_first = Counter(a.prefix_ids[0] for a in coming)
    assert max(by_first.values()) <= 2  # two of each copy
    assert all(len(a.prefix_ids) == a.prompt_tokens - 1 for a in coming)
    shared = [a for a in coming if by_first[a.prefix_ids[0]] == 2]
    assert shared
    for one in shared:
        (other,) = (a for a in coming if a is not one and a.prefix_ids[0] == one.prefix_ids[0])
        assert one.prefix_ids[:512] == other.prefix_ids[:512]
        assert one.prefix_ids[512] != other.prefix_ids[512]


def test_many_copies_of_blocks_with_great_names_are_as_few_small_tokens_as_there_are_blocks() -> None:
    trace = [TraceRequest(k * 1.0, "mooncake", 1030, 5, (180_000 + k, 181_000 + k)) for k in range(50)]
    coming = arrivals(trace, MIX, Span(50.0, 20.0), seed=0)
    tokens = {token for a in coming for token in a.prefix_ids}
    assert len(tokens) <= 2 * len(coming)
    assert 2 <= min(tokens) <= max(tokens) < 2 + len(tokens)
    assert len(tokens) > 1000  # of twenty copies


def test_what_the_model_has_no_room_for_is_left_out() -> None:
    assert [r.prompt_tokens for r in fitting(steady(), 130)] == [100 + k for k in range(11)]
    with pytest.raises(CommandError, match="no request has at most 50 tokens"):
        fitting(steady(), 50)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("code", "not of the form"),
        ("code=urgent", "unknown class 'urgent'"),
        ("code=interactive:many", "is no share"),
        ("code=interactive:0", "above 0"),
        ("code=interactive:0.6,conversation=standard:0.6", "add up to 1.2"),
    ],
)
def test_a_mix_that_cannot_be_is_refused_in_one_line(text: str, says: str) -> None:
    with pytest.raises(CommandError, match=says):
        parse_mix([text])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("chat=standard:0.5", "the trace has no service 'chat'"),
        ("code=interactive:0.1,conversation=standard:0.1", "add up to 0.2, not 1"),
    ],
)
def test_a_mix_that_does_not_suit_the_trace_is_refused(text: str, says: str) -> None:
    with pytest.raises(CommandError, match=says):
        arrivals(steady(), parse_mix([text]), Span(10.0, 1.0), seed=0)


def test_a_service_without_a_class_is_named() -> None:
    with pytest.raises(CommandError, match="service 'search' of the trace has no class"):
        arrivals([TraceRequest(0.0, "search", 1, 1)], MIX, Span(10.0, 1.0), seed=0)


def test_a_span_in_which_too_little_was_recorded_says_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ops.sim.workload.MAX_COPIES", 3)
    with pytest.raises(CommandError, match="lengthen --duration"):
        arrivals(burst(), MIX, Span(1.0, 10_000.0, synchronised=True), seed=0)


def ended(priority_class: str, outcome: Outcome = Outcome.FINISHED) -> RequestRecord:
    return RequestRecord(RequestId("x"), priority_class, 0.0, 1, 1, outcome=outcome)


def test_a_backlog_is_always_as_long_and_ends_when_it_is_told_to() -> None:
    backlog = Backlog([Lengths(100, 10), Lengths(200, 20)], held=5, seed=0, until_s=60.0)
    first = backlog.first()
    assert len(first) == 5
    assert {(a.prompt_tokens, a.output_tokens) for a in first} <= {(100, 10), (200, 20)}
    (next_one,) = backlog.follow(ended("batch"), 7.0)
    assert next_one.at_s == 7.0
    assert next_one.request_id not in {a.request_id for a in first}
    assert not list(backlog.follow(ended("standard"), 7.0))
    assert not list(backlog.follow(ended("batch"), 60.0))


def test_a_refused_backlog_request_is_not_sent_again_at_once() -> None:
    backlog = Backlog([Lengths(100, 10)], held=1, seed=0)
    (again,) = backlog.follow(ended("batch", Outcome.REJECTED_QUEUE_FULL), 7.0)
    assert again.at_s > 7.0


def test_what_fills_a_cluster_is_bound_by_slots_or_by_memory() -> None:
    lengths = [Lengths(900, 100)] * 3
    assert held_to_fill(lengths, slots=4, pool_tokens=100_000, replicas=2, waiting=3) == 2 * 4 + 3
    assert held_to_fill(lengths, slots=400, pool_tokens=100_000, replicas=2, waiting=3) == 2 * 100 + 3


def test_lengths_are_read_from_their_columns(tmp_path: Path) -> None:
    file = tmp_path / "lengths.csv"
    file.write_text("num_prefill_tokens,num_decode_tokens,pd_ratio\n3772,54,69.8\n2015,156,12.9\n")
    assert read_lengths(file) == (Lengths(3772, 54), Lengths(2015, 156))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a,b\n1,2\n", "no columns num_prefill_tokens"),
        ("num_prefill_tokens,num_decode_tokens\n", "has no lengths"),
        ("num_prefill_tokens,num_decode_tokens\n1,x\n", "line 2"),
        ("num_prefill_tokens,num_decode_tokens\n1,0\n", "line 2: lengths must be at least 1"),
    ],
)
def test_a_file_of_lengths_that_cannot_be_read_is_named(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "lengths.csv"
    file.write_text(text)
    with pytest.raises(CommandError, match=says):
        read_lengths(file)
