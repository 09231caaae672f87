"""One request in progress.

Owns: its tokens, its text, its prompt's scores, and what its next row asks of the backend.
Imports cluster and cluster.engine, never a backend. Invariants: all of it follows from the request and the tokens so
far, so that a request cut anywhere and built again from its emitted tokens goes on as if nothing had happened;
`state.tokens` is the length of prompt and output.
"""

from __future__ import annotations

from collections.abc import Iterable

from cluster.engine.draws import Draws
from cluster.engine.kv_cache import IntegrityError
from cluster.engine.prefix import PrefixHashes
from cluster.engine.scheduling.sequence import SequenceState
from cluster.engine.text import TextStage
from cluster.ports import Row, RowOutput, ScoreSpec
from cluster.types import FinishReason, Request, TokenDelta, TokenLogprob


class Live:
    """A request with its scheduling state. A waiting one is little more than its prompt: nothing of it is copied."""

    __slots__ = (
        "_draws",
        "_eos",
        "cached_tokens",
        "foretold_tokens",
        "hashes",
        "output",
        "registered",
        "request",
        "scores",
        "state",
        "text",
    )

    def __init__(
        self,
        request: Request,
        attempt: int,
        text: TextStage,
        *,
        eos: tuple[int, ...],
        max_model_len: int,
        block_size_tokens: int,
    ) -> None:
        s = request.sampling
        self.request = request
        self.output: list[int] = []
        self.text = text
        self.hashes = PrefixHashes(request.tenant, block_size_tokens)
        self.registered = 0
        """Blocks at the beginning of its table that have been registered as prefixes, or were found so."""
        self.cached_tokens: int | None = None
        """Of the prompt, found when it was first let in; None until then."""
        self.foretold_tokens: float | None = None
        """Output that was predicted before its first token; None where a part of it was there already, or none is to come."""
        wants_scores = s.prompt_logprobs is not None and not request.emitted_ids
        self.scores: list[TokenLogprob] | None = [] if wants_scores else None
        """Of the prompt, as far as it has been run; None once they have been said, or where none are asked for."""
        self._eos = () if s.ignore_eos else eos
        self._draws = Draws(s, request.choice, request.prompt_ids, self._eos)
        self.state = SequenceState(
            (request.request_id, attempt),
            request.priority,
            request.arrived_unix_s,
            tokens=len(request.prompt_ids),
            started=bool(request.emitted_ids),
            limit_tokens=min(len(request.prompt_ids) + s.max_tokens, max_model_len),
        )

    # --- its tokens ---

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Token ids of positions start … end - 1, which must be known."""
        prompt = self.request.prompt_ids
        if end <= len(prompt):
            return prompt[start:end]
        if start >= len(prompt):
            return tuple(self.output[start - len(prompt) : end - len(prompt)])
        return prompt[start:] + tuple(self.output[: end - len(prompt)])

    @property
    def at_limit(self) -> bool:
        return self.state.tokens >= self.state.limit_tokens

    @property
    def must_score(self) -> bool:
        """Whether positions of the prompt must still be run for their scores, cached or not."""
        return self.scores is not None and len(self.scores) < len(self.request.prompt_ids) - 1

    @property
    def only_scores(self) -> bool:
        """Whether it ends with its prompt's scores and draws nothing."""
        return self.request.sampling.max_tokens <= 0

    def advance(self, token_id: int) -> tuple[str, FinishReason | None]:
        """Append an output token. Returns the text that became certain with it and whether it ended the request."""
        self.output.append(token_id)
        self.state.tokens += 1
        self._draws.took(token_id)
        if token_id in self._eos:
            return self.text.finish(), FinishReason.STOP
        piece = self.text.push(token_id)
        if not self.text.stopped and self.at_limit:
            piece += self.text.finish()
            if not self.text.stopped:
                return piece, FinishReason.LENGTH
        return piece, FinishReason.STOP if self.text.stopped else None

    def replay(self, token_ids: Iterable[int]) -> FinishReason | None:
        """Append tokens that its client has already, silently. Returns whether they end it."""
        finish: FinishReason | None = None
        for token_id in token_ids:
            _, finish = self.advance(token_id)
            if finish is not None:
                break
        return finish

    # --- what the backend is asked ---

    def row(self, tokens: int, draws: bool, block_table: tuple[int, ...]) -> Row:
        """Its next `tokens` tokens. `block_table` covers them and all before."""
        start = self.state.computed
        end = start + tokens
        return Row(
            token_ids=self.tokens(start, end),
            start=start,
            block_table=block_table,
            sample=self._draws.spec() if draws and not self.only_scores else None,
            score=self._score(start, end) if self.scores is not None else None,
        )

    def _score(self, start: int, end: int) -> ScoreSpec | None:
        top = self.request.sampling.prompt_logprobs
        targets = self.request.prompt_ids[start + 1 : end + 1]
        if top is None or self.scores is None or start + len(targets) <= len(self.scores):
            return None
        return ScoreSpec(targets, top)

    # --- what it says ---

    def take_scores(self, start: int, scores: tuple[TokenLogprob, ...]) -> None:
        """Keep the scores of a row that began at `start`; those that are known already are dropped.

        Raises:
            IntegrityError: there is a gap before them.
        """
        if self.scores is None:
            return
        known = len(self.scores) - start
        if known < 0:
            raise IntegrityError("a part of a prompt was passed over that is to be scored")
        self.scores.extend(scores[known:])

    def take_drawn(self, output: RowOutput) -> TokenDelta:
        """The delta of a row that was to draw a token; without one the request ends."""
        index, token_id = len(self.output), output.token_id
        if token_id is None:
            return self.end(FinishReason.ERROR, "the model computed no numbers for this request's next token")
        piece, finish = self.advance(token_id)
        logprobs = () if output.logprob is None else (output.logprob,)
        return self._delta(index, (token_id,), (piece,), finish, "", logprobs)

    def end(self, finish: FinishReason, error: str = "") -> TokenDelta:
        """An end that comes without a token."""
        return self._delta(len(self.output), (), (), finish, error, ())

    def _delta(
        self,
        index: int,
        token_ids: tuple[int, ...],
        pieces: tuple[str, ...],
        finish: FinishReason | None,
        error: str,
        logprobs: tuple[TokenLogprob, ...],
    ) -> TokenDelta:
        scores: tuple[TokenLogprob, ...] = ()
        if self.scores is not None and not self.must_score:
            scores, self.scores = tuple(self.scores), None
        request_id, attempt = self.state.identity
        # What goes on elsewhere has said it where it began.
        cached_tokens = 0 if index else self.cached_tokens or 0
        return TokenDelta(request_id, attempt, index, token_ids, pieces, finish, error, logprobs, scores, cached_tokens)
