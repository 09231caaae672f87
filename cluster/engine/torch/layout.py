"""Lays the rows of one step out as packed tokens with the index lists that paged attention reads.

Owns: the order of the tokens within a step, the slots that their keys and values go to, and which decodes are attended
to together. Pure, on plain lists; imports no torch. Invariant: every token of every row is laid out exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.ports import Row

GROUP_TOKENS = 1024
"""Keys, padding included, that one batch of decodes reads. Rows of like context are batched, so padding stays small, and
the copied keys of a layer stay in the processor's cache between the copy and their use: measured on one core (32 rows,
150 tokens each, head_dim 64, 3 KV heads, float32), 1.8 ms a layer against 3.0 ms in one batch."""


@dataclass(frozen=True)
class DecodeGroup:
    """Rows of one token each, `begin` to `end` of the packed tokens, attended to as one padded batch."""

    begin: int
    end: int
    blocks: list[int]
    """The rows' block tables, `width` entries each, padded with the row's own first block, whose excess is masked."""
    width: int
    context_tokens: list[int]
    """Keys that each row sees, its own included."""


@dataclass(frozen=True)
class PrefillChunk:
    """Consecutive tokens of one sequence, `begin` to `end` of the packed tokens, at positions `start` and on."""

    begin: int
    end: int
    start: int
    blocks: list[int]

    @property
    def context(self) -> int:
        """Keys that its last token sees."""
        return self.start + self.end - self.begin


@dataclass(frozen=True)
class Layout:
    """One step, packed: the decodes by falling context, the prefill chunks in the order of the rows, then the padding.

    `slots` and `begun_blocks` leave the padding out: nothing of it is kept.
    """

    token_ids: list[int]
    positions: list[int]
    slots: list[int]
    """block x block_size_tokens + offset of each token: where its key and value go."""
    begun_blocks: list[int]
    """Blocks whose first slot is written in this step. The rest of such a block holds what an earlier owner left."""
    decode_tables: list[tuple[int, ...]]
    """Of each decode, the blocks that its context fills."""
    decode_contexts: list[int]
    """Of each decode, the keys that it sees, its own included; never rising."""
    chunks: list[PrefillChunk]
    kept: list[int]
    """Packed indices of the tokens whose logits are asked for, in the order of the rows: of each its scored tokens, then
    its last one if it has a sample."""


def lay_out(rows: Sequence[Row], block_size_tokens: int, padding_tokens: int = 0) -> Layout:
    """Lay out `rows`, and `padding_tokens` more that belong to nobody.

    Raises:
        ValueError: a row has no token, or a block table or targets that do not fit it: a fault of the caller.
    """
    for row in rows:
        needed = -(-(row.start + len(row.token_ids)) // block_size_tokens)
        if not row.token_ids or len(row.block_table) < needed:
            raise ValueError(
                f"a row of {len(row.token_ids)} tokens at {row.start} has {len(row.block_table)} blocks, needs {needed}"
            )
        if row.score is not None and len(row.score.targets) > len(row.token_ids):
            raise ValueError(f"a row of {len(row.token_ids)} tokens has {len(row.score.targets)} targets")
    by_context = sorted((i for i, row in enumerate(rows) if len(row.token_ids) == 1), key=lambda i: -rows[i].start)
    order = by_context + [i for i, row in enumerate(rows) if len(row.token_ids) > 1]
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    begun_blocks: list[int] = []
    first: dict[int, int] = {}
    chunks: list[PrefillChunk] = []
    for i in order:
        row, begin = rows[i], len(token_ids)
        token_ids += row.token_ids
        span = range(row.start, row.start + len(row.token_ids))
        positions += span
        slots += [row.block_table[p // block_size_tokens] * block_size_tokens + p % block_size_tokens for p in span]
        begun_blocks += [row.block_table[p // block_size_tokens] for p in span if p % block_size_tokens == 0]
        first[i] = begin
        if len(row.token_ids) > 1:
            used = row.block_table[: -(-span.stop // block_size_tokens)]
            chunks.append(PrefillChunk(begin=begin, end=len(token_ids), start=row.start, blocks=list(used)))
    kept: list[int] = []
    for i, row in enumerate(rows):
        if row.score is not None:
            kept += range(first[i], first[i] + len(row.score.targets))
        if row.sample is not None:
            kept.append(first[i] + len(row.token_ids) - 1)
    return Layout(
        token_ids=token_ids + [0] * padding_tokens,
        positions=positions + [0] * padding_tokens,
        slots=slots,
        begun_blocks=begun_blocks,
        decode_tables=[rows[i].block_table[: rows[i].start // block_size_tokens + 1] for i in by_context],
        decode_contexts=[rows[i].start + 1 for i in by_context],
        chunks=chunks,
        kept=kept,
    )


def group_decodes(layout: Layout, block_size_tokens: int) -> list[DecodeGroup]:
    """Split the decodes into runs of at most GROUP_TOKENS padded keys, of one row at least."""
    groups: list[DecodeGroup] = []
    tables, contexts = layout.decode_tables, layout.decode_contexts
    begin = 0
    while begin < len(tables):
        width = len(tables[begin])
        end = min(len(tables), begin + max(1, GROUP_TOKENS // (width * block_size_tokens)))
        blocks = [block for table in tables[begin:end] for block in table + table[:1] * (width - len(table))]
        groups.append(DecodeGroup(begin, end, blocks, width, contexts[begin:end]))
        begin = end
    return groups
