"""What replicas and controllers show of themselves: /metrics on a port of their own.

Owns: that listener, and these two kinds of series. Imports `cluster` and the translation of tallies; no Ray. A router shows
its own beside its API (router/app.py).

Invariants: whoever asks, however slowly or often, costs one thread, one connection and a small part of a processor, and no
step waits for it; what is shown is read when it is asked for; a process that cannot have one of its ports serves all the same,
says so once, and has one as soon as it is free.
"""

from __future__ import annotations

import contextlib
import io
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CollectorRegistry, Counter, Histogram, make_wsgi_app
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from cluster import metrics as names
from cluster.ports import EngineProgress
from cluster.tally import Snapshot
from deployments.settings import url_of
from router.tallies import Tallies

LOG = logging.getLogger("forebay.metrics")

PATH = "/metrics"
EXCHANGE_S = 1.0
"""A connection gets no longer than that for its head, nor for its answer: one is served at a time."""
PAUSE_S = 0.05
"""Between two of them: at most 20 a second are answered."""
AGAIN_S = 2.0
"""So often ports that others have are tried again."""
_HEAD_BYTES = 8192
_WAITING = 8
"""Connections that may wait; the kernel keeps them, and turns away what is more."""
_LOOK_S = 1.0
"""So often it is looked whether it is to end, where waking it fails."""


class ReplicaFigures(Collector):
    """One engine, by the names that gateways and dashboards for model servers know."""

    def __init__(self, model: str, progress: Callable[[], EngineProgress]) -> None:
        """`progress` is called from another thread (`EnginePort.progress`)."""
        self._model = model
        self._progress = progress

    def collect(self) -> Iterable[Family]:
        progress, model = self._progress(), self._model
        load = progress.load
        running, waiting = (sum(level.requests for level in levels) for levels in (load.running, load.waiting))
        yield _gauge(names.SERVER_RUNNING, (model,), running)
        yield _gauge(names.SERVER_WAITING, (model,), waiting)
        if load.blocks_total:  # none before the engine knows how many it has
            yield _gauge(names.SERVER_KV_USAGE, (model,), 1 - load.blocks_free / load.blocks_total)
            yield _gauge(names.SERVER_CACHE, (model, str(load.block_size_tokens), str(load.blocks_total)), 1)
        foretold: dict[tuple[str, ...], Snapshot] = {
            (model, priority_class): snapshot for priority_class, snapshot in progress.foretold
        }
        yield from Tallies(names.OUTPUT_OVER_PREDICTED, lambda: foretold).collect()


def _gauge(metric: names.Metric, labels: tuple[str, ...], value: float) -> Family:
    family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
    family.add_metric(labels, value)
    return family


class Kind(StrEnum):
    """What a controller orders or proposes."""

    MOVE = "move"
    """A request is to move to another replica."""
    CALL_BACK = "call_back"
    """A request is to go back to its place in the queue."""
    WEIGH = "weigh"
    """A replica is to say what it holds, since something fits nowhere."""
    DRAIN = "drain"
    """A replica is to be emptied, as an operator or the number of replicas asks for."""
    TAKE_WORK = "take_work"
    """It is to take work again."""
    LEAVE = "leave"
    """It is empty, and is to end."""
    SCALE = "scale"
    """There are to be more replicas of a model, or fewer."""


class ControllerFigures:
    """What one controller did."""

    def __init__(self, registry: CollectorRegistry) -> None:
        tick, decisions = names.TICK, names.TICK_DECISIONS
        self._tick = Histogram(tick.name, tick.help, buckets=names.DECISION_BUCKETS_SECONDS, registry=registry)
        self._decisions = Counter(decisions.name, decisions.help, decisions.labels, registry=registry)
        for kind in Kind:
            self._decisions.labels(kind.value)

    def ticked(self, took_s: float) -> None:
        self._tick.observe(took_s)

    def decided(self, kind: Kind, count: int = 1) -> None:
        self._decisions.labels(kind.value).inc(count)


class Exposition:
    """Shows a registry from `start` to `close`."""

    def __init__(self, registry: CollectorRegistry, key: str) -> None:
        """`key`: what of the profile names the ports, for whoever reads that none can be had."""
        self._app = _at_path(make_wsgi_app(registry))
        self._key = key
        self._ended = threading.Event()
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None
        self.port: int | None = None
        """None while it has none."""

    def start(self, host: str, ports: Sequence[int]) -> None:
        """Listen at the first of `ports` that is free; 0 is any. Where others have all of them, one is waited for, in the
        thread that answers."""
        self._take(host, ports, told=False)
        self._thread = threading.Thread(target=self._run, args=(host, ports), name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the listener; returns when it has ended. Does nothing where none was started."""
        self._ended.set()
        if self._server is not None:
            with contextlib.suppress(OSError):
                self._server.socket.shutdown(socket.SHUT_RDWR)  # wakes whoever waits for a connection
        if self._thread is not None:
            self._thread.join()

    def _take(self, host: str, ports: Sequence[int], *, told: bool) -> None:
        """Have one of the ports; where none can be had, say so, unless that was `told` before."""
        why = ""
        for port in ports:
            try:
                server = _Server(host, port, self._app, self._ended)
            except OSError as error:
                why = str(error)
                continue
            self._server, self.port = server, server.server_port
            LOG.info("metrics are at %s%s", url_of(host, server.server_port), PATH)
            return
        if not told:
            named = f"port {ports[0]}" if len(ports) == 1 else f"each port from {ports[0]} to {ports[-1]}"
            LOG.error(
                "%s: %s on %s cannot be had (%s). No metrics are shown here until one can; 0 takes a free one",
                self._key, named, host, why,
            )  # fmt: skip

    def _run(self, host: str, ports: Sequence[int]) -> None:
        while self._server is None:
            if self._ended.wait(AGAIN_S):
                return
            self._take(host, ports, told=True)
        with self._server as server:
            while not self._ended.is_set():
                server.handle_request()


def exposed(registry: CollectorRegistry, key: str, host: str, port: int | None, count: int = 1) -> Exposition:
    """One that has begun, at one of `count` ports from `port` on, where there is to be one: None listens nowhere."""
    exposition = Exposition(registry, key)
    if port is not None:
        exposition.start(host, range(port, port + count))
    return exposition


def _at_path(shown: WSGIApplication) -> WSGIApplication:
    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ["PATH_INFO"] == PATH:
            # In OpenMetrics, which Prometheus asks for, the library would write vllm:x as vllm_x.
            return shown({**environ, "HTTP_ACCEPT": "text/plain"}, start_response)
        start_response("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
        return [f"Only {PATH} is here.\n".encode()]

    return app


class _Server(WSGIServer):
    """One connection at a time, with a pause after each."""

    request_queue_size = _WAITING
    timeout = _LOOK_S

    def __init__(self, host: str, port: int, app: WSGIApplication, ended: threading.Event) -> None:
        """Raises OSError where the port cannot be had."""
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._ended = ended
        super().__init__((host, port), _Handler)
        self.set_app(app)

    def server_bind(self) -> None:
        """Without the look-up of this host's name that a WSGI server makes, which may take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        host, self.server_port = self.server_address[:2]
        self.server_name = str(host)
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request(request, client_address)
        finally:
            self._ended.wait(PAUSE_S)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002  # as the library calls it
        """Who asked has gone, or read too slowly: that is nobody's trouble."""
        LOG.debug("an answer was not read", exc_info=True)


class _Handler(WSGIRequestHandler):
    """An exchange that is over in time, whatever the other side does."""

    timeout = EXCHANGE_S

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(io.BytesIO(_head(self.connection)))
        self.connection.settimeout(EXCHANGE_S)

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not worth a line each."""


def _head(connection: socket.socket) -> bytes:
    """Of a request; empty where it does not come in time, or is too long."""
    head, until_s = b"", time.monotonic() + EXCHANGE_S
    with contextlib.suppress(OSError):
        while (left_s := until_s - time.monotonic()) > 0 and len(head) <= _HEAD_BYTES:
            connection.settimeout(left_s)
            part = connection.recv(_HEAD_BYTES)
            head += part
            if b"\r\n\r\n" in head:
                return head
            if not part:
                break
    return b""
