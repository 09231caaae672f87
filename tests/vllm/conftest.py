"""These tests run where vLLM is installed, and are passed over elsewhere: it has an environment of its own."""

from __future__ import annotations

import importlib.util
import os
import warnings

import pytest

from cluster.engine.vllm.build import ENVIRONMENT

os.environ.update(ENVIRONMENT)

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own modules warn on import
        import cluster.engine.vllm.adapter  # noqa: F401


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore"))
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(300))
