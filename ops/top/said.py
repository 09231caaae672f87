"""What is read of a router's answers.

Owns: the fields of `/status` that are shown, the series of `/metrics` that are, and how both are read. Imports the router's
form of decisions and the names of metrics. Invariant: what lacks a field that is shown is refused as another version's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from cluster import metrics as names
from router.recent import RecentDecisions


class Band(msgspec.Struct, frozen=True):
    """Work of one priority on one router."""

    priority_class: str
    queued_requests: int
    running_requests: int
    oldest_s: float | None


class Move(msgspec.Struct, frozen=True):
    """A live move under way."""

    request_id: str
    priority_class: str
    source: str
    target: str
    stage: str
    age_s: float
    why: str


class Unroutable(msgspec.Struct, frozen=True):
    replica_id: str
    why: str


class ModelSaid(msgspec.Struct, frozen=True):
    """A model as one router sees it."""

    model: str
    ready: bool
    bands: tuple[Band, ...]
    unroutable: tuple[Unroutable, ...]
    moves: tuple[Move, ...]


class RouterSaid(msgspec.Struct, frozen=True):
    """The router that was asked."""

    classes: dict[str, int]
    """The priority of each, most urgent first."""
    models: tuple[ModelSaid, ...]


class Level(msgspec.Struct, frozen=True):
    """Work of one priority on one replica."""

    priority: int
    requests: int
    blocks: int


class Load(msgspec.Struct, frozen=True):
    slots_total: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    running: tuple[Level, ...]
    waiting: tuple[Level, ...]


class Report(msgspec.Struct, frozen=True):
    state: str
    load: Load


class Entry(msgspec.Struct, frozen=True):
    replica_id: str
    host: str
    model: str


class ReplicaSaid(msgspec.Struct, frozen=True):
    entry: Entry
    report: Report | None
    report_age_s: float | None


class GenerationSaid(msgspec.Struct, frozen=True):
    number: int


class RouterOfCluster(msgspec.Struct, frozen=True):
    """A router as it told the controller last."""

    url: str
    """Empty while it stands by for another's port."""
    models: tuple[ModelSaid, ...]


class ClusterSaid(msgspec.Struct, frozen=True):
    controller_generation: GenerationSaid
    uptime_s: float
    replicas: tuple[ReplicaSaid, ...]
    routers: tuple[RouterOfCluster, ...]


class Status(msgspec.Struct, frozen=True):
    """What `/status` says."""

    router: RouterSaid
    cluster: ClusterSaid | None


Series = tuple[str, tuple[tuple[str, str], ...]]
"""A sample's name, and its labels in their order."""
Samples = Mapping[Series, float]

RISING = (names.TTFT, names.TOKENS_OUT, names.PREEMPTIONS, names.MOVES)
"""Metrics of which is shown by how much they have risen."""
GAUGES = (
    names.REPLICA_SLOTS,
    names.REPLICA_RUNNING,
    names.REPLICA_WAITING,
    names.REPLICA_BLOCKS,
    names.REPLICA_BLOCKS_FREE,
    names.REPLICA_BLOCKS_CACHED,
    names.REPLICA_CLASS_BLOCKS,
)
"""What the router itself knows of replicas: shown where no controller answers."""

read_status = msgspec.json.Decoder(Status).decode
read_decisions = msgspec.json.Decoder(RecentDecisions).decode


@dataclass(frozen=True, slots=True)
class Answer:
    """All that one router said at one time."""

    url: str
    at_s: float
    """When, by the clock of who asked, which only rises."""
    status: Status
    rising: Samples
    gauges: Samples
    decisions: RecentDecisions | None
    no_decisions_why: str = ""


@dataclass(frozen=True, slots=True)
class Trouble:
    """A router that gave no answer that can be shown."""

    url: str
    why: str


def read_metrics(text: str) -> tuple[Samples, Samples]:
    """The samples of RISING, and of GAUGES, in a page of metrics. Only their lines are parsed: a page may have ten thousand.

    Raises:
        ValueError: it is no page of metrics.
    """
    return _read(text, RISING), _read(text, GAUGES)


def _read(text: str, metrics: tuple[names.Metric, ...]) -> Samples:
    prefixes = tuple(start for metric in metrics for start in (metric.name, f"# TYPE {metric.name}"))
    lines = [line for line in text.splitlines() if line.startswith(prefixes)]
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families("\n".join(lines) + "\n")
        for sample in family.samples
    }
