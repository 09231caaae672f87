"""What the metrics of a router's core say of what waits, what runs and what is kept of both.

Owns: those gauges, which are set when somebody asks. Names and labels come from `cluster.metrics`. Invariant: each class and
each tenant of the configuration is shown, with no work too; all other tenants are one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from prometheus_client import CollectorRegistry, Gauge

from cluster import metrics as names
from cluster.metrics import Metric


class QueueMetrics:
    """One set per core."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(m: Metric) -> Gauge:
            return Gauge(m.name, m.help, m.labels, registry=registry)

        self._queued, self._queued_bytes = gauge(names.QUEUED), gauge(names.QUEUED_BYTES)
        self._queued_oldest = gauge(names.QUEUED_OLDEST)
        self._queued_service, self._drain = gauge(names.QUEUED_SERVICE), gauge(names.DRAIN)
        self._in_flight = gauge(names.IN_FLIGHT)
        self._journal_requests, self._journal_bytes = gauge(names.JOURNAL_REQUESTS), gauge(names.JOURNAL_BYTES)
        self._tenant_queued = gauge(names.TENANT_QUEUED)
        self.named: Collection[str] = frozenset()
        """Tenants that are shown by their names."""

    def show_class(
        self,
        priority_class: str,
        *,
        queued: int,
        queued_bytes: int,
        queued_service: int,
        oldest_s: float,
        in_flight: int,
        drain_per_s: float | None,
    ) -> None:
        """A drain that has not been measured is not shown."""
        self._queued.labels(priority_class).set(queued)
        self._queued_bytes.labels(priority_class).set(queued_bytes)
        self._queued_service.labels(priority_class).set(queued_service)
        self._queued_oldest.labels(priority_class).set(oldest_s)
        self._in_flight.labels(priority_class).set(in_flight)
        if drain_per_s is not None:
            self._drain.labels(priority_class).set(drain_per_s)

    def show_tenants(self, queued: Mapping[str, int]) -> None:
        """Requests that wait, of each tenant that has any."""
        shown = Counter(dict.fromkeys((names.OTHER_TENANTS, *self.named), 0))
        for tenant, requests in queued.items():
            shown[tenant if tenant in self.named else names.OTHER_TENANTS] += requests
        for tenant, requests in shown.items():
            self._tenant_queued.labels(tenant).set(requests)

    def show_journal(self, requests: int, size_bytes: int) -> None:
        self._journal_requests.set(requests)
        self._journal_bytes.set(size_bytes)
