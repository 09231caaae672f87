"""How likely the model held tokens to be, for the client.

Owns: log-probabilities of drawn and of given tokens, and of the likeliest beside them. Imports torch and selection.py. Invariant: they
are those of the model's own distribution, the log-softmax of the raw logits in float32, whatever was drawn from after
bias, penalties, temperature and filters (as vLLM reports them by default, `logprobs_mode` "raw_logprobs").
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cluster.engine.torch.selection import at_least, largest
from cluster.types import TokenLogprob


def token_logprob(logits: Tensor, token_id: int, top: int) -> TokenLogprob:
    """Of `token_id` after one position, with the `top` likeliest tokens beside it. `logits`: [vocabulary], raw."""
    logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    return TokenLogprob(float(logprobs[token_id]), _likeliest(logprobs, top))


def score(logits: Tensor, targets: Sequence[int], top: int) -> tuple[TokenLogprob, ...]:
    """The same of `targets[k]` after position k. `logits`: [len(targets), vocabulary], raw.

    Empty where the logits of any position are no numbers: such a prompt has no score. Position by position, for the
    reason that draws are (see sampling.py).
    """
    if not bool(logits.amax(dim=-1).isfinite().all()):
        return ()
    return tuple(token_logprob(row, target, top) for row, target in zip(logits, targets, strict=True))


def _likeliest(logprobs: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """(id, logprob) of the `count` likeliest of [vocabulary], likeliest first, of equals the lowest id first."""
    if count <= 0:
        return ()
    # All that are as likely as the last one: torch's own topk settles ties as it likes.
    token_ids = at_least(logprobs, largest(logprobs, min(count, logprobs.shape[0]))[-1])
    ranked = logprobs[token_ids].sort(descending=True, stable=True)
    order = ranked.indices[:count]
    return tuple(zip(token_ids[order].tolist(), ranked.values[:count].tolist(), strict=True))
