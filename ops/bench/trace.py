"""Request traces: real arrivals and lengths, without text.

Owns: reading the two public formats into one form. Imports nothing of ours but the command line's error.

- Azure: CSV with the columns `arrival_s, service, prompt_tokens, output_tokens` (Azure LLM inference traces,
  Microsoft, CC-BY-4.0).
- Mooncake: JSON lines with `timestamp` (ms), `input_length`, `output_length`, `hash_ids` (Mooncake, kvcache-ai,
  Apache-2.0). Equal ids are equal 512-token blocks with equal prefixes before them.

Invariant: arrivals never go back, lengths are at least 1, and whatever breaks this is named by file and line.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec

from ops.errors import CommandError

MOONCAKE_BLOCK_TOKENS = 512
MOONCAKE_SERVICE = "mooncake"
"""Mooncake's traces name no service."""


class TraceFormat(StrEnum):
    AZURE = "azure"
    MOONCAKE = "mooncake"


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One recorded request. `arrival_s` counts from the trace's own zero."""

    arrival_s: float
    service: str
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()
    """Identity of each block of `MOONCAKE_BLOCK_TOKENS` prompt tokens, in order; empty where it was not recorded."""


@dataclass(frozen=True, slots=True)
class Trace:
    format: TraceFormat
    requests: tuple[TraceRequest, ...]


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


_AZURE_COLUMNS = ("arrival_s", "service", "prompt_tokens", "output_tokens")
_decode_mooncake = msgspec.json.Decoder(_MooncakeLine).decode


def read_trace(path: Path, limit: int | None = None) -> Trace:
    """Read the first `limit` requests (all by default) of a trace; the format is told by its first line.

    Raises:
        CommandError: no such file, neither format, or a line that is wrong (which is named).
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return _read(path, file, limit)
    except OSError as error:
        raise CommandError(f"--trace: {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CommandError(f"--trace: {path} is no text file: {error.reason} at byte {error.start}") from error


def _read(path: Path, file: Iterable[str], limit: int | None) -> Trace:
    lines = enumerate(file, start=1)
    first = next(((number, line) for number, line in lines if line.strip()), None)
    if first is None:
        raise CommandError(f"--trace: {path} is empty")
    columns = _columns(first[1])
    parse: Callable[[str], TraceRequest]
    if first[1].lstrip().startswith("{"):
        format_, parse, rest = TraceFormat.MOONCAKE, _parse_mooncake, itertools.chain([first], lines)
    elif set(_AZURE_COLUMNS) <= set(columns):
        format_, parse, rest = TraceFormat.AZURE, _azure_parser(columns), itertools.chain(lines)
    else:
        raise CommandError(
            f"--trace: {path} line {first[0]} begins neither a CSV with the columns {', '.join(_AZURE_COLUMNS)} "
            "nor JSON lines with timestamp, input_length, output_length"
        )
    requests = tuple(itertools.islice(_parse_all(path, rest, parse), limit))
    if not requests:
        raise CommandError(f"--trace: {path} has no requests")
    return Trace(format_, requests)


def _parse_all(
    path: Path, lines: Iterable[tuple[int, str]], parse: Callable[[str], TraceRequest]
) -> Iterator[TraceRequest]:
    latest_s = float("-inf")
    for number, line in lines:
        if not line.strip():
            continue
        try:
            request = parse(line)
            if not 0 <= request.arrival_s < float("inf"):
                raise ValueError(f"arrival {request.arrival_s} is no time")
            if request.arrival_s < latest_s:
                raise ValueError(f"arrival {request.arrival_s} s is before the one above it, {latest_s} s")
            if min(request.prompt_tokens, request.output_tokens) < 1:
                raise ValueError("lengths must be at least 1")
            needed = -(-request.prompt_tokens // MOONCAKE_BLOCK_TOKENS)
            if request.block_ids and len(request.block_ids) != needed:
                raise ValueError(f"{len(request.block_ids)} hash_ids for {needed} blocks of the prompt")
        except ValueError as error:
            raise CommandError(f"--trace: {path} line {number}: {error}") from error
        latest_s = request.arrival_s
        yield request


def _columns(line: str) -> list[str]:
    return [cell.strip() for cell in next(csv.reader([line]))]


def _azure_parser(columns: list[str]) -> Callable[[str], TraceRequest]:
    at = {name: columns.index(name) for name in _AZURE_COLUMNS}

    def parse(line: str) -> TraceRequest:
        cells = _columns(line)
        if len(cells) != len(columns):
            raise ValueError(f"{len(cells)} cells under {len(columns)} columns")
        return TraceRequest(
            arrival_s=float(cells[at["arrival_s"]]),
            service=cells[at["service"]],
            prompt_tokens=int(cells[at["prompt_tokens"]]),
            output_tokens=int(cells[at["output_tokens"]]),
        )

    return parse


def _parse_mooncake(line: str) -> TraceRequest:
    try:
        record = _decode_mooncake(line)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from error
    return TraceRequest(
        arrival_s=record.timestamp / 1000,
        service=MOONCAKE_SERVICE,
        prompt_tokens=record.input_length,
        output_tokens=record.output_length,
        block_ids=record.hash_ids,
    )
