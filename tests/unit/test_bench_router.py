"""The laws of `bench router`: what counts as a token, what is left out, what a figure is; and one small run, all real."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from cluster.model import ModelFolder
from ops.bench.peers.routers import PEERS, command
from ops.bench.router import (
    OURS,
    REPEATS,
    ROUTER,
    SOURCE,
    Figures,
    added_ttft,
    figure,
    parse_against,
    parse_streams,
    per_token,
    plan,
    report_rows,
    singly,
)
from ops.bench.router_load import LoadError, Tally, dechunk, process_cpu_s, streamed_text
from ops.bench.router_mock import chunk
from ops.bench.router_run import Bench, RouterBench, run
from ops.bench.router_wire import MARK, STEP_S, Counted, answer, piece
from ops.errors import CommandError


def counted(done: int, single: int, router_s: float = 0.1) -> Counted:
    return Counted(1.0, done, single, {ROUTER: router_s, SOURCE: 0.05}, 0.5)


def event(content: str, finish: str = "null") -> bytes:
    return (
        f'data: {{"choices":[{{"index":0,"delta":{{"content":"{content}"}},"finish_reason":{finish}}}]}}\n\n'.encode()
    )


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST = chunk(event("", '"length"')) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


# --- what the client reads ---


def test_every_token_has_one_mark_and_its_own_text() -> None:
    pieces = [piece(k) for k in range(2000)]
    assert len(set(pieces)) == 2000
    assert all(p.count(MARK) == 1 and p.startswith(MARK) for p in pieces)
    assert answer(3) == pieces[0] + pieces[1] + pieces[2]


def test_the_text_of_a_stream_is_that_of_its_events_however_they_are_chunked() -> None:
    body = event(piece(0)) + event(piece(1)) + event(piece(2))
    chunked = b"".join(chunk(body[i : i + 7]) for i in range(0, len(body), 7))
    assert streamed_text(HEAD + chunked + LAST) == answer(3)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"HTTP/1.1 429 Too Many Requests\r\n\r\nno", "no stream: .*429"),
        (HEAD + chunk(event(piece(0))), "no whole chunked body"),
        (HEAD + chunk(event(piece(0))) + b"0\r\n\r\n", "the stream ended with"),
        (HEAD + chunk(event(piece(0))) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n", "finished with None"),
    ],
    ids=["refused", "broken off", "without its end mark", "without a finish reason"],
)
def test_a_stream_that_did_not_end_well_is_no_answer(raw: bytes, why: str) -> None:
    with pytest.raises(LoadError, match=why):
        streamed_text(raw)


@pytest.mark.parametrize("data", [b"zz\r\nab\r\n", b"2\r\nabc\r\n0\r\n\r\n", b"2\r\nab\r\n", b""])
def test_what_is_not_chunked_or_not_whole_is_refused(data: bytes) -> None:
    with pytest.raises(LoadError, match="no whole chunked body"):
        dechunk(data)


async def test_a_refused_stream_ends_the_wait_for_its_first_token() -> None:
    tally = Tally()
    waiting = asyncio.create_task(tally.until(begun=1))
    await asyncio.sleep(0)
    tally.refused = b"HTTP/1.1 503 Service Unavailable"
    tally.changed.set()
    with pytest.raises(LoadError, match="503"):
        await waiting


def test_processor_time_of_a_process_is_what_it_says_of_itself() -> None:
    before_s, own_before_s = process_cpu_s(os.getpid()), time.process_time()
    while time.process_time() - own_before_s < 0.05:
        pass
    grown_s, own_s = process_cpu_s(os.getpid()) - before_s, time.process_time() - own_before_s
    assert grown_s == pytest.approx(own_s, abs=0.005)


# --- what counts ---


def test_windows_whose_tokens_came_together_are_left_out() -> None:
    figures = Figures()
    good, bad = counted(1000, 990), counted(1000, 989)
    assert singly(lambda: (bad, good, counted(0, 0)), figures, "x") == [good]
    assert (figures.windows, figures.windows_left_out) == (3, 2)


def test_a_round_without_one_good_window_is_repeated_and_then_refused_with_what_to_change() -> None:
    asked = 0

    def measure() -> tuple[Counted, ...]:
        nonlocal asked
        asked += 1
        return (counted(1000, 500),)

    with pytest.raises(CommandError, match=r"64 streams: at most 50\.0 % .* 50 % of the machine idle.*--streams"):
        singly(measure, Figures(), "64 streams")
    assert asked == 1 + REPEATS


def test_a_round_in_which_the_streams_never_all_ran_is_refused_too() -> None:
    with pytest.raises(CommandError, match="in 0 windows"):
        singly(tuple, Figures(), "64 streams")


def test_the_ratio_is_of_medians_to_the_cheapest_peer() -> None:
    figures = Figures()
    for target, cpu_s in ((OURS, (0.2, 0.9, 0.3)), ("smg", (0.5, 0.4, 0.1)), ("vllm-router", (0.6, 0.7, 0.8))):
        for seconds in cpu_s:
            per_token(figures, target, "64", counted(10_000, 10_000, seconds))
    rows = {row.name: row.value for row in report_rows(figures, (64,), ("smg", "vllm-router"))}
    assert rows["cpu_us_per_token_64"] == pytest.approx(30.0)
    assert rows["smg.cpu_us_per_token_64"] == pytest.approx(40.0)
    assert rows["cpu_per_token_over_best_rust_64"] == pytest.approx(0.3 / 0.4)
    assert rows["cpu_us_per_token_64_spread"] == pytest.approx((0.9 - 0.2) / 0.3)
    assert rows["replicas.cpu_us_per_token_64"] == pytest.approx(5.0)


def test_without_a_peer_there_is_no_ratio() -> None:
    figures = Figures()
    per_token(figures, OURS, "64", counted(10, 10))
    assert not [row.name for row in report_rows(figures, (64,), ()) if "over_best" in row.name]


def test_what_a_router_adds_is_its_median_less_that_without_one() -> None:
    figures = Figures()
    added_ttft(figures, OURS, [1.0, 2.0, 9.0], [3.0, 3.5, 20.0])
    assert figures.median(figure(OURS, "added_ttft_p50_ms")) == pytest.approx(1.5)


# --- what was asked for ---


@pytest.mark.parametrize(
    ("parse", "text", "why"),
    [
        (parse_against, "nginx", "--against: 'nginx' is none of"),
        (parse_against, "smg,smg", "twice"),
        (parse_streams, "many", "numbers"),
        (parse_streams, "64,8", "rising"),
        (parse_streams, "0", "from 1"),
        (parse_streams, "2000", "1024"),
    ],
)
def test_bad_options_are_refused_by_name(parse: Callable[[str], object], text: str, why: str) -> None:
    with pytest.raises(CommandError, match=why):
        parse(text)


def test_no_peers_and_all_peers_can_be_asked_for() -> None:
    assert parse_against("") == ()
    assert parse_against(",".join(PEERS)) == PEERS


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_is_given_every_worker_and_only_loopback(name: str) -> None:
    line = command(name, Path("/env/bin"), 1, 2, (3, 4))
    assert line[0] == f"/env/bin/{name}"
    assert line[-2:] == ("http://127.0.0.1:3", "http://127.0.0.1:4")
    assert line[line.index("--host") + 1] == "127.0.0.1"


# --- all of it ---


@pytest.mark.slow
def test_an_open_stream_that_says_nothing_takes_at_most_30_kb_of_the_router(
    tiny_model: ModelFolder, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        bench = Bench(RouterBench(tiny_model, (), plan((8,), 1, True), 0), tmp_path, stack)
        assert 1_000_000 < bench.open_streams(1000) < 30_000_000


@pytest.mark.slow
@pytest.mark.alone
def test_one_small_run_measures_our_router_and_leaves_no_process(tiny_model: ModelFolder) -> None:
    """Real processes and sockets; eight streams, one window, no peer. On a machine too busy for that it says so."""
    small = replace(plan((8,), 1, True), warm_s=0.2, windows=1, request_s=0.3, probes=3, open_streams=20)
    quiet = Console(quiet=True)
    try:
        report = run(RouterBench(tiny_model, (), small, 0), quiet, quiet)
    except CommandError as error:
        if "of the machine idle" not in str(error):
            raise
        pytest.skip(str(error))
    assert report.value("tokens_per_s_8") == pytest.approx(8 / STEP_S, rel=0.1)
    for name in (
        "cpu_us_per_token_8",
        "cpu_us_per_token_own_frames_8",
        "replicas.cpu_us_per_token_8",
        "cpu_us_per_request",
        "cpu_us_per_request_pretokenised",
    ):
        assert 0 < report.value(name) < 1e5, name
    assert report.value("single_share_8") >= 0.99
    assert report.value("open_streams_20_kb_each") < 1e5
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    assert not [pid for pid in children if b"ops.bench.router" in Path(f"/proc/{pid}/cmdline").read_bytes()]
