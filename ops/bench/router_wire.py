"""What the processes of `bench router` say to each other, a line of JSON each, and what the mock engines say to clients.

Owns: the messages, the text of every mock answer and the pace of every mock engine. Imports nothing of ours.
Invariant: the k-th token of an answer is the same for every router, so that each client knows what it must read.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from string import ascii_lowercase
from typing import TypeVar

import msgspec

STEP_S = 0.025
"""Time of a mock engine's step: each running stream gets one token."""
WINDOW_S = 1.0
"""Time for which tokens are counted at once. Short, so that work of others spoils few of them."""
REPLICAS = 8
"""Mock engines. Their steps are not synchronised: replica k is k / REPLICAS of a step later than the first."""

MARK = "~"
"""Begins every token, and is nowhere else in an answer: tokens can be counted without reading JSON."""

_LETTERS = len(ascii_lowercase)

T = TypeVar("T")


def piece(index: int) -> str:
    """Text of token `index` of every answer: MARK and four letters."""
    letters = ""
    for _ in range(4):
        index, letter = divmod(index, _LETTERS)
        letters = ascii_lowercase[letter] + letters
    return MARK + letters


def answer(tokens: int) -> str:
    """The whole text of an answer of so many tokens."""
    return "".join(map(piece, range(tokens)))


class Line(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages."""


# --- servers: each says one line once it can be used, and ends when its standard input does ---


class Listening(Line, frozen=True):
    """Ports on 127.0.0.1."""

    ports: tuple[int, ...]


class Pace(Line, frozen=True):
    """To the mock replicas, and back when it is done. `scattered`: each token of a step leaves in a frame of its own, at
    a time of its own; otherwise all of a step in one frame. `idle`: nothing comes after a stream's first token."""

    scattered: bool = False
    idle: bool = False


# --- the load client: answers each question with one line ---


class Load(Line, frozen=True):
    """What every question says."""

    ports: tuple[int, ...]
    """Taken in turns by the connections."""
    model: str
    seed: int
    """Makes prompts that no other question has."""


class Streams(Load, frozen=True):
    """Hold `streams` streams open, and count while all of them run, in `windows` of WINDOW_S one after the other."""

    streams: int
    warm_s: float
    windows: int
    processes: Mapping[str, tuple[int, ...]]
    """Whose CPU time is to be read at both ends of each window: pids by name."""


class Requests(Load, frozen=True):
    """Whole answers of one token, `concurrency` at a time, each connection kept alive."""

    concurrency: int
    pretokenised: bool
    """Token ids on /v1/completions; otherwise a chat."""
    warm_s: float
    measure_s: float
    processes: Mapping[str, tuple[int, ...]]


class Probes(Load, frozen=True):
    """While `streams` streams run, time the first token of `probes` more, one after the other."""

    streams: int
    warm_s: float
    probes: int


class OpenStreams(Load, frozen=True):
    """Hold `streams` streams open that have nothing to say after their first token, and see what memory that takes."""

    streams: int
    processes: tuple[int, ...]


class Counted(Line, frozen=True):
    """Of the time measured."""

    wall_s: float
    done: int
    """Tokens of streams, or whole answers."""
    single: int
    """Of the tokens, those that the client read alone: one token in one read."""
    cpu_s: Mapping[str, float]
    idle_share: float
    """Of all processors of the machine."""


class Windows(Line, frozen=True):
    """One for each window in which all streams ran."""

    counted: tuple[Counted, ...]


class Probed(Line, frozen=True):
    ttft_ms: tuple[float, ...]
    """From sending a request to the read that holds its first token."""


class Opened(Line, frozen=True):
    grown_bytes: int
    """Of resident memory, since the first few streams have come and gone."""


class Failed(Line, frozen=True):
    error: str


Question = Streams | Requests | Probes | OpenStreams
Answer = Counted | Windows | Probed | Opened | Failed


def say(line: Line) -> None:
    """Write one line to whoever started this process."""
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()
