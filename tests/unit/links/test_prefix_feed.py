"""What a replica tells its routers of its prefix cache: all of it, piece by piece, whatever happens to the link."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.engine.prefix import numbers_of, told_of
from cluster.types import PrefixChange
from deployments.prefix_feed import FRAME_BLOCKS, HeldPrefixes, PrefixFeed


class Known:
    """What a router makes of what it is told."""

    def __init__(self) -> None:
        self.numbers: set[int] | None = None

    def take(self, feed: PrefixFeed) -> int:
        """Returns how many blocks it was told of."""
        change = feed.take()
        if change is None:
            return 0
        if change.afresh:
            self.numbers = set()
        assert self.numbers is not None, "the first that is told begins afresh"
        self.numbers -= set(numbers_of(change.gone))
        self.numbers |= set(numbers_of(change.held))
        return len(change.held + change.gone) // 8

    def take_all(self, feed: PrefixFeed) -> int:
        frames = 0
        while self.take(feed):
            frames += 1
        return frames


def change(held: list[int], gone: list[int]) -> PrefixChange:
    return PrefixChange(told_of(held), told_of(gone))


def tell(held: HeldPrefixes, feed: PrefixFeed, *changes: PrefixChange) -> None:
    for one in changes:
        feed.changed(held.apply(one))


NUMBERS = st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 40), max_size=20, unique=True)


@settings(deadline=None)
@given(st.lists(st.tuples(NUMBERS, NUMBERS, st.sampled_from(["wait", "take", "reconnect"])), max_size=40))
def test_what_was_told_since_a_link_came_up_is_what_is_held(deeds: list[tuple[list[int], list[int], str]]) -> None:
    held, model = HeldPrefixes(), set[int]()
    feed, known = PrefixFeed(held), Known()
    for added, removed, then in deeds:
        removed = [number for number in removed if number not in added]
        tell(held, feed, change(added, removed))
        model = (model - set(removed)) | set(added)
        if then == "take":
            known.take(feed)
        elif then == "reconnect":
            feed.begin()
            known = Known()
    known.take_all(feed)
    assert known.numbers == model == held.numbers


def test_where_nothing_has_changed_nothing_is_told() -> None:
    held = HeldPrefixes()
    feed, known = PrefixFeed(held), Known()
    known.take(feed)
    assert known.numbers == set(), "that it holds nothing is told, once"
    assert feed.take() is None
    tell(held, feed, change([1, 2], []))
    known.take(feed)
    assert feed.take() is None


def test_all_that_is_held_leaves_in_pieces_of_a_frame_and_what_is_new_goes_first() -> None:
    held = HeldPrefixes()
    held.apply(change(list(range(5 * FRAME_BLOCKS)), []))
    feed, known = PrefixFeed(held), Known()
    assert known.take(feed) == FRAME_BLOCKS
    new = list(range(10**6, 10**6 + 100))
    tell(held, feed, change(new, [0]))
    assert known.take(feed) == FRAME_BLOCKS
    assert known.numbers is not None
    assert set(new) <= known.numbers
    known.take_all(feed)
    assert known.numbers == held.numbers


def test_a_router_that_does_not_read_is_owed_no_more_than_twice_what_is_held_and_is_told_afresh() -> None:
    """A pool of 3,000 blocks turns over a hundred times meanwhile."""
    held, pool = HeldPrefixes(), 3000
    feed, known = PrefixFeed(held), Known()
    known.take(feed)
    for k in range(100):
        began = k * pool
        tell(held, feed, change(list(range(began, began + pool)), list(range(began - pool, began)) if k else []))
    frames = known.take_all(feed)
    assert known.numbers == set(range(99 * pool, 100 * pool))
    assert frames <= -(-2 * pool // FRAME_BLOCKS)
