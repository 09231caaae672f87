"""Our draw inside vLLM's sampler.

Owns: the logits processor that draws each token as the embedded engine does, with the very same code. Imports torch,
cluster.engine.torch.sampling and vLLM's internals. Invariant: a token depends on the row's logits, the request and its
output so far alone: not on the batch, the attempt or any generator.

Every request is greedy to vLLM. A row that is to be drawn by chance, or whose logits are changed (bias, bans, penalties),
is drawn here, and all but the drawn token is then ruled out; vLLM's greedy choice can only take that one. So output of
earlier attempts, which to vLLM is prompt, counts as output, and a seed draws the same after a resume.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cluster.engine.draws import Draws, has_penalties
from cluster.engine.torch.sampling import draw
from cluster.engine.vllm.internals import LogitsProcessor, SamplingParams, process_dict_updates
from cluster.engine.vllm.wire import NOTE_KEY, RequestNote, decode_request


class Drawn:
    """One row of vLLM's batch that is drawn here. `output_ids` is vLLM's own list, which grows."""

    __slots__ = ("_draws", "_output_ids", "_taken")

    def __init__(self, note: RequestNote, prompt_ids: list[int], output_ids: list[int]) -> None:
        own, emitted = prompt_ids[: note.prompt_tokens], prompt_ids[note.prompt_tokens :]
        self._draws = Draws(note.sampling, note.choice, own, note.eos)
        self._output_ids = output_ids
        self._taken = 0
        for token_id in emitted:
            self._draws.took(token_id)

    def draws(self) -> Draws:
        """Up to date with all output."""
        new = self._output_ids[self._taken :]
        if any(token_id < 0 for token_id in new):
            raise RuntimeError("vLLM asks for a token before it knows the one before")
        for token_id in new:
            self._draws.took(token_id)
        self._taken += len(new)
        return self._draws


class DrawProcessor(LogitsProcessor):
    """For `logits_processors`, vLLM's first model runner."""

    def __init__(self, vllm_config: Any, device: object, is_pin_memory: bool) -> None:  # noqa: ARG002
        self._rows: dict[int, Drawn] = {}

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Requests come from the adapter alone, which has checked them."""

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: object) -> None:
        process_dict_updates(self._rows, batch_update, _drawn)

    def apply(self, logits: Tensor) -> Tensor:
        """`logits` [rows, vocabulary] in float32, changed in place."""
        if not self._rows:
            return logits
        places = sorted(self._rows)
        specs = [self._rows[place].draws().spec() for place in places]
        index = torch.tensor(places, device=logits.device)
        token_ids = draw(logits[index], specs)
        for place, token_id in zip(places, token_ids, strict=True):
            if token_id is not None:
                logits[place] = -torch.inf
                logits[place, token_id] = 0.0
        return logits


def _drawn(params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]) -> Drawn | None:
    """None for a request that only ever takes the most likely token."""
    extra = params.extra_args
    if extra is None or NOTE_KEY not in extra or prompt_ids is None:
        return None  # vLLM's own warm-up
    note = decode_request(extra[NOTE_KEY])
    s = note.sampling
    if s.temperature <= 0 and not s.logit_bias and not s.min_tokens and not has_penalties(s):
        return None
    return Drawn(note, prompt_ids, output_ids)
