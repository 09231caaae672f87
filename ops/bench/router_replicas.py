"""The controller and eight replicas behind our router in `bench router`, in one process: all real but the engines.

    python -m ops.bench.router_replicas INSTANCE_FILE

Owns: the mock engine. Imports the deployment's controller and replicas. A request's first token comes at once, each
further one with a step of its engine; all of a step's tokens leave in one frame unless `Pace` says otherwise.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import msgspec
import uvloop

from cluster.clock import SystemClock
from cluster.messages import ToController
from cluster.model import ModelFolder
from cluster.ports import EnginePort, EngineProgress, HeldAttempt, MovesPort, StepResult
from cluster.types import EngineLoad, FinishReason, PriorityLoad, ReplicaId, Request, RequestId, TokenDelta
from deployments.controller_server import ROLES, ControllerServer
from deployments.replica_process import ReplicaProcess
from deployments.settings import Instance
from deployments.transport import Acceptor
from ops.bench.router_mock import every_step
from ops.bench.router_wire import REPLICAS, STEP_S, Listening, Pace, piece, say

SLOTS = 1024
BLOCKS = 65_536
BLOCK_TOKENS = 16
PARTS = 8
"""Parts of a step between which its tokens are spread where they are scattered."""


class _Running:
    __slots__ = ("attempt", "made", "part", "request")

    def __init__(self, request: Request, attempt: int, part: int) -> None:
        self.request = request
        self.attempt = attempt
        self.made = len(request.emitted_ids)
        self.part = part

    def token(self) -> TokenDelta:
        index, self.made = self.made, self.made + 1
        finish = FinishReason.LENGTH if self.made >= self.request.sampling.max_tokens else None
        return TokenDelta(self.request.request_id, self.attempt, index, (index,), (piece(index),), finish)


class MockEngine:
    """An EnginePort that computes nothing. Lives on the event loop that made it, with no thread of its own."""

    def __init__(self, phase_s: float) -> None:
        self.pace = Pace()
        self._phase_s = phase_s
        self._running: dict[tuple[RequestId, int], _Running] = {}
        self._new: list[_Running] = []
        self._adds = self._steps = self._tokens = self._part = 0
        self._on_result: Callable[[StepResult], None] = lambda _: None

    @property
    def moves(self) -> MovesPort:
        raise NotImplementedError("a mock engine holds nothing that could be moved")

    def start(self, on_result: Callable[[StepResult], None], on_death: Callable[[str], None]) -> None:
        del on_death
        self._on_result = on_result
        every_step(self._phase_s, self._step)

    def add(self, request: Request, attempt: int) -> None:
        self._adds += 1
        running = _Running(request, attempt, self._adds % PARTS)
        self._running[request.request_id, attempt] = running
        if not self._new:
            asyncio.get_running_loop().call_soon(self._first_tokens)
        self._new.append(running)

    def abort(self, request_id: RequestId, attempt: int) -> None:
        self._running.pop((request_id, attempt), None)

    def held(self, limit: int) -> Future[tuple[HeldAttempt, ...]]:
        """Nothing of it can be moved."""
        del limit
        answer = Future[tuple[HeldAttempt, ...]]()
        answer.set_result(())
        return answer

    def progress(self) -> EngineProgress:
        return EngineProgress(load=self._load(), alive=True, step_age_s=None)

    def stop(self) -> None: ...

    def _first_tokens(self) -> None:
        new, self._new = self._new, []
        self._emit(new)

    def _step(self) -> None:
        self._steps += 1
        if self.pace.idle:
            return
        running = [one for one in self._running.values() if one.made > len(one.request.emitted_ids)]
        if not self.pace.scattered:
            self._emit(running)
            return
        loop = asyncio.get_running_loop()
        for part in range(PARTS):
            for one in running:
                if one.part == part:
                    loop.call_later(part * STEP_S / PARTS, self._emit, [one])

    def _emit(self, those: list[_Running]) -> None:
        deltas = tuple(one.token() for one in those if (one.request.request_id, one.attempt) in self._running)
        for delta in deltas:
            if delta.finish is not None:
                del self._running[delta.request_id, delta.attempt]
        self._tokens += len(deltas)
        if deltas:
            self._on_result(StepResult(load=self._load(), deltas=deltas))

    def _load(self) -> EngineLoad:
        held: dict[int, list[int]] = {}
        for one in self._running.values():
            tokens = len(one.request.prompt_ids) + one.made
            counts = held.setdefault(one.request.priority, [0, 0])
            counts[0] += 1
            counts[1] += -(-tokens // BLOCK_TOKENS)
        return EngineLoad(
            slots_total=SLOTS,
            blocks_total=BLOCKS,
            blocks_free=BLOCKS - sum(blocks for _, blocks in held.values()),
            block_size_tokens=BLOCK_TOKENS,
            running=tuple(PriorityLoad(priority, *counts) for priority, counts in sorted(held.items())),
            adds_total=self._adds,
            steps_total=self._steps,
            tokens_total=self._tokens,
        )


async def run(instance: Instance) -> None:
    secret = instance.secret()
    server = ControllerServer(secret, SystemClock())
    decode = msgspec.msgpack.Decoder(ToController).decode
    acceptor = Acceptor(server.identity, ROLES, decode, server.accept, instance.profile.transport)
    address = await acceptor.listen("127.0.0.1", 0, secret)

    async def find() -> tuple[str, int]:
        return address

    (model,) = instance.models().values()
    engines = [MockEngine(number / REPLICAS * STEP_S) for number in range(REPLICAS)]
    replicas = []
    for number, engine in enumerate(engines):

        def load(_: ModelFolder, engine: MockEngine = engine) -> EnginePort:
            return engine

        replicas.append(ReplicaProcess(instance, model.folder, ReplicaId(f"mock-{number}"), find, load, sys.exit))
        await replicas[-1].start("127.0.0.1")
    say(Listening((address[1],)))
    while line := await asyncio.to_thread(sys.stdin.buffer.readline):
        pace = msgspec.json.decode(line, type=Pace)
        for engine in engines:
            engine.pace = pace
        say(pace)


if __name__ == "__main__":
    uvloop.run(run(Instance.model_validate_json(Path(sys.argv[1]).read_bytes())))
