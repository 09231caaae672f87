"""What is sent when, from arithmetic on a trace."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from cluster.config import RouterConfig
from ops.bench.schedule import SERVICE_TIERS, parse_classes, parse_scale, plan, scale_tokens
from ops.bench.trace import TraceRequest, read_trace
from ops.errors import CommandError

DATA = Path(__file__).parents[1] / "data"
ONE = Fraction(1)


def test_first_request_leaves_at_once_and_gaps_are_multiplied() -> None:
    requests = read_trace(DATA / "trace_azure.csv").requests
    planned = plan(requests, parse_classes([]), Fraction(4), ONE)
    assert [p.send_at_s for p in planned] == [0.0, 2.0, 8.0]
    assert [p.index for p in planned] == [0, 1, 2]


def test_lengths_are_multiplied_and_never_reach_zero() -> None:
    requests = read_trace(DATA / "trace_azure.csv").requests
    planned = plan(requests, parse_classes([]), ONE, parse_scale("1/16", "--token-scale"))
    assert [(p.prompt_tokens, p.output_tokens) for p in planned] == [(20, 3), (100, 1), (2, 1)]
    assert scale_tokens(1, Fraction(1, 1000)) == 1


def test_blocks_are_scaled_like_the_lengths() -> None:
    requests = read_trace(DATA / "trace_mooncake.jsonl").requests
    planned = plan(requests, parse_classes([]), ONE, Fraction(1, 16))
    assert {p.block_tokens for p in planned} == {Fraction(32)}
    assert planned[1].block_ids == (7, 8, 10)


def test_default_mapping_is_the_stated_one() -> None:
    requests = read_trace(DATA / "trace_azure.csv").requests
    assert [p.priority_class for p in plan(requests, parse_classes([]), ONE, ONE)] == [
        "standard",
        "interactive",
        "standard",
    ]


def test_named_classes_replace_the_default_of_their_service_only() -> None:
    classes = parse_classes(["code=batch, chat=interactive", "conversation=interactive"])
    assert (classes["code"], classes["chat"], classes["conversation"], classes["mooncake"]) == (
        "batch",
        "interactive",
        "interactive",
        "standard",
    )


def test_service_tier_of_each_class_leads_back_to_it_in_the_router() -> None:
    assert SERVICE_TIERS == {"interactive": "priority", "standard": "default", "batch": "flex"}
    tier_class = {tier: c.name for c in RouterConfig().classes for tier in c.service_tiers}
    assert {name: tier_class[tier] for name, tier in SERVICE_TIERS.items()} == {n: n for n in SERVICE_TIERS}


@pytest.mark.parametrize("text", ["code", "code=", "=batch", "code=urgent", ""])
def test_bad_class_mapping_is_refused(text: str) -> None:
    with pytest.raises(CommandError, match="--classes"):
        parse_classes([text])


def test_service_without_a_class_is_named() -> None:
    with pytest.raises(CommandError, match="'images'"):
        plan([TraceRequest(0, "images", 1, 1)], parse_classes([]), ONE, ONE)


def test_scale_is_a_number_or_a_fraction() -> None:
    assert parse_scale("1/16", "-") == parse_scale("0.0625", "-") == Fraction(1, 16)
    assert parse_scale(" 2 ", "-") == 2


@pytest.mark.parametrize("text", ["0", "-1", "1/0", "fast", "inf", "nan"])
def test_scale_that_is_no_positive_number_is_refused(text: str) -> None:
    with pytest.raises(CommandError, match="--time-scale"):
        parse_scale(text, "--time-scale")
