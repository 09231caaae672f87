"""The batching modes on one A100, in virtual time: the production engine over a backend that only tells the time.

Owns: what is run there (Llama-2-7B, its KV capacity, full conversation lengths). Imports the engine and ops.sim.
Invariant: a run is a function of its setting, its extent and the seed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from cluster.config import BatchingMode, EngineConfig, Order
from cluster.engine.engine import Engine
from cluster.engine.scheduling.plan import Cost
from cluster.types import Request, RequestId, Sampling
from ops.bench.batching_loop import Extent, Measured, MeteredBackend, Mode, Setting, saturate
from ops.bench.lengths import conversation_lengths, shuffled_lengths
from ops.sim.backend import END_TOKEN, ModelledBackend, no_text, prompt_for
from ops.sim.step_time import a100

MODEL = "llama-2-7b"
BLOCK_SIZE_TOKENS = 16
PREFILL_TOKEN_S = 60e-6
"""What a token computed again costs about, in long chunks."""


def run_modelled(
    setting: Setting, extent: Extent, seed: int, show: Callable[[int], None], *, pad_contexts: bool = True
) -> Measured:
    """Run one setting on the modelled A100.

    Args:
        setting: The mode and its batch.
        extent: Requests to run.
        seed: Shuffles the conversations.
        show: Called with the number of requests that have ended.
        pad_contexts: False spares static and dynamic batches the reading of contexts up to the longest.
    """
    times = a100().models[MODEL]
    lengths = conversation_lengths()
    longest_output = max(one.output_tokens for one in lengths)
    padded = setting.mode in {Mode.STATIC, Mode.DYNAMIC}
    config = EngineConfig(
        mode=BatchingMode.CONTINUOUS if setting.mode is Mode.NONE else BatchingMode(setting.mode),
        order=Order.FCFS,
        slots=setting.slots,
        step_token_budget=setting.step_token_budget,
        block_size_tokens=BLOCK_SIZE_TOKENS,
        blocks=times.kv_capacity_tokens // BLOCK_SIZE_TOKENS,
        max_model_len=max(map(sum, lengths)),
        max_held=2 * setting.slots,
        prefix_cache=False,  # the prompts stand for unrelated ones, and are all alike
        host_blocks=0,
    )
    backend = ModelledBackend(times, longest_output, padded=padded and pad_contexts)
    meter = MeteredBackend(backend)
    engine = Engine(config, meter, no_text(), (END_TOKEN,), Cost(PREFILL_TOKEN_S, 1.0))
    requests = _requests(seed, longest_output, lambda: backend.now_ms)
    return saturate(engine, meter, requests, setting, extent, lambda: backend.now_ms, show, rectangular=padded)


def _requests(seed: int, longest_output: int, now_ms: Callable[[], float]) -> Iterator[Request]:
    """Conversations without end, in an order that depends on the seed alone; none tells how long its answer will be."""
    for number, one in enumerate(itertools.cycle(shuffled_lengths(seed))):
        yield Request(
            request_id=RequestId(f"{number:08}"),
            tenant="bench",
            priority=0,
            priority_class="standard",
            arrived_unix_s=now_ms() / 1000,
            prompt_ids=prompt_for(one.prompt_tokens, one.output_tokens),
            sampling=Sampling(max_tokens=longest_output, seed=0, temperature=0.0),
        )
