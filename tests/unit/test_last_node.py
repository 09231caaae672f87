"""How long a head's pod stays for the nodes that are told to end with it."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Sequence

import pytest

from deployments.last_node import NOTICE_S, wait

MOST_S = 100.0


def waited_s(spans: Sequence[tuple[float, float]], most_s: float = MOST_S) -> float:
    """Where nodes drain in these spans of time."""
    now_s = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    def draining() -> list[int]:
        return [node for node, (begin_s, end_s) in enumerate(spans) if begin_s <= now_s < end_s]

    return wait(draining, most_s, now=lambda: now_s, sleep=sleep)


def test_a_head_that_goes_alone_stays_for_its_notice_only() -> None:
    assert waited_s([]) == NOTICE_S
    assert waited_s([(NOTICE_S + 1, MOST_S)]) == NOTICE_S, "who drains later is another matter"


@pytest.mark.parametrize("begin_s", [0.0, NOTICE_S - 5])
def test_a_head_stays_until_the_last_node_that_drains_has_gone(begin_s: float) -> None:
    assert waited_s([(begin_s, 40.0), (begin_s, 70.0)]) == pytest.approx(70.0, abs=1.0)


def test_a_head_stays_no_longer_than_it_is_told() -> None:
    assert waited_s([(0.0, 1e9)]) == pytest.approx(MOST_S, abs=1.0)
    assert waited_s([], most_s=1.0) == pytest.approx(1.0, abs=1.0)


def test_a_head_whose_gcs_says_nothing_stays_no_longer_either() -> None:
    """Ray's client would wait for 40 s."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        code = f"from deployments import last_node as m; m.GCS = '127.0.0.1:{silent.getsockname()[1]}'; m.main(2.0)"
        began_s = time.monotonic()
        subprocess.run([sys.executable, "-c", code], timeout=60, check=False, capture_output=True)
    assert time.monotonic() - began_s < 20
