"""The CPU kernels compute what torch computes, on every shape that their tiles do not divide."""

from __future__ import annotations

import math
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.engine.torch.attention import SdpaStep
from cluster.engine.torch.cpu.attention import CpuStep
from cluster.engine.torch.cpu.compiling import kernel
from cluster.engine.torch.cpu.layers import EXP_MAX, EXP_MIN, exp, rms_norm
from cluster.engine.torch.cpu.matrices import Array, as_numpy, multiply, pack, read_columns
from cluster.engine.torch.cpu.vectors import HAS_LONG_VECTORS, narrowed
from cluster.engine.torch.layout import lay_out
from cluster.engine.torch.paged_cache import LayerShape, PagedCache
from cluster.ports import Row

DTYPES = [torch.float32, torch.bfloat16]
ROUNDING = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8}
"""Of one number, relative: a bit more than half a unit in the last place."""


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [(1,), (48,), (47, 2, 50), (576, 192, 192)])
@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 33])
@pytest.mark.parametrize("depth", [2, 70])
def test_products_are_those_of_the_weights_one_below_the_other(
    dtype: torch.dtype, columns: tuple[int, ...], tokens: int, depth: int
) -> None:
    weights = [random_tensor(n, depth, dtype=dtype, seed=i) for i, n in enumerate(columns)]
    x, bias = random_tensor(tokens, depth, dtype=dtype, seed=9), random_tensor(sum(columns), seed=8)
    expected = x.double() @ torch.cat(weights).double().T
    packed = pack(*weights)
    assert (packed.columns, packed.depth) == (sum(columns), depth)
    out = torch.full(expected.shape, math.nan)
    multiply(as_numpy(x), packed.panels, np.empty(0, np.float32), out.numpy(), False)
    torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=1e-5)
    multiply(as_numpy(x), packed.panels, bias.numpy(), out.numpy(), True)
    torch.testing.assert_close(out.double(), 2 * expected + bias, atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_columns_can_be_read_back_unchanged(dtype: torch.dtype) -> None:
    weights = random_tensor(101, 34, dtype=dtype)
    columns = torch.tensor([0, 100, 47, 48, 0])
    out = np.empty((5, 34), np.float32)
    read_columns(pack(weights).panels, columns.numpy(), out)
    assert torch.equal(torch.from_numpy(out), weights[columns].float())


def test_exponential_is_right_to_two_units_in_the_last_place_and_keeps_nan() -> None:
    xs = np.linspace(EXP_MIN, EXP_MAX, 20_001, dtype=np.float32)
    got = np.array([exp(x) for x in xs], np.float32)
    assert np.abs(got / np.exp(xs.astype(np.float64)) - 1).max() < 2 * 2.0**-23
    assert exp(np.float32(0)) == 1
    assert exp(np.float32(-math.inf)) <= np.float32(2e-38)
    assert math.isnan(exp(np.float32(math.nan)))


@kernel
def narrow(x: Array, out: Array) -> None:
    for i in range(len(x)):
        out[i] = narrowed(out, x[i])


def test_numbers_are_rounded_to_bfloat16_as_torch_does_it() -> None:
    ties = [1.00390625, 1.01171875, -1.00390625, 3.3895314e38, 3.4e38]
    x = torch.cat([torch.tensor([0.0, -0.0, 1e-40, math.inf, -math.inf, math.nan, *ties]), random_tensor(1000)])
    out = torch.empty(x.shape, dtype=torch.bfloat16)
    narrow(x.numpy(), as_numpy(out))
    torch.testing.assert_close(out, x.to(torch.bfloat16), atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_is_that_of_torch(dtype: torch.dtype) -> None:
    x, weight = random_tensor(3, 70) * 5, random_tensor(70, seed=1)
    out = torch.empty(x.shape, dtype=dtype)
    rms_norm(x.numpy(), weight.numpy(), np.float32(1e-5), as_numpy(out))
    expected = torch.nn.functional.rms_norm(x, (70,), weight, 1e-5)
    torch.testing.assert_close(out.float(), expected, atol=1e-6, rtol=2 * ROUNDING[dtype])


@st.composite
def attention_cases(draw: st.DrawFn) -> tuple[LayerShape, int, int, list[tuple[int, int]], int | None, int]:
    """Shape, sharing heads, block size, (tokens, start) of the rows, window, padding."""
    shape = LayerShape(
        draw(st.integers(1, 3)), draw(st.sampled_from([4, 16, 20, 64])), draw(st.sampled_from([4, 16, 36, 64]))
    )
    rows = draw(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), min_size=1, max_size=6))
    return (
        shape,
        draw(st.integers(1, 9)),
        draw(st.sampled_from([1, 4, 16])),
        [(1 if draw(st.booleans()) else n, start) for n, start in rows],
        draw(st.none() | st.integers(1, 50)),
        draw(st.integers(0, 3)),
    )


@settings(max_examples=60, deadline=None)
@given(attention_cases(), st.sampled_from(DTYPES))
def test_attention_on_the_cpu_is_that_of_torch(
    case: tuple[LayerShape, int, int, list[tuple[int, int]], int | None, int], dtype: torch.dtype
) -> None:
    """Where positions are valid; everything else in the pool is NaN."""
    shape, sharing, block_size, spans, window, padding = case
    caches = [PagedCache([shape] * 2, 600, block_size, dtype, torch.device("cpu")) for _ in range(2)]
    caches[0].pool.fill_(math.nan)
    rows: list[Row] = []
    next_block = 0
    for tokens, start in spans:
        blocks = -(-(tokens + start) // block_size)
        table = tuple(range(next_block, next_block + blocks))
        next_block += blocks
        rows.append(Row((1,) * tokens, start, table, None))
        for pool, dim in ((caches[0].keys[1], shape.key_dim), (caches[0].values[1], shape.value_dim)):
            at = torch.arange(start)
            pool[torch.tensor(table)[at // block_size], at % block_size] = random_tensor(
                start, shape.kv_heads, dim, dtype=dtype, seed=next_block
            )
    caches[1].pool.copy_(caches[0].pool)
    layout = lay_out(rows, block_size, padding)
    count = len(layout.token_ids)
    query = random_tensor(count, shape.kv_heads * sharing, shape.key_dim, dtype=dtype, seed=1)
    key = random_tensor(count, shape.kv_heads, shape.key_dim, dtype=dtype, seed=2)
    value = random_tensor(count, shape.kv_heads, shape.value_dim, dtype=dtype, seed=3)
    # torch rounds on its way in bfloat16, so the yardstick computes in float32; and it wants blocks that were zero.
    wide = PagedCache([shape] * 2, 600, block_size, torch.float32, torch.device("cpu"))
    wide.pool.copy_(caches[0].pool.nan_to_num(nan=0.0))
    expected = SdpaStep(wide, layout).attend(1, query.float(), key.float(), value.float(), scaling=None, window=window)
    got = CpuStep(caches[1], layout).attend(1, query, key, value, scaling=None, window=window)
    torch.testing.assert_close(got.float(), expected, atol=4 * ROUNDING[dtype], rtol=4 * ROUNDING[dtype])
    assert torch.equal(caches[1].keys[0].isnan(), caches[0].keys[0].isnan()), "another layer was written to"
    assert not bool(got[len(layout.slots) :].any())


def test_a_block_outside_of_the_pool_is_refused_before_a_kernel_sees_it() -> None:
    cache = PagedCache([LayerShape(1, 4, 4)], 8, 4, torch.float32, torch.device("cpu"))
    for table in ((8,), (-1,)):
        with pytest.raises(IndexError, match="block outside"):
            CpuStep(cache, lay_out([Row((1,), 0, table, None)], 4))


def test_keys_of_a_wider_type_are_rounded_on_their_way_into_the_cache() -> None:
    """Some models turn queries and keys in float32, whatever the dtype."""
    caches = [PagedCache([LayerShape(2, 32, 32)], 4, 4, torch.bfloat16, torch.device("cpu")) for _ in range(2)]
    layout = lay_out([Row((1,) * 6, 0, (2, 1), None), Row((1,), 0, (3,), None)], 4)
    query, key, value = (random_tensor(7, heads, 32, seed=heads) for heads in (4, 2, 2))
    wide = CpuStep(caches[0], layout).attend(0, query, key, value, scaling=None, window=None)
    expected = CpuStep(caches[1], layout).attend(0, query, key.bfloat16(), value.bfloat16(), scaling=None, window=None)
    assert torch.equal(caches[0].pool, caches[1].pool)
    assert torch.equal(wide, expected)
    assert bool(expected.any())


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_that_sees_nothing_is_refused_before_a_kernel_sees_it(window: int) -> None:
    cache = PagedCache([LayerShape(1, 4, 4)], 8, 4, torch.float32, torch.device("cpu"))
    step = CpuStep(cache, lay_out([Row((1,), 0, (0,), None)], 4))
    with pytest.raises(ValueError, match="window"):
        step.attend(0, *(torch.zeros(1, 1, 4) for _ in range(3)), scaling=None, window=window)


PROCESSORS = {
    "AVX2": {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+sse4.2"},
    "AVX-512 without bfloat16": {
        "NUMBA_CPU_NAME": "skylake-avx512",
        "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,+f16c,+avx512f,+avx512bw,+avx512dq,+avx512vl",
    },
    "nothing beyond SSE2": {"NUMBA_CPU_NAME": "generic"},
    "AVX switched off": {"NUMBA_ENABLE_AVX": "0"},
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="these are names of x86 processors")
@pytest.mark.parametrize("processor", PROCESSORS)
def test_kernels_are_right_for_processors_that_have_less_than_this_one(processor: str, tmp_path: Path) -> None:
    """The tests above, compiled for another one. Only AVX2 and older run everywhere, so the rest is of this processor."""
    if "512" in processor and not HAS_LONG_VECTORS:
        pytest.skip("it has no AVX-512")
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), **PROCESSORS[processor]}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


IMPORT = """
import logging
from cluster.engine.torch.cpu import compiling
print(compiling.KEEPS_COMPILED, compiling.config.CACHE_DIR)
"""


def test_compiled_kernels_are_kept_by_source_also_in_a_folder_that_the_user_names(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder, keeps in ((tmp_path / "new", "True"), (tmp_path / "file", "False")):
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder)}
        done = subprocess.run(
            [sys.executable, "-c", IMPORT], env=environment, capture_output=True, text=True, timeout=60, check=True
        )
        said, where = done.stdout.split()
        assert said == keeps
        if keeps == "True":
            assert Path(where).parent == folder
        else:
            assert "compiled at every start" in done.stderr
