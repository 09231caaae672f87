"""The block pool conserves its blocks, finds the prefixes that are in them, and notices when its books are wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

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


# --- prefixes ---


def registered(p: BlockPool[str], key: str, name: str) -> None:
    """All blocks of `key` hold the prefix `name`."""
    for index, block in enumerate(p.table(key)):
        p.register(block, f"{name}{index}".encode())


def found(p: BlockPool[str], name: str) -> list[int]:
    blocks: list[int] = []
    while (block := p.find(f"{name}{len(blocks)}".encode())) is not None:
        blocks.append(block)
    return blocks


def test_a_prefix_is_found_while_it_is_held_and_after_and_counts_as_free_then() -> None:
    p = pool()
    p.allocate("a", 3)
    table = p.table("a")
    assert found(p, "x") == []
    registered(p, "a", "x")
    assert found(p, "x") == list(table)
    assert (p.blocks_free, p.blocks_cached, p.unheld(table)) == (5, 0, 0)
    assert p.free("a") == 3
    assert found(p, "x") == list(table)
    assert (p.blocks_free, p.blocks_cached, p.unheld(table)) == (8, 3, 3)
    p.share("b", found(p, "x")[:2])
    assert (p.blocks_free, p.blocks_cached) == (6, 1)
    p.check_integrity({"b": 8})


def test_a_shared_block_becomes_free_with_its_last_holder_only() -> None:
    p = pool()
    p.allocate("a", 3)
    p.share("b", p.table("a")[:2])
    p.allocate("b", 1)
    assert p.shared("a") == p.shared("b") == [(block, 2) for block in p.table("a")[:2]]
    assert p.free("a") == 1
    assert p.shared("b") == []
    assert p.blocks_free == 8 - 3
    assert p.free("b") == 3
    assert p.blocks_free == 8


def test_what_is_forgotten_is_found_no_more_and_who_shares_it_keeps_it() -> None:
    p = pool()
    p.allocate("a", 3)
    registered(p, "a", "xyz")
    p.share("b", p.table("a")[:2])
    p.forget("a")
    assert found(p, "xyz") == []
    assert len(p.table("b")) == 2
    p.free("a")
    p.free("b")
    assert (p.blocks_free, p.blocks_cached) == (8, 0)
    p.check_integrity({})


def test_what_others_count_on_is_not_to_be_written() -> None:
    p = pool()
    p.allocate("a", 3)
    first, second, third = p.table("a")
    p.share("b", [first])
    p.register(second, b"x")
    assert [p.may_write(block) for block in (first, second, third)] == [False, False, True]
    p.free("b")
    assert p.may_write(first)


def test_an_allocation_takes_plain_free_blocks_first_then_the_prefix_unused_longest_its_later_blocks_first() -> None:
    p = pool(8)
    p.allocate("old", 2)
    p.allocate("new", 3)
    registered(p, "old", "o")
    registered(p, "new", "n")
    old, new = p.table("old"), p.table("new")
    p.free("old")
    p.free("new")
    p.allocate("a", 3)
    assert (len(found(p, "o")), len(found(p, "n"))) == (2, 3), "the plain ones were enough"
    p.allocate("a", 1)
    assert found(p, "o") == [old[0]]
    p.share("b", [old[0]])
    p.free("b")  # it has been used since: it goes last
    p.allocate("a", 1)
    assert found(p, "n") == list(new[:2])
    p.allocate("a", 2)
    assert (found(p, "n"), found(p, "o")) == ([], [old[0]])
    p.check_integrity({"a": 28})


def test_the_same_prefix_computed_twice_is_registered_once() -> None:
    p = pool()
    p.allocate("a", 1)
    p.allocate("b", 1)
    registered(p, "a", "x")
    registered(p, "b", "x")
    assert found(p, "x") == list(p.table("a"))
    p.free("b")
    assert (p.blocks_free, p.blocks_cached) == (7, 0)
    p.check_integrity({"a": 4})


def test_a_free_block_is_neither_shared_nor_registered() -> None:
    p = pool()
    with pytest.raises(IntegrityError):
        p.share("a", [0])
    with pytest.raises(IntegrityError):
        p.register(0, b"x")
    p.allocate("a", 1)
    p.register(p.table("a")[0], b"x")
    with pytest.raises(IntegrityError):
        p.register(p.table("a")[0], b"y")


Call = tuple[str, str, int]


@given(
    st.lists(
        st.tuples(st.sampled_from(("take", "give", "share", "register")), st.sampled_from("abcdef"), st.integers(1, 5)),
        max_size=80,
    )
)
@settings(deadline=None)
def test_pool_is_conserved_under_any_sequence_of_calls(calls: list[Call]) -> None:
    """Against a model: a list of blocks per key, and all that has ever been registered."""
    p = pool()
    held: dict[str, list[int]] = {}
    for n, (what, key, count) in enumerate(calls):
        if what == "take" and p.can_allocate(count):
            p.allocate(key, count)
            held[key] = [*held.get(key, []), *p.table(key)[-count:]]
        elif what == "give" and key in held:
            mine = held.pop(key)
            others = Counter(block for table in held.values() for block in table)
            assert p.shared(key) == [(block, 1 + others[block]) for block in mine if others[block]]
            assert p.free(key) == len(set(mine) - others.keys())
        elif what == "share" and key not in held:
            lender = max(held, key=lambda k: (len(held[k]), k), default=None)
            if lender is not None:
                p.share(key, held[lender][:count])
                held[key] = held[lender][:count]
        elif what == "register" and key in held and p.may_write(held[key][-1]):
            p.register(held[key][-1], f"{n}".encode())
        used = {block for table in held.values() for block in table}
        assert p.blocks_free == 8 - len(used)
        assert {k: list(p.table(k)) for k in held} == held
        p.check_integrity({k: 4 * len(table) for k, table in held.items()})


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("take", "give", "register", "forget", "tell")), st.sampled_from("abc"), st.integers(1, 5)
        ),
        max_size=120,
    )
)
@settings(deadline=None)
def test_all_changes_told_together_are_the_prefixes_that_are_found(calls: list[Call]) -> None:
    """However many are told at a time; a prefix may come back under the name that it had, or be registered twice."""
    p = pool()
    told: set[bytes] = set()
    names = [f"{n}".encode() for n in range(12)]

    def tell() -> None:
        for name in p.take_changed():
            (told.discard if p.find(name) is None else told.add)(name)

    for n, (what, key, count) in enumerate(calls):
        if what == "take" and p.can_allocate(count):
            p.allocate(key, count)
        elif what == "give" and p.table(key):
            p.free(key)
        elif what == "register" and p.table(key) and p.may_write(p.table(key)[-1]):
            p.register(p.table(key)[-1], names[(n * count) % len(names)])
        elif what == "forget":
            p.forget(key)
        elif what == "tell":
            tell()
    tell()
    assert told == {name for name in names if p.find(name) is not None}
    assert p.take_changed() == ()


# --- damage ---


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


def _counted_wrong(p: BlockPool[str]) -> None:
    p._refs[p.table("a")[0]] = 2


def _free_and_counted(p: BlockPool[str]) -> None:
    p._refs[p._free[0]] = 1


def _outside(p: BlockPool[str]) -> None:
    p._free[0] = p.blocks_total


def _found_twice(p: BlockPool[str]) -> None:
    x = p._by_hash.pop(b"x")
    p._by_hash |= {b"y": x, b"x": x}


def _registered_and_plain_free(p: BlockPool[str]) -> None:
    p._hashes[p._free[0]] = b"z"
    p._by_hash[b"z"] = p._free[0]


def _found_elsewhere(p: BlockPool[str]) -> None:
    p._by_hash[b"x"] = p.table("b")[0]


def _cached_without_a_hash(p: BlockPool[str]) -> None:
    p._cached[p._free.pop()] = None


def _twice_in_one_table(p: BlockPool[str]) -> None:
    first = p.table("a")[0]
    p._refs[first] = 2
    p._tables["a"] = (*p.table("a"), first)


@pytest.mark.parametrize(
    "damage",
    [
        _shared,
        _lost,
        _freed_and_used,
        _ownerless,
        _short,
        _counted_wrong,
        _free_and_counted,
        _outside,
        _found_twice,
        _registered_and_plain_free,
        _found_elsewhere,
        _cached_without_a_hash,
        _twice_in_one_table,
    ],
)
def test_every_kind_of_damage_is_noticed(damage: Callable[[BlockPool[str]], None]) -> None:
    p = pool()
    p.allocate("a", 2)
    p.allocate("b", 2)
    p.register(p.table("a")[0], b"x")
    p.check_integrity({"a": 8, "b": 5})
    damage(p)
    with pytest.raises(IntegrityError):
        p.check_integrity({"a": 8, "b": 5})
