"""What passes between `bench engine` and the worker processes that run an engine each: JSON, a line a message.

Owns: the messages and the worker's side of the conversation. Imports nothing of ours. Invariant: each line in is
answered by one line out, in order; whatever else a library prints goes to standard error.

`vllm_cpu.py` runs where this module cannot be imported and speaks the same lines by hand.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import BinaryIO, Protocol

import msgspec

Setting = Mapping[str, int | str]
"""Settings of one engine under its own names for them."""


class Open(msgspec.Struct, tag_field="is", tag="open", frozen=True):
    """Make an engine and forget the one before. Greedy, one thread, no shared prefixes."""

    model: str
    """Folder."""
    dtype: str
    max_model_len: int
    kv_tokens: int
    """Tokens that the KV cache holds in all, whatever the size of its blocks."""
    setting: Setting


class Run(msgspec.Struct, tag_field="is", tag="run", frozen=True):
    """Run a list of (prompt ids, output tokens), `concurrency` at a time, and count output tokens.

    Where requests join and leave the batch singly, the count ends, and what is left is abandoned, when for the first
    time fewer than `concurrency` are in flight. Where batches begin and end as one, all of them are counted.
    """

    requests: tuple[tuple[tuple[int, ...], int], ...]
    concurrency: int


class Profile(msgspec.Struct, tag_field="is", tag="profile", frozen=True):
    """Do the same and say where the time went."""

    requests: tuple[tuple[tuple[int, ...], int], ...]
    concurrency: int


class Opened(msgspec.Struct, tag_field="is", tag="opened", frozen=True):
    version: str
    """Of the package that holds the engine."""


class Measured(msgspec.Struct, tag_field="is", tag="measured", frozen=True):
    tokens: int
    seconds: float
    cpu_seconds: float
    """Of all threads of the process. More than `seconds`: it used several; much less: others had the processor."""
    steps: int

    @property
    def tok_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def tok_per_cpu_s(self) -> float:
        return self.tokens / self.cpu_seconds


class Share(msgspec.Struct, frozen=True):
    """One function's part of a step."""

    name: str
    cpu_ms_per_step: float
    """Its own time, without that of the functions that it calls."""
    calls_per_step: float


class Profiled(msgspec.Struct, tag_field="is", tag="profiled", frozen=True):
    """Times are of the processor, so that they hold on a busy machine."""

    step_cpu_ms: float
    """Without the profiler."""
    outside_backend_cpu_ms: float
    """Of that, scheduling, text and bookkeeping. Without the profiler."""
    functions: tuple[Share, ...]
    """Largest first. The profiler makes functions that call many others slower than they are."""


class Failed(msgspec.Struct, tag_field="is", tag="failed", frozen=True):
    error: str


class Peer(Protocol):
    """An engine as a worker holds it. Whatever a method raises is answered as `Failed`."""

    def open(self, message: Open) -> Opened: ...

    def run(self, message: Run) -> Measured: ...

    def profile(self, message: Profile) -> Profiled: ...


def claim_stdout() -> BinaryIO:
    """Standard output for the lines alone; what others write there goes to standard error from now on."""
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    return out


def serve(peer: Peer, out: BinaryIO) -> None:
    """Answer lines until standard input ends."""
    decoder = msgspec.json.Decoder(Open | Run | Profile)
    for line in sys.stdin.buffer:
        out.write(msgspec.json.encode(_answer(peer, decoder.decode(line))) + b"\n")


def _answer(peer: Peer, message: Open | Run | Profile) -> Opened | Measured | Profiled | Failed:
    try:
        match message:
            case Open():
                return peer.open(message)
            case Run():
                return peer.run(message)
            case Profile():
                return peer.profile(message)
    except Exception as error:  # a setting that an engine cannot run is a result, and the next may work
        return Failed(f"{type(error).__name__}: {error}")
