"""Laws of the layout of a step: every token once, in its own slot, in groups that see exactly their own context."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.engine.torch.layout import GROUP_TOKENS, Layout, group_decodes, lay_out
from cluster.ports import Row, SampleSpec, ScoreSpec

SAMPLE = SampleSpec(temperature=0.0)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Row], int]:
    """Rows with disjoint block tables, longer than needed by up to two blocks, and a block size."""
    block_size = draw(st.sampled_from([1, 4, 16]))
    rows: list[Row] = []
    next_block = 0
    for _ in range(draw(st.integers(1, 8))):
        length = draw(st.one_of(st.just(1), st.integers(1, 20)))
        start = draw(st.one_of(st.integers(0, 40), st.integers(0, 2 * GROUP_TOKENS)))
        blocks = -(-(start + length) // block_size) + draw(st.integers(0, 2))
        rows.append(
            Row(
                token_ids=tuple(range(1000 * len(rows), 1000 * len(rows) + length)),
                start=start,
                block_table=tuple(range(next_block, next_block + blocks)),
                sample=draw(st.sampled_from([SAMPLE, None])),
                score=draw(st.none() | st.integers(0, length).map(lambda n: ScoreSpec(targets=(0,) * n, top=0))),
            )
        )
        next_block += blocks
    return rows, block_size


def slot(row: Row, position: int, block_size: int) -> int:
    return row.block_table[position // block_size] * block_size + position % block_size


@given(steps())
def test_every_token_is_laid_out_once_with_its_position_and_slot(step: tuple[list[Row], int]) -> None:
    rows, block_size = step
    layout = lay_out(rows, block_size)
    expected = {
        (token_id, row.start + i, slot(row, row.start + i, block_size))
        for row in rows
        for i, token_id in enumerate(row.token_ids)
    }
    laid_out = list(zip(layout.token_ids, layout.positions, layout.slots, strict=True))
    assert set(laid_out) == expected
    assert len(laid_out) == len(expected)


@given(steps())
def test_logits_are_kept_in_the_order_of_the_rows_scored_tokens_before_the_drawn_one(
    step: tuple[list[Row], int],
) -> None:
    rows, block_size = step
    layout = lay_out(rows, block_size)
    expected: list[int] = []
    for row in rows:
        expected += row.token_ids[: len(row.score.targets)] if row.score else ()
        expected += row.token_ids[-1:] if row.sample else ()
    assert [layout.token_ids[i] for i in layout.kept] == expected


@given(steps(), st.integers(1, 9))
def test_padding_is_run_after_all_else_and_written_read_and_kept_nowhere(
    step: tuple[list[Row], int], padding_tokens: int
) -> None:
    rows, block_size = step
    plain, padded = lay_out(rows, block_size), lay_out(rows, block_size, padding_tokens)
    tokens = len(plain.token_ids)
    assert len(padded.token_ids) == len(padded.positions) == tokens + padding_tokens
    cut = replace(padded, token_ids=padded.token_ids[:tokens], positions=padded.positions[:tokens])
    assert cut == plain


def test_targets_that_outnumber_the_tokens_are_an_error() -> None:
    row = Row(token_ids=(1, 2), start=0, block_table=(0,), sample=None, score=ScoreSpec(targets=(1, 2, 3), top=0))
    with pytest.raises(ValueError, match="3 targets"):
        lay_out([row], 4)


@given(steps())
def test_groups_and_chunks_cover_the_tokens_in_order_without_overlap(step: tuple[list[Row], int]) -> None:
    rows, block_size = step
    layout = lay_out(rows, block_size)
    spans = [(g.begin, g.end) for g in group_decodes(layout, block_size)] + [(c.begin, c.end) for c in layout.chunks]
    covered = [i for begin, end in spans for i in range(begin, end)]
    assert covered == list(range(len(layout.token_ids)))
    assert all(begin < end for begin, end in spans)


@given(steps())
def test_each_query_sees_exactly_its_own_context(step: tuple[list[Row], int]) -> None:
    rows, block_size = step
    layout = lay_out(rows, block_size)
    by_token = {row.token_ids[-1]: row for row in rows}
    for group in group_decodes(layout, block_size):
        assert len(group.blocks) == group.width * (group.end - group.begin)
        for i in range(group.end - group.begin):
            row = by_token[layout.token_ids[group.begin + i]]
            table = group.blocks[i * group.width : (i + 1) * group.width]
            assert group.context_tokens[i] == row.start + 1
            assert seen_slots(table, group.context_tokens[i], block_size) == own_slots(row, block_size)
            assert set(table) <= set(row.block_table), "padding reads another's block"
    for i, (blocks, context) in enumerate(zip(layout.decode_tables, layout.decode_contexts, strict=True)):
        row = by_token[layout.token_ids[i]]
        assert context == row.start + 1
        assert seen_slots(list(blocks), context, block_size) == own_slots(row, block_size)
    for chunk in layout.chunks:
        row = by_token[layout.token_ids[chunk.end - 1]]
        assert (chunk.start, chunk.end - chunk.begin) == (row.start, len(row.token_ids))
        assert seen_slots(chunk.blocks, chunk.context, block_size) == own_slots(row, block_size)


def seen_slots(table: list[int], context: int, block_size: int) -> list[int]:
    return [block * block_size + offset for block in table for offset in range(block_size)][:context]


def own_slots(row: Row, block_size: int) -> list[int]:
    return [slot(row, position, block_size) for position in range(row.start + len(row.token_ids))]


@given(steps())
def test_a_group_is_one_row_or_stays_within_its_bound(step: tuple[list[Row], int]) -> None:
    rows, block_size = step
    for group in group_decodes(lay_out(rows, block_size), block_size):
        assert group.end - group.begin == 1 or len(group.blocks) * block_size <= GROUP_TOKENS


@given(steps())
def test_blocks_are_begun_where_their_first_slot_is_written(step: tuple[list[Row], int]) -> None:
    rows, block_size = step
    layout: Layout = lay_out(rows, block_size)
    assert sorted(layout.begun_blocks) == sorted(s // block_size for s in layout.slots if s % block_size == 0)
