"""What a client's request asks of the router alone, beside what the engine is told.

Owns: these values. Imports nothing of ours.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Terms:
    """Times count from the request's arrival."""

    ttft_slo_s: float | None = None
    """Its first token is wanted within this; one that cannot be met is refused, and not begun once it has passed."""
    timeout_s: float | None = None
    """It is ended at this age, whatever it has by then."""
    queue_share: float = 1.0
    """Largest part of its class's queue that its tenant may fill."""
    session: str = ""
    """Names a conversation of its tenant, whose requests are best served where the earlier ones were; empty for none."""


NO_TERMS = Terms()
