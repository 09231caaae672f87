"""What was predicted against what came is counted in bounded memory."""

from __future__ import annotations

from cluster.foretold import MAX_CLASSES, OTHER_CLASSES, Foretold
from cluster.tally import Tally


def test_a_value_counts_where_its_bound_is_the_first_that_it_does_not_exceed() -> None:
    tally = Tally((1.0, 2.0))
    for value in (0.0, 1.0, 1.5, 2.0, 2.5, 100.0):
        tally.observe(value)
    assert tally.snapshot() == ((1.0, 2.0), (2, 2, 2), 107.0)


def test_classes_are_bounded_whatever_requests_say() -> None:
    foretold = Foretold()
    for k in range(MAX_CLASSES + 100):
        foretold.ended(f"class {k}", 1.0)
    told = dict(foretold.told())
    assert len(told) == MAX_CLASSES + 1
    assert sum(told[OTHER_CLASSES].counts) == 100
