"""What the core holds for the adapter, and what becomes of it.

Owns: the attempts that the core has with their text, what was sent to the core about them, and the results. Imports
cluster, cluster.engine and vLLM's internals. Invariants: text, ends and indices are those of `Live`, as with the embedded
engine; each attempt ends exactly once, or is released. All of it runs on one loop.

The order in which the core says things is kept: when the answer to a call is here, all that it said before has been told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from cluster.config import EngineConfig
from cluster.engine.inbox import Inbox
from cluster.engine.intake import Intake
from cluster.engine.live import Live
from cluster.engine.scheduling.sequence import Identity
from cluster.engine.vllm.translate import core_request, prompt_scores, row_output
from cluster.engine.vllm.wire import NOTE_KEY, STEP_NOTE_ID, StepNote, core_id, decode_held, decode_step
from cluster.foretold import Foretold
from cluster.ports import Clock, HeldAttempt, StepResult
from cluster.types import EngineLoad, FinishReason, Preempted, PrefixChange, Refusal, Request, TokenDelta

if TYPE_CHECKING:
    from cluster.engine.vllm.internals import CoreClient, EngineCoreOutput, EngineCoreOutputs

Follow: TypeAlias = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]
"""Have something done beside what goes on; if it fails, the engine does."""


@dataclass(slots=True)
class Frozen:
    """One that is out of scheduling for a move, or will be in a moment."""

    settled: asyncio.Future[bytes] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """The KV connector's handle, once nothing of it is on its way; cancelled if it ends before that."""


class CoreLink:
    def __init__(
        self,
        client: CoreClient,
        config: EngineConfig,
        intake: Intake,
        eos: tuple[int, ...],
        clock: Clock,
        inbox: Inbox[Any],
    ) -> None:
        self.load = EngineLoad(
            slots_total=config.slots,
            blocks_total=config.blocks,
            blocks_free=config.blocks,
            block_size_tokens=config.block_size_tokens,
            step_tokens=config.step_token_budget,
        )
        """As it was told last: what the core said, with the adds that were answered here."""
        self.busy_since_s: float | None = None
        """When the core last said anything, or was asked something or got something to do; None while nothing is owed by it."""
        self.on_result: Callable[[StepResult], None] = _nobody
        self.frozen: dict[Identity, Frozen] = {}
        self.foretold = Foretold()
        self._client = client
        self._intake = intake
        self._eos = tuple(sorted(set(eos)))
        self._clock = clock
        self._inbox = inbox
        self._follow: Follow | None = None
        self._live: dict[str, Live] = {}
        """By core id, those whose end is still owed. All are in the core, but for the frozen where there is a KV
        connector: these have left it."""
        self._names: dict[Identity, str] = {}
        """Their core ids."""
        self._lives = count(1)
        self._parked: set[Identity] = set()
        self._core_load = self.load
        self._calls = 0
        """That the core has not answered yet."""
        self._answered_adds = 0
        """Adds that did not go to the core: refused, repeats, or ended at once."""

    async def begin(self, follow: Follow) -> None:
        """Before anything else is sent or received: learn what the core has."""
        self._follow = follow
        self._core_load = self.load = decode_step(await self._utility("load")).load

    # --- to the core ---

    def live(self, identity: Identity) -> Live | None:
        name = self._names.get(identity)
        return None if name is None else self._live[name]

    def answered(self, adds: int, refusals: tuple[Refusal, ...]) -> None:
        """So many adds go no further."""
        self._answered_adds += adds
        if adds or refusals:
            self._tell(refusals=refusals)

    async def add(self, request: Request, attempt: int) -> None:
        taken = self._intake.take(request, attempt)
        if isinstance(taken, TokenDelta):
            self._answered_adds += 1
            self._tell((taken,))
        else:
            await self._send(taken, core_id(request.request_id, attempt), moved=False)

    async def bring(self, request: Request, attempt: int, kv_transfer_params: dict[str, object] | None) -> None:
        """One comes by a move."""
        taken = self._intake.take(request, attempt)
        if isinstance(taken, TokenDelta):
            self._tell((taken,))
        else:
            await self._send(taken, core_id(request.request_id, attempt), moved=True, params=kv_transfer_params)

    async def bring_back(self, identity: Identity) -> None:
        """One goes on that has left the core."""
        live = self._live.pop(self._names[identity])
        await self._send(live, core_id(*identity, next(self._lives)), moved=True)

    async def abort(self, identity: Identity) -> None:
        found = self._forget(identity)
        if found is None:
            return
        name, live = found
        await self._client.abort_requests_async([name])
        self._beside(self._after("load", (), live.end(FinishReason.ABORT)))

    async def call(self, call: str, identity: Identity) -> None:
        """Have the core do something with an attempt. It has been told what came of it when this returns."""
        await self._after(call, (self._names[identity],))

    async def freeze(self, identity: Identity) -> Frozen:
        """Begin to take it out of scheduling."""
        frozen = self.frozen[identity] = Frozen()
        self._parked.discard(identity)
        await self.call("freeze", identity)
        return frozen

    async def release(self, identity: Identity, *, in_core: bool) -> None:
        """An attempt is forgotten without a word."""
        found = self._forget(identity)
        self._inbox.forget((identity,))
        if found is not None and in_core:
            await self._after("release", (found[0],))

    async def park(self, identity: Identity) -> bool:
        if identity not in self._names or identity in self.frozen:
            return False
        self._parked.add(identity)
        await self.call("park", identity)
        return identity in self._names

    async def unpark(self, identity: Identity) -> bool:
        if identity not in self._parked:
            return False
        self._parked.remove(identity)
        await self.call("thaw", identity)
        return True

    async def held(self, limit: int) -> tuple[HeldAttempt, ...]:
        return decode_held(await self._utility("held", limit))

    async def places(self) -> dict[str, str]:
        places: dict[str, str] = await self._utility("places")
        return places

    async def _send(self, live: Live, name: str, *, moved: bool, params: dict[str, object] | None = None) -> None:
        identity = live.state.identity
        self._live[name] = live
        self._names[identity] = name
        self._owes()
        request = msgspec.structs.replace(live.request, emitted_ids=tuple(live.output))
        await self._client.add_request_async(
            core_request(request, identity[1], self._eos, name=name, moved=moved, kv_transfer_params=params)
        )

    async def _after(self, call: str, args: tuple[str, ...], *deltas: TokenDelta) -> None:
        """Tell what is left after everything that was sent to the core before."""
        self._publish(decode_step(await self._utility(call, *args)), deltas)

    async def _utility(self, call: str, *args: str | int) -> Any:
        self._calls += 1
        self._owes()
        answer = await self._client.call_utility_async("forebay", call, *args)
        self._calls -= 1
        self._heard()
        return answer

    def _beside(self, call: Coroutine[Any, Any, None]) -> None:
        assert self._follow is not None
        self._follow(call)

    def _forget(self, identity: Identity) -> tuple[str, Live] | None:
        name = self._names.pop(identity, None)
        if name is None:
            return None
        self._parked.discard(identity)
        frozen = self.frozen.pop(identity, None)
        if frozen is not None:
            frozen.settled.cancel()
        return name, self._live.pop(name)

    # --- from the core ---

    def step(self, outputs: EngineCoreOutputs) -> None:
        """What one of its steps gave."""
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
        is_number = not output.num_nans_in_logits
        if is_number and output.new_prompt_logprobs_tensors is not None and sampling.prompt_logprobs is not None:
            live.take_scores(0, prompt_scores(output.new_prompt_logprobs_tensors, sampling.prompt_logprobs))
        if output.prefill_stats is not None:
            live.cached_tokens = min(output.prefill_stats.num_local_cached_tokens, live.state.prompt_tokens)
        deltas: list[TokenDelta] = []
        for place in range(len(output.new_token_ids)):
            if live.only_scores and is_number:
                deltas.append(live.end(FinishReason.LENGTH))
            else:
                deltas.append(live.take_drawn(row_output(output, place, sampling.logprobs)))
            if deltas[-1].finish is not None:
                break
        ended = bool(deltas) and deltas[-1].finish is not None
        if output.finish_reason is not None and not ended:
            deltas.append(live.end(FinishReason.ERROR, "the engine ended this request before its time"))
        elif ended and output.finish_reason is None:
            self._beside(self._after("stopped", (output.request_id,)))
        if ended or output.finish_reason is not None:
            self._forget(live.state.identity)
        return deltas

    # --- results ---

    def _publish(self, note: StepNote, deltas: tuple[TokenDelta, ...] = ()) -> None:
        """What a note says is older than the last one's where it crossed a step on its way."""
        load, last = note.load, self._core_load
        if (load.steps_total, load.adds_total) >= (last.steps_total, last.adds_total):
            self._core_load = load
        for priority_class, output_over_predicted in note.foretold:
            self.foretold.ended(priority_class, output_over_predicted)
        for name, kv_handle in note.frozen:
            live = self._live.get(name)
            if live is not None:
                self.frozen[live.state.identity].settled.set_result(kv_handle)
        self._heard()
        self._tell(deltas, preempted=note.preempted, prefixes=note.prefixes)

    def _owes(self) -> None:
        """The core has something to do."""
        if self.busy_since_s is None:
            self.busy_since_s = self._clock.monotonic()

    def _heard(self) -> None:
        """The core has said something."""
        still = len(self._parked) + sum(frozen.settled.done() for frozen in self.frozen.values())
        self.busy_since_s = self._clock.monotonic() if self._calls or len(self._live) > still else None

    def _tell(
        self,
        deltas: tuple[TokenDelta, ...] = (),
        *,
        preempted: tuple[Preempted, ...] = (),
        refusals: tuple[Refusal, ...] = (),
        prefixes: PrefixChange | None = None,
    ) -> None:
        if ended := [(delta.request_id, delta.attempt) for delta in deltas if delta.finish is not None]:
            self._inbox.forget(ended)
        load = self._core_load
        self.load = msgspec.structs.replace(load, adds_total=load.adds_total + self._answered_adds)
        self.on_result(
            StepResult(load=self.load, deltas=deltas, preempted=preempted, refusals=refusals, prefixes=prefixes)
        )


def _nobody(result: StepResult) -> None:
    raise AssertionError(f"a result before the start: {result}")
