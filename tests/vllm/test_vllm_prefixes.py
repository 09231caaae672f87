"""What vLLM's core tells of its prefix cache, with one and with two steps in flight: exactly what a prompt finds there."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from cluster.engine.prefix import PrefixHashes, number_of
from cluster.engine.vllm.translate import core_request
from cluster.model import ModelFolder
from cluster.types import Request
from tests.vllm.core_kit import Core, undisturbed
from tests.vllm.test_vllm_scheduler import connected_core, core, depths
from tests.vllm.vllm_kit import request

BLOCK = 4


def told(c: Core, r: Request) -> int:
    """Full blocks of its prompt, from the first on, that were told; without the block of its last token."""
    hashes, limit = PrefixHashes(r.tenant, BLOCK), (len(r.prompt_ids) - 1) // BLOCK
    tokens = [number_of(hashes.of(i, lambda start, end: r.prompt_ids[start:end])) for i in range(limit)]
    return next((i for i, number in enumerate(tokens) if number not in c.held), limit)


def finds(c: Core, r: Request) -> int:
    """The same as vLLM finds them."""
    from vllm.v1.request import Request as VllmRequest  # type: ignore[import-not-found, unused-ignore]

    probe = VllmRequest.from_engine_core_request(core_request(r, 99, ()), c._hasher)
    blocks, _, _ = c.scheduler.kv_cache_manager.get_computed_blocks(probe)
    return len(blocks.blocks[0])


def check_told(c: Core, *requests: Request) -> None:
    pool: Any = c.scheduler.kv_cache_manager.block_pool
    assert [told(c, r) for r in requests] == [finds(c, r) for r in requests]
    assert len(c.held) == len(pool.cached_block_hash_to_block)
    assert c.note is not None
    assert c.note.load.blocks_cached == sum(b.ref_cnt == 0 and b.block_hash is not None for b in pool.blocks)


@depths
@pytest.mark.parametrize("connected", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_under_any_load_all_that_was_told_is_what_prompts_find(
    tiny_model: ModelFolder, depth: int, connected: bool, seed: int
) -> None:
    """Random arrivals of prompts that begin alike, of two tenants, with priorities and aborts, in a small pool; looked at
    whenever nothing is on its way."""
    rng = random.Random(seed)
    c = (connected_core if connected else core)(tiny_model, depth, blocks=rng.choice([25, 40]))
    asked: list[Request] = []
    aborted: set[str] = set()
    looked = 0
    for _ in range(12):
        names: dict[str, Request] = {}
        for _ in range(rng.randint(1, 6)):
            r = request(
                f"p{rng.randrange(5)}",
                prompt=rng.choice([3, 8, 20, 21, 50]),
                max_tokens=rng.randint(1, 30),
                priority=rng.choice([-10, 0, 10]),
                arrived=rng.random() * 50,
                tenant=rng.choice("xy"),
            )
            asked.append(r)
            names[c.add(r)] = r
            for _ in range(rng.randrange(4)):
                c.step()
            if rng.random() < 0.2 and (live := [name for name in names if name not in c.ended]):
                name = rng.choice(live)
                c.abort(name)
                aborted.add(name)
        c.drain()
        assert all(c.outputs[name] == undisturbed(r) for name, r in names.items() if name not in aborted)
        # The abort of the last one that ran is followed by no step: what it changed is told with the next.
        c.add(request("last", prompt=2, max_tokens=1))
        c.drain()
        check_told(c, *asked)
        looked += sum(told(c, r) > 0 for r in asked)
    assert looked > 20
    assert any(c.cached.values())


@depths
def test_a_request_is_told_with_its_first_token_what_it_found(tiny_model: ModelFolder, depth: int) -> None:
    """49 tokens are 12 blocks of 4 and one token more; who begins with 21 of them finds 5 blocks."""
    c = core(tiny_model, depth)
    whole = request("whole", prompt=49, max_tokens=2)
    part = msgspec.structs.replace(request("part", max_tokens=2), prompt_ids=(*whole.prompt_ids[:21], 7, 8, 9))
    other = msgspec.structs.replace(request("other", max_tokens=2, tenant="other"), prompt_ids=whole.prompt_ids)
    found = []
    for r in (whole, part, other, msgspec.structs.replace(whole, request_id=request("again").request_id)):
        name = c.add(r)
        c.drain()
        found.append(c.cached[name])
    assert found == [0, 20, 0, 48]
