"""vLLM's scheduler under our plan.

Owns: carrying out a plan of cluster.engine.scheduling in vLLM's engine core, before each of vLLM's own steps. Imports
the ledger and vLLM's internals. Invariants: vLLM's step decides nothing that the plan has not; whom a plan preempts stays
a live request of the core: it is paused with its blocks, or recomputed from its place in the order.

How. vLLM's `schedule` runs its `running` list in order and takes newcomers from its `waiting` queue. So before each of its
steps the list is set to those that the plan runs, decodes first, and the queue offers those alone whom the plan admits.
A paused request is one that is in neither: vLLM then lets it keep its blocks, and its worker puts it back into the batch
when it is scheduled again. So does a frozen one. One whose blocks a KV connector fills is in neither too: when that is
done it waits, and is admitted by a plan as a paused one is.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from cluster.config import EngineConfig
from cluster.engine.held import worth_weighing
from cluster.engine.scheduling.giving import Shared
from cluster.engine.scheduling.plan import Preemption, StepPlan
from cluster.engine.scheduling.sequence import SequenceState
from cluster.engine.vllm.connector import all_but_the_last, handed_over, lost_blocks
from cluster.engine.vllm.internals import (
    AsyncScheduler,
    EngineCore,
    EngineCoreOutput,
    EngineCoreOutputs,
    RequestStatus,
)
from cluster.engine.vllm.ledger import Ledger, Tracked
from cluster.engine.vllm.orphan import end_with_parent
from cluster.engine.vllm.prefixes import CorePrefixes
from cluster.engine.vllm.queues import Loading, Offered
from cluster.engine.vllm.spoilt import SpoiltBlocks
from cluster.engine.vllm.telling import Telling
from cluster.engine.vllm.wire import NOTE_KEY, STEP_NOTE_ID, RequestNote, decode_request, encode, encode_handle
from cluster.types import PreemptionMeans

if TYPE_CHECKING:
    from cluster.engine.vllm.internals import CoreRequest, ModelRunnerOutput, SchedulerOutput

_ENDED_BY_ITSELF = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


class ForebayScheduler(AsyncScheduler):
    """For `scheduler_cls`. `additional_config[NOTE_KEY]` is an `EngineConfig` as JSON values."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        end_with_parent()
        if len(self.kv_cache_config.kv_cache_groups) != 1:
            raise ValueError("Forebay schedules models with one kind of attention")
        config = EngineConfig.model_validate(self.vllm_config.additional_config[NOTE_KEY])
        blocks = self.kv_cache_manager.block_pool.num_gpu_blocks - 1  # one of them is vLLM's own
        if blocks * config.block_size_tokens < config.max_model_len:
            raise ValueError(
                f"the pool's {blocks} blocks of {config.block_size_tokens} tokens do not hold one request of max_model_len "
                f"({config.max_model_len}): raise gpu_memory_utilization or blocks, or lower max_model_len"
            )
        self._ledger = Ledger(config.model_copy(update={"blocks": blocks}))
        self._telling = Telling(
            self._ledger,
            slots_total=config.slots,
            blocks_total=blocks,
            block_size_tokens=config.block_size_tokens,
            step_tokens=config.step_token_budget,
        )
        self._offered = Offered(self._ledger, self.requests.__getitem__)
        self.waiting = self._offered
        self.kv_holding_waiting = Loading(self._ledger, self.requests.__getitem__)
        if self.connector is not None:
            self.connector.get_num_new_matched_tokens = all_but_the_last(self.connector.get_num_new_matched_tokens)
        self._prefixes = CorePrefixes(
            self.kv_cache_manager.block_pool, lambda core_id: self._ledger.get(core_id).note.tenant
        )
        self._spoilt = SpoiltBlocks(self.kv_cache_manager, config.block_size_tokens)
        self._victims: dict[str, Preemption] = {}
        """Whom the plan that is being carried out recomputes."""
        self._unsettled: set[str] = set()
        """Recomputed ones with output of an earlier step still on its way."""
        self._freezing: set[str] = set()
        """Frozen ones of which something is still on its way."""
        self._kv_transfer_params: Mapping[str, object] | None = None
        """What the KV connector said of the last request that ended."""
        self._looked = False
        """The ledger knows what all steps so far did."""

    # --- vLLM calls these ---

    def add_request(self, request: CoreRequest) -> None:
        note = _note_of(request)
        self._telling.adds += not note.moved
        self._ledger.add(request.request_id, note)
        super().add_request(request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        ledger = self._ledger
        self._look()
        pool_blocks_free = self._pool_blocks_free()
        if ledger.settled(pool_blocks_free):
            held_back: list[CoreRequest] = []
            self.running = [self.requests[t.core_id] for t in ledger.run_order()]
        else:
            held_back = self._carry_out(ledger.plan(pool_blocks_free, self._cached, self._shared))
        offered = tuple(self._offered.offered)
        output = super().schedule(throttle_prefills)
        self._looked = False
        self.running.extend(held_back)
        self._offered.offered.clear()
        self._settle(offered, output.num_scheduled_tokens)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        self._spoilt.note(model_runner_output.num_nans_in_logits, self.requests)
        aside = self._look_at_all() if lost_blocks(model_runner_output) else ()
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._spoilt.evict()
        self._looked = False
        if aside:
            self._set_aside_again(aside)
        for core_id in tuple(self._freezing):
            self._settle_frozen(core_id)
        if scheduler_output.num_scheduled_tokens:
            self._telling.steps += 1
            self._telling.tokens += sum(len(o.new_token_ids) for of_one in outputs.values() for o in of_one.outputs)
        elif not self._telling.is_due(self._pool_blocks_free(), time.monotonic()):
            return outputs
        note = EngineCoreOutput(STEP_NOTE_ID, [], kv_transfer_params={NOTE_KEY: self._note_of_step()})
        if 0 in outputs:
            outputs[0].outputs.append(note)
        else:
            outputs[0] = EngineCoreOutputs(outputs=[note])
        return outputs

    def _get_new_block_ids_to_zero(self) -> list[int] | None:
        return self._spoilt.given_away()

    def has_finished_requests(self) -> bool:
        """Also while the KV connector still sends blocks of some."""
        return bool(self.finished_req_ids) or len(self.requests) > len(self._ledger)

    def _preempt_request(self, request: CoreRequest, timestamp: float, drop_stale_output: bool = False) -> None:
        """Drop its blocks, for whatever reason; vLLM calls this too, where a running one finds no block."""
        core_id = request.request_id
        preemption = self._victims.pop(core_id, None)
        urgent = None if preemption is None else preemption.urgent
        computed = request.num_computed_tokens
        freed = sum(block.ref_cnt == 1 for block in self.kv_cache_manager.get_blocks(core_id).blocks[0])
        self._drop(request, timestamp, for_urgent=urgent is not None, drop_stale_output=drop_stale_output)
        self._telling.preempted(
            self._ledger.get(core_id),
            None if urgent is None else urgent.identity[0],
            blocks_freed=freed,
            tokens_to_recompute=computed,
            means=PreemptionMeans.RECOMPUTE,
        )

    def _drop(
        self, request: CoreRequest, timestamp: float, *, for_urgent: bool, drop_stale_output: bool = False
    ) -> None:
        self._spoilt.leave(request)
        if request.status is RequestStatus.RUNNING:
            super()._preempt_request(request, timestamp, drop_stale_output)
        else:  # its blocks came from a KV connector, and it has not run since
            self._free_request_blocks(request)
            self._inflight_prefills.discard(request)
            request.num_computed_tokens = 0
        self._ledger.drop(request.request_id, request.num_tokens, for_urgent=for_urgent)
        if request.num_in_flight_tokens:
            self._unsettled.add(request.request_id)

    def _free_request(self, request: CoreRequest, delay_free_blocks: bool = False) -> tuple[object, object]:
        self._spoilt.leave(request)
        tracked = self._ledger.remove(request.request_id)
        self._unsettled.discard(request.request_id)
        self._freezing.discard(request.request_id)
        if request.status in _ENDED_BY_ITSELF and not tracked.frozen:
            self._ledger.learn(tracked, tracked.note.emitted_tokens + request.num_output_tokens)
        said = super()._free_request(request, delay_free_blocks)
        self._kv_transfer_params = said[0]
        return said

    # --- the adapter calls these, between two steps, through `EngineCore.forebay` ---

    def call_load(self) -> bytes:
        """The load now, after everything that was sent before this call."""
        return self.step_note()

    def call_stopped(self, core_id: str) -> bytes:
        """End a request because its text has ended."""
        self.finish_requests(core_id, RequestStatus.FINISHED_STOPPED)
        return self.step_note()

    def call_freeze(self, core_id: str) -> bytes:
        """Take a request out of scheduling. A note says so once nothing of it is on its way."""
        if core_id in self._ledger:
            self._freeze(core_id)
            self._freezing.add(core_id)
            self._settle_frozen(core_id)
        return self.step_note()

    def call_thaw(self, core_id: str) -> bytes:
        """Put a frozen or parked request back at its place."""
        if core_id in self._ledger:
            self._ledger.thaw(core_id)
        return self.step_note()

    def call_release(self, core_id: str) -> bytes:
        """Forget a frozen request."""
        self.finish_requests(core_id, RequestStatus.FINISHED_ABORTED)
        return self.step_note()

    def call_park(self, core_id: str) -> bytes:
        """Freeze a request and take its blocks (but those that a KV connector is filling)."""
        if core_id in self._ledger:
            self._freeze(core_id)
            tracked = self._ledger.get(core_id)
            if tracked.held_blocks and not tracked.loading:
                self._drop(self.requests[core_id], time.monotonic(), for_urgent=False)
        return self.step_note()

    def call_places(self) -> dict[str, str]:
        """Where each request stands; for tests and diagnosis."""
        return {tracked.core_id: tracked.place for tracked in self._ledger.all()}

    def call_held(self, limit: int) -> bytes:
        """Of those that run or wait, at most so many, the most worth weighing."""
        self._look()
        ledger = self._ledger
        return encode(worth_weighing(ledger.waiting, ledger.running, limit, self._own_blocks))

    # --- moves ---

    def _freeze(self, core_id: str) -> None:
        self._look()
        request = self.requests[core_id]
        if request in self.running:
            self.running.remove(request)
        self._ledger.freeze(core_id)

    def _settle_frozen(self, core_id: str) -> None:
        """Say so, if nothing of it is on its way any more; a KV connector gets it then."""
        self._look()
        request = self.requests[core_id]
        if request.num_in_flight_tokens or self._ledger.get(core_id).loading:
            return
        self._freezing.remove(core_id)
        kv_handle = b""
        if self.connector is not None:
            status = handed_over(self.connector, request, self.kv_cache_manager.get_blocks(core_id))
            self.finish_requests(core_id, status)
            kv_handle = encode_handle(self._kv_transfer_params)
        self._telling.frozen(core_id, kv_handle)

    # --- a step ---

    def _look(self) -> None:
        """Bring the ledger up to date with what the steps so far did."""
        if self._looked:
            return
        self._looked = True
        ledger, blocks_of = self._ledger, self.kv_cache_manager.get_blocks
        for core_id in ledger.loading & self.finished_recving_kv_req_ids:
            request = self.requests[core_id]
            self._handle_blocked_waiting_request(request)
            held_blocks = len(blocks_of(core_id).blocks[0])
            ledger.loaded(core_id, computed=request.num_computed_tokens, held_blocks=held_blocks)
        for tracked in tuple(ledger.run_order()):
            request = self.requests[tracked.core_id]
            ledger.update(
                tracked,
                tokens=request.num_tokens + request.num_output_placeholders,
                computed=request.num_computed_tokens,
                held_blocks=len(blocks_of(tracked.core_id).blocks[0]),
            )
        for core_id in tuple(self._unsettled):
            request, tracked = self.requests[core_id], ledger.get(core_id)
            ledger.correct(tracked, tokens=request.num_tokens, computed=tracked.state.computed)
            if not request.num_in_flight_tokens:
                self._unsettled.discard(core_id)

    def _carry_out(self, plan: StepPlan) -> list[CoreRequest]:
        """Preempt, admit, and set the running list. Returns those that keep their slot and sit this step out."""
        ledger = self._ledger
        now_s = time.monotonic()
        if plan.blocked is not None and not plan.blocked.blocked_counted:
            plan.blocked.blocked_counted = True
            self._telling.urgent_blocked += 1
        for preemption in plan.preempted:
            self._preempt(preemption, now_s)
        offered: list[Tracked] = []
        for admission in plan.admitted:
            tracked = ledger.of(admission.sequence)
            request = self.requests[tracked.core_id]
            if request.status is not RequestStatus.RUNNING:
                offered.append(tracked)
            elif not request.num_in_flight_tokens:  # it was paused or frozen
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
            assert preemption.urgent is not None
            self._telling.preempted(
                tracked,
                preemption.urgent.identity[0],
                blocks_freed=0,
                tokens_to_recompute=0,
                means=PreemptionMeans.PAUSE,
            )
            return
        self._victims[core_id] = preemption
        self._preempt_request(request, now_s)

    def _settle(self, offered: Collection[CoreRequest], scheduled: dict[str, int]) -> None:
        """Note who came in, and what was run."""
        ledger, telling = self._ledger, self._telling
        for request in offered:
            core_id = request.request_id
            if request.status is RequestStatus.RUNNING:
                ledger.run(core_id, len(self.kv_cache_manager.get_blocks(core_id).blocks[0]))
                telling.prefix_hit_tokens += request.num_computed_tokens - scheduled[core_id]
            elif request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                ledger.load(core_id, len(self.kv_cache_manager.get_blocks(core_id).blocks[0]))
        for core_id, tokens in scheduled.items():
            state = ledger.get(core_id).state
            state.yields = 0
            if tokens > 1 or state.computed < state.prompt_tokens:
                telling.prefill_tokens += tokens

    def _look_at_all(self) -> tuple[CoreRequest, ...]:
        """vLLM looks for requests that counted on lost blocks among those that run. So may a paused or frozen one."""
        running = {request.request_id for request in self.running}
        aside = tuple(
            request
            for request in (self.requests[tracked.core_id] for tracked in self._ledger.all())
            if request.status is RequestStatus.RUNNING and request.request_id not in running
        )
        self.running.extend(aside)
        return aside

    def _set_aside_again(self, aside: Collection[CoreRequest]) -> None:
        names = {request.request_id for request in aside}
        self.running = [request for request in self.running if request.request_id not in names]
        for request in aside:
            if request.request_id in self._ledger:
                tracked = self._ledger.get(request.request_id)
                self._ledger.correct(tracked, tokens=tracked.state.tokens, computed=request.num_computed_tokens)

    # --- blocks ---

    def _pool_blocks_free(self) -> int:
        """Also those that are free as soon as a step has ended that may still write to them."""
        soon = sum(block.ref_cnt == 1 for _, blocks in self.deferred_frees for block in blocks)
        return self.kv_cache_manager.block_pool.get_num_free_blocks() + soon

    def _cached(self, core_id: str) -> tuple[int, int]:
        blocks, _, _ = self.kv_cache_manager.get_computed_blocks(self.requests[core_id])
        cached = blocks.blocks[0]
        return len(cached), sum(block.ref_cnt == 0 for block in cached)

    def _shared(self, core_id: str) -> Shared:
        blocks = self.kv_cache_manager.get_blocks(core_id).blocks[0]
        return [(block.block_id, block.ref_cnt) for block in blocks if block.ref_cnt > 1]

    def _own_blocks(self, state: SequenceState) -> int:
        """Those that nobody else holds, and the promised ones."""
        return state.blocks - len(self._shared(self._ledger.of(state).core_id))

    def _blocks_cached(self) -> int:
        """Of the free ones, and of those that soon are: what is in use, but for what is not registered of it, is not free."""
        pool = self.kv_cache_manager.block_pool
        soon = sum(block.ref_cnt == 1 for _, blocks in self.deferred_frees for block in blocks)
        held_blocks = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks() - soon
        (registered,) = (m.num_cached_block for m in self.kv_cache_manager.coordinator.single_type_managers)
        own = sum(t.held_blocks - registered.get(t.core_id, 0) for t in self._ledger.all() if t.held_blocks)
        return max(0, self._prefixes.blocks - (held_blocks - own))

    def step_note(self) -> bytes:
        self._look()
        return self._telling.note(self._pool_blocks_free(), self._blocks_cached(), time.monotonic())

    def _note_of_step(self) -> bytes:
        self._look()
        prefixes = self._prefixes.take_change()
        return self._telling.note(self._pool_blocks_free(), self._blocks_cached(), time.monotonic(), prefixes)


def _note_of(request: CoreRequest) -> RequestNote:
    extra = request.sampling_params.extra_args
    if extra is None or NOTE_KEY not in extra:
        raise ValueError("a request came to Forebay's scheduler without its note")
    return decode_request(extra[NOTE_KEY])


def _forebay(core: EngineCore, call: str, argument: str | int | None = None) -> object:
    """`EngineCore.forebay`: the adapter's calls, made by the core between two of its steps."""
    method = getattr(core.scheduler, f"call_{call}")
    return method() if argument is None else method(argument)


EngineCore.forebay = _forebay  # type: ignore[attr-defined]
