"""The parts of vLLM that this backend stands on, with their types.

Owns: every import of vllm. vLLM ships no types that a checker outside its environment could read, so what is used is
written down here as it is in vLLM 0.32.0: these declarations are the complete list of internals that we rely on. Importing
this module checks the version first.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import ValidationError

from cluster.engine.vllm.cause import causes_kept
from cluster.engine.vllm.version import check_version

__all__ = [
    "AsyncScheduler",
    "BlockHashToBlockMap",
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
    "core_blocks",
    "core_pids",
    "launch_core",
    "process_dict_updates",
    "replace_count_of_nans",
    "replace_ranks",
]

check_version()

SHUTDOWN_TIMEOUT_S = 1.0
"""A core that has not ended after this is killed, which loses nothing: on CPUs its worker takes five seconds to exit."""

if TYPE_CHECKING:
    from enum import IntEnum

    from torch import Tensor

    class RequestStatus(IntEnum):
        WAITING = 1
        WAITING_FOR_REMOTE_KVS = 3
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

        @property
        def block_hash(self) -> bytes | None:
            """By which the prefix cache finds it; None where it does not."""
            ...

    class KVCacheBlocks(Protocol):
        """Of one request."""

        blocks: tuple[Sequence[KVCacheBlock], ...]
        """Per KV cache group."""

    class BlockHashToBlockMap:
        """What the prefix cache finds. Several blocks may be there under one hash."""

        def get_one_block(self, key: bytes) -> KVCacheBlock | None: ...
        def insert(self, key: bytes, block: KVCacheBlock) -> None: ...
        def pop(self, key: bytes, block_id: int) -> KVCacheBlock | None:
            """None where it is not there under this hash."""
            ...

    class BlockPool(Protocol):
        num_gpu_blocks: int
        """One of them, the null block, is never given to a request."""
        cached_block_hash_to_block: BlockHashToBlockMap
        cache_full_blocks: Callable[[CoreRequest, Sequence[KVCacheBlock], int, int, int, int, list[bool] | None], None]
        """(request, all its blocks, how many of them are registered already, how many are full, tokens in a block, KV cache
        group, which are to be registered at all)"""

        def get_num_free_blocks(self) -> int: ...

    class SingleTypeKVCacheManager(Protocol):
        _record_new_block_ids: bool
        """Whether `take_new_block_ids` is to know of its blocks."""
        num_cached_block: dict[str, int]
        """By request, how many of its blocks have been registered, or were found so."""

    class KVCacheCoordinator(Protocol):
        single_type_managers: Sequence[SingleTypeKVCacheManager]

    class KVCacheManager(Protocol):
        block_pool: BlockPool
        coordinator: KVCacheCoordinator

        def get_blocks(self, request_id: str) -> KVCacheBlocks: ...

        def get_computed_blocks(self, request: CoreRequest) -> tuple[KVCacheBlocks, int, int]:
            """Blocks of the prefix cache, and the tokens in them. Changes nothing."""
            ...

        def evict_blocks(self, block_ids: set[int]) -> None:
            """The prefix cache finds them no more; who holds them keeps them."""
            ...

        def take_new_block_ids(self) -> list[int]:
            """Those that requests have got from the pool since the last call."""
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
        num_prompt_tokens: int
        """What it came with, output of earlier attempts included."""
        all_token_ids: Sequence[int]
        kv_transfer_params: dict[str, Any] | None
        """Taken from `SamplingParams.extra_args` of that key."""

        @property
        def num_tokens(self) -> int: ...
        @property
        def num_output_tokens(self) -> int: ...

    class SchedulerOutput(Protocol):
        num_scheduled_tokens: dict[str, int]

    class KvConnectorOutput(Protocol):
        invalid_block_ids: set[int]

    class ModelRunnerOutput(Protocol):
        kv_connector_output: KvConnectorOutput | None
        num_nans_in_logits: dict[str, int] | None

    class KvConnector(Protocol):
        """The scheduler's side of one. When a request ends, `request_finished` says what is to be known of its blocks, and
        whether they are given back only when the worker's side says that they have been sent."""

        def get_num_new_matched_tokens(
            self, request: CoreRequest, num_computed_tokens: int
        ) -> tuple[int | None, bool]: ...
        def update_state_after_alloc(
            self, request: CoreRequest, blocks: KVCacheBlocks, num_external_tokens: int
        ) -> None: ...

    class AsyncScheduler:
        """`schedule` runs `running` in order, then takes from `waiting` while there are slots; if a running one lacks a
        block it preempts the last of `running`, and in that step takes nobody. A request that is in neither, but whose
        status is RUNNING, keeps its blocks, and its output is still accepted.

        Where a KV connector brings blocks between steps, a newcomer gets them and is put into `kv_holding_waiting` as
        WAITING_FOR_REMOTE_KVS. When they are there its id is in `finished_recving_kv_req_ids`;
        `_handle_blocked_waiting_request` then makes it a waiting one that has blocks."""

        vllm_config: Any
        kv_cache_config: Any
        connector: Any
        kv_cache_manager: KVCacheManager
        requests: dict[str, CoreRequest]
        waiting: RequestQueue
        kv_holding_waiting: RequestQueue
        running: list[CoreRequest]
        finished_req_ids: set[str]
        """Of whom the worker is still to be told."""
        finished_recving_kv_req_ids: set[str]
        deferred_frees: Iterable[tuple[int, list[KVCacheBlock]]]
        """Blocks that go back to the pool when a step has ended that may still write to them."""
        _inflight_prefills: set[CoreRequest]
        """For whose rest blocks are reserved against such newcomers."""

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        def add_request(self, request: CoreRequest) -> None: ...
        def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput: ...
        def update_from_output(
            self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
        ) -> dict[int, EngineCoreOutputs]: ...
        def finish_requests(
            self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
        ) -> list[CoreRequest]: ...
        def _preempt_request(self, request: CoreRequest, timestamp: float, drop_stale_output: bool = False) -> None: ...
        def _free_request(self, request: CoreRequest, delay_free_blocks: bool = False) -> tuple[Any, Any]: ...
        def _free_request_blocks(self, request: CoreRequest) -> None: ...
        def _handle_blocked_waiting_request(self, request: CoreRequest) -> bool: ...
        def has_finished_requests(self) -> bool: ...
        def _get_new_block_ids_to_zero(self) -> list[int] | None:
            """Called once in each `schedule`: blocks that the worker is to clear before the step."""
            ...

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

    class PrefillStats(Protocol):
        num_local_cached_tokens: int
        """What was found in the prefix cache when the request was scheduled first."""

    class EngineCoreOutput:
        request_id: str
        new_token_ids: list[int]
        new_logprobs: LogprobsLists | None
        new_prompt_logprobs_tensors: Any
        """The same as tensors: one row per prompt token but the first."""
        finish_reason: int | None
        num_nans_in_logits: int
        """What the count of NaNs says of the row that gave the last token."""
        prefill_stats: PrefillStats | None
        """With a request's first token."""
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
        vllm_config: Any

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
    from vllm.v1.core.block_pool import BlockHashToBlockMap
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
        RuntimeError: it did not start; says why.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs  # type: ignore[import-not-found, unused-ignore]
    from vllm.logger import DEFAULT_LOGGING_CONFIG  # type: ignore[import-not-found, unused-ignore]
    from vllm.v1.engine.core_client import EngineCoreClient  # type: ignore[import-not-found, unused-ignore]
    from vllm.v1.executor import Executor  # type: ignore[import-not-found, unused-ignore]

    with causes_kept(DEFAULT_LOGGING_CONFIG) as first_cause:
        try:  # the configuration keeps the place of the logging configuration for the core's processes
            config = AsyncEngineArgs(**engine_args).create_engine_config()
        except ValidationError as error:  # its own text ends with an address
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "its whole"
            why = " ".join(str(first["msg"]).split())
            raise RuntimeError(f"vLLM does not take this configuration: {where}: {why}") from error
        try:
            client: CoreClient = EngineCoreClient.make_async_mp_client(
                vllm_config=config, executor_class=Executor.get_class(config), log_stats=False
            )
        except RuntimeError as error:
            raise RuntimeError(f"vLLM's engine core did not start: {first_cause() or error}") from error
    return client


def close_core(client: CoreClient) -> None:
    """End the core's processes and close the sockets to it. After the client's loop has ended."""
    client.shutdown(timeout=SHUTDOWN_TIMEOUT_S)
    client.resources.ctx.destroy(linger=0)


def core_pids(client: CoreClient) -> tuple[int, ...]:
    return tuple(process.pid for process in client.resources.engine_manager.processes)


def core_blocks(client: CoreClient) -> int:
    """How many KV blocks requests can have."""
    return int(client.vllm_config.cache_config.num_gpu_blocks) - 1  # without the null block


def replace_count_of_nans(count: Callable[[Tensor], Tensor]) -> None:
    """Have this process's model runner ask `count` for each row's number of NaNs, [rows, vocabulary] -> [rows] integers on
    the same device. With VLLM_COMPUTE_NANS_IN_LOGITS it does so after each step's draw, copies the answer together with the
    tokens, and sends it along with each token."""
    from vllm.v1.worker import gpu_model_runner  # type: ignore[import-not-found, unused-ignore]

    gpu_model_runner.count_nans_per_row = count


def replace_ranks(rank: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Have this process's sampler ask `rank` how many tokens are likelier than each whose logprob is wanted, [rows,
    vocabulary], [rows, 1] -> [rows] integers on the same device. vLLM's own is compiled when it is first asked, in the midst
    of a step: it takes seconds, and on CPUs a C++ compiler, without which the core dies."""
    from vllm.v1.sample import sampler  # type: ignore[import-not-found, unused-ignore]

    sampler.batched_count_greater_than = rank
