"""Fixtures shared by all suites: the models that tests run; and which tests run alone."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from cluster.model import ModelFolder
from cluster.smollm2 import default_model_cache, ensure_smollm2
from tests.tiny_model import make_tiny_llama

# Read by torch when it is first imported, here and in processes that tests start: several suites share two cores.
os.environ["OMP_NUM_THREADS"] = "1"

# How long an example takes is the machine's business. The environment of vLLM is without Hypothesis.
if importlib.util.find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("untimed")

ALONE = ("e2e", "ray")
"""Folders whose tests start processes that they share the machine with, and measure what comes of it."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.relative_to(here).parts[0] in ALONE:
            item.add_marker(pytest.mark.alone)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """A random-weight Llama of 3.4 million parameters; see tests/tiny_model.py."""
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """Another one, of other weights and with fewer tokens: what is one token to the first is several to this."""
    folder = tmp_path_factory.mktemp("models") / "tiny-other"
    made = make_tiny_llama(folder, seed=1, tokenizer_size=600, vocab_size=600)
    return ModelFolder.open(made.path)


@pytest.fixture(scope="session")
def smollm2() -> ModelFolder:
    """SmolLM2-135M-Instruct, converted once into the user's cache. For tests marked slow."""
    return ModelFolder.open(ensure_smollm2(default_model_cache(os.environ)), name="SmolLM2-135M-Instruct")
