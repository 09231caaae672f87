"""An engine port over vLLM's engine core.

Owns: a thread with an event loop, and the way from the inbox to the core. What the core has of each attempt is
core_link.py's, moves are moves.py's. The core runs in a process of its own and sends one message per step; each becomes
one result. Imports cluster, cluster.engine and vLLM's internals. Invariants: no call from outside waits for a step; what
is asked reaches the core in order; whoever asked for a request is told its end, or of the engine's death.

It speaks to the core through the client that vLLM's own `AsyncLLM` uses, not through `AsyncLLM`: that would take each step
apart into one stream per request, which we would have to put together again, and would turn tokens into text.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, assert_never

from cluster.config import EngineConfig
from cluster.engine.inbox import NOBODY, Abort, Add, Call, EngineStoppedError, Inbox
from cluster.engine.intake import Intake
from cluster.engine.vllm.core_link import CoreLink
from cluster.engine.vllm.internals import close_core, core_pids
from cluster.engine.vllm.moves import MovesCall, VllmMoves, kv_format_of
from cluster.ports import Clock, EngineProgress, HeldAttempt, StepResult
from cluster.types import Refusal, Request, RequestId

if TYPE_CHECKING:
    from cluster.engine.vllm.internals import CoreClient

log = logging.getLogger(__name__)


class VllmEngine:
    """`cluster.ports.EnginePort`. What is asked of it is bounded as with the embedded engine (see cluster/engine/inbox.py)."""

    def __init__(
        self, client: CoreClient, config: EngineConfig, intake: Intake, eos: tuple[int, ...], clock: Clock
    ) -> None:
        self._client = client
        self._clock = clock
        self._inbox: Inbox[MovesCall] = Inbox(config.max_held, self._notify)
        self._link = CoreLink(client, config, intake, eos, clock, self._inbox)
        self._moves = VllmMoves(self._link, self._inbox, kv_format_of(config))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: asyncio.Event | None = None
        self._main_task: asyncio.Task[None] | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._thread: threading.Thread | None = None
        self._ready = threading.Event()
        self._stopping = False
        self._alive = False
        self._failure = ""

    # --- the port ---

    @property
    def moves(self) -> VllmMoves:
        return self._moves

    def start(self, on_result: Callable[[StepResult], None], on_death: Callable[[str], None]) -> None:
        """Begin; the load is the core's own when this returns. Both callbacks are called in the adapter's thread and must
        not block; one that raises ends it.

        Raises:
            RuntimeError: it was started before.
        """
        if self._thread is not None:
            raise RuntimeError("a vLLM engine starts once")
        self._link.on_result = on_result
        self._alive = True
        self._thread = threading.Thread(target=self._run, args=(on_death,), name="vllm-engine", daemon=True)
        self._thread.start()
        self._ready.wait()

    def add(self, request: Request, attempt: int) -> None:
        self._inbox.add(request, attempt)

    def abort(self, request_id: RequestId, attempt: int) -> None:
        self._inbox.abort(request_id, attempt)

    def held(self, limit: int) -> Future[tuple[HeldAttempt, ...]]:
        return self._inbox.ask(NOBODY, lambda: self._link.held(limit))

    def progress(self) -> EngineProgress:
        """`step_age_s` is the time since the core last said anything, while it has work or an
        answer to give: it cannot be asked in a step."""
        since_s = self._link.busy_since_s
        return EngineProgress(
            load=self._link.load,
            alive=self._alive,
            step_age_s=None if since_s is None or not self._alive else max(0.0, self._clock.monotonic() - since_s),
            failure=self._failure,
            foretold=self._link.foretold.told(),
        )

    def stop(self) -> None:
        """End the core's process and the thread; returns when both have ended. Not to be called from a callback."""
        self._stopping = True
        if self._thread is None:
            self._inbox.close("it was stopped")
            close_core(self._client)
            return
        loop, task = self._loop, self._main_task
        if loop is not None and task is not None:
            with suppress(RuntimeError):  # it has ended by itself
                loop.call_soon_threadsafe(task.cancel)
        self._thread.join()

    # --- beyond the port ---

    def park(self, request_id: RequestId, attempt: int) -> Future[bool]:
        """Take an attempt out of scheduling, without its blocks, until `unpark`. False if it is not there, or frozen."""
        return self._inbox.ask((request_id, attempt), lambda: self._link.park((request_id, attempt)))

    def unpark(self, request_id: RequestId, attempt: int) -> Future[bool]:
        """Back to its place. False if it is not parked."""
        return self._inbox.ask((request_id, attempt), lambda: self._link.unpark((request_id, attempt)))

    def places(self) -> Future[dict[str, str]]:
        """Core id -> where it stands (`Tracked.place`), of every request that the core holds."""
        return self._inbox.ask(NOBODY, self._link.places)

    def core_pids(self) -> tuple[int, ...]:
        """Process ids of the engine core."""
        return core_pids(self._client)

    # --- in the adapter's thread ---

    def _run(self, on_death: Callable[[str], None]) -> None:
        try:
            asyncio.run(self._main())
        except asyncio.CancelledError:
            pass  # by `stop`
        except BaseException as error:  # whatever it was, the engine has ended and must say so
            if not self._stopping:
                log.critical("the vLLM engine died", exc_info=error)
                self._failure = _reason(error)
        self._alive = False
        self._inbox.close(self._failure or "it was stopped")
        self._ready.set()
        if self._failure:
            on_death(self._failure)
        close_core(self._client)

    async def _main(self) -> None:
        """Until it is cancelled, or the first of its tasks fails."""
        self._main_task = asyncio.current_task()
        async with asyncio.TaskGroup() as self._tasks:
            self._tasks.create_task(self._receive())  # the core's death is told to whoever receives, and to no call
            await self._link.begin(self._tasks.create_task)
            self._wake = asyncio.Event()
            self._loop = asyncio.get_running_loop()
            self._tasks.create_task(self._send())
            self._ready.set()

    def _notify(self) -> None:
        loop, wake = self._loop, self._wake
        if loop is not None and wake is not None:
            with suppress(RuntimeError):  # the loop has ended: nobody is to be woken
                loop.call_soon_threadsafe(wake.set)

    async def _receive(self) -> None:
        while True:
            outputs = await self._client.get_output_async()
            self._link.step(outputs)

    async def _send(self) -> None:
        assert self._wake is not None
        while True:
            taken = self._inbox.take()
            refusals: tuple[Refusal, ...] = tuple(taken.refused)
            while taken.commands:
                command = taken.commands.popleft()
                match command:
                    case Add(request, attempt):
                        await self._link.add(request, attempt)
                    case Abort(identity):
                        if not self._moves.drop_import(identity):
                            await self._link.abort(identity)
                    case Call():
                        await self._begin(command)
                    case _:
                        assert_never(command)
            self._link.answered(taken.answered_adds, refusals)
            await self._wake.wait()
            self._wake.clear()

    async def _begin(self, call: Call[MovesCall]) -> None:
        """Have a call made beside what goes on: it may wait for a step. What it sends goes out before what comes after."""
        assert self._tasks is not None
        task = self._tasks.create_task(self._make(call))

        def made(_: object) -> None:
            self._inbox.called()
            if not call.answer.done():  # it was cancelled before it began
                call.give_up("it was stopped")

        task.add_done_callback(made)
        await asyncio.sleep(0)  # tasks run in the order in which they were created, each until it waits

    async def _make(self, call: Call[MovesCall]) -> None:
        if not call.answer.set_running_or_notify_cancel():
            return
        try:
            answer = await call.make()
        except LookupError as error:  # the asker's affair
            call.answer.set_exception(error)
        except BaseException as error:
            call.answer.set_exception(EngineStoppedError(f"the engine's thread has ended: {_reason(error)}"))
            raise
        else:
            call.answer.set_result(answer)


def _reason(error: BaseException) -> str:
    """The first failure of a group is its cause; the others are its consequences."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
