"""What the adapter and vLLM's engine core tell each other beyond vLLM's own messages.

Owns: both notes and their bytes. They travel inside free-form fields that vLLM carries and does not read: a request's in
`SamplingParams.extra_args`, a step's in the `kv_transfer_params` of an output that belongs to no request. Imports
cluster, never vllm. Invariant: encoding is msgpack; nothing here is pickled.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from cluster.ports import HeldAttempt
from cluster.types import EngineLoad, Preempted, PrefixChange, Request, RequestId, Sampling, Value

NOTE_KEY = "forebay"
"""Of both dictionaries, and of `additional_config`."""
STEP_NOTE_ID = "forebay:step"
"""The request id of the output that carries a step's note; `core_id` never gives it."""


class RequestNote(Value, frozen=True):
    """What our scheduler and our sampling must know of a request. vLLM's own fields say that its prompt is
    `prompt_tokens` + `emitted_tokens` long."""

    request_id: RequestId
    attempt: int
    tenant: str
    priority: int
    priority_class: str
    arrived_unix_s: float
    prompt_tokens: int
    emitted_tokens: int
    choice: int
    stated_output_tokens: int | None
    eos: tuple[int, ...]
    """The tokens that end it; none where it ignores them."""
    sampling: Sampling
    moved: bool = False
    """It came by a move, or is back from one that was called off: it goes before new work, and no add brought it."""

    @classmethod
    def of(cls, request: Request, attempt: int, eos: tuple[int, ...], *, moved: bool = False) -> RequestNote:
        return cls(
            request_id=request.request_id,
            attempt=attempt,
            tenant=request.tenant,
            priority=request.priority,
            priority_class=request.priority_class,
            arrived_unix_s=request.arrived_unix_s,
            prompt_tokens=len(request.prompt_ids),
            emitted_tokens=len(request.emitted_ids),
            choice=request.choice,
            stated_output_tokens=request.stated_output_tokens,
            eos=() if request.sampling.ignore_eos else eos,
            sampling=request.sampling,
            moved=moved,
        )


class StepNote(Value, frozen=True):
    """What changed in the core: its load now, and what happened since the last note."""

    load: EngineLoad
    preempted: tuple[Preempted, ...] = ()
    frozen: tuple[tuple[str, bytes], ...] = ()
    """Core ids of those of which nothing is on its way any more, each with its KV connector's handle, if it has one."""
    foretold: tuple[tuple[str, float], ...] = ()
    """Of those that ended by themselves: the class, and their output over what was predicted of it when they came."""
    prefixes: PrefixChange | None = None
    """In the note of a step alone: those are read in the order in which they were written, answers to calls may cross them."""


_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(RequestNote)
_step_decoder = msgspec.msgpack.Decoder(StepNote)
_held_decoder = msgspec.msgpack.Decoder(tuple[HeldAttempt, ...])
_handle_decoder = msgspec.msgpack.Decoder(dict[str, object])


def core_id(request_id: RequestId, attempt: int, life: int = 0) -> str:
    """What an attempt is called in vLLM. One that has left the core and comes back has another `life`, as vLLM may still
    know the one before."""
    return f"{attempt}.{life}#{request_id}" if life else f"{attempt}#{request_id}"


def encode(note: RequestNote | StepNote | tuple[HeldAttempt, ...]) -> bytes:
    return _encoder.encode(note)


def decode_request(data: bytes) -> RequestNote:
    return _request_decoder.decode(data)


def decode_step(data: bytes) -> StepNote:
    return _step_decoder.decode(data)


def decode_held(data: bytes) -> tuple[HeldAttempt, ...]:
    return _held_decoder.decode(data)


def encode_handle(kv_transfer_params: Mapping[str, object] | None) -> bytes:
    """A KV connector's parameters as `EngineState.kv_handle`."""
    return _encoder.encode(kv_transfer_params) if kv_transfer_params else b""


def decode_handle(kv_handle: bytes) -> dict[str, object] | None:
    """
    Raises:
        msgspec.MsgspecError: these are no such bytes.
    """
    return _handle_decoder.decode(kv_handle) if kv_handle else None
