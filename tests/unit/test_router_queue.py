"""The laws of the queue: strict bands, first come first served within, exact charges."""

from __future__ import annotations

import random
import time

import pytest

from cluster.types import RequestId
from router.queue import BandQueue, Charge, FifoBand, Waiting


def waiting(name: str, priority: int = 0, arrived: float = 0.0, size: int = 10, priority_class: str = "c") -> Waiting:
    return Waiting(RequestId(name), priority, priority_class, arrived, size)


def drain(queue: BandQueue) -> list[str]:
    order: list[str] = []
    while (head := queue.peek()) is not None:
        order.append(head.request_id)
        queue.remove(head.request_id)
    return order


def test_higher_band_first_then_arrival_then_id() -> None:
    queue = BandQueue()
    for w in [
        waiting("d", 0, 2.0),
        waiting("c", 0, 1.0),
        waiting("b", 0, 1.0),
        waiting("a", -10, 0.0),
        waiting("u", 10, 9.0),
    ]:
        queue.push(w)
    assert drain(queue) == ["u", "b", "c", "d", "a"]
    assert len(queue) == 0


def test_returning_request_has_its_old_place() -> None:
    queue = BandQueue()
    first = waiting("first", arrived=1.0)
    for w in (first, waiting("second", arrived=2.0), waiting("third", arrived=3.0)):
        queue.push(w)
    queue.remove(first.request_id)
    queue.push(first)
    assert drain(queue) == ["first", "second", "third"]


def test_twice_in_the_queue_is_an_error_and_removing_the_absent_too() -> None:
    queue = BandQueue()
    queue.push(waiting("a"))
    with pytest.raises(ValueError, match="already queued"):
        queue.push(waiting("a"))
    with pytest.raises(KeyError):
        queue.remove(RequestId("b"))


def test_at_or_above_counts_whom_a_new_one_stands_behind() -> None:
    queue = BandQueue()
    for k, priority in enumerate([10, 10, 0, -10, -10, -10]):
        queue.push(waiting(str(k), priority))
    assert [queue.at_or_above(p) for p in (11, 10, 5, 0, -10, -99)] == [0, 2, 2, 3, 6, 6]


def test_matches_a_sorted_list_over_random_operations_with_exact_charges() -> None:
    rng = random.Random(11)
    queue = BandQueue()
    model: dict[str, Waiting] = {}
    for step in range(20_000):
        if model and rng.random() < 0.48:
            name = rng.choice(list(model)) if rng.random() < 0.5 else min(model.values(), key=_order).request_id
            assert queue.remove(RequestId(name)) == model.pop(name)
        else:
            w = waiting(f"{step}", rng.choice([-10, 0, 0, 10]), rng.random(), rng.randint(1, 99), rng.choice("xyz"))
            model[w.request_id] = w
            queue.push(w)
        head = queue.peek()
        assert (head.request_id if head else None) == (min(model.values(), key=_order).request_id if model else None)
    for name in "xyz":
        members = [w for w in model.values() if w.priority_class == name]
        assert queue.of_class(name) == Charge(len(members), sum(w.size_bytes for w in members))
    assert sum(charge.requests for _, charge in queue.bands()) == len(queue) == len(model)


def test_memory_of_removed_keys_is_given_back() -> None:
    queue = BandQueue()
    queue.push(waiting("stays", arrived=0.0))
    for k in range(5000):
        queue.push(waiting(str(k), arrived=1.0 + k))
        queue.remove(RequestId(str(k)))
    (band,) = (entry[0] for entry in queue._bands.values())
    assert isinstance(band, FifoBand)
    assert len(band._heap) + len(band._row) + len(band._gone) < 100


def test_removal_from_the_middle_of_a_hundred_thousand_is_quick() -> None:
    """Linear removal would take minutes; a second is generous for n log n."""
    queue = BandQueue()
    names = [str(k) for k in range(100_000)]
    for k, name in enumerate(names):
        queue.push(waiting(name, arrived=float(k)))
    random.Random(0).shuffle(names)
    began = time.process_time()
    for name in names:
        queue.remove(RequestId(name))
    assert time.process_time() - began < 5.0


def _order(w: Waiting) -> tuple[int, float, str]:
    return (-w.priority, w.arrived_unix_s, w.request_id)
