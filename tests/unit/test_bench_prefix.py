"""The laws of `bench prefix`: the second prompt finds the first one's blocks, and the report is arithmetic."""

from __future__ import annotations

from cluster.config import EngineConfig
from cluster.engine.engine import Engine
from cluster.model import ModelFolder
from ops.bench.prefix import PrefixRound, PrefixSettings, build_report, measure
from ops.sim.backend import ModelledBackend
from ops.sim.step_time import a100
from tests.conformance.engine_kit import byte_level_codec


def test_all_but_the_last_block_of_a_repeated_prompt_is_found_and_of_a_new_one_nothing() -> None:
    """100 tokens in blocks of 16: the last token is always run, so 96 are found, in each round anew."""
    config = EngineConfig()
    backend = ModelledBackend(a100().models["llama-2-7b"], longest_output=500, padded=False)
    engine = Engine(config, backend, byte_level_codec(), (0,))
    rounds = measure(engine, backend.vocab_size, PrefixSettings(100, 3, 0), lambda: None)
    assert [r.hit_tokens for r in rounds] == [96, 96, 96]
    assert all(r.same_token for r in rounds)


def test_ratio_is_of_the_medians(tiny_model: ModelFolder) -> None:
    rounds = [
        PrefixRound(100.0, 10.0, 96, True),
        PrefixRound(200.0, 30.0, 96, False),
        PrefixRound(900.0, 20.0, 96, True),
    ]
    report = build_report(rounds, PrefixSettings(100, 3, 0), tiny_model, EngineConfig())
    assert report.value("ttft_ratio") == 0.1
    assert report.value("rounds_with_another_token") == 1
