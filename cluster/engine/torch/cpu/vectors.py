"""What numba cannot say by itself: products on vector registers, and the bits of a float.

Owns: the code that is generated for them. Imports numba and llvmlite. Invariant: sizes are fixed when the code is made, so
that all sums of a tile stay in registers.

A tile is `rows` x `vectors` x 16 sums. For each step along the depth it takes one vector register of weights per 16
columns and one number (in bfloat16 one pair) of each row, the outer product that GotoBLAS is built on (Goto and van de
Geijn 2008, "Anatomy of High-Performance Matrix Multiplication"). One tile reads its weights once, so a batch of up to
`rows` sequences costs one pass over memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic

from cluster.engine.torch.cpu.compiling import config

LANES = 16
"""Floats of the vectors that are written here; the compiler splits them where the processor's are shorter."""
LINE_BYTES = 64
_I32, _I64, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
_VECTOR, _WORDS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_I32, LANES)
_SPLAT = ir.Constant(_WORDS, [0] * LANES)


def generated(describe: Callable[..., tuple[Any, Callable[..., Any]]]) -> Callable[..., Any]:
    """What a kernel can call; `describe` returns its signature and what writes its code."""
    made: Callable[..., Any] = intrinsic(describe)
    return made


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's type of that name, which llvmlite does not know."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


def _features() -> frozenset[str]:
    """Of the processor that numba compiles for, which need not be this one (NUMBA_CPU_FEATURES, NUMBA_ENABLE_AVX).

    By these very names numba keeps apart what it finds in its cache, so sizes may depend on them, and on nothing else.
    """
    flags: str | None = config.CPU_FEATURES
    if flags is None:
        flags = str(get_host_cpu_features())  # type: ignore[no-untyped-call]
    return frozenset(flag[1:] for flag in flags.split(",") if flag.startswith("+"))


HAS_LONG_VECTORS = "avx512f" in _features()
MULTIPLIES_BFLOAT16 = HAS_LONG_VECTORS and "avx512bf16" in _features()
TILE_ROWS = 8 if HAS_LONG_VECTORS else 6
TILE_VECTORS = 3 if HAS_LONG_VECTORS else 1
"""8 x 3 sums, 3 weights and a number fill 28 of the 32 registers of AVX-512; 6 x 1 split in two fill 15 of AVX2's 16."""
TILE_COLUMNS = TILE_VECTORS * LANES


@generated
def tile_product(
    _typing: Any, like: Any, _rows: Any, _x: Any, _x_stride: Any, _w: Any, _depth: Any, _sums: Any, _sums_stride: Any
) -> Any:
    """tile_product(like, rows, x, x_stride, w, depth, sums, sums_stride): sums[rows, TILE_COLUMNS] = x[rows] @ w.

    like: any array of the dtype of x and w: float32, or uint16 for bfloat16. rows: 1 to TILE_ROWS.
    x: bfloat16 in pairs along the depth. w: TILE_COLUMNS numbers (pairs) per step of the depth.
    depth: at least 1, in numbers (pairs). sums: float32. All places are addresses and byte strides, as integers.
    """
    multiply = _bfloat16_products if like.dtype == types.uint16 else _float32_products
    address, number = types.uintp, types.intp
    signature = types.void(like, number, address, number, address, number, address, number)

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        _, count, *places = arguments
        _switch(builder, count, lambda rows: _tile_loop(builder, rows, multiply, *places))

    return signature, generate


def _tile_loop(
    builder: Any,
    rows: int,
    multiply: Callable[..., Any],
    x: Any,
    x_stride: Any,
    weights: Any,
    depth: Any,
    sums: Any,
    sums_stride: Any,
) -> None:
    row_starts = [builder.add(x, builder.mul(x_stride, _I64(row))) for row in range(rows)]
    before = builder.block
    loop, done = builder.append_basic_block("depth"), builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    step, tile = builder.phi(_I64), [[builder.phi(_VECTOR) for _ in range(TILE_VECTORS)] for _ in range(rows)]
    offset = builder.mul(step, _I64(4 * TILE_COLUMNS))
    columns = [_load(builder, builder.add(weights, offset), 64 * i, _WORDS, 4) for i in range(TILE_VECTORS)]
    new_tile = []
    for row_start, row_sums in zip(row_starts, tile, strict=True):
        word = _load(builder, builder.add(row_start, builder.shl(step, _I64(2))), 0, _I32, 4)
        spread = builder.insert_element(ir.Constant(_WORDS, ir.Undefined), word, _I32(0))
        spread = builder.shuffle_vector(spread, ir.Constant(_WORDS, ir.Undefined), _SPLAT)
        new_tile.append(
            [multiply(builder, sum_, spread, column) for sum_, column in zip(row_sums, columns, strict=True)]
        )
    next_step = builder.add(step, _I64(1))
    step.add_incoming(_I64(0), before)
    step.add_incoming(next_step, builder.block)
    for row_sums, new_sums in zip(tile, new_tile, strict=True):
        for sum_, new_sum in zip(row_sums, new_sums, strict=True):
            sum_.add_incoming(ir.Constant(_VECTOR, [0.0] * LANES), before)
            sum_.add_incoming(new_sum, builder.block)
    builder.cbranch(builder.icmp_signed("<", next_step, depth), loop, done)
    builder.position_at_end(done)
    for row, new_sums in enumerate(new_tile):
        start = builder.add(sums, builder.mul(sums_stride, _I64(row)))
        for i, new_sum in enumerate(new_sums):
            target = builder.inttoptr(builder.add(start, _I64(64 * i)), _VECTOR.as_pointer())
            builder.store(new_sum, target, align=4)


def _load(builder: Any, address: Any, offset: int, kind: Any, align: int) -> Any:
    pointer = builder.inttoptr(builder.add(address, _I64(offset)), kind.as_pointer())
    return builder.load(pointer, align=align)


def _float32_products(builder: Any, sums: Any, spread: Any, column: Any) -> Any:
    return _fused(builder, builder.bitcast(spread, _VECTOR), builder.bitcast(column, _VECTOR), sums)


def _bfloat16_products(builder: Any, sums: Any, spread: Any, column: Any) -> Any:
    """Both numbers of each pair, multiplied and added in float32."""
    if MULTIPLIES_BFLOAT16:
        pairs = ir.VectorType(_BFloat(), 2 * LANES)
        kind = ir.FunctionType(_VECTOR, [_VECTOR, pairs, pairs])
        add_products = _llvm(builder, "llvm.x86.avx512bf16.dpbf16ps.512", kind)
        return builder.call(add_products, [sums, builder.bitcast(spread, pairs), builder.bitcast(column, pairs)])
    for widen in (_lower_half, _upper_half):
        sums = _fused(builder, widen(builder, spread), widen(builder, column), sums)
    return sums


def _lower_half(builder: Any, words: Any) -> Any:
    return builder.bitcast(builder.shl(words, ir.Constant(_WORDS, [16] * LANES)), _VECTOR)


def _upper_half(builder: Any, words: Any) -> Any:
    return builder.bitcast(builder.and_(words, ir.Constant(_WORDS, [0xFFFF0000] * LANES)), _VECTOR)


def _fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once where the processor does that by itself."""
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    return builder.call(_llvm(builder, f"llvm.fmuladd.v{LANES}f32", kind), [a, b, c])


def _sum_lanes(builder: Any, vector: Any) -> Any:
    """By halves: the upper half of the lanes is added to the lower one until one is left."""
    half = LANES
    while half > 1:
        half //= 2
        lower, upper = (ir.Constant(ir.VectorType(_I32, half), list(range(i, i + half))) for i in (0, half))
        vector = builder.fadd(
            builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), lower),
            builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), upper),
        )
    return builder.extract_element(vector, _I32(0))


@generated
def fused(_typing: Any, _a: Any, _b: Any, _c: Any) -> Any:
    """a * b + c of float32, rounded as the vectors' products are."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.call(_llvm(builder, "llvm.fmuladd.f32", ir.FunctionType(_FLOAT, [_FLOAT] * 3)), arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


def _llvm(builder: Any, name: str, kind: Any) -> Any:
    return cgutils.get_or_insert_function(builder.module, kind, name)  # type: ignore[no-untyped-call]


@generated
def narrowed(_typing: Any, like: Any, _number: Any) -> Any:
    """A float32 as an element of the array `like`: itself, or its bfloat16 (nearest, ties to even) where that is uint16."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        if like.dtype == types.float32:
            return arguments[1]
        bits = builder.bitcast(arguments[1], _I32)
        odd = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
        rounded = builder.add(bits, builder.add(odd, _I32(0x7FFF)))
        is_nan = builder.fcmp_unordered("uno", arguments[1], arguments[1])
        chosen = builder.select(is_nan, _I32(0x7FC00000), rounded)
        return builder.trunc(builder.lshr(chosen, _I32(16)), ir.IntType(16))

    return like.dtype(like, types.float32), generate


@generated
def widened(_typing: Any, number: Any) -> Any:
    """An element of such an array as a float32."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        if number == types.float32:
            return arguments[0]
        return builder.bitcast(builder.shl(builder.zext(arguments[0], _I32), _I32(16)), _FLOAT)

    return types.float32(number), generate


@generated
def power_of_two(_typing: Any, _shifted: Any) -> Any:
    """2**n as float32, where the argument is n + 1.5 * 2**23: its low bits are n, which become the exponent."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        exponent = builder.shl(builder.bitcast(arguments[0], _I32), _I32(23))
        return builder.bitcast(builder.add(exponent, _I32(0x3F800000)), _FLOAT)

    return types.float32(types.float32), generate


@generated
def head_products(
    _typing: Any,
    _heads: Any,
    _query: Any,
    _query_stride: Any,
    like: Any,
    _key: Any,
    _vectors: Any,
    _out: Any,
    _out_stride: Any,
) -> Any:
    """head_products(heads, query, query_stride, like, key, vectors, out, out_stride): out[head] = query[head] . key.

    Each lane sums its numbers in their order, then the lanes are added by halves.
    heads: 1 to TILE_ROWS queries, float32, of `vectors` x LANES numbers, at least one vector. key: as many, of the dtype of
    the array `like`. out: float32, a stride apart. All places are addresses and byte strides.
    """

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        heads, query, query_stride, _, key, vectors, out, out_stride = arguments

        def products(count: int) -> None:
            starts = [builder.add(query, builder.mul(query_stride, _I64(head))) for head in range(count)]

            def add(offset: Any, sums: list[Any]) -> list[Any]:
                numbers = _floats(builder, key, offset, like.dtype)
                loaded = [_floats(builder, start, offset, types.float32) for start in starts]
                return [_fused(builder, one, numbers, sum_) for one, sum_ in zip(loaded, sums, strict=True)]

            sums = _vector_loop(builder, vectors, add, [ir.Constant(_VECTOR, [0.0] * LANES)] * count)
            for head, sum_ in enumerate(sums):
                total = _sum_lanes(builder, sum_)
                target = builder.add(out, builder.mul(out_stride, _I64(head)))
                builder.store(total, builder.inttoptr(target, _FLOAT.as_pointer()), align=4)

        _switch(builder, heads, products)

    address, number = types.uintp, types.intp
    return types.void(number, address, number, like, address, number, address, number), generate


@generated
def weighted_sums(
    _typing: Any,
    _heads: Any,
    _weights: Any,
    _weights_stride: Any,
    like: Any,
    _values: Any,
    _values_stride: Any,
    _count: Any,
    _sums: Any,
    _sums_stride: Any,
) -> Any:
    """sums[head] += weights[head, i] x values[i], for i below count, at least 1; of LANES numbers each.

    weighted_sums(heads, weights, weights_stride, like, values, values_stride, count, sums, sums_stride). heads: 1 to
    TILE_ROWS. values: of the dtype of the array `like`, the others float32. All places are addresses and byte strides.
    """

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        heads, weights, weights_stride, _, values, values_stride, count, sums, sums_stride = arguments

        def add(number: int) -> None:
            rows = [builder.add(weights, builder.mul(weights_stride, _I64(head))) for head in range(number)]
            targets = [
                builder.inttoptr(builder.add(sums, builder.mul(sums_stride, _I64(head))), _VECTOR.as_pointer())
                for head in range(number)
            ]

            def body(offset: Any, totals: list[Any]) -> list[Any]:
                index = builder.lshr(offset, _I64(LANES.bit_length() - 1))
                start = builder.add(values, builder.mul(values_stride, index))
                value = _floats(builder, start, _I64(0), like.dtype)
                made = []
                for row, total in zip(rows, totals, strict=True):
                    weight = _load(builder, builder.add(row, builder.shl(index, _I64(2))), 0, _FLOAT, 4)
                    made.append(_fused(builder, _spread(builder, weight), value, total))
                return made

            before = [builder.load(target, align=4) for target in targets]
            for target, total in zip(targets, _vector_loop(builder, count, body, before), strict=True):
                builder.store(total, target, align=4)

        _switch(builder, heads, add)

    address, number = types.uintp, types.intp
    return types.void(number, address, number, like, address, number, number, address, number), generate


@generated
def prefetch(_typing: Any, _start: Any, _size: Any) -> Any:
    """prefetch(start, size): ask for the lines of `size` bytes, at least 1, at an address. Never a fault, wherever it is."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        start, size = arguments
        pointer_type = ir.IntType(8).as_pointer()
        ask = _llvm(builder, "llvm.prefetch.p0", ir.FunctionType(ir.VoidType(), [pointer_type, _I32, _I32, _I32]))

        def body(offset: Any, _: list[Any]) -> list[Any]:
            # LANES numbers of a loop over vectors are one line of LINE_BYTES.
            address = builder.add(start, builder.mul(offset, _I64(LINE_BYTES // LANES)))
            builder.call(ask, [builder.inttoptr(address, pointer_type), _I32(0), _I32(3), _I32(1)])
            return []

        lines = builder.udiv(builder.add(size, _I64(LINE_BYTES - 1)), _I64(LINE_BYTES))
        _vector_loop(builder, lines, body, [])

    return types.void(types.uintp, types.intp), generate


def _switch(builder: Any, count: Any, write_case: Callable[[int], None]) -> None:
    """Code for each count from 1 to TILE_ROWS."""
    end = builder.append_basic_block("end")
    switch = builder.switch(count, end)
    for number in range(1, TILE_ROWS + 1):
        case = builder.append_basic_block(f"case{number}")
        switch.add_case(_I64(number), case)
        builder.position_at_end(case)
        write_case(number)
        builder.branch(end)
    builder.position_at_end(end)


def _spread(builder: Any, number: Any) -> Any:
    """A float32 on all lanes."""
    one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), number, _I32(0))
    return builder.shuffle_vector(one, ir.Constant(_VECTOR, ir.Undefined), _SPLAT)


def _vector_loop(
    builder: Any, vectors: Any, body: Callable[[Any, list[Any]], list[Any]], start: list[Any]
) -> list[Any]:
    """body(offset in numbers, state) -> state for each vector; returns the last state."""
    before, loop, done = builder.block, builder.append_basic_block("vectors"), builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    offset, state = builder.phi(_I64), [builder.phi(_VECTOR) for _ in start]
    new_state = body(offset, state)
    next_offset = builder.add(offset, _I64(LANES))
    for phi, first, then in zip([offset, *state], [_I64(0), *start], [next_offset, *new_state], strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(then, loop)
    builder.cbranch(builder.icmp_signed("<", next_offset, builder.mul(vectors, _I64(LANES))), loop, done)
    builder.position_at_end(done)
    return new_state


def _floats(builder: Any, start: Any, offset: Any, dtype: Any) -> Any:
    """LANES numbers from `offset`, as float32."""
    if dtype == types.float32:
        return _load(builder, builder.add(start, builder.shl(offset, _I64(2))), 0, _VECTOR, 4)
    halves = _load(
        builder, builder.add(start, builder.shl(offset, _I64(1))), 0, ir.VectorType(ir.IntType(16), LANES), 2
    )
    words = builder.zext(halves, _WORDS)
    return builder.bitcast(builder.shl(words, ir.Constant(_WORDS, [16] * LANES)), _VECTOR)
