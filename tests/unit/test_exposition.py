"""The port at which replicas and controllers show what they measure: whoever asks there costs little, and stops nothing."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.parser import text_string_to_metric_families

from cluster.config import MetricsConfig
from cluster.foretold import Foretold
from cluster.ports import EngineProgress
from cluster.types import EngineLoad, PriorityLoad
from deployments import exposition
from deployments.checks import free_ports
from deployments.exposition import PAUSE_S, ControllerFigures, Exposition, Kind, ReplicaFigures, exposed
from tests.promtool import check_metrics, needs_promtool

HOST, KEY = "127.0.0.1", "metrics.replica_port"


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Gauge("shown", "A figure.", registry=registry).set(7)
    return registry


@pytest.fixture
def shown(registry: CollectorRegistry) -> Iterator[Exposition]:
    with contextlib.closing(exposed(registry, KEY, HOST, 0)) as shown:
        yield shown


def url_of(shown: Exposition, path: str = "/metrics") -> str:
    assert shown.port is not None
    return f"http://{HOST}:{shown.port}{path}"


def connect(shown: Exposition) -> socket.socket:
    assert shown.port is not None
    return socket.create_connection((HOST, shown.port), timeout=10)


# --- what is there ---


def test_metrics_are_at_their_path_and_nothing_is_beside_it(shown: Exposition) -> None:
    answer = httpx.get(url_of(shown))
    assert (answer.status_code, answer.headers["content-type"].split(";")[0]) == (200, "text/plain")
    assert "shown 7.0" in answer.text
    assert httpx.get(url_of(shown, "/")).status_code == 404
    assert httpx.get(url_of(shown, "/metrics/more")).status_code == 404
    assert httpx.post(url_of(shown), content=b"x").status_code == 405


def test_without_a_port_nothing_listens_and_closing_is_nothing(registry: CollectorRegistry) -> None:
    before = threading.active_count()
    nowhere = exposed(registry, KEY, HOST, None)
    assert (nowhere.port, threading.active_count()) == (None, before)
    nowhere.close()


def test_closed_it_listens_no_more_and_its_thread_has_ended(registry: CollectorRegistry) -> None:
    before = threading.active_count()
    shown = exposed(registry, KEY, HOST, 0)
    assert threading.active_count() == before + 1
    shown.close()
    assert threading.active_count() == before
    with pytest.raises(httpx.ConnectError):
        httpx.get(url_of(shown))


def test_a_port_that_another_has_is_said_once_by_its_key_and_taken_when_it_is_free(
    registry: CollectorRegistry, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exposition, "AGAIN_S", 0.02)
    took = threading.Event()

    class Seen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno == logging.INFO:
                took.set()

    first = exposed(registry, KEY, HOST, 0)
    assert first.port is not None
    with caplog.at_level(logging.INFO, exposition.LOG.name), contextlib.ExitStack() as stack:
        second = exposed(registry, KEY, HOST, first.port)
        stack.callback(second.close)
        third = exposed(registry, KEY, HOST, first.port)
        stack.callback(third.close)
        assert (second.port, third.port) == (None, None)
        assert httpx.get(url_of(first)).status_code == 200
        handler = Seen()
        exposition.LOG.addHandler(handler)
        stack.callback(exposition.LOG.removeHandler, handler)
        first.close()
        assert took.wait(10)
        (has,) = (shown for shown in (second, third) if shown.port is not None)
        assert has.port == first.port
        assert httpx.get(url_of(has)).status_code == 200
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert len(errors) == 2, "one of each"
    assert all(KEY in e and str(first.port) in e and "0 takes a free one" in e for e in errors)


def test_each_of_a_machine_takes_the_first_of_its_ports_that_is_free(registry: CollectorRegistry) -> None:
    first = free_ports(HOST, 3)
    with contextlib.ExitStack() as stack:

        def another() -> Exposition:
            return stack.enter_context(contextlib.closing(exposed(registry, KEY, HOST, first, 3)))

        three = [another() for _ in range(3)]
        assert [shown.port for shown in three] == [first, first + 1, first + 2]
        assert all(httpx.get(url_of(shown)).status_code == 200 for shown in three)
        fourth = another()
        assert fourth.port is None
        fourth.close()  # or it would have the next
        three[1].close()
        assert another().port == first + 1


def test_two_that_are_to_have_one_port_are_refused_and_0_is_no_port() -> None:
    with pytest.raises(ValueError, match="controller_port is 9400, one of the 1 from replica_port on"):
        MetricsConfig(replica_port=9400, controller_port=9400)
    with pytest.raises(ValueError, match="controller_port is 9407, one of the 8 from replica_port on"):
        MetricsConfig(replica_port=9400, replica_ports=8, controller_port=9407)
    MetricsConfig(replica_port=9400, replica_ports=8, controller_port=9408)
    with pytest.raises(ValueError, match="8 from 65529 on go beyond 65535"):
        MetricsConfig(replica_port=65529, replica_ports=8)
    MetricsConfig(replica_port=65528, replica_ports=8)
    for first in (None, 0):
        with pytest.raises(ValueError, match="replica_ports is 2, counted from replica_port"):
            MetricsConfig(replica_port=first, replica_ports=2)
    free = MetricsConfig(replica_port=0, controller_port=0)
    assert (free.replica_port, free.controller_port) == (0, 0)


# --- who asks ---


@pytest.mark.alone
def test_who_says_nothing_or_reads_nothing_keeps_nobody_waiting_longer_than_an_exchange(
    shown: Exposition, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exposition, "EXCHANGE_S", 0.1)
    with connect(shown) as silent, connect(shown) as endless, connect(shown) as deaf:
        endless.sendall(b"GET /metrics HTTP/1.1\r\n" + b"x: " + b"y" * 9000)
        deaf.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert httpx.get(url_of(shown), timeout=10).status_code == 200
        assert silent.recv(1) == b"", "it was closed"
        with contextlib.suppress(ConnectionResetError):
            assert endless.recv(1) == b""


def test_one_that_trickles_its_head_is_cut_off_in_the_time_of_an_exchange(
    shown: Exposition, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte in time for the one before is not in time for all of them."""
    monkeypatch.setattr(exposition, "EXCHANGE_S", 0.2)
    with connect(shown) as trickling:
        trickling.settimeout(0.02)
        sent = 0
        with contextlib.suppress(OSError):
            while sent < 1000:
                trickling.sendall(b"x")
                sent += 1
                with contextlib.suppress(TimeoutError):
                    if not trickling.recv(1):
                        break
    assert sent < 1000


@pytest.mark.alone
def test_a_flood_is_answered_by_one_thread_and_at_a_bounded_rate(shown: Exposition) -> None:
    threads, answers = threading.active_count(), 12
    began_s = time.monotonic()
    for _ in range(answers):
        assert httpx.get(url_of(shown), timeout=30).status_code == 200
        assert threading.active_count() == threads
    assert time.monotonic() - began_s >= (answers - 1) * PAUSE_S


# --- what replicas and controllers show ---


def test_a_replica_shows_its_engine_by_the_names_of_model_servers() -> None:
    """10 of 40 blocks are free; 3 run, 5 wait; an output of 30 where 20 were predicted."""
    load = EngineLoad(
        slots_total=4, blocks_total=40, blocks_free=10, block_size_tokens=16,
        running=(PriorityLoad(0, 2, 20), PriorityLoad(10, 1, 10)), waiting=(PriorityLoad(-10, 5, 0),),
    )  # fmt: skip
    foretold = Foretold()
    foretold.ended("batch", 30 / 20)
    registry = CollectorRegistry()
    registry.register(ReplicaFigures("m", lambda: EngineProgress(
        load=load, alive=True, step_age_s=None, foretold=foretold.told()
    )))  # fmt: skip
    value, of_model = registry.get_sample_value, {"model_name": "m"}
    assert value("vllm:num_requests_running", of_model) == 3
    assert value("vllm:num_requests_waiting", of_model) == 5
    assert value("vllm:kv_cache_usage_perc", of_model) == 0.75
    assert value("vllm:cache_config_info", {**of_model, "block_size": "16", "num_gpu_blocks": "40"}) == 1
    came = {"model": "m", "priority_class": "batch"}
    assert value("forebay_output_over_predicted_sum", came) == 1.5
    assert value("forebay_output_over_predicted_bucket", {**came, "le": "1.25"}) == 0
    assert value("forebay_output_over_predicted_bucket", {**came, "le": "1.5"}) == 1


def test_an_engine_that_does_not_know_its_memory_yet_shows_no_use_of_it() -> None:
    load = EngineLoad(slots_total=4, blocks_total=0, blocks_free=0, block_size_tokens=16)
    registry = CollectorRegistry()
    registry.register(ReplicaFigures("m", lambda: EngineProgress(load=load, alive=True, step_age_s=None)))
    assert registry.get_sample_value("vllm:num_requests_running", {"model_name": "m"}) == 0
    assert registry.get_sample_value("vllm:kv_cache_usage_perc", {"model_name": "m"}) is None


@needs_promtool
def test_a_controller_shows_its_ticks_and_what_it_decided_by_kind() -> None:
    registry = CollectorRegistry()
    figures = ControllerFigures(registry)
    figures.ticked(0.0002)
    figures.decided(Kind.MOVE, 3)
    with contextlib.closing(exposed(registry, "metrics.controller_port", HOST, 0)) as shown:
        text = httpx.get(url_of(shown)).text
    check_metrics(text)
    samples = {(s.name, s.labels.get("kind")): s.value for f in text_string_to_metric_families(text) for s in f.samples}
    assert samples["forebay_controller_tick_seconds_count", None] == 1
    decided = {kind: samples["forebay_controller_decisions_total", kind.value] for kind in Kind}
    assert decided == dict.fromkeys(Kind, 0.0) | {Kind.MOVE: 3.0}
