"""A controller, a router or a replica as a process of its own: what tests/processes.py starts.

    python -m tests.process_parts controller INSTANCE_FILE [PORT [PLACE]]
    python -m tests.process_parts router INSTANCE_FILE CONTROLLER_PORTS
    python -m tests.process_parts replica INSTANCE_FILE CONTROLLER_PORTS REPLICA_ID STEP_MS ROW_MS

Owns: the processes, what SIGTERM means to a router and a replica that Ray does not run (it drains, the next one ends it
at once), and the faults that a replica's engine can be told to have. Each says one line once it can be used and
ends when its standard input does; a replica answers each line that it is told with the same. CONTROLLER_PORTS are one, or
two with a comma between.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, TypeVar, cast
from urllib.parse import urlsplit

import msgspec
import uvloop

from cluster.clock import SystemClock
from cluster.control.demand import Meter
from cluster.engine.engine import Engine
from cluster.engine.moves import Moves
from cluster.engine.runner import EngineRunner
from cluster.engine.runner_moves import RunnerMoves
from cluster.engine.scheduling.sequence import Identity
from cluster.messages import ToController
from cluster.model import ModelFolder
from cluster.ports import Backend, EnginePort, Row, RowOutput, StepResult
from cluster.types import ReplicaId
from deployments.controller_server import ROLES, ControllerServer
from deployments.exposition import exposed
from deployments.garbage import settle
from deployments.replica_process import ReplicaProcess
from deployments.router_process import RouterProcess
from deployments.scaler import Scaled, scalers
from deployments.settings import Environment, Instance
from deployments.transport import Acceptor
from ops.bench.router_ours import find_at, started
from ops.bench.router_wire import Line, Listening, say
from tests.padded import PaddedBackend, engine_over

T = TypeVar("T")

POISON_ID = 7
"""An engine that is given a prompt that begins with it dies, and its process with it."""
APPLICATION = "forebay"
"""As Serve names it, which is asked where a model has `scale` (`Instance.serve`); its deployment has the model's name."""


class Hold(Line, frozen=True):
    """Steps wait in which a sequence would have `tokens` tokens, prompt and output, and draw the next; None lets go."""

    tokens: int | None


class Err(Line, frozen=True):
    """Its model computes no numbers for a sequence that has `tokens` tokens, prompt and output, and draws the next; None heals
    it."""

    tokens: int | None


class Freeze(Line, frozen=True):
    """Stop the process, as SIGSTOP from outside does, while it holds tokens that it has not sent."""


class Drain(Line, frozen=True):
    """Begin to leave, as on SIGTERM: what is there is finished or handed back. The process itself stays."""


MoveCall = Literal[
    "import_begin", "import_blocks", "import_commit", "export_blocks", "freeze", "export_rest", "release"
]
"""Of `cluster.ports.MovesPort`."""


class HoldMoves(Line, frozen=True):
    """The engine stops before it makes such a call, and with it all that it does; None lets go."""

    call: MoveCall | None


class UntilMoveHeld(Line, frozen=True):
    """Answered once it has come to a call that it was told to hold."""


Told = Hold | Err | Freeze | Drain | HoldMoves | UntilMoveHeld


class FaultyBackend(PaddedBackend):
    """Its steps can be held, it can compute nothing for who has come far enough, and a prompt can kill it."""

    def __init__(self, inner: Backend, step_s: float, row_s: float) -> None:
        super().__init__(inner, step_s, row_s)
        self._changed = threading.Condition()
        self._held_at: int | None = None
        self.errs_at: int | None = None

    def hold(self, tokens: int | None) -> None:
        with self._changed:
            self._held_at = tokens
            self._changed.notify_all()

    def run(self, rows: Sequence[Row], padding_tokens: int = 0) -> Sequence[RowOutput]:
        if any(row.start == 0 and row.token_ids[0] == POISON_ID for row in rows):
            os.kill(os.getpid(), signal.SIGKILL)
        with self._changed:
            self._changed.wait_for(lambda: not any(map(self._is_held, rows)))
        ran, errs_at = super().run(rows, padding_tokens), self.errs_at
        if errs_at is None:
            return ran
        return [
            msgspec.structs.replace(output, token_id=None, logprob=None) if _draws(row, errs_at) else output
            for row, output in zip(rows, ran, strict=True)
        ]

    def _is_held(self, row: Row) -> bool:
        return self._held_at is not None and _draws(row, self._held_at)


def _draws(row: Row, tokens: int) -> bool:
    """Whether its sequence has so many tokens or more, and draws the next."""
    return row.sample is not None and row.start + len(row.token_ids) >= tokens


class MoveGate:
    """Holds the engine's thread before one kind of call about moves: nothing that is asked later overtakes it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._changed = threading.Condition()
        self._held: MoveCall | None = None
        self._loop = loop
        self.reached = asyncio.Event()

    def hold(self, call: MoveCall | None) -> None:
        self.reached.clear()
        with self._changed:
            self._held = call
            self._changed.notify_all()

    def pass_by(self, call: str) -> None:
        with self._changed:
            if call == self._held:
                self._loop.call_soon_threadsafe(self.reached.set)
                self._changed.wait_for(lambda: call != self._held)


class GatedMoves:
    """An engine's moves behind a gate."""

    def __init__(self, moves: Moves, gate: MoveGate) -> None:
        self._moves = moves
        self._gate = gate

    def __getattr__(self, call: str) -> Any:
        self._gate.pass_by(call)
        return getattr(self._moves, call)


class FaultyRunner(EngineRunner):
    """Stops its process when a step's tokens are on their way to the event loop; its moves can be held."""

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(engine, SystemClock())
        self._loop = loop
        self.freezes = False
        self.gate = MoveGate(loop)
        self._moves = RunnerMoves(self._ask, engine.moves.kv_format)

    def _ask(self, identity: Identity, call: Callable[[Moves], T]) -> Future[T]:
        return self._inbox.ask(identity, lambda moves: call(cast(Moves, GatedMoves(moves, self.gate))))

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


async def controller(instance: Instance, at_port: int, place: int) -> None:
    clock, models = SystemClock(), instance.models().values()
    scaled = [
        Scaled(model=m.name, deployment=m.name, scale=m.config.scale) for m in models if m.config.scale is not None
    ]
    weights = instance.profile.router.prompt_token_weight, instance.profile.router.output_token_weight
    meters = {one.model: Meter(*weights, clock.monotonic(), one.scale.average_s) for one in scaled}
    server = ControllerServer(instance.secret(), clock, meters, instance.profile.control, place)
    decode = msgspec.msgpack.Decoder(ToController).decode
    acceptor = Acceptor(server.identity, ROLES, decode, server.accept, instance.profile.transport)
    host, port = await acceptor.listen("127.0.0.1", at_port, instance.secret())
    exposed(server.registry, "metrics.controller_port", host, instance.profile.metrics.controller_port)
    tasks = [
        asyncio.create_task(scaler.run(), name="scaler")
        for scaler in scalers(scaled, meters, instance.serve, APPLICATION, server, clock)
    ]
    if (kubernetes := instance.profile.kubernetes) is not None:
        from deployments.kube.operator import in_kubernetes

        operator = in_kubernetes(kubernetes, server, clock, Environment().pod_ref)
        tasks.append(asyncio.create_task(operator.run(), name="kubernetes"))
    say(Listening((port,)))
    await asyncio.to_thread(sys.stdin.buffer.read)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def until_told_to_leave(
    process: RouterProcess | ReplicaProcess, obey: Callable[[bytes], None] | None = None
) -> None:
    """Return when `process` is closed: SIGTERM drains it first; the next one, or the end of standard input, closes it at
    once. `obey` is given each line of that; whoever sends one waits for the answer."""
    loop = asyncio.get_running_loop()
    told, again = asyncio.Event(), asyncio.Event()

    def heard() -> None:
        line = sys.stdin.buffer.readline()
        if not line:
            loop.remove_reader(sys.stdin.fileno())
            told.set()
            again.set()
        elif obey is not None:
            obey(line)

    loop.add_signal_handler(signal.SIGTERM, lambda: (again if told.is_set() else told).set())
    loop.add_reader(sys.stdin.fileno(), heard)
    await told.wait()
    drain, hurry = asyncio.create_task(process.drain()), asyncio.create_task(again.wait())
    done, _ = await asyncio.wait({drain, hurry}, return_when=asyncio.FIRST_COMPLETED)
    for task in (drain, hurry):
        task.cancel()
    await asyncio.gather(drain, hurry, return_exceptions=True)
    await process.close()
    for ended in done:
        ended.result()


async def router(instance: Instance, controller_ports: Sequence[int]) -> None:
    process = await started(instance, *controller_ports)
    port = urlsplit(process.url).port
    say(Listening(() if port is None else (port,)))
    await until_told_to_leave(process)


async def replica(
    instance: Instance, controller_ports: Sequence[int], replica_id: ReplicaId, step_s: float, row_s: float
) -> None:
    from cluster.engine.torch.backend import TorchBackend
    from cluster.engine.torch.build import prepare_process

    prepare_process()
    (served,) = instance.models().values()
    config, loop = served.config.engine, asyncio.get_running_loop()
    backend: FaultyBackend
    runner: FaultyRunner

    def load(model: ModelFolder) -> EnginePort:
        nonlocal backend, runner
        backend = FaultyBackend(TorchBackend(model, config), step_s, row_s)
        runner = FaultyRunner(engine_over(backend, model, config), loop)
        return runner

    find, *others = map(find_at, controller_ports)
    standby = others[0] if others else None
    process = ReplicaProcess(instance, served.folder, replica_id, find, load, _die, standby=standby)
    here = Environment()
    await process.start("127.0.0.1", here.zone, here.node, here.pod_ref)
    settle()
    await process.meet_routers()
    say(Listening(()))
    decode = msgspec.json.Decoder(Told).decode
    leaving: asyncio.Task[None] | None = None
    waiting: set[asyncio.Task[None]] = set()

    def obey(line: bytes) -> None:
        nonlocal leaving
        match told := decode(line):
            case Hold(tokens):
                backend.hold(tokens)
            case Err(tokens):
                backend.errs_at = tokens
            case Freeze():
                runner.freezes = True
            case Drain():
                leaving = leaving or asyncio.create_task(process.drain(), name="drain")
            case HoldMoves(call):
                runner.gate.hold(call)
            case UntilMoveHeld():
                waiting.add(task := asyncio.create_task(reached(), name="until a move is held"))
                task.add_done_callback(waiting.discard)
                return
        say(told)

    async def reached() -> None:
        await runner.gate.reached.wait()
        say(UntilMoveHeld())

    await until_told_to_leave(process, obey)


def _die(why: str) -> None:
    print(f"engine dead, leaving: {why}", file=sys.stderr, flush=True)
    os._exit(1)


def main(role: str, instance_file: str, *rest: str) -> None:
    instance = Instance.model_validate_json(Path(instance_file).read_bytes())
    if role == "controller":
        at_port, place, *_ = (*map(int, rest), 0, 0)
        asyncio.run(controller(instance, at_port, place))
    elif role == "router":
        (controller_ports,) = rest
        uvloop.run(router(instance, _ports(controller_ports)))
    else:
        controller_ports, replica_id, *times_ms = rest
        step_s, row_s = (float(ms) / 1000 for ms in times_ms)
        asyncio.run(replica(instance, _ports(controller_ports), ReplicaId(replica_id), step_s, row_s))


def _ports(words: str) -> list[int]:
    return [int(word) for word in words.split(",")]


if __name__ == "__main__":
    main(*sys.argv[1:])
