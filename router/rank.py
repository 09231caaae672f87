"""The order of one tenant's own requests.

Owns: that order. Pure. Imports config and types.
"""

from __future__ import annotations

from cluster.config import RouterConfig, WithinTenant
from cluster.types import Request
from router.terms import Terms


def rank_of(config: RouterConfig, request: Request, terms: Terms, expected_tokens: float) -> float:
    """Where a request stands among its tenant's own, least first; the same however often it returns.

    Under fcfs all are level, and the oldest goes first. Under sjf it is the time at which it would stand had it been
    expected to put out nothing: nobody is passed by who came `sjf_longest_overtake_s` later. Under deadline it is the
    time by which the first token is wanted, or else all of it, or else by which its class promises to begin it: all
    three are finite, so whoever comes later than that goes behind.

    Args:
        expected_tokens: Output that it will make; read under sjf only.
    """
    match config.within_tenant:
        case WithinTenant.FCFS:
            return 0.0
        case WithinTenant.SJF:
            later_s = min(expected_tokens / config.sjf_ageing_tokens_per_s, config.sjf_longest_overtake_s)
            return request.arrived_unix_s + later_s
        case WithinTenant.DEADLINE:
            allowed = (s for s in (terms.ttft_slo_s, terms.timeout_s) if s is not None)
            longest_s = next(c.longest_wait_s for c in config.classes if c.name == request.priority_class)
            return request.arrived_unix_s + next(allowed, longest_s or config.max_queue_s)
