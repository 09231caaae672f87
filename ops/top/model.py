"""From what routers said to what is shown.

Owns: the picture's form, and the arithmetic that makes it: sums over routers, rates and quantiles from two samples of what
only rises. Pure: time comes with the answers. Invariants: what is remembered is bounded; what was not measured is None,
never zero; a counter that has fallen began anew, and counts from zero.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

import msgspec

from cluster import metrics as names
from ops.top.said import Answer, Band, ClusterSaid, Level, ModelSaid, Move, ReplicaSaid, Samples, Series, Trouble
from router.priority import reached
from router.recent import RecentDecisions, Told

WINDOW_S = 60.0
"""Over which first tokens, moves and preemptions are counted."""
RATE_WINDOW_S = 5.0
"""Over which tokens are counted."""
DECISIONS_KEPT = 500
SILENT_S = 1.0
"""A report that is older is shown to be."""
_SAMPLES_KEPT = 600
"""Of one router: a minute of them at the shortest interval, and more."""


class ClassRow(msgspec.Struct, frozen=True, kw_only=True):
    """One priority class of one model."""

    priority_class: str
    priority: int
    queued: int
    running: int
    oldest_s: float | None
    """Age of the oldest that is queued."""
    tokens_per_s: float | None
    first_tokens: int
    """In the window: those that the quantiles are of."""
    ttft_p50_s: float | None
    ttft_p99_s: float | None


class ReplicaRow(msgspec.Struct, frozen=True, kw_only=True):
    """One replica. Of one that has reported nothing only the state is known, and the numbers are zero."""

    replica_id: str
    host: str
    state: str
    running: int = 0
    slots: int = 0
    waiting: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    """Of those that are free."""
    blocks_by_class: dict[str, int] = {}  # msgspec copies it for each instance


class ModelPicture(msgspec.Struct, frozen=True, kw_only=True):
    """One model."""

    model: str
    ready: bool
    classes: tuple[ClassRow, ...]
    """Most urgent first, those with no work too."""
    replicas: tuple[ReplicaRow, ...]
    moves: tuple[Move, ...]
    """Under way."""
    moved: dict[str, int]
    """In the window, by outcome."""
    preempted: dict[str, int]
    """In the window, by what became of the keys and values."""


class Controller(msgspec.Struct, frozen=True):
    generation: int
    uptime_s: float


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """A decision, and the router that made it."""

    url: str
    told: Told


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """All that is shown."""

    at_unix_s: float
    urls: tuple[str, ...]
    """Routers that have answered: tokens, first tokens and decisions are theirs; queue and moves are of all."""
    routers: int
    """That there are, as far as is known."""
    controller: Controller | None
    window_s: float | None
    """Over which first tokens, moves and preemptions are counted; None: since the routers started."""
    models: tuple[ModelPicture, ...]
    decisions: tuple[Seen, ...]
    """Newest first."""
    missed: int
    """Decisions that were made and not seen."""
    notes: tuple[str, ...]
    """What is not shown, and why."""


class _Sampled(msgspec.Struct, frozen=True):
    at_s: float
    samples: Samples


class Watch:
    """What has been seen so far."""

    def __init__(self, window_s: float | None = WINDOW_S) -> None:
        """`window_s` None: count first tokens, moves and preemptions since the routers started."""
        self._window_s = window_s
        self._sampled: dict[str, deque[_Sampled]] = {}
        self._cursors: dict[str, tuple[str, int]] = {}
        """By router: its feed, and the last of its decisions that was seen."""
        self._decisions: dict[tuple[str, int], Seen] = {}
        """By feed and number."""
        self._missed = 0

    def after(self, url: str) -> int | None:
        """From which decision on this router is to be asked; None for the first time."""
        cursor = self._cursors.get(url)
        return None if cursor is None else cursor[1]

    def take(self, found: Sequence[Answer | Trouble], at_unix_s: float) -> Picture | None:
        """The picture with these answers; None where there is none among them."""
        answers = _one_of_each(answer for answer in found if isinstance(answer, Answer))
        if not answers:
            return None
        for answer in answers:
            self._remember(answer)
        status = answers[0].status
        cluster = next((a.status.cluster for a in answers if a.status.cluster is not None), None)
        said = list(_said_of_models(answers, cluster))
        window_s, risen = self._risen(answers, self._window_s)
        tokens = self._tokens_per_s(answers)
        models = [m.model for m in status.router.models]
        decisions = sorted(self._decisions.values(), key=lambda seen: (seen.told.at_unix_s, seen.told.sequence))
        return Picture(
            at_unix_s=at_unix_s,
            urls=tuple(answer.url for answer in answers),
            routers=max(len(answers), len(_that_serve(cluster))),
            controller=_controller(cluster),
            window_s=window_s,
            models=tuple(
                _model(
                    name,
                    status.router.classes,
                    [s for s in said if s.model == name],
                    _replicas(name, answers, cluster),
                    risen,
                    tokens,
                )
                for name in models
            ),
            decisions=tuple(reversed(decisions)),
            missed=self._missed,
            notes=tuple(_notes(answers, [t for t in found if isinstance(t, Trouble)])),
        )

    def _remember(self, answer: Answer) -> None:
        sampled = self._sampled.setdefault(answer.url, deque(maxlen=_SAMPLES_KEPT))
        if answer.decisions is not None:
            before = self._cursors.get(answer.url)
            if before is not None and before[0] != answer.decisions.feed:
                sampled.clear()
            self._see(answer.url, answer.decisions, before)
        sampled.append(_Sampled(answer.at_s, answer.rising))
        while len(sampled) > 2 and answer.at_s - sampled[1].at_s >= WINDOW_S:
            sampled.popleft()

    def _see(self, url: str, decisions: RecentDecisions, before: tuple[str, int] | None) -> None:
        for told in decisions.decisions:
            self._decisions.setdefault((decisions.feed, told.sequence), Seen(url=url, told=told))
        for oldest in list(self._decisions)[:-DECISIONS_KEPT]:
            del self._decisions[oldest]
        if before is None or before[0] == decisions.feed:
            self._cursors[url] = decisions.feed, decisions.last
            self._missed += decisions.missed
        else:  # started anew: what it decided first may not be here
            del self._cursors[url]

    def _risen(self, answers: Sequence[Answer], window_s: float | None) -> tuple[float | None, Samples]:
        """(seconds, by how much each series has risen in them, over all routers). None: since they started, which is told
        where that is asked for, and the first time."""
        total: dict[Series, float] = {}
        seconds: float | None = None
        several = [a for a in answers if len(self._sampled[a.url]) > 1] if window_s is not None else []
        for answer in several or answers:
            before: Samples = {}
            if several and window_s is not None:
                first = _first(self._sampled[answer.url], window_s)
                before = first.samples
                seconds = max(seconds or 0.0, answer.at_s - first.at_s)
            for series, value in increase(before, answer.rising).items():
                total[series] = total.get(series, 0.0) + value
        return seconds, total

    def _tokens_per_s(self, answers: Sequence[Answer]) -> dict[tuple[str, str], float] | None:
        """Output tokens by model and class; None where each router has answered once. Each has a window of its own: one may
        have been away."""
        rates: dict[tuple[str, str], float] | None = None
        for answer in answers:
            sampled = self._sampled[answer.url]
            first = _first(sampled, RATE_WINDOW_S) if len(sampled) > 1 else sampled[0]
            if (seconds := answer.at_s - first.at_s) > 0:
                rates = {} if rates is None else rates
                for (name, pairs), value in increase(first.samples, answer.rising).items():
                    if name == f"{names.TOKENS_OUT.name}_total":
                        labels = dict(pairs)
                        of = labels.get(names.MODEL_LABEL, ""), labels.get("priority_class", "")
                        rates[of] = rates.get(of, 0.0) + value / seconds
        return rates


# --- arithmetic ---


def increase(before: Samples, now: Samples) -> dict[Series, float]:
    """By how much each series has risen."""
    return {
        series: value - then if value >= (then := before.get(series, 0.0)) else value for series, value in now.items()
    }


def quantile(buckets: Iterable[tuple[float, float]], q: float) -> float | None:
    """The q-quantile of what fell into a histogram's buckets, evenly spread within each.

    Args:
        buckets: (upper bound, how many fell at or below it); the last bound is infinite.

    Returns:
        None where nothing fell in. Where the quantile is above every finite bound, the highest of them.
    """
    ordered = sorted(buckets)
    total = ordered[-1][1] if ordered else 0.0
    if total <= 0:
        return None
    below, lower = 0.0, 0.0
    for upper, count in ordered:
        if count >= q * total and count > below:
            return lower if math.isinf(upper) else lower + (upper - lower) * (q * total - below) / (count - below)
        below, lower = count, upper
    return lower


def cells(parts: Sequence[int], width: int) -> list[int]:
    """How many of `width` cells each part gets, by its size: all are given away, and what is not nothing gets one where
    there are enough."""
    total = sum(parts)
    if not total or width < sum(part > 0 for part in parts):
        return [0] * len(parts)
    ends = [round(width * end / total) for end in accumulate(parts)]
    given = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    for index, part in enumerate(parts):
        if part and not given[index]:
            given[max(range(len(given)), key=given.__getitem__)] -= 1
            given[index] = 1
    return given


# --- parts of the picture ---


def _first(sampled: Sequence[_Sampled], window_s: float) -> _Sampled:
    """Where a window begins: the earliest sample within it, at the latest the last but one."""
    now_s = sampled[-1].at_s
    return next((s for s in list(sampled)[:-1] if now_s - s.at_s <= window_s), sampled[-2])


def _one_of_each(answers: Iterable[Answer]) -> list[Answer]:
    """Two addresses may lead to one router, which counts once."""
    seen: set[str] = set()
    kept = []
    for answer in answers:
        feed = answer.url if answer.decisions is None else answer.decisions.feed
        if feed not in seen:
            seen.add(feed)
            kept.append(answer)
    return kept


def _said_of_models(answers: Sequence[Answer], cluster: ClusterSaid | None) -> Iterator[ModelSaid]:
    """What each router says of each model. Where a controller knows more routers than were asked, as it heard it last."""
    asked = [answer.status.router.models for answer in answers]
    told = _that_serve(cluster)
    for models in asked if len(asked) >= len(told) else told:
        yield from models


def _that_serve(cluster: ClusterSaid | None) -> list[tuple[ModelSaid, ...]]:
    """The models of each router that a controller knows, less those that stand by."""
    return [] if cluster is None else [router.models for router in cluster.routers if router.url]


def _controller(cluster: ClusterSaid | None) -> Controller | None:
    return None if cluster is None else Controller(cluster.controller_generation.number, cluster.uptime_s)


def _notes(answers: Sequence[Answer], troubles: Sequence[Trouble]) -> Iterator[str]:
    yield from (trouble.why for trouble in troubles)
    yield from dict.fromkeys(answer.no_decisions_why for answer in answers if answer.no_decisions_why)


def _model(
    name: str,
    classes: Mapping[str, int],
    said: Sequence[ModelSaid],
    replicas: Sequence[ReplicaRow],
    risen: Samples,
    tokens_per_s: Mapping[tuple[str, str], float] | None,
) -> ModelPicture:
    bands = [band for model in said for band in model.bands]
    return ModelPicture(
        model=name,
        ready=any(model.ready for model in said),
        classes=tuple(
            _class(name, c, priority, [b for b in bands if b.priority_class == c], risen, tokens_per_s)
            for c, priority in classes.items()
        ),
        replicas=tuple(sorted(replicas, key=lambda row: row.replica_id)),
        moves=tuple(sorted((move for model in said for move in model.moves), key=lambda move: -move.age_s)),
        moved=_by(risen, f"{names.MOVES.name}_total", name, "outcome"),
        preempted=_by(risen, f"{names.PREEMPTIONS.name}_total", name, "means"),
    )


def _class(
    model: str,
    name: str,
    priority: int,
    bands: Sequence[Band],
    risen: Samples,
    tokens_per_s: Mapping[tuple[str, str], float] | None,
) -> ClassRow:
    buckets = _buckets(risen, model, name)
    oldest = [band.oldest_s for band in bands if band.oldest_s is not None]
    return ClassRow(
        priority_class=name,
        priority=priority,
        queued=sum(band.queued_requests for band in bands),
        running=sum(band.running_requests for band in bands),
        oldest_s=max(oldest) if oldest else None,
        tokens_per_s=None if tokens_per_s is None else tokens_per_s.get((model, name), 0.0),
        first_tokens=round(max((count for _, count in buckets), default=0.0)),
        ttft_p50_s=quantile(buckets, 0.5),
        ttft_p99_s=quantile(buckets, 0.99),
    )


def _replicas(name: str, answers: Sequence[Answer], cluster: ClusterSaid | None) -> list[ReplicaRow]:
    """Those of a model: as the controller knows them, or where none answers as the routers that were asked do."""
    classes = answers[0].status.router.classes
    said = [model for answer in answers for model in answer.status.router.models if model.model == name]
    unroutable = {u.replica_id: u.why for model in said for u in model.unroutable}
    if cluster is not None:
        there = [replica for replica in cluster.replicas if replica.entry.model == name]
        return [_replica(replica, classes, unroutable.get(replica.entry.replica_id)) for replica in there]
    figures: dict[str, dict[str, dict[str, int]]] = {}
    for answer in answers:
        for (sample, pairs), value in answer.gauges.items():
            labels = dict(pairs)
            if labels.get(names.MODEL_LABEL) == name:
                of_replica = figures.setdefault(labels.get("replica", ""), {})
                of_replica.setdefault(sample, {})[labels.get("priority_class", "")] = round(value)
    return [_replica_of_gauges(r, f, classes, unroutable.get(r, "ready")) for r, f in figures.items()]


def _replica_of_gauges(
    replica_id: str, figures: Mapping[str, Mapping[str, int]], classes: Mapping[str, int], state: str
) -> ReplicaRow:
    def figure(metric: names.Metric) -> int:
        return sum(figures.get(metric.name, {}).values())

    held = figures.get(names.REPLICA_CLASS_BLOCKS.name, {})
    return ReplicaRow(
        replica_id=replica_id,
        host="",
        state=state.replace("_", " "),
        running=figure(names.REPLICA_RUNNING),
        slots=figure(names.REPLICA_SLOTS),
        waiting=figure(names.REPLICA_WAITING),
        blocks_total=figure(names.REPLICA_BLOCKS),
        blocks_free=figure(names.REPLICA_BLOCKS_FREE),
        blocks_cached=figure(names.REPLICA_BLOCKS_CACHED),
        blocks_by_class={priority_class: held.get(priority_class, 0) for priority_class in classes},
    )


def _replica(replica: ReplicaSaid, classes: Mapping[str, int], unroutable: str | None) -> ReplicaRow:
    entry, report, age_s = replica.entry, replica.report, replica.report_age_s
    if report is None:
        return ReplicaRow(replica_id=entry.replica_id, host=entry.host, state="no report")
    silent = age_s is not None and age_s >= SILENT_S
    state = f"silent {age_s:.0f} s" if silent else (unroutable or report.state).replace("_", " ")
    load = report.load
    return ReplicaRow(
        replica_id=entry.replica_id,
        host=entry.host,
        state=state,
        running=sum(level.requests for level in load.running),
        slots=load.slots_total,
        waiting=sum(level.requests for level in load.waiting),
        blocks_total=load.blocks_total,
        blocks_free=load.blocks_free,
        blocks_cached=load.blocks_cached,
        blocks_by_class=_blocks_by_class((*load.running, *load.waiting), classes),
    )


def _blocks_by_class(levels: Iterable[Level], classes: Mapping[str, int]) -> dict[str, int]:
    """By the router's own rule."""
    blocks = dict.fromkeys(classes, 0)
    of_class, priorities = list(classes), list(classes.values())
    for level in levels:
        blocks[of_class[reached(priorities, level.priority)]] += level.blocks
    return blocks


def _buckets(risen: Samples, model: str, priority_class: str) -> list[tuple[float, float]]:
    buckets = []
    for (name, pairs), value in risen.items():
        if name == f"{names.TTFT.name}_bucket":
            labels = dict(pairs)
            if (labels.get(names.MODEL_LABEL), labels.get("priority_class")) == (model, priority_class):
                buckets.append((float(labels["le"]), value))
    return buckets


def _by(risen: Samples, sample: str, model: str, label: str) -> dict[str, int]:
    """How often, by the values of a label, less those that did not happen."""
    counts: Counter[str] = Counter()
    for (name, pairs), value in risen.items():
        labels = dict(pairs)
        if name == sample and labels.get(names.MODEL_LABEL) == model and value:
            counts[labels.get(label, "")] += round(value)
    return dict(counts)
