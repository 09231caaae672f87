"""What routers say, made by hand, for tests of `forebay top`.

Owns: the shortest way to write an answer of which only a part matters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ops.top.said import (
    Answer,
    Band,
    ClusterSaid,
    Entry,
    GenerationSaid,
    Level,
    Load,
    ModelSaid,
    Move,
    ReplicaSaid,
    Report,
    RouterOfCluster,
    RouterSaid,
    Status,
    Unroutable,
    read_metrics,
)
from router.recent import RecentDecisions, Told

CLASSES = {"interactive": 10, "standard": 0, "batch": -10}


def band(priority_class: str, queued: int, running: int, oldest_s: float | None = None) -> Band:
    return Band(priority_class, queued, running, oldest_s)


def said(
    *bands: Band,
    model: str = "m",
    ready: bool = True,
    unroutable: Mapping[str, str] | None = None,
    moves: Sequence[Move] = (),
) -> ModelSaid:
    away = tuple(Unroutable(replica_id, why) for replica_id, why in (unroutable or {}).items())
    return ModelSaid(model, ready, bands, away, tuple(moves))


def replica(
    name: str,
    *,
    model: str = "m",
    running: Sequence[tuple[int, int, int]] = (),
    waiting: Sequence[tuple[int, int, int]] = (),
    free: int = 100,
    cached: int = 0,
    state: str = "ready",
    age_s: float = 0.05,
) -> ReplicaSaid:
    """Of 100 blocks and 8 slots. `running` and `waiting`: (priority, requests, blocks)."""
    levels = [tuple(Level(*level) for level in part) for part in (running, waiting)]
    load = Load(8, 100, free, cached, *levels)
    return ReplicaSaid(Entry(name, "host", model), Report(state, load), age_s)


def cluster(*replicas: ReplicaSaid, routers: Sequence[Sequence[ModelSaid]] = ()) -> ClusterSaid:
    return ClusterSaid(
        GenerationSaid(3),
        60.0,
        replicas,
        tuple(RouterOfCluster(f"http://{n}", tuple(m)) for n, m in enumerate(routers)),
    )


def page(
    tokens: float = 0.0,
    first_tokens: Mapping[float, int] | None = None,
    *,
    priority_class: str = "standard",
    more: Sequence[str] = (),
) -> str:
    """A page of metrics: output tokens, and how many first tokens came within each bound, in seconds."""
    labels = f'model="m",priority_class="{priority_class}"'
    lines = [
        "# HELP forebay_output_tokens Output tokens.",
        "# TYPE forebay_output_tokens counter",
        f"forebay_output_tokens_total{{{labels}}} {tokens}",
        "# TYPE forebay_ttft_seconds histogram",
    ]
    counts = first_tokens or {}
    total = max(counts.values(), default=0)
    lines += [f'forebay_ttft_seconds_bucket{{{labels},le="{le}"}} {n}' for le, n in counts.items()]
    lines += [
        f'forebay_ttft_seconds_bucket{{{labels},le="+Inf"}} {total}',
        f"forebay_ttft_seconds_count{{{labels}}} {total}",
    ]
    return "\n".join([*lines, *more]) + "\n"


def told(sequence: int, at_unix_s: float, event: str = "dispatched", **more: str) -> Told:
    fields = {"request_id": f"cmpl-{sequence}", "tenant": "t", "priority_class": "standard", "model": "m"} | more
    return Told(sequence=sequence, at_unix_s=at_unix_s, event=event, **fields)  # type: ignore[arg-type]


def decisions(*made: Told, feed: str = "feed", last: int | None = None, missed: int = 0) -> RecentDecisions:
    last = last if last is not None else max((d.sequence for d in made), default=0)
    return RecentDecisions(feed=feed, last=last, missed=missed, decisions=made)


def answer(
    *models: ModelSaid,
    url: str = "http://a",
    at_s: float = 0.0,
    of: ClusterSaid | None = None,
    metrics: str = "",
    recent: RecentDecisions | None = None,
) -> Answer:
    status = Status(RouterSaid(CLASSES, models or (said(),)), of)
    rising, gauges = read_metrics(metrics)
    return Answer(url, at_s, status, rising, gauges, recent)
