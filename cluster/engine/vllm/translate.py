"""Between our requests and vLLM's, value by value.

Owns: the request that the core is sent, and the reading of its outputs. Imports vLLM's internals. Invariant: it decides
nothing and keeps nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cluster.engine.vllm.internals import EngineCoreRequest, SamplingParams
from cluster.engine.vllm.wire import NOTE_KEY, RequestNote, core_id, encode
from cluster.ports import RowOutput
from cluster.types import Request, TokenLogprob

if TYPE_CHECKING:
    from cluster.engine.vllm.internals import EngineCoreOutput


def core_request(
    request: Request,
    attempt: int,
    eos: tuple[int, ...],
    *,
    name: str = "",
    moved: bool = False,
    kv_transfer_params: Mapping[str, object] | None = None,
) -> EngineCoreRequest:
    """To vLLM all is prompt that the request has so far, and every request is greedy (see sampler.py).

    Args:
        name: Its core id, where that is not the first one.
        kv_transfer_params: For the KV connector.
    """
    s = request.sampling
    note = RequestNote.of(request, attempt, eos, moved=moved)
    extra: dict[str, object] = {NOTE_KEY: encode(note)}
    if kv_transfer_params is not None:
        extra["kv_transfer_params"] = dict(kv_transfer_params)
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=max(1, s.max_tokens - len(request.emitted_ids)),
        stop_token_ids=list(note.eos),
        ignore_eos=True,  # `stop_token_ids` says all
        logprobs=s.logprobs,
        prompt_logprobs=None if request.emitted_ids else s.prompt_logprobs,
        detokenize=False,
        skip_clone=True,
        extra_args=extra,
    )
    return EngineCoreRequest(
        request_id=name or core_id(request.request_id, attempt),
        prompt_token_ids=[*request.prompt_ids, *request.emitted_ids],
        mm_features=None,
        sampling_params=sampling,
        pooling_params=None,
        arrival_time=request.arrived_unix_s,
        lora_request=None,
        cache_salt=f"tenant:{request.tenant}",  # also of the empty name: no prefix is shared without a salt
        data_parallel_rank=None,
        priority=-request.priority,
    )


def row_output(output: EngineCoreOutput, place: int, logprobs: int | None) -> RowOutput:
    """Of the token at `place` of an output; `logprobs` is what the request asked for."""
    if output.num_nans_in_logits:
        return RowOutput()
    token_id = output.new_token_ids[place]
    if logprobs is None or output.new_logprobs is None:
        return RowOutput(token_id)
    lists = output.new_logprobs
    return RowOutput(token_id, _token_logprob(lists.logprob_token_ids[place], lists.logprobs[place], logprobs))


def prompt_scores(tensors: Any, top: int) -> tuple[TokenLogprob, ...]:
    """One per prompt token but the first."""
    rows = zip(tensors.logprob_token_ids, tensors.logprobs, strict=True)
    return tuple(_token_logprob(ids, logprobs, top) for ids, logprobs in rows)


def _token_logprob(ids: Any, logprobs: Any, top: int) -> TokenLogprob:
    """A row is the token itself, then the likeliest; of the batch's longest wish, hence it may be longer than asked."""
    first, *values = logprobs.tolist()
    likeliest = zip(ids.tolist()[1 : top + 1], values[:top], strict=True)
    return TokenLogprob(first, tuple(sorted(likeliest, key=lambda pair: (-pair[1], pair[0]))))
