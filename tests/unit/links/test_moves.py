"""Live requests that move between replicas: real engines, real links, and a router that the test plays.

At the end of each test no replica may hold anything, and its engine's books must be right (`World.end`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest

from cluster.clock import SystemClock
from cluster.engine.inbox import EngineBusyError
from cluster.engine.runner import EngineRunner
from cluster.messages import (
    Add,
    Grant,
    MoveAbort,
    MoveAnswer,
    MoveBegin,
    MoveBlocks,
    MoveStage,
    MoveState,
)
from cluster.model import ModelFolder
from cluster.ports import NO_KV, ImportRefusal
from cluster.types import EngineState, Generation, Refusal, RefusalReason, ReplicaId, Request, RequestId, RouterId
from router.suspects import Trial
from tests.conformance.arithmetic_backend import EMPTY, extended
from tests.conformance.engine_kit import config, request
from tests.unit.links.move_kit import PATIENCE_S, Replica, Router, World, is_draining, until, whole

Make = Callable[..., World]

QUICK = {"move_answer_s": 0.2, "move_expiry_s": 0.2}
"""For what is to run out. Elsewhere nothing may."""
BLOCK_TOKENS = 4
BLOCK_BYTES = BLOCK_TOKENS * len(EMPTY)
ME = RouterId("router-1")


def asked(name: str, *, prompt: int | tuple[int, ...] = 41, tokens: int = 300, **sampling: Any) -> Request:
    return request(name, prompt=prompt, max_tokens=tokens, **sampling)


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    worlds: list[World] = []

    def make_world(**transport: Any) -> World:
        worlds.append(World(**transport))
        return worlds[-1]

    yield make_world
    for world in worlds:
        await world.end()


# --- the whole course ---


async def test_a_hundred_moves_change_nothing_and_no_prompt_is_run_again(make: Make) -> None:
    world = make()
    pair = [await world.replica("a"), await world.replica("b")]
    router = await world.router(*pair)
    chance: dict[str, Any] = {"temperature": 0.9, "logprobs": 2, "frequency_penalty": 0.4}
    moved = 0
    prompts = 0

    async def client(number: int) -> None:
        nonlocal moved, prompts
        at, attempt = number % 2, 0
        r = asked(f"r{number}", prompt=30 + 11 * (number % 8), seed=number, **(chance if number % 3 else {}))
        prompts += len(r.prompt_ids)
        await router.runs(r, pair[at], tokens=1 + number % 8)
        while attempt < 5 and await router.moves(r.request_id, pair[at], pair[1 - at], attempt):
            moved, at, attempt = moved + 1, 1 - at, attempt + 1
            await router.tells(r.request_id, attempt, tokens=1)
        await router.goes_on(r, attempt)

    serial = 0
    while moved < 100:
        await asyncio.gather(*(client(n) for n in range(serial, serial + 4)))
        serial += 4
        assert serial < 80, "too few requests live long enough to be moved"
    run = sum(replica.runner.progress().load.prefill_tokens_total for replica in pair)
    assert run == prompts


@pytest.mark.slow
async def test_a_real_model_goes_on_alike_wherever_it_is_cut(make: Make, tiny_model: ModelFolder) -> None:
    """One request at a time, so that no batch of others decides a rounding."""
    from cluster.engine.torch.build import build_engine, prepare_process

    prepare_process()
    world = make(move_chunk_bytes=2**16)
    settings = config(slots=4, step_token_budget=128, block_size_tokens=16, blocks=32, max_model_len=256)
    engines = [build_engine(tiny_model, settings) for _ in range(2)]
    pair = [await world.serve(n, e, EngineRunner(e, SystemClock())) for n, e in zip("ab", engines, strict=True)]
    router = await world.router(*pair)
    for number, sampling in enumerate(({}, {"temperature": 1.0, "seed": 5, "frequency_penalty": 0.3})):
        still, r = (
            asked(f"{kind}{number}", prompt=tuple(range(60)), tokens=150, **sampling) for kind in ("still", "moved")
        )
        await router.runs(still, pair[0])
        expected = await router.ends(still.request_id)
        await router.runs(msgspec.structs.replace(r, tenant="another"), pair[0])
        for attempt in range(3):
            await router.tells(r.request_id, attempt, tokens=5 + 7 * attempt)
            assert await router.moves(r.request_id, pair[attempt % 2], pair[1 - attempt % 2], attempt)
        assert await router.ends(r.request_id, 3) == expected
    assert pair[1].runner.progress().load.prefill_tokens_total == 0


async def test_between_engines_of_unequal_kv_format_only_the_request_travels(make: Make) -> None:
    world = make()
    # In one step: the last token, run alone in another, would be none of a prompt.
    source, target = await world.replica("a"), await world.replica("b", kv_format="other", step_token_budget=256)
    router = await world.router(source, target)
    r = await router.runs(asked("x"), source)
    assert await router.moves(r.request_id, source, target)
    frozen = router.ears.of("x", 0)[0].index
    await router.goes_on(r, 1)
    assert target.runner.progress().load.prefill_tokens_total == len(r.prompt_ids) + frozen


async def test_a_request_moves_before_its_prompt_has_run(make: Make) -> None:
    world = make()
    source, target = await world.replica("a", step_token_budget=8), await world.replica("b")
    router = await world.router(source, target)
    source.steps.clear()
    r = asked("x", prompt=900, tokens=20)
    router.links["a"].add(r, 0)
    router.links["a"].move(r.request_id, 0, 1, target.entry)
    await until(lambda: len(source.server._leaving))
    source.steps.set()
    assert await frozen_at_none(router, "x") == 0
    router.links["b"].grant(r.request_id, 1, 0)
    await router.ears.notice("x", 1, MoveStage.TAKEN)
    router.links["a"].release(r.request_id, 0)
    await router.goes_on(r, 1)


async def frozen_at_none(router: Router, name: str) -> int:
    """Before it has told any token."""
    router.ears.firsts.setdefault((RequestId(name), 0), 0)
    return (await router.ears.notice(name, 0, MoveStage.FROZEN)).index


# --- it stays where it is ---


async def test_it_stays_where_the_target_has_no_room(make: Make) -> None:
    world = make()
    source, target = await world.replica("a"), await world.replica("b", blocks=16, max_model_len=64)
    router = await world.router(source, target)
    r = await router.runs(asked("x", prompt=100), source)
    router.links["a"].move(r.request_id, 0, 1, target.entry)
    assert ImportRefusal.NO_ROOM in await router.ears.off("x")
    await router.goes_on(r)


@pytest.mark.parametrize("why", ["nobody listens", "another generation", "another model"])
async def test_it_stays_where_the_target_is_not_who_it_was(make: Make, why: str) -> None:
    world = make()
    source = await world.replica("a")
    target = await world.replica("b", model="n" * 64 if why == "another model" else "m" * 64)
    router = await world.router(source)
    entry = target.entry
    if why == "nobody listens":
        await target.acceptor.close()
    elif why == "another generation":
        entry = msgspec.structs.replace(entry, generation=Generation(7, "u7"))
    r = await router.runs(asked("x"), source)
    router.links["a"].move(r.request_id, 0, 1, entry)
    said = {"nobody listens": "nobody listens", "another generation": "generation 1", "another model": "model"}
    assert said[why] in await router.ears.off("x")
    await router.goes_on(r)


async def test_a_draining_target_takes_nothing_that_moves(make: Make) -> None:
    world = make()
    source, target = await world.replica("a"), await world.replica("b")
    router = await world.router(source, target)
    target.server.take_work(False)
    r = await router.runs(asked("x"), source)
    router.links["a"].move(r.request_id, 0, 1, target.entry)
    assert RefusalReason.DRAINING in await router.ears.off("x")
    await router.goes_on(r)


async def test_only_an_attempt_that_runs_here_moves_and_not_to_where_it_is(make: Make) -> None:
    world = make()
    source = await world.replica("a")
    router = await world.router(source)
    r = await router.runs(asked("x"), source)
    router.links["a"].move(RequestId("ghost"), 0, 1, source.entry)
    assert "no such attempt" in await router.ears.off("ghost")
    router.links["a"].move(r.request_id, 0, 1, source.entry)
    assert "here already" in await router.ears.off("x")
    await router.goes_on(r)


async def test_another_router_can_neither_move_nor_call_off_nor_release_what_is_not_its_own(make: Make) -> None:
    world = make()
    source, target = await world.replica("a"), await world.replica("b")
    router = await world.router(source, target)
    other = await world.router(source, target, name="router-2")
    r = await router.runs(asked("x"), source)
    other.links["a"].move(r.request_id, 0, 1, target.entry)
    await other.ears.off("x")
    index = await router.frozen(r.request_id, source, target.entry)
    assert index is not None
    other.links["a"].call_off(r.request_id, 0)
    other.links["a"].release(r.request_id, 0)
    other.links["b"].abort(r.request_id, 1)
    other.links["b"].grant(r.request_id, 1, index)
    assert "another router" in await other.ears.off("x", 1)
    router.links["b"].grant(r.request_id, 1, index)
    await router.ears.notice("x", 1, MoveStage.TAKEN)
    router.links["a"].release(r.request_id, 0)
    await router.goes_on(r, 1)


# --- the source, with a target that the test plays ---


class Played:
    """A source under test, one request on it, and the target's end of its move."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def begin(
        self, *, tokens: int = 300, prompt: int = 100, step_s: float = 0.0, max_frame_bytes: int = 2**24
    ) -> Played:
        self.source = await self.world.replica("a", step_s=step_s)
        self.router = await self.world.router(self.source)
        self.entry, self.wires = await self.world.played_target(max_frame_bytes)
        self.r = await self.router.runs(asked("x", prompt=prompt, tokens=tokens), self.source)
        self.router.links["a"].move(self.r.request_id, 0, 1, self.entry)
        self.wire = await asyncio.wait_for(self.wires.get(), PATIENCE_S)
        begin = await self.wire.hears()
        assert isinstance(begin, MoveBegin)
        assert (begin.request_id, begin.attempt, begin.router_id, begin.kv_format) == ("x", 1, ME, "arithmetic")
        assert begin.blocks >= 100 // BLOCK_TOKENS
        return self

    def answer(self, refusal: str = "") -> None:
        self.wire.send(MoveAnswer(self.r.request_id, 1, refusal))

    async def freeze(self) -> MoveState:
        """Answer all until the state has come; checks that the blocks follow each other without a gap."""
        self.answer()
        blocks = 0
        while not isinstance(message := await self.wire.hears(), MoveState):
            assert isinstance(message, MoveBlocks)
            assert message.first == blocks
            blocks += len(message.data) // BLOCK_BYTES
            self.answer()
        assert blocks == -(-message.state.computed_tokens // BLOCK_TOKENS)
        return message

    async def is_told_of_the_end(self) -> None:
        while not isinstance(message := await self.wire.hears(), MoveAbort):
            assert isinstance(message, MoveBlocks | MoveState)
        assert (message.request_id, message.attempt) == ("x", 1)


async def test_a_source_has_but_a_few_messages_that_are_not_answered_on_their_way(make: Make) -> None:
    p = await Played(make()).begin(prompt=200)
    p.answer()
    first = await p.wire.hears()
    for _ in range(2):
        await p.wire.hears()
    await p.router.ears.until(lambda: len(p.router.ears.told("x")) > 50)
    assert p.wire.heard.empty()
    assert isinstance(first, MoveBlocks)
    p.answer()
    await p.wire.hears()
    p.router.links["a"].call_off(p.r.request_id, 0)
    await p.is_told_of_the_end()
    await p.router.goes_on(p.r)


@pytest.mark.parametrize("when", ["before the first answer", "amid the blocks", "frozen"])
@pytest.mark.parametrize("by", ["call", "broken link"])
async def test_a_move_that_is_called_off_or_cut_leaves_the_attempt_as_it_was(make: Make, when: str, by: str) -> None:
    p = await Played(make()).begin()
    if when == "amid the blocks":
        p.answer()
        await p.wire.hears()
    elif when == "frozen":
        await p.freeze()
        await p.router.ears.notice("x", 0, MoveStage.FROZEN)
    if by == "call":
        p.router.links["a"].call_off(p.r.request_id, 0)
        assert "called off" in await p.router.ears.off("x")
        await p.is_told_of_the_end()
    else:
        p.wire.link.abort("cable pulled")
        assert "broke" in await p.router.ears.off("x")
    p.router.links["a"].call_off(p.r.request_id, 0)  # late: nothing comes of it
    await p.router.goes_on(p.r)
    assert len([n for n in p.router.ears.of("x", 0) if n.stage is MoveStage.OFF]) == 1


@pytest.mark.parametrize("when", ["the beginning", "the blocks"])
async def test_it_stays_where_the_target_does_not_answer_in_time(make: Make, when: str) -> None:
    p = await Played(make(**QUICK)).begin(tokens=900, step_s=0.005)  # it outlasts that by far
    if when == "the blocks":
        p.answer()
        await p.wire.hears()
    assert "did not answer within 0.2 s" in await p.router.ears.off("x")
    await p.is_told_of_the_end()
    p.router.links["a"].abort(p.r.request_id, 0)


@pytest.mark.parametrize("refusal", [ImportRefusal.FULL, ImportRefusal.KNOWN, RefusalReason.DRAINING])
async def test_it_stays_where_the_target_refuses_it_and_the_router_is_told_why(make: Make, refusal: str) -> None:
    p = await Played(make()).begin()
    p.answer(refusal)
    assert refusal in await p.router.ears.off("x")
    await p.router.goes_on(p.r)


async def test_it_stays_where_the_target_refuses_a_block(make: Make) -> None:
    p = await Played(make()).begin()
    p.answer()
    await p.wire.hears()
    p.answer(ImportRefusal.NO_ROOM)
    assert ImportRefusal.NO_ROOM in await p.router.ears.off("x")
    await p.is_told_of_the_end()
    await p.router.goes_on(p.r)


async def test_a_target_of_another_kv_format_is_asked_again_without_and_gets_the_state_alone(make: Make) -> None:
    p = await Played(make()).begin()
    p.answer(ImportRefusal.KV_FORMAT)
    again = await p.wire.hears()
    assert isinstance(again, MoveBegin)
    assert (again.kv_format, again.blocks) == (NO_KV, 0)
    p.answer()
    state = await p.wire.hears()
    assert isinstance(state, MoveState)
    assert list(state.state.request.emitted_ids) == p.router.ears.told("x")
    p.router.links["a"].call_off(p.r.request_id, 0)
    await p.router.goes_on(p.r)


async def test_blocks_that_fit_in_no_frame_of_the_target_stay_and_the_state_goes_alone(make: Make) -> None:
    p = await Played(make()).begin(max_frame_bytes=4096 + BLOCK_BYTES - 1)
    p.answer()
    assert isinstance(await p.wire.hears(), MoveState)
    p.router.links["a"].call_off(p.r.request_id, 0)
    await p.router.goes_on(p.r)


@pytest.mark.parametrize("when", ["copied", "frozen"])
@pytest.mark.parametrize("how", ["abort", "release", "its router leaves"])
async def test_an_attempt_that_is_given_up_takes_its_move_with_it_without_a_word(
    make: Make, when: str, how: str
) -> None:
    p = await Played(make()).begin()
    if when == "frozen":
        await p.freeze()
        await p.router.ears.notice("x", 0, MoveStage.FROZEN)
    if how == "abort":
        p.router.links["a"].abort(p.r.request_id, 0)
    elif how == "release":
        p.router.links["a"].release(p.r.request_id, 0)
        p.router.links["a"].release(p.r.request_id, 0)
    else:
        await p.router.leave()
    if (when, how) != ("frozen", "release"):
        await p.is_told_of_the_end()
    await p.source.emptied()
    assert not [n for n in p.router.ears.of("x", 0) if n.stage is MoveStage.OFF]


async def test_an_attempt_that_ends_while_it_is_copied_is_told_its_end_and_nothing_of_the_move(make: Make) -> None:
    p = await Played(make()).begin(tokens=120)
    await p.router.goes_on(p.r)
    p.answer()
    await p.is_told_of_the_end()
    assert p.router.ears.of("x", 0) == []


async def test_a_frozen_attempt_that_nobody_releases_goes_on_by_itself(make: Make) -> None:
    p = await Played(make(move_expiry_s=0.2)).begin()
    await p.freeze()
    assert "did not release" in await p.router.ears.off("x")
    await p.router.goes_on(p.r)


async def test_a_release_after_it_has_gone_on_by_itself_ends_it_all_the_same(make: Make) -> None:
    p = await Played(make(move_expiry_s=0.2)).begin(tokens=900, step_s=0.003)
    await p.freeze()
    await p.router.ears.off("x")
    p.router.links["a"].release(p.r.request_id, 0)
    await p.source.emptied()
    assert not p.router.ears.ends


async def test_a_move_that_is_asked_for_twice_is_made_once(make: Make) -> None:
    p = await Played(make()).begin()
    p.router.links["a"].move(p.r.request_id, 0, 1, p.entry)
    await p.freeze()
    await p.router.ears.notice("x", 0, MoveStage.FROZEN)
    p.router.links["a"].move(p.r.request_id, 0, 1, p.entry)
    p.router.links["a"].release(p.r.request_id, 0)
    await p.source.emptied()
    assert p.wire.heard.empty()
    assert p.wires.empty()


async def test_late_answers_to_a_move_that_was_called_off_are_not_taken_for_those_of_the_next(make: Make) -> None:
    p = await Played(make()).begin()
    p.router.links["a"].call_off(p.r.request_id, 0)
    await p.router.ears.off("x")
    await p.is_told_of_the_end()
    p.router.links["a"].move(p.r.request_id, 0, 1, p.entry)
    assert isinstance(await p.wire.hears(), MoveBegin)
    p.answer(ImportRefusal.FULL)  # to the first
    await p.freeze()
    await p.router.ears.notice("x", 0, MoveStage.FROZEN)
    p.router.links["a"].release(p.r.request_id, 0)


async def test_moves_between_two_replicas_share_one_link(make: Make) -> None:
    p = await Played(make()).begin()
    other = await p.router.runs(asked("y"), p.source)
    p.router.links["a"].move(other.request_id, 0, 1, p.entry)
    begin = await p.wire.hears()
    assert (begin.request_id, begin.attempt) == ("y", 1)
    assert p.wires.empty()
    for r in (p.r, other):
        p.router.links["a"].abort(r.request_id, 0)


async def test_a_replica_that_leaves_hands_back_what_is_copied_and_not_what_is_frozen(make: Make) -> None:
    p = await Played(make()).begin()
    await p.freeze()
    await p.router.ears.notice("x", 0, MoveStage.FROZEN)
    other = await p.router.runs(asked("y"), p.source)
    p.router.links["a"].move(other.request_id, 0, 1, p.entry)
    await p.wire.hears()
    drained = asyncio.create_task(p.source.server.drain())
    await p.router.ears.until(lambda: is_draining(p.router.ears.reports[ReplicaId("a")]))
    p.source.server.hand_back()
    await p.router.ears.until(lambda: p.router.ears.refusals)
    assert [(r.request_id, r.reason) for r in p.router.ears.refusals] == [("y", RefusalReason.DRAINING)]
    assert not drained.done()
    p.router.links["a"].release(p.r.request_id, 0)
    await asyncio.wait_for(drained, PATIENCE_S)


async def test_a_link_that_nothing_moves_over_ends_and_is_made_again_when_something_does(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = await Played(make()).begin()
    await p.source.hold()  # what is to move may not end meanwhile
    with monkeypatch.context() as patched:
        patched.setattr("deployments.peer_link._KEPT_S", 0.05)
        p.answer(ImportRefusal.FULL)
        await asyncio.wait_for(p.wire.why, PATIENCE_S)
    p.source.steps.set()
    p.router.links["a"].move(p.r.request_id, 0, 1, p.entry)
    p.wire = await asyncio.wait_for(p.wires.get(), PATIENCE_S)
    assert isinstance(await p.wire.hears(), MoveBegin)
    p.router.links["a"].call_off(p.r.request_id, 0)
    await p.router.goes_on(p.r)


def busy(*attempt: object) -> Future[Any]:
    """What an engine answers that is asked too much."""
    answer: Future[Any] = Future()
    answer.set_exception(EngineBusyError("too many calls"))
    return answer


async def test_a_frozen_attempt_that_cannot_be_thawed_is_handed_back(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = await Played(make()).begin()
    await p.freeze()
    await p.router.ears.notice("x", 0, MoveStage.FROZEN)
    monkeypatch.setattr(p.source.runner.moves, "thaw", busy)
    p.router.links["a"].call_off(p.r.request_id, 0)
    await p.router.ears.until(lambda: p.router.ears.refusals)
    assert p.router.ears.refusals == [Refusal(p.r.request_id, 0, RefusalReason.DRAINING)]


async def test_a_moved_attempt_that_cannot_be_released_is_ended_all_the_same(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = await Played(make()).begin()
    await p.freeze()
    await p.router.ears.notice("x", 0, MoveStage.FROZEN)
    monkeypatch.setattr(p.source.runner.moves, "release", busy)
    p.router.links["a"].release(p.r.request_id, 0)
    await p.source.emptied()
    assert not p.router.ears.ends


async def test_it_stays_where_the_engine_is_asked_too_much_to_freeze_it(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = await Played(make()).begin()
    monkeypatch.setattr(p.source.runner.moves, "freeze", busy)
    p.answer()
    while not isinstance(await p.wire.hears(), MoveAbort):
        p.answer()
    assert "EngineBusyError" in await p.router.ears.off("x")
    await p.router.goes_on(p.r)


async def test_what_is_reserved_is_given_back_also_where_the_engine_was_asked_too_much_at_first(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make(move_answer_s=0.05)
    target = await world.replica("b")
    wire = await world.peer(target)
    wire.send(begin("x"))
    assert await wire.hears() == answered("x")
    with monkeypatch.context() as patched:
        patched.setattr(target.runner.moves, "import_abort", busy)
        wire.send(MoveAbort(RequestId("x"), 1))
        await until(lambda: not len(target.server._coming))
    await target.emptied()


async def test_work_moves_away_from_a_replica_that_drains(make: Make) -> None:
    world = make()
    source, target = await world.replica("a"), await world.replica("b")
    router = await world.router(source, target)
    r = await router.runs(asked("x"), source)
    drained = asyncio.create_task(source.server.drain())
    await router.ears.until(lambda: is_draining(router.ears.reports[source.entry.replica_id]))
    assert await router.moves(r.request_id, source, target)
    await asyncio.wait_for(drained, PATIENCE_S)
    await router.goes_on(r, 1)


# --- the target, with a source that the test plays ---


def kv(r: Request, tokens: int) -> bytes:
    """What whole blocks of it hold after so many tokens of prompt and output, by the backend's own rule."""
    states, state = [], b""
    for token in (*r.prompt_ids, *r.emitted_ids)[:tokens]:
        state = extended(state, token)
        states.append(state)
    return b"".join(states).ljust(-(-tokens // BLOCK_TOKENS) * BLOCK_BYTES, b"\0")


def cut(r: Request, tokens: int) -> Request:
    return msgspec.structs.replace(r, emitted_ids=tuple(whole(r)[:tokens]))


def state_of(r: Request) -> EngineState:
    return EngineState(request=r, computed_tokens=len(r.prompt_ids) + len(r.emitted_ids) - 1, kv_format="arithmetic")


def begin(name: str, attempt: int = 1, blocks: int = 4, router: RouterId = ME) -> MoveBegin:
    return MoveBegin(RequestId(name), attempt, router, "arithmetic", blocks)


def answered(name: str, refusal: str = "", attempt: int = 1) -> MoveAnswer:
    return MoveAnswer(RequestId(name), attempt, refusal)


async def bring(wire: Any, r: Request) -> None:
    """All of it, with its keys and values."""
    data = kv(r, state_of(r).computed_tokens)
    wire.send(begin(r.request_id), MoveBlocks(r.request_id, 1, 0, memoryview(data)), MoveState(1, state_of(r)))
    assert [await wire.hears(), await wire.hears()] == [answered(r.request_id)] * 2


@pytest.mark.parametrize("order", ["grant last", "state last"])
async def test_an_attempt_begins_once_it_is_here_and_granted_in_either_order(make: Make, order: str) -> None:
    world = make()
    target = await world.replica("b")
    router, wire = await world.router(target), await world.peer(target)
    r = cut(asked("x", tokens=40), 9)
    if order == "grant last":
        await bring(wire, r)
        router.links["b"].grant(r.request_id, 1, 9)
    else:
        data = kv(r, state_of(r).computed_tokens)
        wire.send(begin("x"), MoveBlocks(r.request_id, 1, 0, memoryview(data)))
        assert [await wire.hears(), await wire.hears()] == [answered("x")] * 2
        router.links["b"].grant(r.request_id, 1, 9)
        await until(lambda: [c.grant for c in target.server._coming._coming.values()] != [None])
        wire.send(MoveState(1, state_of(r)))
    await router.ears.notice("x", 1, MoveStage.TAKEN)
    assert [*r.emitted_ids, *(await router.ends(r.request_id, 1))] == whole(asked("x", tokens=40))
    assert target.runner.progress().load.prefill_tokens_total == 0


async def test_what_comes_after_it_was_taken_changes_nothing(make: Make) -> None:
    world = make()
    target = await world.replica("b")
    router, wire = await world.router(target), await world.peer(target)
    r = cut(asked("x", tokens=200), 9)
    await bring(wire, r)
    for _ in range(3):
        router.links["b"].grant(r.request_id, 1, 9)
    await router.ears.notice("x", 1, MoveStage.TAKEN)
    wire.send(MoveAbort(r.request_id, 1), MoveState(1, state_of(r)), begin("x"))
    assert await wire.hears() == answered("x", ImportRefusal.KNOWN)
    wire.send(MoveBlocks(r.request_id, 1, 0, memoryview(bytes(BLOCK_BYTES))))
    assert await wire.hears() == answered("x", ImportRefusal.UNKNOWN)
    router.links["b"].grant(r.request_id, 1, 9)
    assert [*r.emitted_ids, *(await router.ends(r.request_id, 1))] == whole(asked("x", tokens=200))
    assert [n.stage for n in router.ears.of("x", 1)] == [MoveStage.TAKEN]


async def test_a_report_counts_a_grant_once_its_load_does(make: Make) -> None:
    world = make()
    target = await world.replica("b")
    router, wire = await world.router(target), await world.peer(target)
    r = cut(asked("x", tokens=900), 9)
    await bring(wire, r)
    target.steps.clear()
    number = router.links["b"].grant(r.request_id, 1, 9)
    await router.ears.notice("x", 1, MoveStage.TAKEN)
    reports = router.ears.reports
    assert reports[ReplicaId("b")].applied_sequence < number
    target.steps.set()
    await router.ears.until(lambda: reports[ReplicaId("b")].applied_sequence == number)
    assert reports[ReplicaId("b")].load.running or reports[ReplicaId("b")].load.waiting
    router.links["b"].abort(r.request_id, 1)


@pytest.mark.parametrize("missing", ["all of it", "its state"])
async def test_a_grant_of_what_does_not_come_is_answered_in_time(make: Make, missing: str) -> None:
    world = make(move_answer_s=0.2)
    target = await world.replica("b")
    router, wire = await world.router(target), await world.peer(target)
    if missing == "its state":
        wire.send(begin("x"))
        assert await wire.hears() == answered("x")
    router.links["b"].grant(RequestId("x"), 1, 9)
    why = await router.ears.off("x", 1)
    assert why == ("it has not come" if missing == "all of it" else "it has not come in time")


async def test_a_grant_from_another_token_on_than_it_was_frozen_at_is_off(make: Make) -> None:
    world = make()
    target = await world.replica("b")
    router, wire = await world.router(target), await world.peer(target)
    await bring(wire, r := cut(asked("x"), 9))
    router.links["b"].grant(r.request_id, 1, 8)
    assert await router.ears.off("x", 1) == "it has 9 tokens and was granted from 8 on"


@pytest.mark.parametrize("state_came", [False, True])
async def test_what_nobody_grants_is_dropped(make: Make, state_came: bool) -> None:
    world = make(move_expiry_s=0.2)
    target = await world.replica("b")
    router, wire = await world.router(target), await world.peer(target)
    r = cut(asked("x"), 9)
    if state_came:
        await bring(wire, r)
    else:
        wire.send(begin("x"))
        assert await wire.hears() == answered("x")
    await target.emptied()
    router.links["b"].grant(r.request_id, 1, 9)
    assert await router.ears.off("x", 1) == "it has not come"


@pytest.mark.parametrize("granted", [False, True])
@pytest.mark.parametrize(
    "how", ["its source calls it off", "its link breaks", "its router gives it up", "its router goes"]
)
async def test_what_has_not_come_whole_is_dropped_when_it_has_lost_its_source_or_its_router(
    make: Make, granted: bool, how: str
) -> None:
    world = make()
    target = await world.replica("b")
    router, wire = await world.router(target), await world.peer(target)
    wire.send(begin("x"))
    assert await wire.hears() == answered("x")
    if granted:
        router.links["b"].grant(RequestId("x"), 1, 9)
        await until(lambda: [c.grant for c in target.server._coming._coming.values()] != [None])
    if how == "its source calls it off":
        wire.send(MoveAbort(RequestId("x"), 1))
    elif how == "its link breaks":
        wire.link.abort("cable pulled")
    elif how == "its router gives it up":
        router.links["b"].abort(RequestId("x"), 1)
    else:
        await router.leave()
    await target.emptied()
    if granted and how != "its router goes":
        await router.ears.off("x", 1)


async def test_what_has_come_whole_needs_its_source_no_more(make: Make) -> None:
    world = make()
    target = await world.replica("b")
    router, wire = await world.router(target), await world.peer(target)
    await bring(wire, r := cut(asked("x", tokens=30), 9))
    wire.link.close("it has left")
    await wire.why
    router.links["b"].grant(r.request_id, 1, 9)
    assert [*r.emitted_ids, *(await router.ends(r.request_id, 1))] == whole(asked("x", tokens=30))


async def test_a_cancel_after_the_grant_ends_it_on_both_sides(make: Make) -> None:
    world = make()
    source, target = await world.replica("a"), await world.replica("b")
    router = await world.router(source, target)
    r = await router.runs(asked("x"), source)
    index = await router.frozen(r.request_id, source, target.entry)
    assert index is not None
    router.links["b"].grant(r.request_id, 1, index)
    router.links["b"].abort(r.request_id, 1)
    router.links["a"].release(r.request_id, 0)
    await source.emptied()
    await target.emptied()
    assert not router.ears.ends


async def test_an_attempt_that_a_later_one_has_replaced_is_not_taken(make: Make) -> None:
    world = make()
    target = await world.replica("b")
    router, wire = await world.router(target), await world.peer(target)
    await bring(wire, r := cut(asked("x", tokens=200), 9))
    await router.runs(r, target, attempt=2)
    router.links["b"].grant(r.request_id, 1, 9)
    assert await router.ears.off("x", 1) == "a later attempt is here"
    await router.ears.until(lambda: (r.request_id, 2) in router.ears.ends)
    assert [*r.emitted_ids, *router.ears.told("x", 2)] == whole(asked("x", tokens=200))


async def test_nothing_is_held_for_moves_beyond_what_the_engine_may_hold(make: Make) -> None:
    world = make()
    target = await world.replica("b", max_held=6)
    wire = await world.peer(target)
    for n in range(8):
        wire.send(begin(f"x{n}", blocks=1))
    answers = {message.request_id: message.refusal for message in [await wire.hears() for _ in range(8)]}
    assert [answers[RequestId(f"x{n}")] for n in range(8)] == [""] * 6 + [ImportRefusal.FULL] * 2
    wire.link.abort("gone")


# --- ahead of the grant ---


async def made_ahead(target: Replica, tokens: int = 1) -> None:
    """Wait until so many have been made of what is not granted yet."""
    await until(lambda: any(len(c.made) >= tokens for c in target.server._coming._coming.values()))


@pytest.mark.parametrize("granted", ["after the state", "before the state", "long after it has begun"])
async def test_a_pause_spans_two_steps_of_the_target_at_most_however_late_the_grant(make: Make, granted: str) -> None:
    """The one that runs when the state comes, and its own."""
    world = make()
    target = await world.replica("b")
    router, wire = await world.router(target), await world.peer(target)
    other = await router.runs(asked("other", tokens=900), target)
    r = cut(asked("x", tokens=60), 9)
    data = kv(r, state_of(r).computed_tokens)
    wire.send(begin("x"), MoveBlocks(r.request_id, 1, 0, memoryview(data)))
    assert [await wire.hears(), await wire.hears()] == [answered("x")] * 2
    coming = target.server._coming
    made = await target.hold()
    if granted == "before the state":
        router.links["b"].grant(r.request_id, 1, 9)
        await until(lambda: [c.grant for c in coming._coming.values()] != [None])
    wire.send(MoveState(1, state_of(r)))
    if granted == "long after it has begun":
        await until(lambda: coming.runs)
        target.steps.set()
        await made_ahead(target, tokens=3)
        await target.hold()
        router.links["b"].grant(r.request_id, 1, 9)
    elif granted == "after the state":
        router.links["b"].grant(r.request_id, 1, 9)
    await until(lambda: not len(coming))
    target.steps.set()
    await router.tells(r.request_id, 1, tokens=1)
    tokens, steps = router.ears.first_told[r.request_id, 1]
    assert steps - tokens == made + 1, "each step from the second on has given it a token"
    assert tokens >= 3 if granted == "long after it has begun" else tokens == 1
    assert [*r.emitted_ids, *(await router.ends(r.request_id, 1))] == whole(asked("x", tokens=60))
    router.links["b"].abort(other.request_id, 0)


@pytest.mark.parametrize(
    "how",
    [
        "its source calls it off",
        "its router gives it up",
        "its router goes",
        "the replica leaves",
        "nobody grants it",
        "it is granted from another token on",
    ],
)
async def test_what_has_run_ahead_and_is_not_granted_is_ended_and_nothing_of_it_told(make: Make, how: str) -> None:
    world = make(move_expiry_s=0.2) if how == "nobody grants it" else make()
    target = await world.replica("b", step_s=0.003)  # time for a word to it
    router, wire = await world.router(target), await world.peer(target)
    r = cut(asked("x", tokens=900), 9)
    await bring(wire, r)
    await made_ahead(target)
    match how:
        case "its source calls it off":
            wire.send(MoveAbort(r.request_id, 1))
        case "its router gives it up":
            router.links["b"].abort(r.request_id, 1)
        case "its router goes":
            await router.leave()
        case "the replica leaves":
            target.server.hand_back()
        case "it is granted from another token on":
            router.links["b"].grant(r.request_id, 1, 8)
            await router.ears.off("x", 1)
        case "nobody grants it":
            await target.hold()
            await until(lambda: not len(target.server._coming))
            target.steps.set()
    await target.emptied()
    assert not router.ears.tokens
    assert not router.ears.ends
    assert target.runner.progress().load.steps_total < 600, "it has not been left to run to its end"


async def test_what_ends_before_it_is_granted_is_told_whole_with_its_end(make: Make) -> None:
    world = make()
    target = await world.replica("b")
    router, wire = await world.router(target), await world.peer(target)
    r = cut(asked("x", tokens=12), 9)
    await bring(wire, r)
    await made_ahead(target, tokens=3)
    assert not router.ears.tokens
    router.links["b"].grant(r.request_id, 1, 9)
    await router.ears.notice("x", 1, MoveStage.TAKEN)
    assert [*r.emitted_ids, *(await router.ends(r.request_id, 1))] == whole(asked("x", tokens=12))


async def test_a_preemption_before_the_grant_is_told_after_it(make: Make) -> None:
    world = make()
    target = await world.replica("b", blocks=32, max_model_len=128)
    router, wire = await world.router(target), await world.peer(target)
    r = cut(asked("x", tokens=60), 9)
    await bring(wire, r)
    await made_ahead(target)
    urgent = msgspec.structs.replace(asked("urgent", prompt=100, tokens=20), priority=10)
    await router.runs(urgent, target, tokens=1)
    assert not router.ears.preempted
    router.links["b"].grant(r.request_id, 1, 9)
    assert [*r.emitted_ids, *(await router.ends(r.request_id, 1))] == whole(asked("x", tokens=60))
    assert [(p.request_id, p.attempt) for p in router.ears.preempted] == [("x", 1)]


@pytest.mark.parametrize(
    "why", ["its router is not here", "a suspect is tried alone", "a later attempt is here", "the replica drains"]
)
async def test_it_is_not_begun_ahead_where_it_may_not_be_granted(make: Make, why: str) -> None:
    world = make(move_expiry_s=0.2)
    target = await world.replica("b")
    router, wire = await world.router(target), await world.peer(target)
    r = cut(asked("x"), 9)
    data = kv(r, state_of(r).computed_tokens)
    owner = RouterId("router-9") if why == "its router is not here" else ME
    wire.send(begin("x", router=owner), MoveBlocks(r.request_id, 1, 0, memoryview(data)))
    assert [await wire.hears(), await wire.hears()] == [answered("x")] * 2
    match why:
        case "a suspect is tried alone":
            router.links["b"].add(asked("suspect", tokens=900), 0, trial=Trial.ALONE, trial_tokens=900)
            await router.tells(RequestId("suspect"), 0, tokens=1)
        case "a later attempt is here":
            await router.runs(r, target, attempt=2)
        case "the replica drains":
            target.server.take_work(False)
    # What is refused is so after the state has been heard.
    wire.send(MoveState(1, state_of(r)), MoveBlocks(RequestId("ghost"), 1, 0, memoryview(bytes(BLOCK_BYTES))))
    assert await wire.hears() == answered("ghost", ImportRefusal.UNKNOWN)
    assert len(target.server._coming) == 1
    assert not target.server._coming.runs
    router.links["b"].abort(RequestId("suspect"), 0)
    router.links["b"].abort(r.request_id, 2)
    await target.emptied()


async def test_beside_what_has_begun_ahead_no_suspect_is_tried_alone(make: Make) -> None:
    world = make()
    target = await world.replica("b", step_s=0.003)
    router, wire = await world.router(target), await world.peer(target)
    await bring(wire, r := cut(asked("x", tokens=900), 9))
    await made_ahead(target)
    router.links["b"].add(asked("suspect"), 0, trial=Trial.ALONE, trial_tokens=3)
    await router.ears.until(lambda: router.ears.refusals)
    assert router.ears.refusals == [Refusal(RequestId("suspect"), 0, RefusalReason.FULL)]
    router.links["b"].abort(r.request_id, 1)


async def test_what_the_engine_was_asked_too_much_to_begin_ahead_is_begun_with_its_grant(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make()
    target = await world.replica("b")
    router, wire = await world.router(target), await world.peer(target)
    with monkeypatch.context() as patched:
        patched.setattr(target.runner.moves, "import_commit", busy)
        await bring(wire, r := cut(asked("x", tokens=60), 9))
        await until(lambda: target.server._coming.runs)
    router.links["b"].grant(r.request_id, 1, 9)
    assert [*r.emitted_ids, *(await router.ends(r.request_id, 1))] == whole(asked("x", tokens=60))


# --- what must not be said ---


async def test_blocks_that_are_not_whole_or_leave_a_gap_or_belong_to_nothing_are_refused(make: Make) -> None:
    world = make()
    target = await world.replica("b")
    wire = await world.peer(target)

    async def refused(attempt: int, first: int, size: int) -> str:
        wire.send(MoveBlocks(RequestId("x"), attempt, first, memoryview(bytes(size))))
        answer = await wire.hears()
        assert isinstance(answer, MoveAnswer)
        return answer.refusal

    assert await refused(1, 0, BLOCK_BYTES) == ImportRefusal.UNKNOWN
    wire.send(begin("x"))
    assert await wire.hears() == answered("x")
    assert await refused(1, 0, BLOCK_BYTES - 1) == ImportRefusal.MISFIT
    assert await refused(1, 0, 0) == ImportRefusal.MISFIT
    assert await refused(1, 1, BLOCK_BYTES) == ImportRefusal.MISFIT
    assert await refused(2, 0, BLOCK_BYTES) == ImportRefusal.UNKNOWN
    assert await refused(1, 0, 600 * BLOCK_BYTES) == ImportRefusal.NO_ROOM
    assert await refused(1, 0, BLOCK_BYTES) == ""
    wire.send(MoveAbort(RequestId("x"), 1), MoveAbort(RequestId("x"), 1), MoveAbort(RequestId("ghost"), 9))


async def test_one_replica_cannot_add_to_or_end_what_another_brings(make: Make) -> None:
    world = make()
    target = await world.replica("b")
    router, wire, other = await world.router(target), await world.peer(target), await world.peer(target)
    wire.send(begin("x"))
    assert await wire.hears() == answered("x")
    other.send(
        begin("x"), MoveAbort(RequestId("x"), 1), MoveBlocks(RequestId("x"), 1, 0, memoryview(bytes(BLOCK_BYTES)))
    )
    assert await other.hears() == answered("x", ImportRefusal.KNOWN)
    assert await other.hears() == answered("x", ImportRefusal.UNKNOWN)
    r = cut(asked("x", tokens=30), 9)
    wire.send(MoveBlocks(r.request_id, 1, 0, memoryview(kv(r, state_of(r).computed_tokens))), MoveState(1, state_of(r)))
    assert await wire.hears() == answered("x")
    router.links["b"].grant(r.request_id, 1, 9)
    assert [*r.emitted_ids, *(await router.ends(r.request_id, 1))] == whole(asked("x", tokens=30))


async def test_a_state_that_can_never_run_ends_with_an_error_to_its_router(make: Make) -> None:
    world = make()
    target = await world.replica("b")
    router, wire = await world.router(target), await world.peer(target)
    bad = msgspec.structs.replace(asked("x"), prompt_ids=(10**6,))
    wire.send(begin("x"), MoveState(1, EngineState(request=bad, computed_tokens=10**9, kv_format="arithmetic")))
    assert await wire.hears() == answered("x")
    router.links["b"].grant(RequestId("x"), 1, 0)
    await router.ears.until(lambda: router.ears.ends)
    assert router.ears.ends == {(RequestId("x"), 1): "error"}


async def test_a_source_that_does_not_wait_for_answers_loses_its_link(make: Make) -> None:
    world = make()
    target = await world.replica("b", step_s=0.003)
    router, wire = await world.router(target), await world.peer(target)
    await router.runs(asked("busy", tokens=900), target)
    target.steps.clear()
    wire.send(begin("x"), *[MoveBlocks(RequestId("x"), 1, 0, memoryview(bytes(BLOCK_BYTES)))] * 8)
    await asyncio.wait_for(wire.why, PATIENCE_S)
    target.steps.set()
    router.links["b"].abort(RequestId("busy"), 0)


@pytest.mark.parametrize("what", ["a frame over the limit", "no message", "an add", "a grant"])
async def test_a_replica_that_says_what_it_must_not_loses_its_link_and_all_that_it_brought(
    make: Make, what: str
) -> None:
    world = make()
    target = await world.replica("b")
    wire = await world.peer(target)
    wire.send(begin("x"))
    assert await wire.hears() == answered("x")
    assert wire.link._transport is not None
    match what:
        case "a frame over the limit":
            wire.link._transport.write((2**30).to_bytes(4, "big"))
        case "no message":
            wire.link._transport.write(b"\0\0\0\1\xc0")
        case "an add":
            wire.send(Add(asked("y"), 0, 1))
        case _:
            wire.send(Grant(RequestId("x"), 1, 0, 1))
    await asyncio.wait_for(wire.why, PATIENCE_S)
    await target.emptied()


async def test_a_router_that_says_what_a_replica_does_loses_its_link(make: Make) -> None:
    world = make()
    target = await world.replica("b")
    wire = await world.peer(target, role="router")
    wire.send(begin("x"))
    await asyncio.wait_for(wire.why, PATIENCE_S)
    assert len(target.server._coming) == 0
