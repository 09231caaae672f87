"""Logprobs of the vLLM engine, where no compiler is installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.clock import SystemClock
from cluster.engine.vllm.build import build_vllm_engine
from cluster.model import ModelFolder
from tests.vllm.test_vllm_engine import CONFIG
from tests.vllm.vllm_kit import Listener, Reference, request


@pytest.fixture
def without_compiler(tiny_model: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    """An engine whose processes find neither a C++ compiler nor what one made before."""
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    listener = Listener(build_vllm_engine(tiny_model, CONFIG, SystemClock()))
    listener.start()
    yield listener
    listener.engine.stop()


def test_logprobs_need_no_compiler(without_compiler: Listener, tiny_model: ModelFolder) -> None:
    """Of prompt and output, in one step with one that asks for none; the numbers are those of transformers."""
    asks, other = request("asks", max_tokens=8, logprobs=3, prompt_logprobs=3), request("other", max_tokens=8)
    made, beside = without_compiler.run(asks, other)
    reference = Reference(tiny_model)
    assert made.token_ids == reference.output_ids(asks)
    assert beside.token_ids == reference.output_ids(other)
    assert made.prompt_logprobs is not None
    ids = [*asks.prompt_ids, *made.token_ids]
    expected = reference.logprobs(ids)
    told = [*made.prompt_logprobs, *made.logprobs]
    assert len(told) == len(ids) - 1
    for place, one in enumerate(told):
        assert one.logprob == pytest.approx(float(expected[place, ids[place + 1]]), abs=1e-3)
