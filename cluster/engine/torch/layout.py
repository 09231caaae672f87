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


@dataclass(frozen=True)
class Layout:
    """One step, packed: the decodes by falling context, then the prefill chunks in the order of the rows."""

    token_ids: list[int]
    positions: list[int]
    slots: list[int]
    """block x block_size_tokens + offset of each token: where its key and value go."""
    begun_blocks: list[int]
    """Blocks whose first slot is written in this step. The rest of such a block holds what an earlier owner left."""
    decodes: list[DecodeGroup]
    chunks: list[PrefillChunk]
    sampled: list[int]
    """For each row with a sample, in the order of the rows: the packed index of its last token."""


def lay_out(rows: Sequence[Row], block_size_tokens: int) -> Layout:
    """Raises ValueError where a row has no token or a block table that does not fit it: a fault of the caller."""
    for row in rows:
        needed = -(-(row.start + len(row.token_ids)) // block_size_tokens)
        if not row.token_ids or len(row.block_table) < needed:
            raise ValueError(
                f"a row of {len(row.token_ids)} tokens at {row.start} has {len(row.block_table)} blocks, needs {needed}"
            )
    by_context = sorted((i for i, row in enumerate(rows) if len(row.token_ids) == 1), key=lambda i: -rows[i].start)
    order = by_context + [i for i, row in enumerate(rows) if len(row.token_ids) > 1]
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    begun_blocks: list[int] = []
    last: dict[int, int] = {}
    chunks: list[PrefillChunk] = []
    for i in order:
        row, begin = rows[i], len(token_ids)
        token_ids += row.token_ids
        span = range(row.start, row.start + len(row.token_ids))
        positions += span
        slots += [row.block_table[p // block_size_tokens] * block_size_tokens + p % block_size_tokens for p in span]
        begun_blocks += [row.block_table[p // block_size_tokens] for p in span if p % block_size_tokens == 0]
        last[i] = len(token_ids) - 1
        if len(row.token_ids) > 1:
            used = row.block_table[: -(-span.stop // block_size_tokens)]
            chunks.append(PrefillChunk(begin=begin, end=len(token_ids), start=row.start, blocks=list(used)))
    return Layout(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        begun_blocks=begun_blocks,
        decodes=_groups([rows[i] for i in by_context], block_size_tokens),
        chunks=chunks,
        sampled=[last[i] for i, row in enumerate(rows) if row.sample is not None],
    )


def _groups(rows: list[Row], block_size_tokens: int) -> list[DecodeGroup]:
    """Split rows of falling context into runs of at most GROUP_TOKENS padded keys, of one row at least."""
    groups: list[DecodeGroup] = []
    begin = 0
    while begin < len(rows):
        padded_keys = (rows[begin].start // block_size_tokens + 1) * block_size_tokens
        end = min(len(rows), begin + max(1, GROUP_TOKENS // padded_keys))
        groups.append(_group(rows[begin:end], begin, block_size_tokens))
        begin = end
    return groups


def _group(rows: list[Row], begin: int, block_size_tokens: int) -> DecodeGroup:
    width = rows[0].start // block_size_tokens + 1
    blocks: list[int] = []
    for row in rows:
        used = row.block_table[: row.start // block_size_tokens + 1]
        blocks += used + (row.block_table[0],) * (width - len(used))
    return DecodeGroup(
        begin=begin,
        end=begin + len(rows),
        blocks=blocks,
        width=width,
        context_tokens=[row.start + 1 for row in rows],
    )
