"""The block pool conserves its blocks, and notices when it does not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.engine.kv_cache import BlockPool, IntegrityError


def pool(blocks: int = 8) -> BlockPool[str]:
    return BlockPool(blocks, block_size_tokens=4)


def test_blocks_for_rounds_up() -> None:
    assert [pool().blocks_for(n) for n in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]


def test_table_keeps_its_blocks_in_order_as_it_grows() -> None:
    p = pool()
    p.allocate("a", 2)
    first = p.table("a")
    p.allocate("b", 1)
    p.allocate("a", 1)
    assert p.table("a")[:2] == first
    assert len(set(p.table("a")) | set(p.table("b"))) == 4
    assert p.blocks_free == 4


def test_allocation_beyond_the_pool_raises_and_takes_nothing() -> None:
    p = pool(4)
    p.allocate("a", 3)
    assert p.can_allocate(1)
    assert not p.can_allocate(2)
    with pytest.raises(IntegrityError):
        p.allocate("b", 2)
    assert p.blocks_free == 1
    p.check_integrity({"a": 12})


def test_freeing_twice_raises() -> None:
    p = pool()
    p.allocate("a", 3)
    assert p.free("a") == 3
    with pytest.raises(IntegrityError):
        p.free("a")
    assert p.blocks_free == 8


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 5)), max_size=60))
@settings(deadline=None)
def test_pool_is_conserved_under_any_sequence_of_calls(calls: list[tuple[str, int]]) -> None:
    p = pool()
    held: dict[str, int] = {}
    for key, blocks in calls:
        if blocks == 0:
            if key in held:
                assert p.free(key) == held.pop(key)
        elif p.can_allocate(blocks):
            p.allocate(key, blocks)
            held[key] = held.get(key, 0) + blocks
        assert p.blocks_free == 8 - sum(held.values())
        assert {k: len(p.table(k)) for k in held} == held
        p.check_integrity({k: 4 * n for k, n in held.items()})


def _shared(p: BlockPool[str]) -> None:
    p._tables["a"] = (*p.table("a")[:-1], p.table("b")[0])


def _lost(p: BlockPool[str]) -> None:
    p._free.pop()


def _freed_and_used(p: BlockPool[str]) -> None:
    p._free[-1] = p.table("a")[0]


def _ownerless(p: BlockPool[str]) -> None:
    p._tables["ghost"] = p._tables.pop("b")


def _short(p: BlockPool[str]) -> None:
    p._free.append(p.table("b")[0])
    p._tables["b"] = p.table("b")[1:]


@pytest.mark.parametrize("damage", [_shared, _lost, _freed_and_used, _ownerless, _short])
def test_every_kind_of_damage_is_noticed(damage: object) -> None:
    p = pool()
    p.allocate("a", 2)
    p.allocate("b", 2)
    p.check_integrity({"a": 8, "b": 5})
    assert callable(damage)
    damage(p)
    with pytest.raises(IntegrityError):
        p.check_integrity({"a": 8, "b": 5})
