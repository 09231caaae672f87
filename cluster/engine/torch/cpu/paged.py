"""Kernels of attention that read keys and values where they lie, through block tables.

Owns: the attention of decodes and of prefill chunks, and the way of new keys and values into the cache. Imports numpy and
numba. Invariant: a query reads the positions that it sees and no others, so that neither where the blocks lie nor what an
earlier owner left in them matters.

Scores, their softmax and sums are float32. keys and values of the pool are [blocks, block_size, kv_heads, head_dim]; the
heads that share a KV head are neighbours.

A query's result is the same to the last bit whether it comes alone or in a chunk of any length, since both kernels add in
one order: a score by the lanes of `head_products`, weights by position modulo LANES and then by halves, values by position.
So a request that is preempted, moved or continued elsewhere computes what it would have computed undisturbed.
"""

from __future__ import annotations

import numpy as np

from cluster.engine.torch.cpu.compiling import kernel, reordering_kernel
from cluster.engine.torch.cpu.layers import exp
from cluster.engine.torch.cpu.matrices import Array
from cluster.engine.torch.cpu.vectors import (
    LANES,
    TILE_COLUMNS,
    TILE_ROWS,
    fused,
    head_products,
    narrowed,
    prefetch,
    tile_product,
    weighted_sums,
    widened,
)

AHEAD = 32
"""Positions between the one that is asked for and the one that is used."""


@kernel
def attend_step(
    query: Array,
    key: Array,
    value: Array,
    keys: Array,
    values: Array,
    slots: Array,
    tables: Array,
    contexts: Array,
    chunks: Array,
    scaling: np.float32,
    window: int,
    out: Array,
) -> None:
    """Write the keys and values of one layer to their slots, then attend: decodes, then chunks, then zeros for padding.

    query, out [tokens, heads, dim]; key, value [tokens, kv_heads, dim]; slots [tokens without padding]; tables [decodes +
    chunks, blocks]; contexts [decodes]: keys that each sees; chunks [chunks, 3]: begin, end and first position. A query at
    position p sees the keys at positions > p - window.
    """
    write_cache(key, slots, keys)
    write_cache(value, slots, values)
    decodes = contexts.shape[0]
    attend_decodes(query, keys, values, tables, contexts, scaling, window, out)
    for i in range(chunks.shape[0]):
        begin, end, start = chunks[i]
        attend_chunk(query[begin:end], keys, values, tables[decodes + i], start, scaling, window, out[begin:end])
    out[slots.shape[0] :] = 0


@kernel
def write_cache(numbers: Array, slots: Array, pool: Array) -> None:
    """numbers [tokens, kv_heads, head_dim] of the first len(slots) tokens to their slots of pool [blocks, block_size, …]."""
    block_size = pool.shape[1]
    for token in range(slots.shape[0]):
        block, offset = slots[token] // block_size, slots[token] % block_size
        for head in range(numbers.shape[1]):
            for i in range(numbers.shape[2]):
                pool[block, offset, head, i] = numbers[token, head, i]


@kernel
def prefetch_position(pool: Array, table: Array, position: int) -> None:
    """Ask for one position of keys or values: blocks lie scattered, so the processor does not see what comes next."""
    block_size = pool.shape[1]
    at = pool.ctypes.data + table[position // block_size] * pool.strides[0] + position % block_size * pool.strides[1]
    prefetch(at, pool.strides[1])


@kernel
def score_keys(
    query: Array, keys: Array, values: Array, table: Array, following: Array, begin: int, end: int, scores: Array
) -> None:
    """scores[head, p] = query[head] . key at p, for p from begin to end. All of query and scores is float32.

    The values are only asked for, since they are read next, and so is the beginning of the `following` table's keys.
    """
    block_size, kv_heads, dim = keys.shape[1:]
    sharing, vectors = query.shape[0] // kv_heads, dim // LANES
    for position in range(begin, end):
        block, offset = table[position // block_size], position % block_size
        at = keys.ctypes.data + block * keys.strides[0] + offset * keys.strides[1]
        ahead = position + AHEAD
        if ahead < end:
            prefetch_position(keys, table, ahead)
        else:
            prefetch_position(keys, following, min(ahead - end, following.shape[0] * block_size - 1))
        prefetch_position(values, table, position)
        for kv_head in range(kv_heads):
            for head in range(kv_head * sharing, (kv_head + 1) * sharing, TILE_ROWS):
                heads = min(TILE_ROWS, (kv_head + 1) * sharing - head)
                if vectors:
                    head_products(
                        heads,
                        query.ctypes.data + head * query.strides[0],
                        query.strides[0],
                        keys,
                        at + kv_head * keys.strides[2],
                        vectors,
                        scores.ctypes.data + head * scores.strides[0] + position * scores.strides[1],
                        scores.strides[0],
                    )
                for one in range(head, head + heads):
                    product = scores[one, position] if vectors else np.float32(0)
                    for i in range(vectors * LANES, dim):
                        product = fused(query[one, i], widened(keys[block, offset, kv_head, i]), product)
                    scores[one, position] = product


@kernel
def add_values(weights: Array, values: Array, table: Array, begin: int, end: int, sums: Array) -> None:
    """sums[head] = the sum of weights[head, p] x value at p, for p from begin to end; block by block."""
    block_size, kv_heads, dim = values.shape[1:]
    sharing, whole = sums.shape[0] // kv_heads, dim // LANES * LANES
    sums[:] = 0
    position = begin
    while position < end:
        block, offset = table[position // block_size], position % block_size
        count = min(block_size - offset, end - position)
        at = values.ctypes.data + block * values.strides[0] + offset * values.strides[1]
        for kv_head in range(kv_heads):
            for head in range(kv_head * sharing, (kv_head + 1) * sharing, TILE_ROWS):
                heads = min(TILE_ROWS, (kv_head + 1) * sharing - head)
                for i in range(0, whole, LANES):
                    weighted_sums(
                        heads,
                        weights.ctypes.data + head * weights.strides[0] + position * weights.strides[1],
                        weights.strides[0],
                        values,
                        at + kv_head * values.strides[2] + i * values.strides[3],
                        values.strides[1],
                        count,
                        sums.ctypes.data + head * sums.strides[0] + i * sums.strides[1],
                        sums.strides[0],
                    )
                for one in range(head, head + heads):
                    for k in range(count):
                        for i in range(whole, dim):
                            number = widened(values[block, offset + k, kv_head, i])
                            sums[one, i] = fused(weights[one, position + k], number, sums[one, i])
        position += count


@reordering_kernel
def greatest_of(scores: Array) -> np.float32:
    greatest: np.float32 = scores[0]
    for i in range(scores.shape[0]):
        greatest = max(greatest, scores[i])
    return greatest


@kernel
def sum_halves(parts: Array, count: int) -> None:
    """Add the first `count` of parts [LANES, n] to parts[0], the upper half to the lower one until one is left."""
    half = LANES
    while half > 1:
        half //= 2
        for lane in range(half):
            lower, upper = parts[lane], parts[lane + half]
            for i in range(count):
                lower[i] += upper[i]


@kernel
def soften(scores: Array, first: int, parts: Array) -> np.float32:
    """Replace scores [positions], the first at position `first`, by e**(score - the greatest); returns their sum.

    parts [LANES, 1] is written over.
    """
    count, greatest = scores.shape[0], greatest_of(scores)
    for i in range(count):
        scores[i] = exp(scores[i] - greatest)
    parts[:] = 0
    lane = first % LANES
    done = 0
    if lane:
        done = min(count, LANES - lane)
        for i in range(done):
            parts[lane + i, 0] += scores[i]
    while done + LANES <= count:
        for i in range(LANES):
            parts[i, 0] += scores[done + i]
        done += LANES
    for i in range(count - done):
        parts[i, 0] += scores[done + i]
    sum_halves(parts, 1)
    total: np.float32 = parts[0, 0]
    return total


@kernel
def attend_decodes(
    query: Array,
    keys: Array,
    values: Array,
    tables: Array,
    contexts: Array,
    scaling: np.float32,
    window: int,
    out: Array,
) -> None:
    """The first len(contexts) rows of out, whose queries see so many keys, the last `window` of them."""
    heads, dim = query.shape[1:]
    longest = 0
    for row in range(contexts.shape[0]):
        longest = max(longest, contexts[row])
    scores = np.empty((heads, longest), np.float32)
    scaled, sums = np.empty((heads, dim), np.float32), np.empty((heads, values.shape[3]), np.float32)
    totals, parts = np.empty(heads, np.float32), np.empty((LANES, 1), np.float32)
    for row in range(contexts.shape[0]):
        end = contexts[row]
        begin = max(0, end - window)
        for head in range(heads):
            for i in range(dim):
                scaled[head, i] = widened(query[row, head, i]) * scaling
        score_keys(scaled, keys, values, tables[row], tables[min(row + 1, contexts.shape[0] - 1)], begin, end, scores)
        for head in range(heads):
            totals[head] = soften(scores[head, begin:end], begin, parts)
        add_values(scores, values, tables[row], begin, end, sums)
        for head in range(heads):
            share = np.float32(1) / totals[head]
            for i in range(sums.shape[1]):
                out[row, head, i] = narrowed(out, sums[head, i] * share)


@kernel
def attend_chunk(
    query: Array, keys: Array, values: Array, table: Array, start: int, scaling: np.float32, window: int, out: Array
) -> None:
    """out of consecutive queries [tokens, heads, dim] of one sequence, the first at position `start`.

    Both products are tiles with queries as their columns: keys x queries, and values x the softmax of that, so that the
    softmax runs along whole vectors and only the queries and the values are turned round.
    """
    tokens, heads, dim = query.shape
    kv_heads, value_dim = keys.shape[2], values.shape[3]
    sharing = heads // kv_heads
    first = max(0, start + 1 - window)
    seen, before, vectors = start + tokens - first, start - first, dim // LANES
    key_rows, value_columns = np.empty((seen, dim), np.float32), np.empty((value_dim, seen), np.float32)
    columns, scores = np.empty((dim, TILE_COLUMNS), np.float32), np.empty((seen, TILE_COLUMNS), np.float32)
    tile, totals = np.empty((TILE_ROWS, TILE_COLUMNS), np.float32), np.empty((LANES, TILE_COLUMNS), np.float32)
    parts = np.empty((LANES, TILE_ROWS * TILE_COLUMNS), np.float32)
    for kv_head in range(kv_heads):
        gather(keys, values, table, first, kv_head, key_rows, value_columns)
        for begin in range(0, tokens * sharing, TILE_COLUMNS):
            count = min(TILE_COLUMNS, tokens * sharing - begin)
            columns[:] = 0
            for i in range(count):
                token, head = (begin + i) // sharing, kv_head * sharing + (begin + i) % sharing
                for k in range(dim):
                    columns[lane_order(k, vectors), i] = widened(query[token, head, k]) * scaling
            last = before + (begin + count - 1) // sharing + 1
            score_tiles(key_rows[:last], columns, vectors, parts, scores)
            soften_columns(scores[:last], begin, sharing, first, before, window, totals)
            for k in range(0, value_dim, TILE_ROWS):
                rows = min(TILE_ROWS, value_dim - k)
                multiply_tiles(value_columns[k : k + rows, :last], scores[:last], tile)
                for i in range(count):
                    token, head = (begin + i) // sharing, kv_head * sharing + (begin + i) % sharing
                    for row in range(rows):
                        out[token, head, k + row] = narrowed(out, tile[row, i] * (np.float32(1) / totals[0, i]))


@kernel
def gather(
    keys: Array, values: Array, table: Array, first: int, kv_head: int, key_rows: Array, value_columns: Array
) -> None:
    """One KV head from position `first` on, as float32: keys as key_rows [positions, dim in the order of the lanes],
    values as [dim, positions]."""
    block_size, vectors = keys.shape[1], key_rows.shape[1] // LANES
    for i in range(key_rows.shape[0]):
        block, offset = table[(first + i) // block_size], (first + i) % block_size
        for k in range(key_rows.shape[1]):
            key_rows[i, lane_order(k, vectors)] = widened(keys[block, offset, kv_head, k])
        for k in range(value_columns.shape[0]):
            value_columns[k, i] = widened(values[block, offset, kv_head, k])


@kernel
def lane_order(k: int, vectors: int) -> int:
    """Where number k of a head lies when the numbers of each lane are neighbours; what fills no vector stays behind."""
    return k % LANES * vectors + k // LANES if k < vectors * LANES else k


@kernel
def score_tiles(key_rows: Array, columns: Array, vectors: int, parts: Array, scores: Array) -> None:
    """The first rows of scores [positions, TILE_COLUMNS] = key_rows [positions, dim] @ columns [dim, TILE_COLUMNS], each
    added up as `head_products` does it. parts [LANES, TILE_ROWS * TILE_COLUMNS] is written over."""
    dim = key_rows.shape[1]
    for row in range(0, key_rows.shape[0], TILE_ROWS):
        rows = min(TILE_ROWS, key_rows.shape[0] - row)
        if vectors:
            for lane in range(LANES):
                tile_product(
                    columns,
                    rows,
                    key_rows.ctypes.data + row * key_rows.strides[0] + lane * vectors * key_rows.strides[1],
                    key_rows.strides[0],
                    columns.ctypes.data + lane * vectors * columns.strides[0],
                    vectors,
                    parts.ctypes.data + lane * parts.strides[0],
                    columns.strides[0],
                )
            sum_halves(parts, rows * TILE_COLUMNS)
        else:
            parts[0] = 0
        for one in range(rows):
            target, sums = scores[row + one], parts[0, one * TILE_COLUMNS :]
            for i in range(TILE_COLUMNS):
                target[i] = sums[i]
            for k in range(vectors * LANES, dim):
                for i in range(TILE_COLUMNS):
                    target[i] = fused(columns[k, i], key_rows[row + one, k], target[i])


@kernel
def multiply_tiles(x: Array, columns: Array, out: Array) -> None:
    """The first len(x) rows of out [rows, TILE_COLUMNS] = x [rows, depth] @ columns [depth, TILE_COLUMNS], all float32."""
    for row in range(0, x.shape[0], TILE_ROWS):
        tile_product(
            out,
            min(TILE_ROWS, x.shape[0] - row),
            x.ctypes.data + row * x.strides[0],
            x.strides[0],
            columns.ctypes.data,
            columns.shape[0],
            out.ctypes.data + row * out.strides[0],
            out.strides[0],
        )


@kernel
def soften_columns(
    scores: Array, begin: int, sharing: int, first: int, before: int, window: int, totals: Array
) -> None:
    """Replace each column of scores [positions, queries] by e**(score - the greatest), 0 where the query does not see.

    Positions count from `first`; query i stands at before + (begin + i) // sharing. totals[0] of totals [LANES, queries]:
    the sums of the columns.
    """
    queries = scores.shape[1]
    at, greatest = np.empty(queries, np.int32), np.full(queries, -np.inf, np.float32)
    for i in range(queries):
        at[i] = before + (begin + i) // sharing
    for position in range(scores.shape[0]):
        row = scores[position]
        if position > at[0] or position <= at[queries - 1] - window:
            for i in range(queries):
                row[i] = row[i] if at[i] - window < position <= at[i] else -np.inf
        for i in range(queries):
            greatest[i] = row[i] if row[i] > greatest[i] else greatest[i]
    totals[:] = 0
    for position in range(scores.shape[0]):
        row, sums = scores[position], totals[(first + position) % LANES]
        for i in range(queries):
            weight = exp(row[i] - greatest[i])
            row[i] = np.float32(0) if row[i] == -np.inf else weight
            sums[i] += row[i]
    sum_halves(totals, queries)
