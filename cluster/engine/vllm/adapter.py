"""An engine port over vLLM's engine core.

Owns: a thread with an event loop, the attempts that the core holds for it, and their text. The core runs in a process of
its own and sends one message per step; each becomes one result. Imports cluster, cluster.engine and vLLM's internals.
Invariants: no call from outside waits for a step; text, ends and indices are those of `Live`, as with the embedded
engine; whoever asked for a request is told its end, or of the engine's death.

It speaks to the core through the client that vLLM's own `AsyncLLM` uses, not through `AsyncLLM`: that would take each step
apart into one stream per request, which we would have to put together again, and would turn tokens into text.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, assert_never

import msgspec

from cluster.config import EngineConfig
from cluster.engine.intake import Intake
from cluster.engine.live import Live
from cluster.engine.scheduling.sequence import Identity
from cluster.engine.vllm.internals import close_core, core_pids
from cluster.engine.vllm.translate import core_request, prompt_scores, row_output
from cluster.engine.vllm.wire import NOTE_KEY, STEP_NOTE_ID, StepNote, core_id, decode_step
from cluster.ports import Clock, EngineProgress, StepResult
from cluster.types import EngineLoad, FinishReason, Preempted, Refusal, RefusalReason, Request, RequestId, TokenDelta

if TYPE_CHECKING:
    from cluster.engine.vllm.internals import CoreClient, EngineCoreOutput, EngineCoreOutputs

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Add:
    request: Request
    attempt: int


@dataclass(frozen=True, slots=True)
class _Abort:
    identity: Identity


class VllmEngine:
    """`cluster.ports.EnginePort`. The inbox is bounded as the embedded engine's is: an attempt is in it or in the core at
    most once, `max_held` of them in all, each aborted at most once."""

    def __init__(
        self, client: CoreClient, config: EngineConfig, intake: Intake, eos: tuple[int, ...], clock: Clock
    ) -> None:
        self._client = client
        self._config = config
        self._intake = intake
        self._eos = tuple(sorted(set(eos)))
        self._clock = clock
        self._lock = threading.Lock()
        """Guards what follows up to the next blank line; never held across a call of others."""
        self._inbox: deque[_Add | _Abort] = deque()
        self._attempts: dict[Identity, bool] = {}
        """Held here or in the core; True once its abort is on the way."""
        self._refused: list[Refusal] = []
        self._answered_adds = 0
        """Adds that did not go to the core: refused, repeats, or ended at once."""

        self._live: dict[str, Live] = {}
        """By core id, those that the core has and whose end is still owed."""
        self._core_load = self._load = EngineLoad(
            slots_total=config.slots,
            blocks_total=config.blocks,
            blocks_free=config.blocks,
            block_size_tokens=config.block_size_tokens,
        )
        """As the core said it last, and as it was told last: with the adds that were answered here."""
        self._told_adds = 0
        self._busy_since_s: float | None = None
        """When the core last said anything, or got something to do."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: asyncio.Event | None = None
        self._main_task: asyncio.Task[None] | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._thread: threading.Thread | None = None
        self._ready = threading.Event()
        self._on_result: Callable[[StepResult], None] = _nobody
        self._stopping = False
        self._alive = False
        self._failure = ""

    # --- the port ---

    def start(self, on_result: Callable[[StepResult], None], on_death: Callable[[str], None]) -> None:
        """Begin. Both callbacks are called in the adapter's thread and must not block; one that raises ends it.

        Raises:
            RuntimeError: it was started before.
        """
        if self._thread is not None:
            raise RuntimeError("a vLLM engine starts once")
        self._on_result = on_result
        self._alive = True
        self._thread = threading.Thread(target=self._run, args=(on_death,), name="vllm-engine", daemon=True)
        self._thread.start()
        self._ready.wait()

    def add(self, request: Request, attempt: int) -> None:
        identity = (request.request_id, attempt)
        with self._lock:
            if identity in self._attempts:
                self._answered_adds += 1
            elif len(self._attempts) >= self._config.max_held:
                self._answered_adds += 1
                self._refused.append(Refusal(request.request_id, attempt, RefusalReason.FULL))
            else:
                self._attempts[identity] = False
                self._inbox.append(_Add(request, attempt))
        self._notify()

    def abort(self, request_id: RequestId, attempt: int) -> None:
        identity = (request_id, attempt)
        with self._lock:
            if self._attempts.get(identity) is not False:
                return
            self._attempts[identity] = True
            self._inbox.append(_Abort(identity))
        self._notify()

    def progress(self) -> EngineProgress:
        """`step_age_s` is the time since the core last said anything, while it has work: it cannot be asked in a step."""
        since_s = self._busy_since_s
        return EngineProgress(
            load=self._load,
            alive=self._alive,
            step_age_s=None if since_s is None else max(0.0, self._clock.monotonic() - since_s),
            failure=self._failure,
        )

    def stop(self) -> None:
        """End the core's process and the thread; returns when both have ended. Not to be called from a callback."""
        self._stopping = True
        if self._thread is None:
            close_core(self._client)
            return
        loop, task = self._loop, self._main_task
        if loop is not None and task is not None:
            with suppress(RuntimeError):  # it has ended by itself
                loop.call_soon_threadsafe(task.cancel)
        self._thread.join()

    # --- beyond the port ---

    def park(self, request_id: RequestId, attempt: int) -> Future[bool]:
        """Take an attempt out of scheduling, without its blocks, until `unpark`. False if it is not there."""
        return self._ask("park", core_id(request_id, attempt))

    def unpark(self, request_id: RequestId, attempt: int) -> Future[bool]:
        """Back to its place."""
        return self._ask("unpark", core_id(request_id, attempt))

    def places(self) -> Future[dict[str, str]]:
        """Core id -> running, waiting, paused or parked, of every request that the core holds."""
        return self._ask("places")

    def core_pids(self) -> tuple[int, ...]:
        """Process ids of the engine core."""
        return core_pids(self._client)

    def _ask(self, call: str, *args: str) -> Future[Any]:
        assert self._loop is not None, "to be asked after start"

        async def ask() -> Any:
            answer = await self._client.call_utility_async("forebay", call, *args)
            self._publish(decode_step(await self._client.call_utility_async("forebay", "load")))
            return answer

        return asyncio.run_coroutine_threadsafe(ask(), self._loop)

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
        self._busy_since_s = None
        self._ready.set()
        if self._failure:
            on_death(self._failure)
        close_core(self._client)

    async def _main(self) -> None:
        """Until it is cancelled, or the first of its tasks fails."""
        async with asyncio.TaskGroup() as self._tasks:
            self._loop, self._wake, self._main_task = (
                asyncio.get_running_loop(),
                asyncio.Event(),
                asyncio.current_task(),
            )
            self._tasks.create_task(self._receive())
            self._tasks.create_task(self._send())
            self._ready.set()

    def _notify(self) -> None:
        loop, wake = self._loop, self._wake
        if loop is not None and wake is not None:
            with suppress(RuntimeError):  # the loop has ended: nobody is to be woken
                loop.call_soon_threadsafe(wake.set)

    async def _send(self) -> None:
        assert self._wake is not None
        while True:
            with self._lock:
                commands, self._inbox = self._inbox, deque()
                refused, self._refused = tuple(self._refused), []
            ended: list[TokenDelta] = []
            for command in commands:
                match command:
                    case _Add(request, attempt):
                        ended.extend(await self._add(request, attempt))
                    case _Abort(identity):
                        await self._abort(identity)
                    case _:
                        assert_never(command)
            if ended or refused or self._answered_adds != self._told_adds:
                self._tell(deltas=tuple(ended), refusals=refused)
            await self._wake.wait()
            self._wake.clear()

    async def _add(self, request: Request, attempt: int) -> tuple[TokenDelta, ...]:
        taken = self._intake.take(request, attempt)
        if isinstance(taken, TokenDelta):
            with self._lock:
                self._answered_adds += 1
            return (taken,)
        name = core_id(request.request_id, attempt)
        self._live[name] = taken
        if self._busy_since_s is None:
            self._busy_since_s = self._clock.monotonic()
        await self._client.add_request_async(core_request(request, attempt, self._eos))
        return ()

    async def _abort(self, identity: Identity) -> None:
        name = core_id(*identity)
        live = self._live.pop(name, None)
        if live is None:
            return
        await self._client.abort_requests_async([name])
        self._follow(self._after("load", (), live.end(FinishReason.ABORT)))

    async def _after(self, call: str, args: tuple[str, ...], *deltas: TokenDelta) -> None:
        """Tell what is left after everything that was sent to the core before."""
        note = decode_step(await self._client.call_utility_async("forebay", call, *args))
        self._publish(note, deltas)

    def _follow(self, call: Coroutine[Any, Any, None]) -> None:
        """Have it done beside what goes on; if it fails, the engine does."""
        assert self._tasks is not None
        self._tasks.create_task(call)

    async def _receive(self) -> None:
        while True:
            outputs = await self._client.get_output_async()
            self._step(outputs)

    def _step(self, outputs: EngineCoreOutputs) -> None:
        note = StepNote(load=self._core_load)
        deltas: list[TokenDelta] = []
        for output in outputs.outputs:
            if output.request_id == STEP_NOTE_ID:
                assert output.kv_transfer_params is not None
                note = decode_step(output.kv_transfer_params[NOTE_KEY])
            elif (live := self._live.get(output.request_id)) is not None:
                deltas.extend(self._advance(live, output))
        self._publish(note, tuple(deltas))

    def _advance(self, live: Live, output: EngineCoreOutput) -> list[TokenDelta]:
        sampling = live.request.sampling
        if output.new_prompt_logprobs_tensors is not None and sampling.prompt_logprobs is not None:
            live.take_scores(0, prompt_scores(output.new_prompt_logprobs_tensors, sampling.prompt_logprobs))
        deltas: list[TokenDelta] = []
        for place in range(len(output.new_token_ids)):
            if live.only_scores:
                deltas.append(live.end(FinishReason.LENGTH))
            else:
                deltas.append(live.take_drawn(row_output(output, place, sampling.logprobs)))
            if deltas[-1].finish is not None:
                break
        ended = bool(deltas) and deltas[-1].finish is not None
        if output.finish_reason is not None and not ended:
            deltas.append(live.end(FinishReason.ERROR, "the engine ended this request before its time"))
        elif ended and output.finish_reason is None:
            self._follow(self._after("stopped", (output.request_id,)))
        if ended or output.finish_reason is not None:
            del self._live[output.request_id]
        return deltas

    # --- results ---

    def _publish(self, note: StepNote, deltas: tuple[TokenDelta, ...] = ()) -> None:
        """What a note says is older than the last one's where it crossed a step on its way."""
        load, last = note.load, self._core_load
        if (load.steps_total, load.adds_total) >= (last.steps_total, last.adds_total):
            self._core_load = load
        self._busy_since_s = self._clock.monotonic() if self._live else None
        self._tell(deltas, preempted=note.preempted)

    def _tell(
        self,
        deltas: tuple[TokenDelta, ...] = (),
        *,
        preempted: tuple[Preempted, ...] = (),
        refusals: tuple[Refusal, ...] = (),
    ) -> None:
        with self._lock:
            for delta in deltas:
                if delta.finish is not None:
                    self._attempts.pop((delta.request_id, delta.attempt), None)
        self._told_adds = self._answered_adds
        load = self._core_load
        self._load = msgspec.structs.replace(load, adds_total=load.adds_total + self._told_adds)
        self._on_result(StepResult(load=self._load, deltas=deltas, preempted=preempted, refusals=refusals))


def _nobody(result: StepResult) -> None:
    raise AssertionError(f"a result before the start: {result}")


def _reason(error: BaseException) -> str:
    """The first failure of a group is its cause; the others are its consequences."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
