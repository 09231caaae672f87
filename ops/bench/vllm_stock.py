"""vLLM as it is, for the benchmark beside it.

Owns: every import of vllm by `bench vllm`: its own `AsyncLLM`, and an engine core in this process that is stepped by hand.
Imports no engine of ours. Invariants: the stock engine has our engine's arguments without what is ours; nothing runs on
when an engine is closed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from cluster.types import Sampling
from ops.bench.workload import WorkItem

OURS = ("scheduler_cls", "logits_processors", "additional_config", "scheduling_policy")
"""Arguments that make vLLM ours."""
OURS_ENVIRONMENT = ("VLLM_COMPUTE_NANS_IN_LOGITS",)
STOCK_FIELDS = ("temperature", "top_p", "top_k", "frequency_penalty", "repetition_penalty")
"""Of `Sampling` and of vLLM's own parameters."""
T = TypeVar("T")


def without_ours(engine_arguments: Mapping[str, object]) -> dict[str, object]:
    """vLLM's engine with the same arguments but for what is ours; for processes that start from now on."""
    for name in OURS_ENVIRONMENT:
        os.environ.pop(name, None)
    return {name: value for name, value in engine_arguments.items() if name not in OURS}


class Stock:
    """`AsyncLLM`: to be closed, and used by one thread."""

    def __init__(self, engine_arguments: Mapping[str, object], policy: str) -> None:
        from vllm import AsyncEngineArgs  # type: ignore[import-not-found, unused-ignore]
        from vllm.v1.engine.async_llm import AsyncLLM  # type: ignore[import-not-found, unused-ignore]

        arguments = without_ours(engine_arguments)
        self._runner = asyncio.Runner()
        self._llm: Any = self._runner.run(_made(AsyncLLM, AsyncEngineArgs(**arguments, scheduling_policy=policy)))
        self._serial = 0

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Work that awaits this engine."""
        return self._runner.run(work)

    def close(self) -> None:
        self._runner.run(_closed(self._llm))
        self._runner.close()

    async def request(self, item: WorkItem, took: Callable[[int], None], *, priority: int = 0) -> None:
        """Run one, greedily; `took` is told of tokens as they come. Ended where it is cancelled.

        Raises:
            RuntimeError: it ended with another number of tokens than it was to have.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found, unused-ignore]

        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=item.output_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._serial += 1
        made = 0
        prompt = {"prompt_token_ids": list(item.prompt_ids)}
        async for output in self._llm.generate(prompt, sampling, str(self._serial), priority=priority):
            made += len(output.outputs[0].token_ids)
            took(len(output.outputs[0].token_ids))
        if made != item.output_tokens:
            raise RuntimeError(f"a request ended with {made} tokens, not {item.output_tokens}")


async def _made(llm: Any, arguments: Any) -> Any:
    return llm.from_engine_args(arguments)


async def _closed(llm: Any) -> None:
    llm.shutdown(timeout=1.0)


class CoreHere:
    """An engine core in this process, its worker included. To be closed."""

    def __init__(self, engine_arguments: Mapping[str, object]) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.core import EngineCore  # type: ignore[import-not-found, unused-ignore]
        from vllm.v1.executor import Executor  # type: ignore[import-not-found, unused-ignore]

        config = AsyncEngineArgs(**engine_arguments, distributed_executor_backend="uni").create_engine_config()
        self._core: Any = EngineCore(config, Executor.get_class(config), False)
        del os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"]  # the engines that come after have processes of their own

    def add(self, core_requests: Sequence[Any]) -> None:
        for request in core_requests:
            self._core.add_request(*self._core.preprocess_add_request(request))

    def add_stock(self, prompts: Sequence[Sequence[int]], sampling: Sampling, serial: str) -> None:
        """Requests as vLLM's own, drawn with its own sampler and without seeds, which it would draw one by one.

        Their core must have been made with `without_ours`.
        """
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest  # type: ignore[import-not-found, unused-ignore]

        drawn = {name: getattr(sampling, name) for name in STOCK_FIELDS}
        for number, prompt_ids in enumerate(prompts):
            request = EngineCoreRequest(
                request_id=f"{serial}-{number}",
                prompt_token_ids=list(prompt_ids),
                mm_features=None,
                sampling_params=SamplingParams(
                    **drawn, max_tokens=sampling.max_tokens, ignore_eos=True, detokenize=False
                ),
                pooling_params=None,
                arrival_time=0.0,
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
            )
            self.add([request])

    def step(self) -> int:
        """Run one step; returns the tokens that it gave."""
        outputs, _ = self._core.step_fn()
        return sum(len(one.new_token_ids) for of_client in (outputs or {}).values() for one in of_client.outputs)

    @property
    def has_work(self) -> bool:
        return bool(self._core.scheduler.has_requests())

    def close(self) -> None:
        self._core.shutdown()
