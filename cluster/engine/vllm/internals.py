"""The parts of vLLM that this backend stands on, with their types.

Owns: every import of vllm. vLLM ships no types that a checker outside its environment could read, so what is used is
written down here as it is in vLLM 0.32.0: these declarations are the complete list of internals that we rely on. Importing
this module checks the version first.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from cluster.engine.vllm.version import check_version

__all__ = [
    "AsyncScheduler",
    "EngineCore",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreRequest",
    "EngineDeadError",
    "LogitsProcessor",
    "RequestQueue",
    "RequestStatus",
    "SamplingParams",
    "close_core",
    "core_pids",
    "launch_core",
    "process_dict_updates",
]

check_version()

SHUTDOWN_TIMEOUT_S = 5.0
"""A core that has not ended after this is killed."""

if TYPE_CHECKING:
    from enum import IntEnum

    class RequestStatus(IntEnum):
        WAITING = 1
        RUNNING = 5
        PREEMPTED = 6
        FINISHED_STOPPED = 7
        FINISHED_LENGTH_CAPPED = 8
        FINISHED_ABORTED = 9

    class SamplingParams:
        extra_args: dict[str, Any] | None

        def __init__(
            self,
            *,
            temperature: float,
            max_tokens: int,
            stop_token_ids: list[int] | None,
            ignore_eos: bool,
            logprobs: int | None,
            prompt_logprobs: int | None,
            detokenize: bool,
            skip_clone: bool,
            extra_args: dict[str, Any],
        ) -> None: ...

    class KVCacheBlock(Protocol):
        block_id: int
        ref_cnt: int

    class KVCacheBlocks(Protocol):
        blocks: tuple[Sequence[KVCacheBlock], ...]
        """Per KV cache group."""

    class BlockPool(Protocol):
        num_gpu_blocks: int
        """One of them, the null block, is never given to a request."""

        def get_num_free_blocks(self) -> int: ...

    class KVCacheManager(Protocol):
        block_pool: BlockPool

        def get_blocks(self, request_id: str) -> KVCacheBlocks: ...

        def get_computed_blocks(self, request: CoreRequest) -> tuple[KVCacheBlocks, int, int]:
            """Blocks of the prefix cache, and the tokens in them. Changes nothing."""
            ...

    class CoreRequest(Protocol):
        """`vllm.v1.request.Request`."""

        request_id: str
        client_index: int
        sampling_params: SamplingParams
        status: RequestStatus
        num_computed_tokens: int
        """What is scheduled counts as computed at once."""
        num_output_placeholders: int
        """Tokens that are on their way."""
        num_in_flight_tokens: int

        @property
        def num_tokens(self) -> int: ...
        @property
        def num_output_tokens(self) -> int: ...

    class SchedulerOutput(Protocol):
        num_scheduled_tokens: dict[str, int]

    class AsyncScheduler:
        """`schedule` runs `running` in order, then takes from `waiting` while there are slots; if a running one lacks a
        block it preempts the last of `running`, and in that step takes nobody. A request that is in neither, but whose
        status is RUNNING, keeps its blocks, and its output is still accepted."""

        vllm_config: Any
        kv_cache_config: Any
        connector: Any
        kv_cache_manager: KVCacheManager
        requests: dict[str, CoreRequest]
        waiting: RequestQueue
        running: list[CoreRequest]

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        def add_request(self, request: CoreRequest) -> None: ...
        def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput: ...
        def update_from_output(
            self, scheduler_output: SchedulerOutput, model_runner_output: object
        ) -> dict[int, EngineCoreOutputs]: ...
        def finish_requests(
            self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
        ) -> list[CoreRequest]: ...
        def _preempt_request(self, request: CoreRequest, timestamp: float, drop_stale_output: bool = False) -> None: ...
        def _free_request(self, request: CoreRequest, delay_free_blocks: bool = False) -> tuple[Any, Any]: ...

    class RequestQueue: ...

    class EngineCore:
        scheduler: AsyncScheduler

    class EngineCoreRequest:
        def __init__(
            self,
            *,
            request_id: str,
            prompt_token_ids: list[int],
            mm_features: None,
            sampling_params: SamplingParams,
            pooling_params: None,
            arrival_time: float,
            lora_request: None,
            cache_salt: str,
            data_parallel_rank: None,
            priority: int,
        ) -> None: ...

    class LogprobsLists(Protocol):
        """Rows: the drawn token, then the likeliest, likeliest first. Arrays of numpy."""

        logprob_token_ids: Any
        logprobs: Any

    class EngineCoreOutput:
        request_id: str
        new_token_ids: list[int]
        new_logprobs: LogprobsLists | None
        new_prompt_logprobs_tensors: Any
        """The same as tensors: one row per prompt token but the first."""
        finish_reason: int | None
        kv_transfer_params: dict[str, Any] | None

        def __init__(
            self, request_id: str, new_token_ids: list[int], *, kv_transfer_params: Mapping[str, object]
        ) -> None: ...

    class EngineCoreOutputs:
        outputs: list[EngineCoreOutput]

        def __init__(self, *, outputs: list[EngineCoreOutput]) -> None: ...

    class EngineDeadError(RuntimeError): ...

    class LogitsProcessor:
        def __init__(self, vllm_config: Any, device: object, is_pin_memory: bool) -> None: ...

    class CoreClient(Protocol):
        """`AsyncMPClient`: the engine core in a process of its own, one message per step. To be used on one loop."""

        resources: Any

        def add_request_async(self, request: EngineCoreRequest) -> Awaitable[None]: ...
        def abort_requests_async(self, request_ids: list[str]) -> Awaitable[None]: ...
        def call_utility_async(self, method: str, *args: object) -> Awaitable[Any]: ...
        def get_output_async(self) -> Awaitable[EngineCoreOutputs]:
            """Raises EngineDeadError once the core's process has ended."""
            ...

        def shutdown(self, timeout: float | None = None) -> None: ...

    def process_dict_updates(req_entries: dict[int, Any], batch_update: object, new_state: object) -> bool:
        """Keep `req_entries`, by place in the batch, in step with a batch update."""
        ...


else:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.request_queue import RequestQueue
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.exceptions import EngineDeadError
    from vllm.v1.request import RequestStatus
    from vllm.v1.sample.logits_processor.builtin import process_dict_updates
    from vllm.v1.sample.logits_processor.interface import LogitsProcessor


def launch_core(engine_args: Mapping[str, object]) -> CoreClient:
    """Start an engine core in a process of its own, and wait until it has loaded its model.

    Raises:
        RuntimeError: it did not start.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs  # type: ignore[import-not-found, unused-ignore]
    from vllm.v1.engine.core_client import EngineCoreClient  # type: ignore[import-not-found, unused-ignore]
    from vllm.v1.executor import Executor  # type: ignore[import-not-found, unused-ignore]

    config = AsyncEngineArgs(**engine_args).create_engine_config()
    client: CoreClient = EngineCoreClient.make_async_mp_client(
        vllm_config=config, executor_class=Executor.get_class(config), log_stats=False
    )
    return client


def close_core(client: CoreClient) -> None:
    """End the core's processes and close the sockets to it. After the client's loop has ended."""
    client.shutdown(timeout=SHUTDOWN_TIMEOUT_S)
    client.resources.ctx.destroy(linger=0)


def core_pids(client: CoreClient) -> tuple[int, ...]:
    return tuple(process.pid for process in client.resources.engine_manager.processes)
