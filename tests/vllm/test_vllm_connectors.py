"""Live requests move between vLLM engines by KV connectors of vLLM's: by its own example, which stores prompts in a folder and
finds them by their tokens, and by one that is handed requests and takes its time (later_connector.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cluster.clock import SystemClock
from cluster.config import VllmConfig
from cluster.engine.vllm.build import build_vllm_engine
from cluster.model import ModelFolder
from cluster.ports import NO_KV, ImportRefusal
from cluster.types import FinishReason
from tests.move_laws import LAWS, Pair, Side, ending_fails_every_call_rather_than_letting_it_wait
from tests.vllm.later_connector import BROKEN
from tests.vllm.moves_kit import CONFIG, TOKENS, Outputs


@dataclass
class Connected:
    pair: Pair

    def counted(self, side: Side) -> tuple[int, int]:
        """Tokens that were computed as prompts, and that came from elsewhere, so far."""
        load = side.port.progress().load
        return load.prefill_tokens_total, load.prefix_hit_tokens_total


def transfer_config(kind: str, folder: Path) -> dict[str, Any]:
    if kind == "sharing":
        extra: dict[str, Any] = {"shared_storage_path": str(folder)}
        return {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return {
        "kv_connector": "LaterConnector",
        "kv_connector_module_path": "tests.vllm.later_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"folder": str(folder)},
    }


@pytest.fixture(scope="module")
def connected(
    request: pytest.FixtureRequest, tiny_model: ModelFolder, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Connected]:
    """Two engines with the connector that the test is for; the last test of a kind ends them."""
    transfer = transfer_config(request.param, tmp_path_factory.mktemp(request.param))
    config = CONFIG.model_copy(update={"vllm": VllmConfig(eager=True, kv_transfer_config=transfer)})
    source, target = (Side(build_vllm_engine(tiny_model, config, SystemClock())) for _ in range(2))
    for side in (source, target):
        side.start()
    yield Connected(Pair(source, target, Outputs(tiny_model), tokens=TOKENS, serial=5000))
    for side in (source, target):
        ending_fails_every_call_rather_than_letting_it_wait(side)


sharing = pytest.mark.parametrize("connected", ["sharing"], indirect=True)
handing = pytest.mark.parametrize("connected", ["handing"], indirect=True)


@sharing
def test_a_moved_prompt_comes_from_the_shared_folder_and_only_the_rest_is_computed(connected: Connected) -> None:
    """205 tokens, in one step: 192 are six full blocks. A few tokens later it moves."""
    p = connected.pair
    r = p.request("shared", prompt=205)
    p.source.add(r)
    p.source.until_tokens(4, r)
    computed, came = connected.counted(p.target)
    state = p.move(r)
    assert (state.kv_format, state.kv_handle) == (p.target.moves.kv_format, b""), "this connector needs none"
    emitted = len(state.request.emitted_ids)
    assert emitted < 18, "it crossed no block: this connector finds whole prompts alone"
    got = p.target.until_ended(r, 1)
    assert [*state.request.emitted_ids, *got.token_ids] == p.whole(r)
    now = connected.counted(p.target)
    assert (now[0] - computed, now[1] - came) == (205 + emitted - 192, 192)
    p.source.until_idle()
    p.target.until_idle()


@pytest.mark.parametrize("connected", ["sharing", "handing"], indirect=True)
@pytest.mark.parametrize("law", LAWS)
def test_with_a_connector(connected: Connected, law: Callable[[Pair], None]) -> None:
    law(connected.pair)


@handing
@pytest.mark.parametrize("prompt", [200, 222, 224, 225])
def test_all_that_was_computed_comes_with_the_handle_and_only_the_last_token_is_run(
    connected: Connected, prompt: int
) -> None:
    """Also where the last token is the first of a block, which the source then has not."""
    p = connected.pair
    r = p.request("handed", prompt=prompt)
    p.source.add(r)
    p.source.until_tokens(1, r)
    computed, came = connected.counted(p.target)
    state = p.move(r)
    assert state.kv_handle
    known = prompt + len(state.request.emitted_ids)
    got = p.target.until_ended(r, 1)
    assert [*p.source.told(r).token_ids, *got.token_ids] == p.whole(r)
    now = connected.counted(p.target)
    assert (now[0] - computed, now[1] - came) == (0, known - 1)
    p.source.until_idle()
    p.target.until_idle()


@handing
def test_of_what_the_target_has_already_nothing_comes_again(connected: Connected) -> None:
    p = connected.pair
    first = p.request("prefix", prompt=150, max_tokens=2)
    p.target.add(first)
    p.target.until_ended(first)
    r = p.request("prefix", prompt=150)
    r = msgspec.structs.replace(r, prompt_ids=first.prompt_ids)
    p.source.add(r)
    p.source.until_tokens(2, r)
    computed, _ = connected.counted(p.target)
    state = p.move(r)
    got = p.target.until_ended(r, 1)
    assert [*state.request.emitted_ids, *got.token_ids] == p.whole(r)
    assert connected.counted(p.target)[0] == computed


@handing
def test_what_cannot_be_read_is_computed_again(connected: Connected) -> None:
    p = connected.pair
    r = p.request(BROKEN, prompt=100)
    p.source.add(r)
    p.source.until_tokens(2, r)
    computed, _ = connected.counted(p.target)
    state = p.move(r)
    got = p.target.until_ended(r, 1)
    assert [*state.request.emitted_ids, *got.token_ids] == p.whole(r)
    assert connected.counted(p.target)[0] - computed >= 100
    p.target.until_idle()


@handing
def test_one_that_waits_for_its_blocks_can_be_aborted_and_gives_them_back(connected: Connected) -> None:
    p = connected.pair
    r = p.request("aborted", prompt=300)
    p.source.add(r)
    p.source.until_tokens(2, r)
    p.move(r)
    p.target.port.abort(r.request_id, 1)
    assert p.target.until_ended(r, 1).finish is FinishReason.ABORT
    p.target.until_idle()
    p.source.until_idle()


@handing
def test_a_handle_of_another_kind_is_not_taken(connected: Connected) -> None:
    p = connected.pair
    r = p.request("odd")
    p.source.add(r)
    p.source.until_tokens(2, r)
    state = p.source.ask(p.source.moves.freeze(r.request_id, 0))
    assert state is not None
    moves, name = p.target.moves, r.request_id
    assert p.target.ask(moves.import_begin(name, 1, moves.kv_format, 0)) is None
    odd = msgspec.structs.replace(state, kv_handle=b"no handle")
    assert p.target.ask(moves.import_commit(odd, 1)) is ImportRefusal.MISFIT
    foreign = msgspec.structs.replace(state, kv_format=NO_KV)
    assert p.target.ask(moves.import_commit(foreign, 1)) is ImportRefusal.KV_FORMAT
    assert p.target.ask(moves.import_abort(name, 1))
    assert p.source.ask(p.source.moves.thaw(name, 0))
    assert p.source.until_ended(r).token_ids == p.whole(r)
