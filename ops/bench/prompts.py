"""Prompts of real words to a wanted number of tokens.

Owns: the words, and the arithmetic between words and tokens. Pure: chance is a seed. Imports only the schedule's type.

Each word is short and common, one token with a leading space in the usual English vocabularies, so prompts can be
made without the server's tokenizer: two requests to the server tell the tokens per word and what it adds (a begin
token, a chat template). Invariant: the same seed and request give the same prompt, and requests that share block ids
share their words exactly as far as the blocks are equal.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from ops.bench.schedule import PlannedRequest

WORDS: tuple[str, ...] = tuple(
    """
    time people water house light story music river paper garden morning evening winter summer letter window market
    village teacher doctor family mother father sister brother children school student number question answer
    country city street bridge mountain forest island ocean animal horse bird fish flower tree fruit bread coffee
    kitchen table chair room door wall floor roof stone glass metal wood fire wind rain snow cloud star moon earth
    world history science art language book page word sentence picture voice song dance game team player coach road
    train boat plane engine machine tool clock bell map gold silver iron king queen prince army peace law court
    judge office company business money price trade farm field milk sugar salt oil plant seed leaf root soil
    """.split()  # noqa: SIM905 - 123 quoted words say no more
)
"""All different; tests hold them to be."""

CALIBRATION_WORDS = (64, 64 + len(WORDS))
"""Lengths of the two calibration prompts: they differ by every word once."""


@dataclass(frozen=True, slots=True)
class Lexicon:
    """How text turns into tokens at this server, on average over `WORDS`."""

    tokens_per_word: Fraction
    overhead_tokens: Fraction
    """Tokens that every prompt has besides its words."""

    def words_for(self, tokens: int) -> int:
        """Words of a prompt of about `tokens` tokens; at least 1."""
        return max(1, round((tokens - self.overhead_tokens) / self.tokens_per_word))


def calibration_prompt(words: int) -> str:
    """`words` words in the fixed order of `WORDS`, round and round."""
    return _text([WORDS[i % len(WORDS)] for i in range(words)])


def calibrate(tokens: tuple[int, int]) -> Lexicon:
    """From the token counts of the two calibration prompts.

    Raises:
        ValueError: the longer prompt has not more tokens, so the counts are not of these prompts.
    """
    short, long = CALIBRATION_WORDS
    tokens_per_word = Fraction(tokens[1] - tokens[0], long - short)
    if tokens_per_word <= 0:
        raise ValueError(f"{long} words have {tokens[1]} tokens and {short} words {tokens[0]}")
    return Lexicon(tokens_per_word, tokens[0] - tokens_per_word * short)


def prompt(request: PlannedRequest, lexicon: Lexicon, seed: int) -> str:
    """The prompt of one request."""
    count = lexicon.words_for(request.prompt_tokens)
    if not request.block_ids:
        return _text(random.Random(f"{seed}/request/{request.index}").choices(WORDS, k=count))
    # Block borders lie at fixed places for all requests, whatever their length, so that prefixes are equal.
    words_per_block = request.block_tokens / lexicon.tokens_per_word
    words: list[str] = []
    for position, block_id in enumerate(request.block_ids):
        end = min(count, round(words_per_block * (position + 1)))
        words += random.Random(f"{seed}/block/{block_id}").choices(WORDS, k=max(0, end - len(words)))
    # Overhead and rounding may leave a few words behind the last block.
    words += random.Random(f"{seed}/request/{request.index}").choices(WORDS, k=max(0, count - len(words)))
    return _text(words)


def _text(words: Sequence[str]) -> str:
    return " ".join(words)
