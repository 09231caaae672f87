"""The watch over nodes, in a thread of its own, again and again.

Owns: when nodes are listed whole, when watched on, and the pauses. Imports the API's adapter and what on a node is a notice;
what follows from that is decided elsewhere.

Invariants: whatever ends a watch (410 Gone, a cut, an API server that goes and comes), nothing is missed: it goes on from
the last version that was seen where the watch ended as agreed, and with a full listing else; the server is never asked in a
tight loop: each failure in a row, and each watch that ends at once, doubles the pause up to `backoff_max_s`, with jitter,
but for the first 410, which is ordinary; while it does not answer, nobody hears anything, and so nothing changes.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from cluster.config import KubernetesConfig
from cluster.control.nodes import Node, Reason, notices
from cluster.ports import Clock
from deployments.kube.api import KubeApi, KubeError
from deployments.kube.calls import pause_after

_log = logging.getLogger("forebay.kubernetes")

_AT_ONCE_S = 1.0
"""A watch that ends sooner is no watch."""
_GONE = 410


class Listed(NamedTuple):
    """All nodes that there are, with the notices on each."""

    nodes: Mapping[str, frozenset[Reason]]


class Changed(NamedTuple):
    """One is new, or has other notices than it had."""

    name: str
    reasons: frozenset[Reason]


class Gone(NamedTuple):
    name: str


Observation = Listed | Changed | Gone


class Watcher:
    """Tells `on` what it sees, in its thread and in order, until `on` returns False or `stop`."""

    def __init__(
        self,
        api: KubeApi,
        config: KubernetesConfig,
        on: Callable[[Observation], bool],
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self._api = api
        self._config = config
        self._on = on
        self._clock = clock
        self._rng = rng
        self._stopped = threading.Event()
        self._known: dict[str, frozenset[Reason]] = {}
        self._failures = 0
        self._version: str | None = None
        """To watch on from; None: list first."""
        # Read by others.
        self.heard_s: float | None = None
        """When the API server last said something."""
        self.trouble = ""
        self.ended: Counter[str] = Counter({"agreed": 0, "gone": 0, "failed": 0})
        """Watches, and listings that failed, by how they ended."""

    def start(self) -> None:
        # A daemon: it may be waiting for the API server when the process ends, and leaves nothing undone.
        threading.Thread(target=self._run, name="kubernetes nodes", daemon=True).start()

    def stop(self) -> None:
        """It says nothing more, and ends when its watch does."""
        self._stopped.set()

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                self._stopped.wait(self._turn())
        finally:
            self._api.close()

    def _turn(self) -> float:
        """List, where that is needed, and watch once. Returns the pause after it."""
        try:
            if self._version is None:
                self._list()
            began_s = self._clock.monotonic()
            self._watch()
        except KubeError as error:
            return self._failed(error)
        self.ended["agreed"] += 1
        self._heard()
        if self._clock.monotonic() - began_s < _AT_ONCE_S:
            return self._pause_s()
        self._failures = 0
        return 0.0

    def _list(self) -> None:
        version, nodes = self._api.list_nodes()
        self._known = {node.name: notices(node, self._config) for node in nodes}
        self._version = version
        self._heard()
        self._tell(Listed(dict(self._known)))

    def _watch(self) -> None:
        assert self._version is not None
        for seen in self._api.watch_nodes(self._version):
            self._version = seen.version
            self._heard()
            if seen.node is not None:
                self._saw(seen.node, seen.gone)
            if self._stopped.is_set():
                return

    def _saw(self, node: Node, gone: bool) -> None:
        """Of all that is told of nodes, their heartbeats most often, only notices are passed on."""
        if gone:
            if self._known.pop(node.name, None) is not None:
                self._tell(Gone(node.name))
            return
        reasons = notices(node, self._config)
        if self._known.get(node.name) != reasons:
            self._known[node.name] = reasons
            self._tell(Changed(node.name, reasons))

    def _tell(self, observation: Observation) -> None:
        if self._stopped.is_set() or not self._on(observation):
            self._stopped.set()

    def _heard(self) -> None:
        self.heard_s, self.trouble = self._clock.monotonic(), ""

    def _failed(self, error: KubeError) -> float:
        self._version = None
        self._api.close()  # whatever became of the connection
        if error.status == _GONE:
            self.ended["gone"] += 1
            if not self._failures:
                self._failures = 1
                return 0.0
        else:
            self.ended["failed"] += 1
        pause_s = self._pause_s()
        self.trouble = str(error)
        _log.warning("nodes stay as they were last seen, asked again in %.1f s: %s", pause_s, error)
        return pause_s

    def _pause_s(self) -> float:
        pause_s = pause_after(self._failures, self._config, self._rng)
        self._failures += 1
        return pause_s
