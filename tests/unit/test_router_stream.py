"""The laws of the hand-over from core to client."""

from __future__ import annotations

import asyncio

from cluster.types import Outcome, TokenLogprob
from router.journal import Scores
from router.outcomes import MEANINGS, Ending
from router.stream import LOGPROB_BYTES, PART_OVERHEAD_BYTES, TOP_BYTES, Batch, Buffer, Choices, Pushed, Stream

END = Ending(Outcome.FINISHED, 1, 2)


async def test_each_delta_is_its_own_batch_for_a_client_that_keeps_up() -> None:
    stream = Stream(Buffer(10_000))
    for text in ("a", "b"):
        taker = asyncio.create_task(stream.take())
        await asyncio.sleep(0)
        stream.push(text, 1)
        assert await taker == Batch(text, 1, None)


async def test_what_came_meanwhile_is_one_batch_and_the_ending_is_last() -> None:
    stream = Stream(Buffer(10_000))
    stream.push("a", 1)
    stream.push("b", 2)
    stream.end(END)
    assert await stream.take() == Batch("ab", 3, END)


async def test_token_without_text_wakes_the_client() -> None:
    stream = Stream(Buffer(10_000))
    taker = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    stream.push("", 1)
    assert await taker == Batch("", 1, None)


async def test_bound_is_in_bytes_of_utf8_and_taking_makes_room() -> None:
    buffer = Buffer(2 * (PART_OVERHEAD_BYTES + 4))
    stream = Stream(buffer)
    assert stream.push("水a", 1) is Pushed.HELD
    assert stream.push("水a", 1) is Pushed.HELD
    assert stream.push("", 1) is Pushed.OVERFLOW
    assert buffer.held_bytes == 2 * (PART_OVERHEAD_BYTES + 4)
    assert (await stream.take()).text == "水a水a"
    assert buffer.held_bytes == 0
    assert stream.push("x", 1) is Pushed.HELD


async def test_cancelled_taker_leaves_the_stream_usable() -> None:
    stream = Stream(Buffer(1000))
    taker = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    taker.cancel()
    await asyncio.gather(taker, return_exceptions=True)
    stream.push("a", 1)
    assert (await stream.take()).text == "a"


async def test_logprobs_travel_with_their_text_and_are_charged_but_for_the_prompt_s() -> None:
    buffer = Buffer(PART_OVERHEAD_BYTES + 1 + LOGPROB_BYTES + 2 * TOP_BYTES)
    stream = Stream(buffer)
    scores = Scores((7,), (TokenLogprob(-1.0, ((7, -1.0), (8, -2.0))),), tuple(TokenLogprob(-3.0) for _ in range(9)))
    assert stream.push("a", 1, scores) is Pushed.HELD
    assert buffer.held_bytes == buffer.max_bytes
    assert stream.push("", 0) is Pushed.OVERFLOW
    assert await stream.take() == Batch("a", 1, None, (scores,))
    assert buffer.held_bytes == 0


async def test_choices_are_taken_together_each_until_its_own_end() -> None:
    over: list[bool] = []
    choices = Choices(3, 10_000, lambda: over.append(True))
    first, second, third = choices.streams
    taker = asyncio.create_task(choices.take())
    await asyncio.sleep(0)
    third.push("c", 1)
    first.push("a", 1)
    first.end(END)
    assert await taker == [(0, Batch("a", 1, END)), (2, Batch("c", 1, None))]
    second.end(END)
    assert await choices.take() == [(1, Batch("", 0, END))]
    assert (choices.over, over) == (False, [])
    third.end(END)
    assert over == [True]
    assert await choices.take() == [(2, Batch("", 0, END))]
    assert choices.over
    assert choices.failure is None


async def test_first_choice_that_ends_badly_decides_and_is_announced_once() -> None:
    over: list[bool] = []
    choices = Choices(3, 10_000, lambda: over.append(True))
    bad = Ending(Outcome.ENGINE_ERROR, 1, 0, error="x")
    choices.streams[1].end(bad)
    assert over == [True]
    choices.streams[0].end(Ending(Outcome.CANCELLED, 1, 0))
    choices.streams[2].end(END)
    assert (choices.failure, over) == (bad, [True])


async def test_choices_share_one_bound() -> None:
    choices = Choices(2, PART_OVERHEAD_BYTES + 1, lambda: None)
    assert choices.streams[0].push("a", 1) is Pushed.HELD
    assert choices.streams[1].push("b", 1) is Pushed.OVERFLOW
    assert await choices.take() == [(0, Batch("a", 1, None))]
    assert choices.streams[1].push("b", 1) is Pushed.HELD


def test_ending_is_announced_once() -> None:
    told: list[Ending] = []
    stream = Stream(Buffer(1000), told.append)
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
