"""vLLM's scheduler under our plan.

Owns: carrying out a plan of cluster.engine.scheduling in vLLM's engine core, before each of vLLM's own steps. Imports
the ledger and vLLM's internals. Invariants: vLLM's step decides nothing that the plan has not; whom a plan preempts stays
a live request of the core: it is paused with its blocks, or recomputed from its place in the order.

How. vLLM's `schedule` runs its `running` list in order and takes newcomers from its `waiting` queue. So before each of its
steps the list is set to those that the plan runs, decodes first, and the queue offers those alone whom the plan admits.
A paused request is one that is in neither: vLLM then lets it keep its blocks, and its worker puts it back into the batch
when it is scheduled again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

from cluster.config import EngineConfig
from cluster.engine.scheduling.giving import Shared
from cluster.engine.scheduling.plan import Preemption, StepPlan
from cluster.engine.scheduling.sequence import SequenceState
from cluster.engine.vllm.internals import (
    AsyncScheduler,
    EngineCore,
    EngineCoreOutput,
    EngineCoreOutputs,
    RequestQueue,
    RequestStatus,
)
from cluster.engine.vllm.ledger import Ledger, Tracked
from cluster.engine.vllm.wire import NOTE_KEY, STEP_NOTE_ID, RequestNote, StepNote, decode_request, encode
from cluster.types import EngineLoad, Preempted, PreemptionMeans

if TYPE_CHECKING:
    from cluster.engine.vllm.internals import CoreRequest, SchedulerOutput

_ENDED_BY_ITSELF = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


class ForebayScheduler(AsyncScheduler):
    """For `scheduler_cls`. `additional_config[NOTE_KEY]` is an `EngineConfig` as JSON values."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        if len(self.kv_cache_config.kv_cache_groups) != 1 or self.connector is not None:
            raise ValueError("Forebay schedules models with one kind of attention and no KV connector")
        self._config = EngineConfig.model_validate(self.vllm_config.additional_config[NOTE_KEY])
        self._ledger = Ledger(self._config)
        self._offered = Offered(self, self._ledger)
        self.waiting = self._offered
        self._victims: dict[str, Preemption] = {}
        """Whom the plan that is being carried out recomputes."""
        self._unsettled: set[str] = set()
        """Recomputed ones with output of an earlier step still on its way."""
        self._preempted: list[Preempted] = []
        """Since the last note."""
        self._count = Counters()
        self._looked = False
        """The ledger knows what all steps so far did."""

    # --- vLLM calls these ---

    def add_request(self, request: CoreRequest) -> None:
        self._count.adds += 1
        self._ledger.add(request.request_id, _note_of(request))
        super().add_request(request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        ledger = self._ledger
        self._look()
        if ledger.settled(self.kv_cache_manager.block_pool.get_num_free_blocks()):
            held_back: list[CoreRequest] = []
            self.running = [self.requests[t.core_id] for t in ledger.run_order()]
        else:
            plan = ledger.plan(self.kv_cache_manager.block_pool.get_num_free_blocks(), self._cached, self._shared)
            held_back = self._carry_out(plan)
        offered = tuple(self._offered.offered)
        output = super().schedule(throttle_prefills)
        self._looked = False
        self.running.extend(held_back)
        self._offered.offered.clear()
        self._settle(offered, output.num_scheduled_tokens)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: object
    ) -> dict[int, EngineCoreOutputs]:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._looked = False
        if not scheduler_output.num_scheduled_tokens:
            return outputs  # a turn that only tells the worker who has ended
        self._count.steps += 1
        self._count.tokens += sum(len(o.new_token_ids) for of_client in outputs.values() for o in of_client.outputs)
        note = EngineCoreOutput(STEP_NOTE_ID, [], kv_transfer_params={NOTE_KEY: self.step_note()})
        if 0 in outputs:
            outputs[0].outputs.append(note)
        else:
            outputs[0] = EngineCoreOutputs(outputs=[note])
        return outputs

    def _preempt_request(self, request: CoreRequest, timestamp: float, drop_stale_output: bool = False) -> None:
        """Drop its blocks, for whatever reason; vLLM calls this too, where a running one finds no block."""
        core_id, pool = request.request_id, self.kv_cache_manager.block_pool
        preemption = self._victims.pop(core_id, None)
        urgent = None if preemption is None else preemption.urgent
        computed, free_before = request.num_computed_tokens, pool.get_num_free_blocks()
        self._drop(request, timestamp, for_urgent=urgent is not None, drop_stale_output=drop_stale_output)
        freed = pool.get_num_free_blocks() - free_before
        self._tell(core_id, urgent, freed, computed, PreemptionMeans.RECOMPUTE)

    def _drop(
        self, request: CoreRequest, timestamp: float, *, for_urgent: bool, drop_stale_output: bool = False
    ) -> None:
        super()._preempt_request(request, timestamp, drop_stale_output)
        self._ledger.drop(request.request_id, request.num_tokens, for_urgent=for_urgent)
        if request.num_in_flight_tokens:
            self._unsettled.add(request.request_id)

    def _free_request(self, request: CoreRequest, delay_free_blocks: bool = False) -> tuple[object, object]:
        tracked = self._ledger.remove(request.request_id)
        self._unsettled.discard(request.request_id)
        if request.status in _ENDED_BY_ITSELF:
            self._ledger.learn(tracked, tracked.note.emitted_tokens + request.num_output_tokens)
        return super()._free_request(request, delay_free_blocks)

    # --- the adapter calls these, between two steps, through `EngineCore.forebay` ---

    def call_load(self) -> bytes:
        """The load now, after everything that was sent before this call."""
        return self.step_note()

    def call_stopped(self, core_id: str) -> bytes:
        """End a request because its text has ended."""
        self.finish_requests(core_id, RequestStatus.FINISHED_STOPPED)
        return self.step_note()

    def call_park(self, core_id: str) -> bool:
        """Take a request out of scheduling, without its blocks, until it is unparked. False if it is not there."""
        if core_id not in self._ledger:
            return False
        request, tracked = self.requests[core_id], self._ledger.get(core_id)
        if tracked.parked:
            return True
        if request.status is RequestStatus.RUNNING:
            if request in self.running:
                self.running.remove(request)
            self._drop(request, time.monotonic(), for_urgent=False)
        self._ledger.park(core_id)
        return True

    def call_unpark(self, core_id: str) -> bool:
        """Put a parked request back at its place."""
        if core_id not in self._ledger or not self._ledger.get(core_id).parked:
            return False
        self._ledger.unpark(core_id)
        return True

    def call_places(self) -> dict[str, str]:
        """Where each request stands; for tests and diagnosis."""
        places = {t.core_id: "running" for t in self._ledger.run_order()}
        places |= {t.core_id: "paused" if t.state.blocks else "waiting" for t in self._ledger.wait_order()}
        return {core_id: places.get(core_id, "parked") for core_id in self.requests}

    # --- a step ---

    def _look(self) -> None:
        """Bring the ledger up to date with what the steps so far did."""
        if self._looked:
            return
        self._looked = True
        ledger, blocks_of = self._ledger, self.kv_cache_manager.get_blocks
        for tracked in tuple(ledger.run_order()):
            request = self.requests[tracked.core_id]
            ledger.update(
                tracked,
                tokens=request.num_tokens + request.num_output_placeholders,
                computed=request.num_computed_tokens,
                held_blocks=len(blocks_of(tracked.core_id).blocks[0]),
            )
        for core_id in tuple(self._unsettled):
            request = self.requests[core_id]
            ledger.get(core_id).state.tokens = request.num_tokens
            if not request.num_in_flight_tokens:
                self._unsettled.discard(core_id)

    def _carry_out(self, plan: StepPlan) -> list[CoreRequest]:
        """Preempt, admit, and set the running list. Returns those that keep their slot and sit this step out."""
        ledger = self._ledger
        now_s = time.monotonic()
        if plan.blocked is not None and not plan.blocked.blocked_counted:
            plan.blocked.blocked_counted = True
            self._count.urgent_blocked += 1
        for preemption in plan.preempted:
            self._preempt(preemption, now_s)
        offered: list[Tracked] = []
        for admission in plan.admitted:
            tracked = ledger.of(admission.sequence)
            if not tracked.state.blocks:
                offered.append(tracked)
            elif not self.requests[tracked.core_id].num_in_flight_tokens:
                ledger.run(tracked.core_id, tracked.held_blocks)
        self._offered.offered.extend(self.requests[t.core_id] for t in offered)
        return self._set_running(plan, offered)

    def _set_running(self, plan: StepPlan, offered: list[Tracked]) -> list[CoreRequest]:
        """Decodes before prompts, as in the plan; who has no part in the step, or a part of a prompt that would take what
        newcomers ahead of it are to have, is held back."""
        chunks = {chunk.sequence: chunk for chunk in plan.chunks}
        first = min((t.state.key for t in offered), default=None)
        decodes: list[CoreRequest] = []
        prefills: list[CoreRequest] = []
        held_back: list[CoreRequest] = []
        for tracked in self._ledger.run_order():
            request, state = self.requests[tracked.core_id], tracked.state
            chunk = chunks.get(state)
            if tracked.at_limit:
                decodes.append(request)
            elif chunk is None or (first is not None and first < state.key and not chunk.draws):
                held_back.append(request)
            else:
                (decodes if state.tokens - state.computed <= 1 else prefills).append(request)
        self.running = decodes + prefills
        return held_back

    def _preempt(self, preemption: Preemption, now_s: float) -> None:
        tracked = self._ledger.of(preemption.victim)
        core_id = tracked.core_id
        request = self.requests[core_id]
        if preemption.means is PreemptionMeans.PAUSE:
            self._ledger.pause(core_id)
            self._tell(core_id, preemption.urgent, 0, 0, PreemptionMeans.PAUSE)
            return
        self._victims[core_id] = preemption
        self._preempt_request(request, now_s)

    def _settle(self, offered: Collection[CoreRequest], scheduled: dict[str, int]) -> None:
        """Note who came in, and what was run."""
        ledger, count = self._ledger, self._count
        for request in offered:
            if request.status is RequestStatus.RUNNING:
                ledger.run(request.request_id, len(self.kv_cache_manager.get_blocks(request.request_id).blocks[0]))
                count.prefix_hit_tokens += request.num_computed_tokens - scheduled[request.request_id]
        for core_id, tokens in scheduled.items():
            state = ledger.get(core_id).state
            state.yields = 0
            if tokens > 1 or state.computed < state.prompt_tokens:
                count.prefill_tokens += tokens

    # --- blocks ---

    def _cached(self, core_id: str) -> tuple[int, int]:
        blocks, _, _ = self.kv_cache_manager.get_computed_blocks(self.requests[core_id])
        cached = blocks.blocks[0]
        return len(cached), sum(block.ref_cnt == 0 for block in cached)

    def _shared(self, core_id: str) -> Shared:
        blocks = self.kv_cache_manager.get_blocks(core_id).blocks[0]
        return [(block.block_id, block.ref_cnt) for block in blocks if block.ref_cnt > 1]

    # --- what is told ---

    def step_note(self) -> bytes:
        self._look()
        preempted, self._preempted = tuple(self._preempted), []
        return encode(StepNote(load=self._load(), preempted=preempted))

    def _tell(
        self,
        core_id: str,
        urgent: SequenceState | None,
        blocks_freed: int,
        tokens_to_recompute: int,
        means: PreemptionMeans,
    ) -> None:
        request_id, attempt = self._ledger.get(core_id).state.identity
        for_request_id = None if urgent is None else urgent.identity[0]
        self._preempted.append(Preempted(request_id, attempt, for_request_id, blocks_freed, tokens_to_recompute, means))
        self._count.preemptions += 1

    def _load(self) -> EngineLoad:
        ledger, count, pool = self._ledger, self._count, self.kv_cache_manager.block_pool
        return EngineLoad(
            slots_total=self._config.slots,
            blocks_total=pool.num_gpu_blocks - 1,
            blocks_free=max(0, pool.get_num_free_blocks() - ledger.promised_blocks()),
            block_size_tokens=self._config.block_size_tokens,
            running=ledger.running.loads(),
            waiting=ledger.waiting.loads(),
            adds_total=count.adds,
            steps_total=count.steps,
            tokens_total=count.tokens,
            preemptions_total=count.preemptions,
            urgent_blocked_total=count.urgent_blocked,
            prefix_hit_tokens_total=count.prefix_hit_tokens,
            prefill_tokens_total=count.prefill_tokens,
        )


class Counters:
    """They only rise."""

    __slots__ = ("adds", "preemptions", "prefill_tokens", "prefix_hit_tokens", "steps", "tokens", "urgent_blocked")

    def __init__(self) -> None:
        self.adds = self.steps = self.tokens = self.preemptions = 0
        self.urgent_blocked = self.prefill_tokens = self.prefix_hit_tokens = 0


class Offered(RequestQueue):
    """vLLM's waiting queue: as long as all that wait in the ledger, it offers those that the plan admits.

    Who joins, leaves and comes back is the ledger's affair, so that what vLLM puts in or takes out changes nothing.
    """

    def __init__(self, scheduler: ForebayScheduler, ledger: Ledger) -> None:
        self.offered: deque[CoreRequest] = deque()
        self._scheduler = scheduler
        self._ledger = ledger

    def add_request(self, request: CoreRequest) -> None:
        pass

    def prepend_request(self, request: CoreRequest) -> None:
        pass

    def prepend_requests(self, requests: Iterable[CoreRequest]) -> None:
        pass

    def remove_request(self, request: CoreRequest) -> None:
        pass

    def remove_requests(self, requests: Iterable[CoreRequest]) -> None:
        pass

    def peek_request(self) -> CoreRequest:
        return self.offered[0]

    def pop_request(self) -> CoreRequest:
        return self.offered.popleft()

    def __bool__(self) -> bool:
        return bool(self.offered)

    def __len__(self) -> int:
        return len(self._ledger.waiting)

    def __iter__(self) -> Iterator[CoreRequest]:
        return (self._scheduler.requests[t.core_id] for t in self._ledger.wait_order())


def _note_of(request: CoreRequest) -> RequestNote:
    extra = request.sampling_params.extra_args
    if extra is None or NOTE_KEY not in extra:
        raise ValueError("a request came to Forebay's scheduler without its note")
    return decode_request(extra[NOTE_KEY])


def _forebay(core: EngineCore, call: str, core_id: str = "") -> object:
    """`EngineCore.forebay`: the adapter's calls, made by the core between two of its steps."""
    method = getattr(core.scheduler, f"call_{call}")
    return method(core_id) if core_id else method()


EngineCore.forebay = _forebay  # type: ignore[attr-defined]
