"""From a request to one in progress, or to the end that it comes to at once.

Owns: what makes a request impossible here, and how long its output is expected to be. Imports cluster and
cluster.engine, never a backend. Invariant: whatever a request says, taking it raises nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from cluster.config import EngineConfig
from cluster.engine.live import Live
from cluster.engine.text import TextCodec
from cluster.foretold import Foretold
from cluster.lengths import LengthPredictor
from cluster.types import FinishReason, Request, TokenDelta


class Intake:
    """Builds `Live` requests for one engine, and learns from those that have ended."""

    def __init__(self, config: EngineConfig, text_codec: TextCodec, vocab_size: int, eos: Collection[int]) -> None:
        self._config = config
        self._codec = text_codec
        self._vocab_size = vocab_size
        self._eos = tuple(sorted(set(eos)))
        self._lengths = LengthPredictor()
        self.foretold = Foretold()

    def take(self, request: Request, attempt: int) -> Live | TokenDelta:
        """`request.emitted_ids` go through the text stage silently.

        Returns:
            The end of a request that can never run here, or that has ended already: with ERROR for an empty prompt, for
            a token id that the model does not have, in its tokens or in `logit_bias`, for a prompt that leaves no room
            for output in `max_model_len` (which the pool is known to hold), and for an arrival that is no number; with
            what its `emitted_ids` end it with; with LENGTH where nothing is to be generated and nothing to be scored.
        """
        if error := self._never_runs(request):
            return _ended(request, attempt, FinishReason.ERROR, error)
        live = Live(
            request,
            attempt,
            self._codec.stage(request.sampling.stop, request.sampling.min_tokens),
            eos=self._eos,
            max_model_len=self._config.max_model_len,
            block_size_tokens=self._config.block_size_tokens,
        )
        finish = live.replay(request.emitted_ids)
        if finish is None and live.at_limit and not live.must_score:
            finish = FinishReason.LENGTH
        if finish is not None:
            return _ended(request, attempt, finish)
        self.predict(live)
        if not (request.emitted_ids or live.only_scores):
            live.foretold_tokens = live.state.predicted_tokens - live.state.prompt_tokens
        return live

    def predict(self, live: Live) -> None:
        """Estimate its length anew, from what it has made so far. Its key may be another then."""
        state, request = live.state, live.request
        if live.only_scores:
            state.limit_tokens = state.tokens + 1
            state.predicted_tokens = float(state.limit_tokens)
            return
        output_tokens = self._lengths.predict(
            request.tenant,
            request.priority_class,
            state.prompt_tokens,
            max_tokens=state.limit_tokens - state.prompt_tokens,
            made=len(live.output),
            stated=request.stated_output_tokens,
        )
        state.expect(output_tokens)

    def learn(self, live: Live) -> None:
        """It has ended by itself: this is how long it became."""
        request = live.request
        if not live.only_scores:
            self._lengths.observe(request.tenant, request.priority_class, live.state.prompt_tokens, len(live.output))
        if live.foretold_tokens is not None:
            self.foretold.ended(request.priority_class, len(live.output) / live.foretold_tokens)

    def _never_runs(self, request: Request) -> str:
        """Why a request can never run here; empty if it can."""
        ids, vocab_size = request.prompt_ids, self._vocab_size
        if not math.isfinite(request.arrived_unix_s):
            return "the time of its arrival is no number, so that it has no place in any order"
        if not ids:
            return "the prompt has no tokens"
        if min(ids) < 0 or max(ids) >= vocab_size:
            return f"the prompt has a token id that this model does not have: its ids are 0..{vocab_size - 1}"
        if any(not 0 <= token_id < vocab_size for token_id in request.emitted_ids):
            return f"the output so far has a token id that this model does not have: its ids are 0..{vocab_size - 1}"
        if len(ids) >= self._config.max_model_len:
            return (
                f"the prompt has {len(ids)} tokens, which leaves no room for output in the "
                f"{self._config.max_model_len} that this model is served with"
            )
        for token_id, _ in request.sampling.logit_bias:
            if not 0 <= token_id < vocab_size:
                return (
                    f"logit_bias names the token id {token_id}, which this model does not have: "
                    f"its ids are 0..{vocab_size - 1}"
                )
        return ""


def _ended(request: Request, attempt: int, finish: FinishReason, error: str = "") -> TokenDelta:
    return TokenDelta(request.request_id, attempt, len(request.emitted_ids), (), (), finish, error)
