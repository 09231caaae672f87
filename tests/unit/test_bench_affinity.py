"""The laws of `bench affinity`: what it counts is what the engines did, caches without end find all that is repeated, and
what replicas tell is worth more than what routers remember."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ops.bench.affinity import AffinityRun, AffinitySettings, Knowledge, arrivals_of, build_report, repeated_tokens, run

SMALL = AffinitySettings(
    documents=12, document_tokens=256, question_tokens=8, output_tokens=4, requests=250, rate_per_s=10.0, blocks=80
)
"""A replica's cache holds some four of the documents."""


def test_what_replicas_tell_saves_more_than_what_routers_remember_and_that_more_than_load_alone() -> None:
    arrivals = arrivals_of(SMALL)
    runs = {knowledge: run(SMALL, arrivals, knowledge) for knowledge in Knowledge}
    told, own, none = (runs[knowledge].cached_tokens for knowledge in (Knowledge.TOLD, Knowledge.OWN, Knowledge.NONE))
    assert none < own < told <= repeated_tokens(SMALL, arrivals)
    assert run(SMALL, arrivals, Knowledge.TOLD) == runs[Knowledge.TOLD], "equal settings give equal figures"
    assert {sum(one.by_replica) for one in runs.values()} == {SMALL.requests}


def test_one_replica_with_room_for_everything_finds_every_repeated_block_whatever_is_known() -> None:
    """At a request a second none of them meets another."""
    settings = replace(SMALL, replicas=1, blocks=5000, rate_per_s=1.0)
    arrivals = arrivals_of(settings)
    for knowledge in Knowledge:
        one = run(settings, arrivals, knowledge)
        assert one.cached_tokens == repeated_tokens(settings, arrivals)
        assert one.prompt_tokens == settings.requests * (256 + 8)


def test_repeats_are_counted_in_full_blocks_of_documents_that_came_before() -> None:
    """Of 40 tokens 32 fill blocks of 16; the first request of each document repeats nothing."""
    settings = replace(SMALL, documents=2, document_tokens=40, requests=20)
    assert repeated_tokens(settings, arrivals_of(settings)) == 18 * 32


def test_report_is_of_each_kind_of_knowledge() -> None:
    one = AffinityRun(1000, 250, (10.0, 20.0, 90.0), (3, 1))
    report = build_report({Knowledge.TOLD: one}, 500, SMALL)
    assert report.value("told.cached_ratio") == 0.25
    assert report.value("endless.cached_ratio") == 0.5
    assert report.value("told.ttft_p50_ms") == 20.0
    assert report.value("told.busiest_share") == pytest.approx(0.75)
