"""From a trace to what is sent when.

Owns: scaling of time and lengths, and which class a service's requests are. Pure. Imports the configuration's classes,
so that a class and its service tier are named in one place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from cluster.config import DEFAULT_CLASSES
from ops.bench.trace import MOONCAKE_BLOCK_TOKENS, MOONCAKE_SERVICE, TraceRequest
from ops.errors import CommandError

SERVICE_TIERS: Mapping[str, str] = {c.name: c.service_tiers[0] for c in DEFAULT_CLASSES}
"""The service tier that names each class on the wire."""

DEFAULT_SERVICE_CLASSES: Mapping[str, str] = {
    "code": "interactive",
    "conversation": "standard",
    MOONCAKE_SERVICE: "standard",
}
"""No public trace has real priorities; this mapping is stated with every result."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request to send. `send_at_s` counts from the start of the replay."""

    index: int
    send_at_s: float
    priority_class: str
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()
    block_tokens: Fraction = Fraction(MOONCAKE_BLOCK_TOKENS)
    """Tokens of each block of `block_ids`, scaled like the lengths."""


def parse_scale(text: str, option: str) -> Fraction:
    """A positive factor: `2`, `0.0625` or `1/16`.

    Raises:
        CommandError: it is none.
    """
    try:
        scale = Fraction(text.strip())
    except (ValueError, ZeroDivisionError) as error:
        raise CommandError(f"{option}: {text!r} is no number; write 2, 0.0625 or 1/16") from error
    if scale <= 0:
        raise CommandError(f"{option}: {text!r} must be greater than 0")
    return scale


def parse_classes(texts: Sequence[str]) -> dict[str, str]:
    """Service to class, from `service=class[,service=class…]`, on top of the default mapping.

    Raises:
        CommandError: an entry has another form or names an unknown class.
    """
    classes = dict(DEFAULT_SERVICE_CLASSES)
    for entry in (e.strip() for text in texts for e in text.split(",")):
        service, _, name = (part.strip() for part in entry.partition("="))
        if not service or not name:
            raise CommandError(f"--classes: {entry!r} is not of the form service=class, as code=interactive")
        if name not in SERVICE_TIERS:
            raise CommandError(f"--classes: unknown class {name!r}; one of {', '.join(SERVICE_TIERS)}")
        classes[service] = name
    return classes


def scale_tokens(tokens: int, scale: Fraction) -> int:
    """A scaled length: the nearest whole number, half to even, and at least 1."""
    return max(1, round(tokens * scale))


def plan(
    requests: Sequence[TraceRequest], classes: Mapping[str, str], time_scale: Fraction, token_scale: Fraction
) -> tuple[PlannedRequest, ...]:
    """When to send what. The first request leaves at once; `time_scale` multiplies every gap, `token_scale` every length.

    Raises:
        CommandError: a service of the trace has no class.
    """
    missing = sorted({r.service for r in requests} - classes.keys())
    if missing:
        raise CommandError(f"--classes: service {missing[0]!r} of the trace has no class; add {missing[0]}=standard")
    return tuple(
        PlannedRequest(
            index=index,
            send_at_s=(request.arrival_s - requests[0].arrival_s) * float(time_scale),
            priority_class=classes[request.service],
            prompt_tokens=scale_tokens(request.prompt_tokens, token_scale),
            output_tokens=scale_tokens(request.output_tokens, token_scale),
            block_ids=request.block_ids,
            block_tokens=MOONCAKE_BLOCK_TOKENS * token_scale,
        )
        for index, request in enumerate(requests)
    )
