"""What streaming costs the engine: step times with a router's streams against none, side by side in one process.

Owns: the measurement behind the decision to run the engine in a thread of the replica's process. Rounds alternate:
`alone`, the engine runs the requests and its results go nowhere; `streamed`, the same requests come over a real link
from a router in another process, and every step's tokens go back over it. A step's time is that between two results of
the engine with every slot running, so it holds whatever the event loop takes from the engine's thread.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cluster.clock import SystemClock
from cluster.config import EngineConfig, TransportConfig
from cluster.messages import RosterEntry
from cluster.model import ModelFolder
from cluster.ports import EnginePort, EngineProgress, HeldAttempt, MovesPort, StepResult
from cluster.types import Generation, ReplicaId, Request, RequestId, Sampling
from deployments.replica_server import ROLES, ReplicaServer, decode
from deployments.transport import Acceptor, Identity
from ops.errors import CommandError
from ops.report import Report, ReportRow, machine_context

REPLICA = ReplicaId("bench")
GENERATION = Generation(1, "bench")
PROMPT_TOKENS = 1
"""As short as can be: every step should be one in which all streams decode."""


@dataclass(frozen=True)
class StepSettings:
    streams: int
    tokens: int
    rounds: int


def requests(round_name: str, streams: int, tokens: int) -> list[Request]:
    """Equal work for every round, and different prompts, so that nothing is shared."""
    return [
        Request(
            request_id=RequestId(f"{round_name}-{number}"),
            tenant="bench",
            priority=0,
            priority_class="standard",
            arrived_unix_s=float(number),
            prompt_ids=tuple(100 + number + i for i in range(PROMPT_TOKENS)),
            sampling=Sampling(max_tokens=tokens, seed=1, temperature=0.0, ignore_eos=True),
        )
        for number in range(streams)
    ]


class TimedEngine:
    """An EnginePort around another: stamps each result with every slot running; `forward` is off in `alone` rounds."""

    def __init__(self, inner: EnginePort, streams: int) -> None:
        self._inner = inner
        self._streams = streams
        self.forward = False
        self.step_ms: list[float] = []
        self.idle = threading.Event()
        self._last_s: float | None = None
        self._on_result: Callable[[StepResult], None] | None = None

    def start(self, on_result: Callable[[StepResult], None], on_death: Callable[[str], None]) -> None:
        self._on_result = on_result

        def died(why: str) -> None:
            on_death(why)
            self.idle.set()  # it will never be told so by a result

        self._inner.start(self._stamp, died)

    def _stamp(self, result: StepResult) -> None:
        now_s = time.perf_counter()
        full = len(result.deltas) == self._streams
        if full and self._last_s is not None:
            self.step_ms.append((now_s - self._last_s) * 1000)
        self._last_s = now_s if full else None
        if self.forward and self._on_result is not None:
            self._on_result(result)
        if not result.load.running and not result.load.waiting:
            self.idle.set()

    def add(self, request: Request, attempt: int) -> None:
        self._inner.add(request, attempt)

    def abort(self, request_id: RequestId, attempt: int) -> None:
        self._inner.abort(request_id, attempt)

    @property
    def moves(self) -> MovesPort:
        return self._inner.moves

    def held(self, limit: int) -> Future[tuple[HeldAttempt, ...]]:
        return self._inner.held(limit)

    def progress(self) -> EngineProgress:
        return self._inner.progress()

    def stop(self) -> None:
        self._inner.stop()


async def measure(engine: TimedEngine, settings: StepSettings, show: Callable[[], None]) -> dict[str, list[float]]:
    """Step times in ms, `alone` and `streamed`, of all rounds; `show` is called after each.

    Raises:
        RuntimeError: the engine died, or the process that plays the router failed.
    """
    config = TransportConfig()
    server = ReplicaServer(engine, REPLICA, GENERATION, config, SystemClock())
    deaths: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        secret_path = Path(folder) / "secret"
        secret_path.touch(mode=0o600)
        secret_path.write_text(secrets.token_hex(32))
        secret = secret_path.read_bytes()
        acceptor = Acceptor(
            lambda _: Identity("replica", REPLICA, secret, generation=GENERATION),
            ROLES,
            decode,
            server.accept,
            config,
        )
        host, port = await acceptor.listen("127.0.0.1", 0, secret)
        entry = RosterEntry(REPLICA, GENERATION, host, port, "bench")
        router = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "ops.bench.step_router", entry.host, str(entry.port), str(secret_path),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert router.stdin is not None
        assert router.stdout is not None
        times: dict[str, list[float]] = {"alone": [], "streamed": []}

        def died(why: str) -> None:
            deaths.append(why)
            if router.returncode is None:
                router.kill()  # it waits for tokens that will not come

        async def reports() -> None:
            while True:
                server.tick()
                await asyncio.sleep(config.report_period_s)

        server.start(died)
        ticking = asyncio.create_task(reports())
        try:
            for number in range(settings.rounds):
                for mode in ("alone", "streamed") if number % 2 else ("streamed", "alone"):
                    engine.step_ms, engine.forward = [], mode == "streamed"
                    engine.idle.clear()
                    if engine.forward:
                        router.stdin.write(f"{number} {settings.streams} {settings.tokens}\n".encode())
                        if await router.stdout.readline() != b"done\n" and not deaths:
                            raise RuntimeError("the process that plays the router failed")
                    else:
                        for request in requests(f"alone-{number}", settings.streams, settings.tokens):
                            engine.add(request, 0)
                    await asyncio.to_thread(engine.idle.wait)
                    if deaths:
                        raise RuntimeError(f"the engine died: {deaths[0]}")
                    times[mode] += engine.step_ms
                    show()
        finally:
            ticking.cancel()
            router.stdin.close()
            await router.wait()
            await acceptor.close()
            await asyncio.to_thread(engine.stop)
    return times


def build_report(
    times: dict[str, list[float]], settings: StepSettings, model: ModelFolder, config: EngineConfig
) -> Report:
    """Percentiles of both kinds of rounds and their ratios.

    Raises:
        CommandError: in no two steps in a row did every stream run, so nothing was measured.
    """
    if not all(times.values()):
        raise CommandError(
            f"--tokens: {settings.tokens} are too few: the first of {settings.streams} streams ended before the last "
            "began, so no step ran all of them"
        )
    rows = []
    for q in (50, 99):
        alone, streamed = (float(np.percentile(times[mode], q)) for mode in ("alone", "streamed"))
        rows += [
            ReportRow(f"alone.step_p{q}_ms", alone, "ms"),
            ReportRow(f"streamed.step_p{q}_ms", streamed, "ms"),
            ReportRow(f"streamed_over_alone_p{q}", streamed / alone, "ratio"),
        ]
    context = machine_context(("torch",)) | {
        "model": model.name,
        "dtype": str(config.dtype),
        "streams": settings.streams,
        "tokens": settings.tokens,
        "rounds": settings.rounds,
        "steps_alone": len(times["alone"]),
        "steps_streamed": len(times["streamed"]),
    }
    return Report("bench step", context, tuple(rows))
