"""Our scheduler in vLLM's core without a process or a model: stepped by hand, with as many steps in flight as vLLM has.

A CPU runs vLLM one step at a time. On a GPU the next step is scheduled while one runs, so that the scheduler works with
output that is still on its way. `Core` does that too, in the order of vLLM's `EngineCore.step_with_batch_queue`.

`Worker` stands where the model runner does and keeps what that one keeps: block tables, and in each slot of each block
which text was written there. In each step it checks that all that the step reads is there. Its next token is
a hash of the whole text. With a KV connector (the scheduler's side of later_connector.py) it also does the transfers, some
steps later than it is told to; those to a path that says so fail.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from cluster.config import EngineConfig
from cluster.engine.prefix import numbers_of
from cluster.engine.vllm.build import engine_arguments
from cluster.engine.vllm.scheduler import ForebayScheduler
from cluster.engine.vllm.translate import core_request
from cluster.engine.vllm.wire import NOTE_KEY, STEP_NOTE_ID, StepNote, decode_step
from cluster.model import ModelFolder
from cluster.types import Preempted, Request
from tests.vllm.later_connector import BROKEN, Transfer

TOKENS = 1000


def next_token(text: tuple[int, ...]) -> int:
    return int.from_bytes(hashlib.blake2b(repr(text).encode(), digest_size=4).digest(), "big") % TOKENS + 3


def undisturbed(r: Request) -> list[int]:
    text = tuple(r.prompt_ids) + tuple(r.emitted_ids)
    made: list[int] = []
    while len(r.emitted_ids) + len(made) < r.sampling.max_tokens:
        made.append(next_token((*text, *made)))
    return made


@dataclass
class Worker:
    """Raises AssertionError where a step reads keys and values that are not there."""

    block_size: int
    prompts: dict[str, list[int]] = field(default_factory=dict)
    made: dict[str, list[int]] = field(default_factory=dict)
    tables: dict[str, list[int]] = field(default_factory=dict)
    written: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    """(block, slot) -> the text up to and with the token whose keys and values are there."""
    in_last_step: set[str] = field(default_factory=set)
    sends: list[Transfer] = field(default_factory=list)
    receives: list[Transfer] = field(default_factory=list)
    stored: dict[str, list[list[tuple[int, ...] | None]]] = field(default_factory=dict)
    """Path -> of each block, of each slot, the text that was written there."""
    spoilt: set[str] = field(default_factory=set)
    """Whose logits are no numbers."""

    def run(self, step: Any) -> Any:
        from vllm.v1.outputs import ModelRunnerOutput  # type: ignore[import-not-found, unused-ignore]

        for core_request_id in step.finished_req_ids:
            for known in (self.prompts, self.made, self.tables):
                known.pop(core_request_id, None)
        for new in step.scheduled_new_reqs:
            self.prompts[new.req_id], self.made[new.req_id] = list(new.prompt_token_ids), []
            self.tables[new.req_id] = list(new.block_ids[0])
        cached = step.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        for place, name in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[place]
            if name in cached.resumed_req_ids:
                self.tables[name] = list(blocks[0])
            elif blocks is not None:
                self.tables[name].extend(blocks[0])
            if name not in self.in_last_step:
                made = cached.num_output_tokens[place]
                assert cached.all_token_ids[name][-made:] == self.made[name] or not made, "tokens are lost on the way"
            computed[name] = cached.num_computed_tokens[place]
        # A layer writes all keys and values of a step before it reads any, so a step may share what it writes itself.
        for name, tokens in step.num_scheduled_tokens.items():
            self._write(name, computed[name], tokens)
        sampled = [self._read(name, computed[name] + tokens) for name, tokens in step.num_scheduled_tokens.items()]
        self.in_last_step = set(step.num_scheduled_tokens)
        names = list(step.num_scheduled_tokens)
        transfers = self._transfer(step.kv_connector_metadata) if step.kv_connector_metadata is not None else None
        return ModelRunnerOutput(
            names,
            {name: k for k, name in enumerate(names)},
            sampled,
            kv_connector_output=transfers,
            num_nans_in_logits={name: int(name in self.spoilt) for name in names},
        )

    def _transfer(self, orders: Any) -> Any:
        from vllm.v1.outputs import KVConnectorOutput  # type: ignore[import-not-found, unused-ignore]

        self.sends.extend(orders.sends)
        self.receives.extend(orders.receives)
        for transfer in (*self.sends, *self.receives):
            transfer.turns_left -= 1
        sent = [t for t in self.sends if t.turns_left <= 0]
        received = [t for t in self.receives if t.turns_left <= 0 and (t.path in self.stored or BROKEN in t.path)]
        for t in sent:
            self.stored[t.path] = [
                [self.written.get((block, slot)) for slot in range(self.block_size)] for block in t.block_ids
            ]
        failed: set[int] = set()
        for t in received:
            if BROKEN in t.path:
                failed.update(t.block_ids)
                continue
            came = self.stored[t.path][t.first_block :]
            assert len(came) == len(t.block_ids), "the target asks for other blocks than the source has"
            for block, texts in zip(t.block_ids, came, strict=True):
                for slot, text in enumerate(texts):
                    self.written.pop((block, slot), None)
                    if text is not None:
                        self.written[block, slot] = text
        self.sends = [t for t in self.sends if t not in sent]
        self.receives = [t for t in self.receives if t not in received]
        return KVConnectorOutput(
            finished_sending={t.request_id for t in sent},
            finished_recving={t.request_id for t in received},
            invalid_block_ids=failed,
        )

    def _text(self, name: str) -> tuple[int, ...]:
        return (*self.prompts[name], *self.made[name])

    def _slot(self, name: str, position: int) -> tuple[int, int]:
        return self.tables[name][position // self.block_size], position % self.block_size

    def _write(self, name: str, computed: int, tokens: int) -> None:
        text = self._text(name)
        assert computed + tokens <= len(text)
        for position in range(computed, computed + tokens):
            self.written[self._slot(name, position)] = text[: position + 1]

    def _read(self, name: str, end: int) -> list[int]:
        text = self._text(name)
        for position in range(end):
            assert self.written.get(self._slot(name, position)) == text[: position + 1], (
                f"{name}: position {position} is not where its block table says"
            )
        if end < len(text):
            return []
        self.made[name].append(next_token(text))
        return [self.made[name][-1]]


class Core:
    """Steps the scheduler with `depth` steps in flight, and gathers what comes out."""

    def __init__(self, scheduler: ForebayScheduler, hasher: Any, config: EngineConfig, depth: int) -> None:
        self.scheduler = scheduler
        self.outputs: dict[str, list[int]] = {}
        self.ended: set[str] = set()
        self.preempted: list[Preempted] = []
        self.note: StepNote | None = None
        self.frozen: dict[str, bytes] = {}
        """Those of which nothing is on its way any more, as a note said, with the KV connector's handle."""
        self.ran: dict[str, int] = {}
        """Tokens of each request in the step that was scheduled last."""
        self.held: set[int] = set()
        """Of the blocks in its prefix cache, the sum of what the notes of its steps said."""
        self.cached: dict[str, int] = {}
        """Tokens of each request that were found in the prefix cache."""
        self.cleared: set[int] = set()
        """Blocks that some step was told to clear first."""
        self.slots = config.slots
        self._hasher = hasher
        self.worker = Worker(config.block_size_tokens)
        self._depth = depth
        self._in_flight: deque[tuple[Any, Any]] = deque()

    def add(self, r: Request, attempt: int = 0, **more: Any) -> str:
        """`more` is for `core_request`."""
        from vllm.v1.request import Request as VllmRequest  # type: ignore[import-not-found, unused-ignore]

        sent = core_request(r, attempt, (), **more)
        name: str = sent.request_id  # type: ignore[attr-defined]
        self.outputs[name] = []
        self.scheduler.add_request(VllmRequest.from_engine_core_request(sent, self._hasher))
        return name

    def call(self, call: str, name: str) -> None:
        """What the adapter calls between steps: freeze, thaw, release, park."""
        if call in ("thaw", "release"):
            self.frozen.pop(name, None)
        self._read(getattr(self.scheduler, f"call_{call}")(name))

    def abort(self, name: str) -> None:
        from cluster.engine.vllm.internals import RequestStatus

        self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
        self.ended.add(name)
        self.frozen.pop(name, None)

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight) or self.scheduler.has_requests()  # type: ignore[attr-defined]

    def step(self) -> None:
        """One turn of vLLM's loop: schedule, and take output once as many steps are in flight as can be."""
        if self.scheduler.has_requests():  # type: ignore[attr-defined]
            self.begin()
            if len(self._in_flight) < self._depth and self.ran:
                return
        if self._in_flight:
            self.end()

    def begin(self) -> None:
        """Schedule a step, which then is in flight."""
        step = self.scheduler.schedule()
        self.ran = dict(step.num_scheduled_tokens)
        self.cleared.update(step.new_block_ids_to_zero or ())  # type: ignore[attr-defined]
        self._in_flight.append((step, self.worker.run(step)))

    def end(self) -> None:
        """The oldest step in flight has ended."""
        self._take(self.scheduler.update_from_output(*self._in_flight.popleft()))

    def drain(self, steps: int = 5000) -> None:
        for _ in range(steps):
            if not self.has_work:
                return
            self.step()
        raise AssertionError(f"not done after {steps} steps")

    def _take(self, by_client: dict[int, Any]) -> None:
        for output in (output for of_client in by_client.values() for output in of_client.outputs):
            if output.request_id == STEP_NOTE_ID:
                self._read(output.kv_transfer_params[NOTE_KEY])
                assert self.note is not None
                if self.note.prefixes is not None:
                    self.held.difference_update(numbers_of(self.note.prefixes.gone))
                    self.held.update(numbers_of(self.note.prefixes.held))
                continue
            assert output.request_id not in self.ended, "something came after the end"
            assert output.request_id not in self.frozen, "something came after it was said to be frozen"
            self.outputs[output.request_id].extend(output.new_token_ids)
            if output.prefill_stats is not None:
                self.cached[output.request_id] = output.prefill_stats.num_local_cached_tokens
            if output.finish_reason is not None:
                self.ended.add(output.request_id)

    def _read(self, note: bytes) -> None:
        self.note = decode_step(note)
        self.preempted.extend(self.note.preempted)
        self.frozen.update(self.note.frozen)


def make_core(model: ModelFolder, config: EngineConfig, *, depth: int, pool_blocks: int | None = None) -> Core:
    """`pool_blocks` where the number of blocks is not the configuration's."""
    from vllm.engine.arg_utils import AsyncEngineArgs  # type: ignore[import-not-found, unused-ignore]
    from vllm.utils.hashing import sha256  # type: ignore[import-not-found, unused-ignore]
    from vllm.v1.core.kv_cache_utils import (  # type: ignore[import-not-found, unused-ignore]
        get_request_block_hasher,
        init_none_hash,
    )
    from vllm.v1.kv_cache_interface import (  # type: ignore[import-not-found, unused-ignore]
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
    )
    from vllm.v1.structured_output import StructuredOutputManager  # type: ignore[import-not-found, unused-ignore]

    size, blocks = config.block_size_tokens, (config.blocks if pool_blocks is None else pool_blocks) + 1
    vllm_config = AsyncEngineArgs(**engine_arguments(model, config)).create_engine_config()
    vllm_config.scheduler_config.async_scheduling = depth > 1  # vLLM's CPU platform turns it off
    vllm_config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    init_none_hash(sha256)
    scheduler = ForebayScheduler(
        vllm_config=vllm_config,
        kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=size,
    )
    return Core(scheduler, get_request_block_hasher(size, sha256), config, depth)
