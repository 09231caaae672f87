"""What a request whose logits are no numbers leaves in the KV cache reaches nobody."""

from __future__ import annotations

import pytest

from cluster.model import ModelFolder
from tests.vllm.core_kit import undisturbed
from tests.vllm.test_vllm_scheduler import check_all_given_back, core, depths
from tests.vllm.vllm_kit import request


@pytest.mark.parametrize(("way", "depth"), [("abort", 1), ("abort", 2), ("park", 2)])
def test_a_block_that_is_lost_in_the_midst_of_a_step_that_spoils_it_is_cleared_before_anybody_has_it(
    tiny_model: ModelFolder, way: str, depth: int
) -> None:
    """The token that is on its way lies in the last of its blocks."""
    c = core(tiny_model, depth)
    name = c.add(request("spoilt", prompt=22, max_tokens=20))
    while len(c.outputs[name]) < 2:
        c.step()
    c.begin()
    assert c.ran == {name: 1}
    c.worker.spoilt.add(name)
    last = c.scheduler.kv_cache_manager.get_blocks(name).blocks[0][-1].block_id
    if way == "abort":
        c.abort(name)
    else:
        c.call("park", name)
    assert last not in c.cleared
    others = [request(f"other {n}", prompt=50, max_tokens=10) for n in range(6)]
    names = [c.add(r) for r in others]
    while not all(other in c.ended for other in names):
        c.step()
    if way == "park":
        c.abort(name)
    c.drain()
    assert last in c.cleared
    assert [c.outputs[other] for other in names] == [undisturbed(r) for r in others]
    check_all_given_back(c)


@depths
def test_what_a_spoilt_request_has_computed_is_found_as_nobodys_prefix(tiny_model: ModelFolder, depth: int) -> None:
    c = core(tiny_model, depth)
    prompt = request("prompt", prompt=22).prompt_ids

    def hits() -> int:
        assert c.note is not None
        return c.note.load.prefix_hit_tokens_total

    c.add(request("whole", prompt=prompt, max_tokens=3))
    c.drain()
    spoilt = c.add(request("spoilt", prompt=prompt, max_tokens=20))
    c.worker.spoilt.add(spoilt)
    while not c.outputs[spoilt]:
        c.step()
    before = hits()
    assert before == 20, "five whole blocks of the first one's"
    c.call("stopped", spoilt)
    c.drain()
    c.add(request("next", prompt=prompt, max_tokens=3))
    c.drain()
    assert hits() == before
    check_all_given_back(c)
