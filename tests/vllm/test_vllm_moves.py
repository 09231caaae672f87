"""Live requests move to, from and between vLLM engines that have no KV connector: they are computed again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from cluster.clock import SystemClock
from cluster.config import EngineKind
from cluster.engine.vllm.adapter import VllmEngine
from cluster.engine.vllm.build import build_vllm_engine
from cluster.model import ModelFolder
from cluster.ports import NO_KV
from tests.move_laws import LAWS, PATIENCE_S, Pair, Side, ending_fails_every_call_rather_than_letting_it_wait
from tests.vllm.moves_kit import CONFIG, TOKENS, Outputs, plain_engine


@pytest.fixture(scope="module")
def whole(tiny_model: ModelFolder) -> Outputs:
    return Outputs(tiny_model)


@pytest.fixture(scope="module")
def sides(tiny_model: ModelFolder) -> Iterator[tuple[Side, Side]]:
    """A vLLM engine and an embedded one."""
    plain = CONFIG.model_copy(update={"kind": EngineKind.EMBEDDED, "vllm": None})
    vllm = Side(build_vllm_engine(tiny_model, CONFIG, SystemClock()))
    embedded = Side(plain_engine(tiny_model, plain), stands_still=True)
    vllm.start()
    embedded.start()
    yield vllm, embedded
    for side in (vllm, embedded):
        ending_fails_every_call_rather_than_letting_it_wait(side)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(
    "route", [(0, 0), (0, 1), (1, 0)], ids=["vllm to vllm", "vllm to embedded", "embedded to vllm"]
)
def test_between_engines_that_have_no_keys_and_values_in_common(
    sides: tuple[Side, Side], whole: Outputs, route: tuple[int, int], law: Callable[[Pair], None]
) -> None:
    source, target = sides[route[0]], sides[route[1]]
    law(Pair(source, target, whole, tokens=TOKENS if route[0] == 0 else 24, serial=1000 * route[0] + 100 * route[1]))
    for side in (source, target):
        assert side.port.progress().alive


def test_before_it_was_told_anything_its_load_is_the_cores_own(sides: tuple[Side, Side]) -> None:
    load = sides[0].port.progress().load
    assert (load.blocks_total, load.slots_total) == (CONFIG.blocks, CONFIG.slots)
    assert sides[0].moves.kv_format == NO_KV


def test_a_core_that_does_not_answer_shows_in_the_age_of_its_step_though_it_has_no_work(
    sides: tuple[Side, Side],
) -> None:
    """As when a frozen request is to go on, and nothing else is there."""
    engine = sides[0].port
    assert isinstance(engine, VllmEngine)
    assert engine.progress().step_age_s is None
    (pid,) = engine.core_pids()
    os.kill(pid, signal.SIGSTOP)
    try:
        answer = engine.places()
        deadline_s = time.monotonic() + PATIENCE_S
        while (engine.progress().step_age_s or 0.0) < 0.3:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        assert not answer.done()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert answer.result(PATIENCE_S) == {}
    assert engine.progress().step_age_s is None
