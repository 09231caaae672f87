"""From a recorded trace to what arrives at a simulated cluster.

Owns: copies of a trace, their shifts and thinning, the mapping of services to classes, and the backlog of batch work.
Imports the readers of traces. Invariants: equal settings and seed give equal arrivals; each arrival has the lengths of a
recorded request, and what one copy leaves out another does not.

A cluster of many GPUs has many times the traffic of a recorded service. So the trace is laid several times over itself,
each copy turned by a random time of its own: what is left of its end goes on at its beginning. Bursts of a copy remain and
meet those of others by chance. Synchronised copies are all turned by the same time: every burst is everybody's. Of each
class so many requests are then drawn as are wanted, each as likely as the next.
"""

from __future__ import annotations

import csv
import math
import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cluster.types import Outcome, RequestId
from ops.bench.lengths import Lengths
from ops.bench.schedule import parse_classes
from ops.bench.trace import MOONCAKE_BLOCK_TOKENS, TraceRequest
from ops.errors import CommandError
from ops.sim.backend import FILLER_TOKEN
from ops.sim.values import Arrival, RequestRecord

BATCH = "batch"
MAX_COPIES = 20_000
MAX_ARRIVALS = 10_000_000
REFUSED_AGAIN_S = 1.0
FILL_FROM_S = 0.1
FILL_FOR_S = 1.0
"""In which a backlog fills an empty cluster."""
_LENGTH_COLUMNS = ("num_prefill_tokens", "num_decode_tokens")


@dataclass(frozen=True, slots=True)
class Mix:
    """Which class each service's requests are, and which part of all requests some services are to be."""

    classes: Mapping[str, str]
    shares: Mapping[str, float]
    """By service; the others have what is left, as they were recorded."""


def parse_mix(texts: Sequence[str]) -> Mix:
    """From `service=class` or `service=class:share`, several with commas between, on top of the default classes.

    Raises:
        CommandError: an entry has another form, names an unknown class, or the shares are none.
    """
    classes: list[str] = []
    shares: dict[str, float] = {}
    for entry in (e.strip() for text in texts for e in text.split(",")):
        named, colon, share = (part.strip() for part in entry.partition(":"))
        classes.append(named)
        if colon:
            shares[named.partition("=")[0].strip()] = _share(share, entry)
    if sum(shares.values()) > 1:
        raise CommandError(f"--classes: the shares add up to {sum(shares.values()):g}; at most 1")
    return Mix(parse_classes(classes), shares)


def _share(text: str, entry: str) -> float:
    try:
        share = float(text)
    except ValueError as error:
        raise CommandError(f"--classes: {text!r} in {entry!r} is no share; write code=interactive:0.1") from error
    if not 0 < share <= 1:
        raise CommandError(f"--classes: the share in {entry!r} must be above 0 and at most 1")
    return share


def weights(requests: Sequence[TraceRequest], mix: Mix) -> list[float]:
    """By what each recorded request is to be more or less frequent than it was; the mean over all is 1.

    Raises:
        CommandError: a service has no class, a share is of a service that the trace lacks, or the shares leave something
            over that no service has.
    """
    counts = Counter(request.service for request in requests)
    if missing := sorted(counts.keys() - mix.classes.keys()):
        raise CommandError(f"--classes: service {missing[0]!r} of the trace has no class; add {missing[0]}=standard")
    if absent := sorted(mix.shares.keys() - counts.keys()):
        raise CommandError(f"--classes: the trace has no service {absent[0]!r}; it has {', '.join(sorted(counts))}")
    named, rest = sum(mix.shares.values()), sum(n for service, n in counts.items() if service not in mix.shares)
    if not rest and abs(named - 1) > 1e-9:
        raise CommandError(f"--classes: every service has a share, and they add up to {named:g}, not 1")
    by_service = {
        service: (mix.shares[service] / n if service in mix.shares else (1 - named) / rest) * len(requests)
        for service, n in counts.items()
    }
    return [by_service[request.service] for request in requests]


def fitting_lengths(lengths: Sequence[Lengths], max_model_len: int) -> tuple[Lengths, ...]:
    """Those of batch requests that the model has room for.

    Raises:
        CommandError: it has room for none.
    """
    kept = tuple(one for one in lengths if sum(one) <= max_model_len)
    if not kept:
        raise CommandError(f"--batch: no request has at most {max_model_len} tokens, which is the model's longest")
    return kept


def fitting(requests: Sequence[TraceRequest], max_model_len: int) -> tuple[TraceRequest, ...]:
    """Those that the model has room for.

    Raises:
        CommandError: it has room for none.
    """
    kept = tuple(r for r in requests if r.prompt_tokens + r.output_tokens <= max_model_len)
    if not kept:
        raise CommandError(f"--trace: no request has at most {max_model_len} tokens, which is the model's longest")
    return kept


@dataclass(frozen=True, slots=True)
class Span:
    """How long a cluster is looked at, how much arrives, and how the copies lie to each other."""

    duration_s: float
    rate_rps: float
    synchronised: bool = False


def recorded_rate_rps(requests: Sequence[TraceRequest]) -> float:
    return len(requests) / _period_s(requests)


def _period_s(requests: Sequence[TraceRequest]) -> float:
    """The time after which a trace is taken to begin anew: a mean gap after its last request."""
    recorded_s = requests[-1].arrival_s - requests[0].arrival_s
    return recorded_s * len(requests) / (len(requests) - 1) if recorded_s else 1.0


def arrivals(requests: Sequence[TraceRequest], mix: Mix, span: Span, seed: int) -> Iterator[Arrival]:
    """`span.rate_rps` x `span.duration_s` arrivals, of each service its share of them. Each is made when it is taken: their
    prompts together may be more than there is room for.

    Raises:
        CommandError: of some service too little was recorded to draw so many from, or they would be none, or too many.
    """
    drawn, tokens = _drawn(requests, mix, span, seed), _BlockTokens()
    return (
        _arrival(requests[index], mix, at_s, tokens.of(copy, requests[index]), RequestId(f"{number:07}"))
        for number, (at_s, copy, index) in enumerate(drawn)
    )


def _drawn(requests: Sequence[TraceRequest], mix: Mix, span: Span, seed: int) -> list[tuple[float, int, int]]:
    """(when, of which copy, which request), in order."""
    rng = random.Random(seed)
    wanted = _wanted(requests, mix, span)
    if not any(wanted.values()):
        raise CommandError(
            f"--trace: no request arrives in {span.duration_s:g} s; lengthen --duration, or raise --times"
        )
    if (total := sum(wanted.values())) > MAX_ARRIVALS:
        raise CommandError(
            f"--duration: {total:,} requests would arrive, more than {MAX_ARRIVALS:,}; shorten it, or lower the load"
        )
    copies = _turned(requests, span, rng)
    candidates: dict[str, list[tuple[float, int, int]]] = {service: [] for service in wanted}
    for copy in range(MAX_COPIES):
        if all(len(candidates[service]) >= n for service, n in wanted.items()):
            break
        for at_s, index in next(copies):
            found = candidates[requests[index].service]
            if len(found) < 4 * wanted[requests[index].service] + 1000:
                found.append((at_s, copy, index))
    short = sorted(service for service, n in wanted.items() if len(candidates[service]) < n)
    if short:
        raise CommandError(
            f"--trace: {MAX_COPIES} copies have too few requests of service {short[0]!r} in {span.duration_s:g} s; "
            "lengthen --duration, lower its share, or leave --synchronised out"
        )
    return sorted(one for service, n in wanted.items() for one in rng.sample(candidates[service], n))


def _wanted(requests: Sequence[TraceRequest], mix: Mix, span: Span) -> dict[str, int]:
    total = span.rate_rps * span.duration_s
    parts: dict[str, float] = {}
    for request, weight in zip(requests, weights(requests, mix), strict=True):
        parts[request.service] = parts.get(request.service, 0.0) + weight / len(requests)
    return {service: round(total * part) for service, part in sorted(parts.items())}


def _turned(requests: Sequence[TraceRequest], span: Span, rng: random.Random) -> Iterator[list[tuple[float, int]]]:
    """Of one copy after the other what falls into the span: (when, which request)."""
    period_s, first_s = _period_s(requests), requests[0].arrival_s
    times_s = [request.arrival_s - first_s for request in requests]
    together_s = rng.random() * period_s
    while True:
        turned_s = together_s if span.synchronised else rng.random() * period_s
        copy: list[tuple[float, int]] = []
        round_s, index = -turned_s, bisect_left(times_s, turned_s)
        while True:
            if index == len(times_s):
                round_s, index = round_s + period_s, 0
            at_s = times_s[index] + round_s
            if at_s >= span.duration_s:
                break
            copy.append((max(0.0, at_s), index))
            index += 1
        yield copy


def _arrival(
    request: TraceRequest, mix: Mix, at_s: float, prefix_ids: tuple[int, ...], request_id: RequestId
) -> Arrival:
    return Arrival(
        at_s=at_s,
        request_id=request_id,
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
        priority_class=mix.classes[request.service],
        prefix_ids=prefix_ids,
    )


class _BlockTokens:
    """The tokens of recorded blocks: equal blocks are equal tokens, in one copy alone."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}

    def of(self, copy: int, request: TraceRequest) -> tuple[int, ...]:
        """Those that a prompt begins with; its last is its own."""
        shared = min(len(request.block_ids) * MOONCAKE_BLOCK_TOKENS, request.prompt_tokens - 1)
        whole = -(-shared // MOONCAKE_BLOCK_TOKENS)
        ids = [
            token
            for block in request.block_ids[:whole]
            for token in (self._number(copy, block),) * MOONCAKE_BLOCK_TOKENS
        ]
        return tuple(ids[:shared])

    def _number(self, copy: int, block: int) -> int:
        """Of one block, beyond what tokens mean to the modelled backend; as few as there are, for ids have an end."""
        return self._numbers.setdefault((copy, block), len(self._numbers) + 1 + FILLER_TOKEN)


# --- batch work that is always there ---


def read_lengths(path: Path) -> tuple[Lengths, ...]:
    """Lengths of batch requests from a CSV.

    Raises:
        CommandError: no such file, no such columns, or a line that is wrong (which is named).
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file)
            if not set(_LENGTH_COLUMNS) <= set(rows.fieldnames or ()):
                raise CommandError(f"--batch: {path} has no columns {', '.join(_LENGTH_COLUMNS)}")
            lengths = tuple(_lengths(path, rows.line_num, row) for row in rows)
    except OSError as error:
        raise CommandError(f"--batch: {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CommandError(f"--batch: {path} is no text file: {error.reason} at byte {error.start}") from error
    if not lengths:
        raise CommandError(f"--batch: {path} has no lengths")
    return lengths


def _lengths(path: Path, line: int, row: Mapping[str, str | None]) -> Lengths:
    try:
        prompt_tokens, output_tokens = (int(row[name] or "") for name in _LENGTH_COLUMNS)
    except ValueError as error:
        raise CommandError(f"--batch: {path} line {line}: {error}") from error
    if min(prompt_tokens, output_tokens) < 1:
        raise CommandError(f"--batch: {path} line {line}: lengths must be at least 1")
    return Lengths(prompt_tokens, output_tokens)


class Backlog:
    """Requests of one class, always `held` of them running or waiting: one that ends is followed by another."""

    def __init__(
        self, lengths: Sequence[Lengths], held: int, seed: int, priority_class: str = BATCH, until_s: float = math.inf
    ) -> None:
        """`until_s`: nothing follows after that."""
        self._lengths = lengths
        self._held = held
        self._rng = random.Random(f"backlog {seed}")
        self._priority_class = priority_class
        self._until_s = until_s
        self._number = 0

    def first(self) -> list[Arrival]:
        """One after the other, once replicas have reported: all at once they would be more than a router's queue may hold."""
        return [self._next(FILL_FROM_S + FILL_FOR_S * number / self._held) for number in range(self._held)]

    def follow(self, record: RequestRecord, now_s: float) -> Iterable[Arrival]:
        """What comes when a request has ended. One that was refused comes again later: it would be refused at once."""
        if record.priority_class != self._priority_class:
            return ()
        at_s = now_s if record.outcome is Outcome.FINISHED else now_s + REFUSED_AGAIN_S
        return (self._next(at_s),) if at_s < self._until_s else ()

    def _next(self, at_s: float) -> Arrival:
        one = self._rng.choice(self._lengths)
        self._number += 1
        return Arrival(
            at_s,
            RequestId(f"held-{self._number:07}"),
            one.prompt_tokens,
            one.output_tokens,
            priority_class=self._priority_class,
        )


def held_to_fill(lengths: Sequence[Lengths], slots: int, pool_tokens: int, replicas: int, waiting: int) -> int:
    """How many requests fill the replicas when nothing else is there, and `waiting` more."""
    mean_tokens = float(np.mean([sum(one) for one in lengths]))
    return replicas * min(slots, math.ceil(pool_tokens / mean_tokens)) + waiting
