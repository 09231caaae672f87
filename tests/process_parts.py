"""A controller or a replica as a process of its own: what tests/processes.py starts.

    python -m tests.process_parts controller INSTANCE_FILE
    python -m tests.process_parts replica INSTANCE_FILE CONTROLLER_PORT REPLICA_ID STEP_MS

Owns: the two processes, and the faults that a replica's engine can be told to have. Each says one line once it can be
used, answers each line that it is told with the same, and ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from cluster.clock import SystemClock
from cluster.engine.engine import Engine
from cluster.engine.runner import EngineRunner
from cluster.messages import ToController
from cluster.model import ModelFolder
from cluster.ports import Backend, EnginePort, Row, RowOutput, StepResult
from cluster.types import ReplicaId
from deployments.controller_server import ROLES, ControllerServer
from deployments.replica_process import ReplicaProcess
from deployments.settings import Instance
from deployments.transport import Acceptor
from ops.bench.router_wire import Line, Listening, say
from tests.padded import PaddedBackend, engine_over

POISON_ID = 7
"""An engine that is given a prompt that begins with it dies, and its process with it."""


class Hold(Line, frozen=True):
    """Steps wait in which a sequence would have `tokens` tokens, prompt and output, and draw the next; None lets go."""

    tokens: int | None


class Freeze(Line, frozen=True):
    """Stop the process, as SIGSTOP from outside does, while it holds tokens that it has not sent."""


Told = Hold | Freeze


class FaultyBackend(PaddedBackend):
    """Its steps can be held, and a prompt can kill it."""

    def __init__(self, inner: Backend, step_s: float) -> None:
        super().__init__(inner, step_s)
        self._changed = threading.Condition()
        self._held_at: int | None = None

    def hold(self, tokens: int | None) -> None:
        with self._changed:
            self._held_at = tokens
            self._changed.notify_all()

    def run(self, rows: Sequence[Row], padding_tokens: int = 0) -> Sequence[RowOutput]:
        if any(row.start == 0 and row.token_ids[0] == POISON_ID for row in rows):
            os.kill(os.getpid(), signal.SIGKILL)
        with self._changed:
            self._changed.wait_for(lambda: not any(map(self._is_held, rows)))
        return super().run(rows, padding_tokens)

    def _is_held(self, row: Row) -> bool:
        return self._held_at is not None and row.sample is not None and row.start + len(row.token_ids) >= self._held_at


class FreezingRunner(EngineRunner):
    """Stops its process when a step's tokens are on their way to the event loop."""

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(engine, SystemClock())
        self._loop = loop
        self.freezes = False

    def start(self, on_result: Callable[[StepResult], None], on_death: Callable[[str], None]) -> None:
        def told(result: StepResult) -> None:
            if not (self.freezes and result.deltas):
                on_result(result)
                return
            self.freezes = False
            passed = threading.Event()

            def stop() -> None:
                os.kill(os.getpid(), signal.SIGSTOP)
                on_result(result)  # its tokens are in line before what the loop reads next
                passed.set()

            self._loop.call_soon_threadsafe(stop)
            passed.wait()  # no later step overtakes this one

        super().start(told, on_death)


async def controller(instance: Instance) -> None:
    server = ControllerServer(instance.secret(), SystemClock())
    decode = msgspec.msgpack.Decoder(ToController).decode
    acceptor = Acceptor(server.identity, ROLES, decode, server.accept, instance.profile.transport)
    _, port = await acceptor.listen("127.0.0.1", 0, instance.secret())
    say(Listening((port,)))
    await asyncio.to_thread(sys.stdin.buffer.read)


async def replica(instance: Instance, controller_port: int, replica_id: ReplicaId, step_s: float) -> None:
    from cluster.engine.torch.backend import TorchBackend
    from cluster.engine.torch.build import prepare_process

    async def find() -> tuple[str, int]:
        return "127.0.0.1", controller_port

    prepare_process()
    (served,) = instance.models().values()
    config, loop = served.config.engine, asyncio.get_running_loop()
    backend: FaultyBackend
    runner: FreezingRunner

    def load(model: ModelFolder) -> EnginePort:
        nonlocal backend, runner
        backend = FaultyBackend(TorchBackend(model, config), step_s)
        runner = FreezingRunner(engine_over(backend, model, config), loop)
        return runner

    process = ReplicaProcess(instance, served.folder, replica_id, find, load, _die)
    await process.start("127.0.0.1")
    say(Listening(()))
    decode = msgspec.json.Decoder(Told).decode
    while line := await asyncio.to_thread(sys.stdin.buffer.readline):
        match told := decode(line):
            case Hold(tokens):
                backend.hold(tokens)
            case Freeze():
                runner.freezes = True
        say(told)


def _die(why: str) -> None:
    print(f"engine dead, leaving: {why}", file=sys.stderr, flush=True)
    os._exit(1)


def main(role: str, instance_file: str, *rest: str) -> None:
    instance = Instance.model_validate_json(Path(instance_file).read_bytes())
    if role == "controller":
        asyncio.run(controller(instance))
    else:
        controller_port, replica_id, step_ms = rest
        asyncio.run(replica(instance, int(controller_port), ReplicaId(replica_id), float(step_ms) / 1000))


if __name__ == "__main__":
    main(*sys.argv[1:])
