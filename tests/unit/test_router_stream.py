"""The laws of the hand-over from core to client."""

from __future__ import annotations

import asyncio

from cluster.types import Outcome
from router.outcomes import MEANINGS, Ending
from router.stream import PART_OVERHEAD_BYTES, Batch, Pushed, Stream

END = Ending(Outcome.FINISHED, 1, 2)


async def test_each_delta_is_its_own_batch_for_a_client_that_keeps_up() -> None:
    stream = Stream(10_000)
    for text in ("a", "b"):
        taker = asyncio.create_task(stream.take())
        await asyncio.sleep(0)
        stream.push(text, 1)
        assert await taker == Batch(text, 1, None)


async def test_what_came_meanwhile_is_one_batch_and_the_ending_is_last() -> None:
    stream = Stream(10_000)
    stream.push("a", 1)
    stream.push("b", 2)
    stream.end(END)
    assert await stream.take() == Batch("ab", 3, END)


async def test_token_without_text_wakes_the_client() -> None:
    stream = Stream(10_000)
    taker = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    stream.push("", 1)
    assert await taker == Batch("", 1, None)


async def test_bound_is_in_bytes_of_utf8_and_taking_makes_room() -> None:
    stream = Stream(2 * (PART_OVERHEAD_BYTES + 4))
    assert stream.push("水a", 1) is Pushed.HELD
    assert stream.push("水a", 1) is Pushed.HELD
    assert stream.push("", 1) is Pushed.OVERFLOW
    assert stream.held_bytes == 2 * (PART_OVERHEAD_BYTES + 4)
    assert (await stream.take()).text == "水a水a"
    assert stream.held_bytes == 0
    assert stream.push("x", 1) is Pushed.HELD


async def test_cancelled_taker_leaves_the_stream_usable() -> None:
    stream = Stream(1000)
    taker = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    taker.cancel()
    await asyncio.gather(taker, return_exceptions=True)
    stream.push("a", 1)
    assert (await stream.take()).text == "a"


def test_ending_is_announced_once() -> None:
    told: list[Ending] = []
    stream = Stream(1000, told.append)
    stream.end(END)
    assert told == [END]


def test_every_outcome_but_success_has_an_error_that_a_client_can_act_on() -> None:
    for outcome, meaning in MEANINGS.items():
        if outcome is Outcome.FINISHED:
            assert meaning.status == 200
            continue
        assert 400 <= meaning.status < 600
        assert meaning.message
        assert meaning.code
        kinds = {429: "rate_limit_error"}
        assert meaning.error_type == kinds.get(
            meaning.status, "invalid_request_error" if meaning.status < 500 else "server_error"
        )
