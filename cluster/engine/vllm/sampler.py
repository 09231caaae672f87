"""Our draw inside vLLM's sampler.

Owns: the logits processor that draws each token as the embedded engine does, with the very same code, and says of which
rows none can be drawn. Imports torch, cluster.engine.torch.sampling and vLLM's internals. Invariants: a token depends on
the row's logits, the request and its output so far alone: not on the batch, the attempt or any generator; nothing here
waits for the device, and nothing is done on it row by row.

Every request is greedy to vLLM. A row that is to be drawn by chance, or whose logits are changed (bias, bans, penalties),
is drawn here, and the drawn token's logit is then raised above all; vLLM's greedy choice can only take that one. So output
of earlier attempts, which to vLLM is prompt, counts as output, and a seed draws the same after a resume.
"""

from __future__ import annotations

from array import array
from typing import Any

import torch
from torch import Tensor

from cluster.engine.draws import Draws, has_penalties
from cluster.engine.torch.by_chance import on_device
from cluster.engine.torch.sampling import draw_overwriting
from cluster.engine.vllm.internals import (
    LogitsProcessor,
    SamplingParams,
    process_dict_updates,
    replace_count_of_nans,
    replace_ranks,
)
from cluster.engine.vllm.orphan import end_with_parent
from cluster.engine.vllm.wire import NOTE_KEY, RequestNote, decode_request


class Drawn:
    """One row of vLLM's batch that is drawn here. `output_ids` is vLLM's own list, which grows."""

    __slots__ = ("_draws", "_output_ids", "_taken")

    def __init__(self, note: RequestNote, prompt_ids: list[int], output_ids: list[int]) -> None:
        own, emitted = prompt_ids[: note.prompt_tokens], prompt_ids[note.prompt_tokens :]
        self._draws = Draws(note.sampling, note.choice, array("q", own), note.eos)
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
        self._without_token: Tensor | None = None
        """[rows] of the last step: 1 where no token can be drawn because the logits are no numbers."""
        end_with_parent()  # in a worker; where the core itself has the model, it has asked for this before or will
        replace_count_of_nans(self._take_without_token)
        replace_ranks(_no_ranks)

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Requests come from the adapter alone, which has checked them."""

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: object) -> None:
        process_dict_updates(self._rows, batch_update, _drawn)

    def apply(self, logits: Tensor) -> Tensor:
        """`logits` [rows, vocabulary] in float32, changed in place."""
        places = sorted(self._rows)
        if len(places) < logits.shape[0]:
            is_number = logits.amax(dim=-1).isfinite()
        else:
            is_number = torch.empty(len(places), dtype=torch.bool, device=logits.device)
        if places:
            specs = [self._rows[place].draws().spec() for place in places]
            index = on_device(torch.tensor(places), logits)
            token_ids = draw_overwriting(logits if len(places) == logits.shape[0] else logits[index], specs)
            is_number[index] = token_ids >= 0
            logits[index, token_ids.clamp(min=0)] = torch.inf
        self._without_token = is_number.logical_not().int()
        return logits

    def _take_without_token(self, logits: Tensor) -> Tensor:  # noqa: ARG002
        """In place of vLLM's own count of each row's NaNs, which is dearer and does not know of infinities and bans."""
        without_token, self._without_token = self._without_token, None
        assert without_token is not None, "vLLM asks once after each call of `apply`"
        return without_token


def _no_ranks(logprobs: Tensor, of_tokens: Tensor) -> Tensor:  # noqa: ARG001
    """Nobody reads them."""
    return torch.zeros(logprobs.shape[0], dtype=torch.int64, device=logprobs.device)


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
