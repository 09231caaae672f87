"""Kernels are compiled before the first engine starts, and not once more when it does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.model import ModelFolder

START = """
import sys
from pathlib import Path
from cluster.config import DType, EngineConfig
from cluster.engine.torch.build import build_engine
from cluster.model import ModelFolder
for dtype in DType:
    build_engine(ModelFolder.open(Path(sys.argv[1])), EngineConfig(dtype=dtype, blocks=64, max_model_len=128))
"""


def compiled(cache: Path) -> dict[str, int]:
    return {str(file.relative_to(cache)): file.stat().st_mtime_ns for file in cache.rglob("*.nb*")}


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_an_engine_that_starts_after_precompiling_compiles_nothing(tmp_path: Path, tiny_model: ModelFolder) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-m", "cluster.engine.torch.precompile"], env=environment, check=True, timeout=300)
    before = compiled(tmp_path)
    assert before
    subprocess.run([sys.executable, "-c", START, str(tiny_model.path)], env=environment, check=True, timeout=100)
    assert compiled(tmp_path) == before
