"""A backend that computes nothing and knows how long it would have taken.

Owns: the virtual clock of one engine, the translation of rows into terms of the step-time model, and the text of its
tokens. Imports the engine's text, the ports and the model of the step times. Invariant: time passes in `run`,
where it depends on the rows and the padding only, and where blocks are copied.

A sequence's length is in its tokens: the token after `k` is `k - 1`, and 0 ends it. A prompt that ends in the id `n`
thus has an answer of n tokens, which no planner can know before, wherever it is cut, preempted and computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenizers import Tokenizer, decoders, models

from cluster.engine.text import TextCodec
from cluster.ports import Row, RowOutput
from ops.sim.step_time import Prefill, StepTimes, host_ms, mixed_ms

END_TOKEN = 0
FILLER_TOKEN = 1


def prompt_for(prompt_tokens: int, output_tokens: int) -> tuple[int, ...]:
    """A prompt of so many tokens whose answer has so many, the end token included."""
    return (FILLER_TOKEN,) * (prompt_tokens - 1) + (output_tokens,)


def no_text() -> TextCodec:
    """For an engine whose text nobody reads: a tokenizer that knows no token gives none."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.ByteLevel()
    return TextCodec(tokenizer)


class ModelledBackend:
    """Implements `cluster.ports.Backend` in virtual time. A block is one byte, which says nothing.

    `padded` says how a batch is laid out: as one rectangle, in which every row reaches as far back as the longest and
    padding tokens are rows like the others (what static and dynamic batching do), or without any padding.
    """

    kv_block_bytes = 1
    kv_format = "nothing"

    def __init__(
        self,
        times: StepTimes,
        longest_output: int,
        *,
        padded: bool,
        copy_block_ms: float = 0.0,
        host_ms: Callable[[int], float] = host_ms,
    ) -> None:
        """`copy_block_ms`: of a block to the host's memory, or from there. `host_ms`: what it adds to a step of so many
        requests."""
        self.vocab_size = 1 + max(longest_output, FILLER_TOKEN)
        self.now_ms = 0.0
        self._untold_ms = 0.0
        self._beside = (0, 0)
        self._times = times
        self._padded = padded
        self._copy_block_ms = copy_block_ms
        self._host_ms = host_ms

    def run(self, rows: Sequence[Row], padding_tokens: int = 0) -> list[RowOutput]:
        took_ms = self.step_ms(rows, padding_tokens)
        self.now_ms += took_ms
        self._untold_ms += took_ms
        return [
            RowOutput() if row.sample is None else RowOutput(token_id=max(row.token_ids[-1] - 1, END_TOKEN))
            for row in rows
        ]

    def beside(self, sequences: int, context_tokens: int) -> None:
        """In the step that is run next so many sequences decode, too, behind so many tokens in all; without padding."""
        self._beside = (sequences, context_tokens)

    def take_ms(self) -> float:
        """What has been run since this was asked last; of one step exactly its time, whatever the clock says."""
        took_ms, self._untold_ms = self._untold_ms, 0.0
        return took_ms

    def beside_ms(self, sequences: int, context_tokens: int, chunk_tokens: int, behind_tokens: int) -> float:
        """How long a step takes, without padding, in which so many sequences decode behind so many tokens in all, and beside
        them runs a chunk of a prompt, none if it has 0 tokens, behind so many of its own. It is as long as that of its rows."""
        requests = sequences + (chunk_tokens > 0)
        if chunk_tokens > 1:
            prefills = (Prefill(chunk_tokens, behind_tokens),)
            return mixed_ms(self._times, prefills, sequences, context_tokens) + self._host_ms(requests)
        if chunk_tokens:
            context_tokens += behind_tokens
        return mixed_ms(self._times, (), requests, context_tokens) + self._host_ms(requests)

    def step_ms(self, rows: Sequence[Row], padding_tokens: int) -> float:
        """How long a step of these rows takes."""
        longest = max((row.start for row in rows), default=0) if self._padded else 0
        prefills: list[Prefill] = []
        decodes: list[int] = []
        for row in rows:
            if len(row.token_ids) == 1:
                decodes.append(max(row.start, longest))
            else:
                prefills.append(Prefill(len(row.token_ids), max(row.start, longest)))
        # Padding tokens reach as far back as all others. Beside prompts they are the rest of a rectangle's rows.
        width = max((p.tokens for p in prefills), default=1)
        whole, rest = divmod(padding_tokens, width)
        if width > 1:
            prefills.extend([Prefill(width, longest)] * whole + [Prefill(rest, longest)] * bool(rest))
        else:
            decodes.extend([longest] * whole)
        (sequences, contexts), self._beside = self._beside, (0, 0)
        device_ms = mixed_ms(self._times, prefills, len(decodes) + sequences, sum(decodes) + contexts)
        return device_ms + self._host_ms(len(rows) + sequences)

    def copy_block(self, source: int, target: int) -> None:
        """There is nothing in a block."""

    def save_blocks(self, blocks: Sequence[int]) -> memoryview:
        self._copied(len(blocks))
        return memoryview(bytes(len(blocks)))

    def load_blocks(self, blocks: Sequence[int], saved: memoryview) -> None:
        del saved
        self._copied(len(blocks))

    def _copied(self, blocks: int) -> None:
        took_ms = self._copy_block_ms * blocks
        self.now_ms += took_ms
        self._untold_ms += took_ms
