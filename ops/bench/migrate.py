"""What a live migration costs: a request leaves one engine for another, in another process, in the middle of its answer.

Owns: the source's side and the measurement. Imports the engine, its runner and the report. The source decodes on while
its full blocks are copied over loopback; then it is frozen, the rest is copied, and the target goes on. Both engines'
tokens are seen here, so the pause is what a client of both would see: from the last token of the source to the first of
the target. Invariant: a round counts only if every token is that of a run that was not moved.
"""

from __future__ import annotations

import queue
import random
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import msgspec

from cluster.config import DType, EngineConfig
from cluster.engine.runner import EngineRunner
from cluster.model import ModelFolder
from cluster.ports import StepResult
from cluster.types import Request, RequestId, Sampling, TokenDelta
from ops.bench.migrate_wire import Begin, Blocks, Commit, Died, Done, Frame, Hello, Link, Tokens, ToSource
from ops.report import Report, ReportRow, machine_context

ATTEMPT_HERE, ATTEMPT_THERE = 0, 1
TOKENS_BEFORE = 16
"""Output tokens before a request has the length at which it moves."""
TOKENS_IN_ALL = 96
"""Output tokens: more follow while its blocks are copied, and the rest is left to the target."""
PATIENCE_S = 300.0
"""Nothing of this takes so long unless something is broken."""


@dataclass(frozen=True, slots=True)
class MigrateSettings:
    kv_tokens: int
    """Computed positions of the request when it moves, at least."""
    chunk_blocks: int
    """Blocks in one frame while the source decodes on."""
    rounds: int
    seed: int

    @property
    def prompt_tokens(self) -> int:
        return self.kv_tokens - TOKENS_BEFORE

    @property
    def longest_tokens(self) -> int:
        """Prompt and output."""
        return self.prompt_tokens + TOKENS_IN_ALL

    def request(self, name: str, tenant: str, vocab_size: int, number: int) -> Request:
        """The same prompt for the same number; other tenants find nothing of it cached."""
        draw = random.Random(f"{self.seed}/{number}")
        return Request(
            request_id=RequestId(name),
            tenant=tenant,
            priority=0,
            priority_class="standard",
            arrived_unix_s=time.time(),
            prompt_ids=tuple(draw.randrange(vocab_size) for _ in range(self.prompt_tokens)),
            sampling=Sampling(max_tokens=TOKENS_IN_ALL, seed=0, temperature=0.0, ignore_eos=True),
        )


@dataclass(frozen=True, slots=True)
class Move:
    """One round."""

    gap_ms: float
    """From the source's last token to the target's first."""
    stop_and_copy_ms: float
    """From the order to freeze to the target's word that it has everything."""
    source_step_ms: float
    target_step_ms: float
    """Medians of the gaps between tokens, before and after the move."""
    tail_blocks: int
    """Copied while the request stood still."""
    tail_bytes: int
    streamed_bytes: int
    """Copied while the source decoded on."""
    prefill_tokens: int
    """Tokens of prompts that the target has run, in all rounds so far: what it had to compute again."""
    tokens_that_differ: int
    """From those of a run that was not moved."""

    @property
    def pause_over_step(self) -> float:
        """What the move adds to the time between two tokens, in decode steps of the target."""
        return (self.gap_ms - self.target_step_ms) / self.target_step_ms


class Source:
    """The engine in this process, and when each of its tokens came."""

    def __init__(self, runner: EngineRunner) -> None:
        self.runner = runner
        self._news: queue.Queue[tuple[float, TokenDelta] | str] = queue.Queue(maxsize=4096)
        runner.start(self._on_result, self._news.put_nowait)

    def _on_result(self, result: StepResult) -> None:
        now_s = time.perf_counter()
        for delta in result.deltas:
            self._news.put_nowait((now_s, delta))

    def next_delta(self) -> tuple[float, TokenDelta]:
        """
        Raises:
            RuntimeError: the engine died, or the request failed.
            queue.Empty: nothing came for a long time.
        """
        return _checked(self._news.get(timeout=PATIENCE_S))

    def waiting_deltas(self) -> Iterator[tuple[float, TokenDelta]]:
        """Those that have come by now."""
        while not self._news.empty():
            yield self.next_delta()


class Target:
    """The other process."""

    def __init__(self, link: Link, kv_format: str) -> None:
        self.kv_format = kv_format
        self._link = link
        self._answers: queue.Queue[str] = queue.Queue(maxsize=4096)
        self._news: queue.Queue[tuple[float, Tokens] | str] = queue.Queue(maxsize=4096)
        self._reader = threading.Thread(target=self._read, name="migrate-target", daemon=True)
        self._reader.start()

    def send(self, frame: Frame, raw: memoryview | None = None) -> None:
        self._link.send(frame, raw)

    def confirm(self, answers: int) -> None:
        """Wait until so many messages are answered.

        Raises:
            RuntimeError: the target refused one.
            queue.Empty: nothing came for a long time.
        """
        for _ in range(answers):
            if refusal := self._answers.get(timeout=PATIENCE_S):
                raise RuntimeError(f"the target refused the request: {refusal}")

    def next_tokens(self) -> tuple[float, Tokens]:
        """
        Raises:
            RuntimeError: the target's engine or process has ended.
            queue.Empty: nothing came for a long time.
        """
        news = self._news.get(timeout=PATIENCE_S)
        if isinstance(news, str):
            raise RuntimeError(f"the target ended: {news}")
        return news

    def _read(self) -> None:
        decode = msgspec.msgpack.Decoder(ToSource).decode
        why = "its connection closed"
        try:
            while (frame := self._link.receive()) is not None:
                message: ToSource = decode(frame)
                now_s = time.perf_counter()
                match message:
                    case Done(refusal):
                        self._answers.put_nowait(refusal)
                    case Tokens():
                        self._news.put_nowait((now_s, message))
                    case Died(why):
                        break
                    case Hello():
                        why = "it said hello twice"
                        break
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            why = str(error)
        self._news.put_nowait(why)
        self._answers.put_nowait(why)


def _checked(news: tuple[float, TokenDelta] | str) -> tuple[float, TokenDelta]:
    if isinstance(news, str):
        raise RuntimeError(f"the engine died: {news}")
    if news[1].error:
        raise RuntimeError(f"a request failed: {news[1].error}")
    return news


@contextmanager
def target_process(model: ModelFolder, dtype: DType) -> Iterator[Target]:
    """Start the other process; it has ended when this is left.

    Raises:
        RuntimeError: it ended before its engine was warm, or something else connected.
    """
    token = secrets.token_hex(16)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(1.0)
        port = listener.getsockname()[1]
        command = [sys.executable, "-m", "ops.bench.migrate_target", str(port), str(model.path), dtype.value]
        process = subprocess.Popen(command, stdin=subprocess.PIPE)
        assert process.stdin is not None
        try:
            process.stdin.write(f"{token}\n".encode())
            process.stdin.close()
            connection = _accept(listener, process)
            with connection:
                link = Link(connection)
                frame = link.receive()
                hello = None if frame is None else msgspec.msgpack.decode(frame, type=ToSource)
                if not isinstance(hello, Hello) or not secrets.compare_digest(hello.token, token):
                    raise RuntimeError("what connected is not the process that was started")
                yield Target(link, hello.kv_format)
                connection.shutdown(socket.SHUT_RDWR)
            process.wait(timeout=30)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def _accept(listener: socket.socket, process: subprocess.Popen[bytes]) -> socket.socket:
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            if process.poll() is not None:
                raise RuntimeError(f"the target ended before it was warm (exit code {process.returncode})") from None
        else:
            connection.settimeout(None)
            return connection
    raise RuntimeError("the target did not become warm")


def measure(
    source: Source, target: Target, vocab_size: int, settings: MigrateSettings, show: Callable[[], None]
) -> list[Move]:
    """Run every round; `show` is called after each.

    Raises:
        RuntimeError: an engine died, or a request failed or was refused.
    """
    moves = []
    for number in range(settings.rounds):
        expected = _unmoved(source, settings.request(f"{number}-unmoved", "unmoved", vocab_size, number))
        request = settings.request(f"{number}-moved", "moved", vocab_size, number)
        moves.append(_move(source, target, request, settings, expected))
        show()
    return moves


def _unmoved(source: Source, request: Request) -> list[int]:
    source.runner.add(request, ATTEMPT_HERE)
    tokens: list[int] = []
    while True:
        _, delta = source.next_delta()
        tokens += delta.token_ids
        if delta.finish is not None:
            return tokens


class _Seen:
    """One engine's tokens of one request, and when they came."""

    def __init__(self) -> None:
        self.came_s: list[float] = []
        self.token_ids: list[int] = []

    def take(self, at_s: float, delta: TokenDelta) -> None:
        self.came_s.append(at_s)
        self.token_ids.extend(delta.token_ids)

    @property
    def step_ms(self) -> float:
        """Median of the times between two tokens."""
        return median((b - a) * 1000 for a, b in pairwise(self.came_s))


@dataclass(frozen=True, slots=True)
class _Copied:
    blocks: int
    raw_bytes: int


def _move(source: Source, target: Target, request: Request, settings: MigrateSettings, expected: list[int]) -> Move:
    here, there = _Seen(), _Seen()
    source.runner.add(request, ATTEMPT_HERE)
    here.take(*source.next_delta())
    streamed = _stream(source, target, request.request_id, settings, here)
    begin_s = time.perf_counter()
    tail = _stop_and_copy(source, target, request.request_id, streamed.blocks)
    stop_and_copy_ms = (time.perf_counter() - begin_s) * 1000
    source.runner.moves.release(request.request_id, ATTEMPT_HERE).result()
    for news in source.waiting_deltas():
        here.take(*news)
    prefill_tokens = _follow(target, there)
    return Move(
        gap_ms=(there.came_s[0] - here.came_s[-1]) * 1000,
        stop_and_copy_ms=stop_and_copy_ms,
        source_step_ms=here.step_ms,
        target_step_ms=there.step_ms,
        tail_blocks=tail.blocks,
        tail_bytes=tail.raw_bytes,
        streamed_bytes=streamed.raw_bytes,
        prefill_tokens=prefill_tokens,
        tokens_that_differ=sum(a != b for a, b in zip(here.token_ids + there.token_ids, expected, strict=True)),
    )


def _stream(source: Source, target: Target, request_id: RequestId, settings: MigrateSettings, here: _Seen) -> _Copied:
    """Copy what is final while the request decodes on, until it has the length that is asked for and no more is final."""
    moves = source.runner.moves
    final_blocks = moves.exportable_blocks(request_id, ATTEMPT_HERE).result()
    target.send(Begin(request_id, ATTEMPT_THERE, target.kv_format, final_blocks))
    blocks, raw_bytes, answers = 0, 0, 1
    while True:
        for news in source.waiting_deltas():
            here.take(*news)
        if blocks < final_blocks:
            count = min(settings.chunk_blocks, final_blocks - blocks)
            raw = moves.export_blocks(request_id, ATTEMPT_HERE, blocks, count).result()
            target.send(Blocks(request_id, ATTEMPT_THERE, blocks, raw.nbytes), raw)
            blocks, raw_bytes, answers = blocks + count, raw_bytes + raw.nbytes, answers + 1
        elif settings.prompt_tokens + len(here.token_ids) <= settings.kv_tokens:
            here.take(*source.next_delta())
        elif (now_final := moves.exportable_blocks(request_id, ATTEMPT_HERE).result()) > final_blocks:
            final_blocks = now_final
        else:
            target.confirm(answers)
            return _Copied(blocks, raw_bytes)


def _stop_and_copy(source: Source, target: Target, request_id: RequestId, copied_blocks: int) -> _Copied:
    """Freeze the request, copy the blocks that are left, and hand it over. The target has it when this returns."""
    moves = source.runner.moves
    state = moves.freeze(request_id, ATTEMPT_HERE).result()
    if state is None:
        raise RuntimeError("the request ended before it was moved: its blocks were copied too slowly")
    blocks = moves.exportable_blocks(request_id, ATTEMPT_HERE).result() - copied_blocks
    raw_bytes = 0
    if blocks:
        raw = moves.export_blocks(request_id, ATTEMPT_HERE, copied_blocks, blocks).result()
        raw_bytes = raw.nbytes
        target.send(Blocks(request_id, ATTEMPT_THERE, copied_blocks, raw_bytes), raw)
    target.send(Commit(state, ATTEMPT_THERE))
    target.confirm(2 if blocks else 1)
    return _Copied(blocks, raw_bytes)


def _follow(target: Target, there: _Seen) -> int:
    """Take the target's tokens up to the request's end. Returns the tokens of prompts that it has ever run."""
    while True:
        at_s, news = target.next_tokens()
        for delta in news.deltas:
            if delta.error:
                raise RuntimeError(f"the request failed on the target: {delta.error}")
            there.take(at_s, delta)
            if delta.finish is not None:
                return news.prefill_tokens_total


def build_report(moves: list[Move], settings: MigrateSettings, model: ModelFolder, config: EngineConfig) -> Report:
    """Medians over the rounds."""
    context = machine_context(("torch",)) | {
        "model": model.name,
        "dtype": str(config.dtype),
        "kv_tokens": settings.kv_tokens,
        "prompt_tokens": settings.prompt_tokens,
        "chunk_blocks": settings.chunk_blocks,
        "rounds": settings.rounds,
        "seed": settings.seed,
    }
    rows = (
        ReportRow("pause_over_step", median(m.pause_over_step for m in moves), "ratio"),
        ReportRow("gap_ms", median(m.gap_ms for m in moves), "ms"),
        ReportRow("stop_and_copy_ms", median(m.stop_and_copy_ms for m in moves), "ms"),
        ReportRow("target.step_ms", median(m.target_step_ms for m in moves), "ms"),
        ReportRow("source.step_ms", median(m.source_step_ms for m in moves), "ms"),
        ReportRow("streamed_mib", median(m.streamed_bytes for m in moves) / 2**20, "MiB"),
        ReportRow("tail_mib", median(m.tail_bytes for m in moves) / 2**20, "MiB"),
        ReportRow("tail_blocks", median(m.tail_blocks for m in moves), "blocks"),
        ReportRow("target.prefill_tokens", moves[-1].prefill_tokens, "tokens"),
        ReportRow("tokens_that_differ", sum(m.tokens_that_differ for m in moves), "tokens"),
    )
    return Report("bench migrate", context, rows)
