"""Replicas' sides of moves against whoever may speak to them: routers that say anything at any time, and peers that send
what no replica of ours would.

Replicas and the controller are processes of their own. Routers and peers are the test: links as production makes them, over
which it says what it likes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from cluster.config import TransportConfig
from cluster.messages import (
    Add,
    CallOff,
    FromPeer,
    Grant,
    Hello,
    Message,
    Move,
    MoveAbort,
    MoveAnswer,
    MoveBegin,
    MoveBlocks,
    MoveNotice,
    MoveStage,
    MoveState,
    Release,
    RosterEntry,
    StepFrame,
    ToPeer,
    ToRouter,
)
from cluster.model import ModelFolder
from cluster.ports import NO_KV, ImportRefusal
from cluster.types import (
    EngineLoad,
    EngineState,
    FinishReason,
    Generation,
    ReplicaId,
    Request,
    RequestId,
    RouterId,
    Sampling,
)
from deployments.settings import Profile
from deployments.transport import Acceptor, Identity, Link, TransportError, connect
from tests.e2e.test_faults import PROMPT
from tests.e2e.test_move_faults import is_idle
from tests.line import until
from tests.processes import Cluster, running_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

T = TypeVar("T")

BLOCK_TOKENS = 16
SECRET = b"0123456789abcdef" * 4
PATIENCE_S = 30.0
SETTLED_S = 10.0
"""Whatever becomes of a move, nothing of it is kept anywhere for longer."""
PROFILE = Profile.model_validate(
    {"engine": {"slots": 8, "step_token_budget": 256, "blocks": 256, "max_model_len": 1024, "max_held": 64}}
)
STEP_S = 0.01
MANY_TOKENS = 500
"""An attempt of so many is still there, on a busy machine too, when all that a test does with it meanwhile is done."""
IMPATIENT = Profile.model_validate(PROFILE.model_dump() | {"transport": {"move_answer_s": 0.5}})
"""A move whose target says nothing is off long before its attempt would end."""
FEW_BLOCKS = 64
"""They fit in a frame, and not in a pool that has so many left of which others hold some."""


def request(name: str, tokens: int = 200, prompt_tokens: int = 200, **changes: Any) -> Request:
    prompt = tuple(itertools.islice(itertools.cycle(PROMPT), prompt_tokens))
    sampling = Sampling(max_tokens=tokens, seed=7, ignore_eos=True)
    return msgspec.structs.replace(Request(RequestId(name), "t", 0, "standard", 1.0, prompt, sampling), **changes)


@dataclass
class Spoken:
    """One link to a replica."""

    entry: RosterEntry
    link: Link
    handler: Handler

    def send(self, message: Message) -> None:
        self.link.send(message)

    async def hear(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                assert self.handler.reason is None, f"the link ended: {self.handler.reason}"
                self.handler.changed.clear()
                await self.handler.changed.wait()

    async def answered(self) -> None:
        await self.hear(lambda: self.handler.answers)

    async def ended(self, name: str, attempt: int) -> None:
        await self.hear(lambda: (name, attempt) in self.handler.ended)

    async def closed(self) -> str:
        await self.hear(lambda: self.handler.reason is not None)
        assert self.handler.reason is not None
        return self.handler.reason


@dataclass
class Handler:
    """LinkHandler: keeps what it hears."""

    tokens: dict[tuple[str, int], dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    """Of each attempt, by index."""
    ended: dict[tuple[str, int], str] = field(default_factory=dict)
    notices: list[MoveNotice] = field(default_factory=list)
    refusals: list[tuple[str, int, str]] = field(default_factory=list)
    answers: list[MoveAnswer] = field(default_factory=list)
    load: EngineLoad | None = None
    reason: str | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def message(self, message: StepFrame | MoveAnswer) -> None:
        if isinstance(message, MoveAnswer):
            self.answers.append(message)
        else:
            self.load = message.report.load
            for delta in message.deltas:
                key = (delta.request_id, delta.attempt)
                for index, token in enumerate(delta.token_ids, delta.index):
                    assert self.tokens[key].setdefault(index, token) == token, "no token is told twice and otherwise"
                if delta.finish is not None:
                    self.ended[key] = delta.finish
            self.notices.extend(message.moves)
            self.refusals.extend((r.request_id, r.attempt, r.reason) for r in message.refusals)
        self.changed.set()

    def writable(self) -> None:
        pass

    def closed(self, reason: str) -> None:
        self.reason = reason
        self.changed.set()


class Replicas:
    """Of a running cluster, and links to them."""

    def __init__(self, cluster: Cluster, entries: list[RosterEntry], model_hash: str) -> None:
        self.cluster = cluster
        self.entries = entries
        self.model_hash = model_hash

    async def link(self, entry: RosterEntry, role: str, name: str) -> Spoken:
        handler = Handler()
        identity = Identity(role, name, SECRET, self.model_hash, Generation(1, name))
        decode = msgspec.msgpack.Decoder(FromPeer if role == "replica" else ToRouter).decode
        link = await connect(entry.host, entry.port, identity, decode, lambda *_: handler, TransportConfig())
        return Spoken(entry, link, handler)

    async def loads(self) -> list[dict[str, Any]]:
        told = (await self.cluster.client.get("/status")).json()["cluster"]
        return [one["report"]["load"] for one in told["replicas"]]

    async def nothing_is_kept(self) -> None:
        """Nor has anything been lost: each engine takes its books for right, which it checks whenever it is idle."""

        await until(self.loads, lambda loads: all(map(is_idle, loads)), within_s=SETTLED_S)


def entry_of(told: dict[str, Any]) -> RosterEntry:
    return RosterEntry(**told | {"generation": Generation(**told["generation"])})


@contextlib.asynccontextmanager
async def running(model: ModelFolder, folder: Path, profile: Profile = PROFILE) -> AsyncIterator[Replicas]:
    async with running_cluster(model, profile, folder, step_s=STEP_S) as cluster:
        told = (await cluster.client.get("/status")).json()["cluster"]
        entries = [entry_of(one["entry"]) for one in told["replicas"]]
        yield Replicas(cluster, sorted(entries, key=lambda entry: entry.replica_id), model.identity)


class Mover:
    """A router that moves attempts, step by step as the test wants it."""

    def __init__(self, name: str, source: Spoken, target: Spoken) -> None:
        self.router_id = RouterId(name)
        self.source = source
        self.target = target
        self._sequence = itertools.count(1)

    @classmethod
    async def of(cls, replicas: Replicas, name: str) -> Mover:
        source, target = [await replicas.link(entry, "router", name) for entry in replicas.entries]
        return cls(name, source, target)

    def add(self, of: Request, attempt: int = 1) -> None:
        self.source.send(Add(of, attempt, next(self._sequence)))

    def grant(self, name: str, attempt: int, index: int) -> None:
        self.target.send(Grant(RequestId(name), attempt, index, next(self._sequence)))

    async def has(self, side: Spoken, name: str, attempt: int, tokens: int) -> None:
        await side.hear(lambda: len(side.handler.tokens[name, attempt]) >= tokens)

    async def noticed(self, side: Spoken, name: str, attempt: int, *stages: MoveStage) -> MoveNotice:
        def found() -> list[MoveNotice]:
            return [
                n for n in side.handler.notices if (n.request_id, n.attempt) == (name, attempt) and n.stage in stages
            ]

        await side.hear(found)
        return found()[0]

    async def move(self, name: str, attempt: int) -> int:
        """A whole move, as a router makes it; returns at which token."""
        self.source.send(Move(RequestId(name), attempt, attempt + 1, self.target.entry))
        frozen = await self.noticed(self.source, name, attempt, MoveStage.FROZEN, MoveStage.OFF)
        assert frozen.stage is MoveStage.FROZEN, frozen.why
        assert frozen.index == 1 + max(self.source.handler.tokens[name, attempt]), "all that it made has been told"
        self.grant(name, attempt + 1, frozen.index)
        taken = await self.noticed(self.target, name, attempt + 1, MoveStage.TAKEN, MoveStage.OFF)
        assert taken.stage is MoveStage.TAKEN, taken.why
        self.source.send(Release(RequestId(name), attempt))
        return frozen.index

    def turn(self) -> None:
        self.source, self.target = self.target, self.source


def whole(*parts: dict[int, int]) -> list[int]:
    """Tokens of attempts that follow one another. No index may be there twice, and none may be missing."""
    assert sum(map(len, parts)) == len(set().union(*parts)), "no token comes of two attempts"
    merged = {index: token for part in parts for index, token in part.items()}
    assert sorted(merged) == list(range(len(merged)))
    return [merged[index] for index in sorted(merged)]


async def test_an_attempt_that_moves_there_and_back_says_what_it_would_have_said(
    tiny_model: ModelFolder, tmp_path: Path
) -> None:
    async with running(tiny_model, tmp_path) as replicas:
        mover = await Mover.of(replicas, "router-a")
        mover.add(request("undisturbed", MANY_TOKENS))
        await mover.source.hear(lambda: mover.source.handler.ended)
        expected = whole(mover.source.handler.tokens["undisturbed", 1])
        assert len(expected) == MANY_TOKENS
        mover.add(request("moved", MANY_TOKENS))
        parts = []
        for attempt in range(1, 9):
            await mover.has(mover.source, "moved", attempt, 15)
            await mover.move("moved", attempt)
            parts.append(mover.source.handler.tokens["moved", attempt])
            mover.turn()
        await mover.source.hear(lambda: mover.source.handler.ended.get(("moved", 9)))
        assert whole(*parts, mover.source.handler.tokens["moved", 9]) == expected
        await replicas.nothing_is_kept()
        computed = sum(load["prefill_tokens_total"] for load in await replicas.loads())
        print(f"[moves] {computed} tokens of prompts computed")


async def test_two_routers_that_move_at_once_from_one_replica_lose_nothing_and_neither_may_grant_what_is_the_others(
    tiny_model: ModelFolder, tmp_path: Path
) -> None:
    async with running(tiny_model, tmp_path) as replicas:
        movers = [await Mover.of(replicas, name) for name in ("router-a", "router-b")]
        movers[0].add(request("undisturbed"))
        await movers[0].source.hear(lambda: movers[0].source.handler.ended)
        expected = whole(movers[0].source.handler.tokens["undisturbed", 1])
        names = [(mover, f"{mover.router_id}-{number}") for mover in movers for number in range(4)]
        for mover, name in names:
            mover.add(request(name))
        await asyncio.gather(*(mover.has(mover.source, name, 1, 10) for mover, name in names))
        stranger = movers[1]
        stolen = asyncio.create_task(movers[0].noticed(movers[0].source, "router-a-0", 1, MoveStage.FROZEN))
        movers[0].source.send(Move(RequestId("router-a-0"), 1, 2, movers[0].target.entry))
        frozen = await stolen
        stranger.grant("router-a-0", 2, frozen.index)
        assert (await stranger.noticed(stranger.target, "router-a-0", 2, MoveStage.OFF)).why
        assert not stranger.target.handler.tokens["router-a-0", 2]
        stranger.source.send(Release(RequestId("router-a-0"), 1))
        stranger.source.send(CallOff(RequestId("router-a-0"), 1))
        movers[0].grant("router-a-0", 2, frozen.index)
        await movers[0].noticed(movers[0].target, "router-a-0", 2, MoveStage.TAKEN)
        movers[0].source.send(Release(RequestId("router-a-0"), 1))
        await asyncio.gather(*(mover.move(name, 1) for mover, name in names if name != "router-a-0"))
        for mover, name in names:
            await mover.target.ended(name, 2)
            assert (
                whole(*(side.handler.tokens[name, k] for side, k in ((mover.source, 1), (mover.target, 2)))) == expected
            )
        await replicas.nothing_is_kept()


# --- routers that say what does not fit ---


async def test_orders_that_fit_nothing_are_answered_or_ignored_and_the_attempt_goes_on(
    tiny_model: ModelFolder, tmp_path: Path
) -> None:
    async with running(tiny_model, tmp_path) as replicas:
        mover = await Mover.of(replicas, "router-a")
        source, target = mover.source, mover.target
        mover.add(request("undisturbed", MANY_TOKENS))
        await source.hear(lambda: source.handler.ended)
        expected = whole(source.handler.tokens["undisturbed", 1])
        name = RequestId("moved")
        mover.add(request(name, MANY_TOKENS))
        await mover.has(source, name, 1, 5)
        nobody = msgspec.structs.replace(target.entry, port=1)
        former = msgspec.structs.replace(target.entry, generation=Generation(0, "former"))
        for entry in (source.entry, nobody, former):
            source.handler.notices.clear()
            source.send(Move(name, 1, 2, entry))
            assert (await mover.noticed(source, name, 1, MoveStage.OFF)).why, entry
        source.send(Move(name, 9, 10, target.entry))
        assert (await mover.noticed(source, name, 9, MoveStage.OFF)).why
        source.handler.notices.clear()
        mover.grant(name, 2, 5)
        assert (await mover.noticed(target, name, 2, MoveStage.OFF)).why
        for _ in range(3):
            source.send(CallOff(name, 1))
            source.send(CallOff(RequestId("never"), 1))
            target.send(Release(name, 2))
        for called_off in range(3):
            source.handler.notices.clear()
            source.send(Move(name, 1, 2 + called_off, target.entry))
            await mover.noticed(source, name, 1, MoveStage.FROZEN)
            source.send(CallOff(name, 1))
            await mover.noticed(source, name, 1, MoveStage.OFF)
        await source.hear(lambda: (name, 1) in source.handler.ended)
        assert whole(source.handler.tokens[name, 1]) == expected
        await replicas.nothing_is_kept()


async def test_repeats_of_every_order_of_a_move_change_nothing(tiny_model: ModelFolder, tmp_path: Path) -> None:
    async with running(tiny_model, tmp_path) as replicas:
        mover = await Mover.of(replicas, "router-a")
        source, target = mover.source, mover.target
        mover.add(request("undisturbed"))
        await source.hear(lambda: source.handler.ended)
        expected = whole(source.handler.tokens["undisturbed", 1])
        name = RequestId("moved")
        mover.add(request(name))
        await mover.has(source, name, 1, 20)
        for _ in range(3):
            source.send(Move(name, 1, 2, target.entry))
        index = (await mover.noticed(source, name, 1, MoveStage.FROZEN)).index
        for _ in range(3):
            mover.grant(name, 2, index)
        await mover.noticed(target, name, 2, MoveStage.TAKEN)
        for _ in range(3):
            mover.grant(name, 2, index)
            source.send(Release(name, 1))
            source.send(CallOff(name, 1))
        await target.hear(lambda: (name, 2) in target.handler.ended)
        assert whole(source.handler.tokens[name, 1], target.handler.tokens[name, 2]) == expected
        assert [n.stage for n in source.handler.notices] == [MoveStage.FROZEN]
        assert [n.stage for n in target.handler.notices] == [MoveStage.TAKEN]
        await replicas.nothing_is_kept()


async def test_a_router_that_leaves_at_any_stage_of_a_move_leaves_nothing_behind(
    tiny_model: ModelFolder, tmp_path: Path
) -> None:
    async with running(tiny_model, tmp_path) as replicas:
        for stage in ("ordered", "frozen", "granted", "taken"):
            mover = await Mover.of(replicas, f"router-{stage}")
            mover.add(request(stage, tokens=800))
            await mover.has(mover.source, stage, 1, 10)
            mover.source.send(Move(RequestId(stage), 1, 2, mover.target.entry))
            if stage != "ordered":
                index = (await mover.noticed(mover.source, stage, 1, MoveStage.FROZEN)).index
            if stage in ("granted", "taken"):
                mover.grant(stage, 2, index)
            if stage == "taken":
                await mover.noticed(mover.target, stage, 2, MoveStage.TAKEN)
            mover.source.link.close("gone")
            mover.target.link.close("gone")
            await replicas.nothing_is_kept()


async def test_a_move_that_its_router_forgets_is_over_by_itself_and_the_attempt_goes_on_where_it_was(
    tiny_model: ModelFolder, tmp_path: Path
) -> None:
    async with running(tiny_model, tmp_path) as replicas:
        mover = await Mover.of(replicas, "router-a")
        source, target = mover.source, mover.target
        mover.add(request("undisturbed"))
        await source.hear(lambda: source.handler.ended)
        expected = whole(source.handler.tokens["undisturbed", 1])
        name = RequestId("forgotten")
        mover.add(request(name))
        await mover.has(source, name, 1, 20)
        source.send(Move(name, 1, 2, target.entry))
        index = (await mover.noticed(source, name, 1, MoveStage.FROZEN)).index
        assert (await mover.noticed(source, name, 1, MoveStage.OFF)).why
        await source.hear(lambda: (name, 1) in source.handler.ended)
        assert whole(source.handler.tokens[name, 1]) == expected
        mover.grant(name, 2, index)
        assert (await mover.noticed(target, name, 2, MoveStage.OFF)).why
        await replicas.nothing_is_kept()


# --- targets that are none ---


class PlayedTarget:
    """A replica as far as moves can tell: what `answer` says of each message that must be answered; None says nothing."""

    def __init__(self, answer: Callable[[MoveBegin | MoveBlocks], str | None] = lambda _: "") -> None:
        self.answer = answer
        self.heard: list[ToPeer] = []
        self.links: list[Link] = []
        self.changed = asyncio.Event()

    @classmethod
    @contextlib.asynccontextmanager
    async def listening(
        cls, model_hash: str, answer: Callable[[MoveBegin | MoveBlocks], str | None] = lambda _: ""
    ) -> AsyncIterator[tuple[PlayedTarget, RosterEntry]]:
        played, generation = cls(answer), Generation(1, "played")
        acceptor = Acceptor(
            lambda _: Identity("replica", "played", SECRET, model_hash, generation),
            frozenset({"replica"}),
            msgspec.msgpack.Decoder(ToPeer).decode,
            played._accept,
            TransportConfig(),
        )
        host, port = await acceptor.listen("127.0.0.1", 0, SECRET)
        try:
            yield played, RosterEntry(ReplicaId("played"), generation, host, port, "tiny-llama")
        finally:
            await acceptor.close()

    def _accept(self, link: Link, _: Hello) -> PlayedLink:
        self.links.append(link)
        return PlayedLink(self, link)

    async def hear(self, kind: type[T]) -> T:
        """The first message of that kind."""
        async with asyncio.timeout(PATIENCE_S):
            while not (found := [message for message in self.heard if isinstance(message, kind)]):
                self.changed.clear()
                await self.changed.wait()
        return found[0]


class PlayedLink:
    """LinkHandler of a played target."""

    def __init__(self, target: PlayedTarget, link: Link) -> None:
        self._target = target
        self._link = link

    def message(self, message: ToPeer) -> None:
        self._target.heard.append(message)
        self._target.changed.set()
        if isinstance(message, MoveBegin | MoveBlocks) and (refusal := self._target.answer(message)) is not None:
            self._link.send(MoveAnswer(message.request_id, message.attempt, refusal))

    def writable(self) -> None:
        pass

    def closed(self, reason: str) -> None:
        pass


def silent(message: MoveBegin | MoveBlocks) -> str | None:
    return None


def silent_to_blocks(message: MoveBegin | MoveBlocks) -> str | None:
    return "" if isinstance(message, MoveBegin) else None


def refusing(message: MoveBegin | MoveBlocks) -> str | None:
    return ImportRefusal.FULL


def refusing_blocks(message: MoveBegin | MoveBlocks) -> str | None:
    return "" if isinstance(message, MoveBegin) else ImportRefusal.NO_ROOM


@pytest.mark.parametrize(
    "answer", [silent, silent_to_blocks, refusing, refusing_blocks], ids=lambda answer: answer.__name__
)
async def test_a_target_that_is_silent_or_refuses_before_the_freeze_leaves_the_attempt_where_it_is(
    tiny_model: ModelFolder, tmp_path: Path, answer: Callable[[MoveBegin | MoveBlocks], str | None]
) -> None:
    async with running(tiny_model, tmp_path, IMPATIENT) as replicas:
        mover = await Mover.of(replicas, "router-a")
        source = mover.source
        mover.add(request("undisturbed", MANY_TOKENS))
        await source.hear(lambda: source.handler.ended)
        mover.add(request("stays", MANY_TOKENS))
        await mover.has(source, "stays", 1, 5)
        async with PlayedTarget.listening(tiny_model.identity, answer) as (played, entry):
            source.send(Move(RequestId("stays"), 1, 2, entry))
            assert (await mover.noticed(source, "stays", 1, MoveStage.OFF, MoveStage.FROZEN)).stage is MoveStage.OFF
            assert await played.hear(MoveAbort) == MoveAbort(RequestId("stays"), 2)
            await source.hear(lambda: ("stays", 1) in source.handler.ended)
        assert whole(source.handler.tokens["stays", 1]) == whole(source.handler.tokens["undisturbed", 1])
        await replicas.nothing_is_kept()


@dataclass
class Travelled:
    """A request as it leaves a replica."""

    state: EngineState
    data: bytes
    block_bytes: int


async def travelled(replicas: Replicas) -> Travelled:
    mover = await Mover.of(replicas, "router-s")
    mover.add(request("state"))
    await mover.has(mover.source, "state", 1, 5)
    async with PlayedTarget.listening(replicas.model_hash) as (played, entry):
        mover.source.send(Move(RequestId("state"), 1, 2, entry))
        state = (await played.hear(MoveState)).state
        chunks = {message.first: message.data for message in played.heard if isinstance(message, MoveBlocks)}
    mover.source.link.close("done")
    mover.target.link.close("done")
    data = b"".join(bytes(chunks[first]) for first in sorted(chunks))
    return Travelled(state, data, len(data) // -(-state.computed_tokens // BLOCK_TOKENS))


# --- peers that are none ---


@contextlib.asynccontextmanager
async def bystander(replicas: Replicas) -> AsyncIterator[Spoken]:
    """A request that runs on the replica that is attacked, and ends whole whatever comes. Yields its router's link."""
    mover = await Mover.of(replicas, "router-b")
    target = mover.target
    mover.turn()
    mover.add(request("undisturbed", tokens=300))
    await target.hear(lambda: ("undisturbed", 1) in target.handler.ended)
    mover.add(request("bystander", tokens=300))
    await mover.has(target, "bystander", 1, 5)
    yield target
    await target.hear(lambda: ("bystander", 1) in target.handler.ended)
    assert whole(target.handler.tokens["bystander", 1]) == whole(target.handler.tokens["undisturbed", 1])


MISFITS: dict[str, bytes | Message] = {
    "no message": os.urandom(64),
    "a router's message": Add(request("intruder"), 1, 1),
    "an unknown one": msgspec.msgpack.encode(["MoveEverything", 1]),
    "too few fields": msgspec.msgpack.encode(["MoveBegin", "x"]),
    "wrong types": msgspec.msgpack.encode(["MoveBegin", "x", "one", "router-b", "", 0]),
    "a frame over the limit": b"",
}


async def test_a_peer_that_says_what_no_peer_says_loses_its_link_and_nobody_else_anything(
    tiny_model: ModelFolder, tmp_path: Path
) -> None:
    async with running(tiny_model, tmp_path) as replicas, bystander(replicas):
        attacked = replicas.entries[1]
        for what, sent in MISFITS.items():
            peer = await replicas.link(attacked, "replica", "stranger")
            peer.send(MoveBegin(RequestId(what), 1, RouterId("router-b"), NO_KV, 0))
            await peer.answered()
            if isinstance(sent, Message):
                peer.send(sent)
            else:
                transport = peer.link._transport
                assert transport is not None
                length = len(sent) or PROFILE.transport.max_frame_bytes + 1
                transport.write(length.to_bytes(4, "big") + sent)
            await peer.closed()
        router = await replicas.link(attacked, "router", "stranger")
        router.send(MoveBegin(RequestId("x"), 1, RouterId("stranger"), NO_KV, 0))
        await router.closed()
        with pytest.raises(TransportError, match="model"):
            await Replicas(replicas.cluster, replicas.entries, "other").link(attacked, "replica", "stranger")


async def test_messages_of_a_move_that_fit_nothing_are_refused_and_keep_nothing(
    tiny_model: ModelFolder, tmp_path: Path
) -> None:
    async with running(tiny_model, tmp_path) as replicas, bystander(replicas) as router:
        peer = await replicas.link(replicas.entries[1], "replica", "stranger")
        router_id, total = RouterId("router-b"), router.handler.load.blocks_total  # type: ignore[union-attr]
        taken = await travelled(replicas)

        async def answer(message: MoveBegin | MoveBlocks) -> str:
            peer.handler.answers.clear()
            peer.send(message)
            await peer.hear(lambda: peer.handler.answers)
            return peer.handler.answers[0].refusal

        def begin(attempt: int, kv_format: str = taken.state.kv_format, blocks: int = 1) -> MoveBegin:
            return MoveBegin(RequestId("x"), attempt, router_id, kv_format, blocks)

        def blocks(attempt: int, first: int, data: bytes) -> MoveBlocks:
            return MoveBlocks(RequestId("x"), attempt, first, memoryview(data))

        block = bytes(taken.data[: taken.block_bytes])
        assert await answer(blocks(1, 0, block)) == ImportRefusal.UNKNOWN
        assert await answer(begin(1, "another")) == ImportRefusal.KV_FORMAT
        assert await answer(begin(1, blocks=total + 1)) == ImportRefusal.NO_ROOM
        assert await answer(begin(1, blocks=2**53)) == ImportRefusal.NO_ROOM
        assert await answer(begin(1, blocks=0)) == ""
        assert await answer(begin(1)) == ImportRefusal.KNOWN
        for first, data in ((0, b""), (0, block[:-1]), (1, block), (2**53, block)):
            assert await answer(blocks(1, first, data)) == ImportRefusal.MISFIT
        assert await answer(blocks(1, 0, block)) == ""
        hog = RequestId("hog")
        assert await answer(MoveBegin(hog, 1, router_id, taken.state.kv_format, total - FEW_BLOCKS)) == ""
        assert await answer(blocks(1, 0, block * FEW_BLOCKS)) == ImportRefusal.NO_ROOM
        for name in (RequestId("x"), hog):
            peer.send(MoveAbort(name, 1))
        assert await answer(begin(2, NO_KV, 7)) == ""
        assert await answer(blocks(2, 0, block)) == ImportRefusal.MISFIT
        peer.send(MoveAbort(RequestId("never"), 7))
        peer.send(MoveState(7, taken.state))
        assert await answer(blocks(7, 0, block)) == ImportRefusal.UNKNOWN
        peer.link.close("gone")


async def test_a_peer_that_begins_moves_without_end_is_refused_beyond_what_may_be_held_and_nothing_is_kept(
    tiny_model: ModelFolder, tmp_path: Path
) -> None:
    most, asked = PROFILE.models[0].engine.max_held, 4 * PROFILE.models[0].engine.max_held
    async with running(tiny_model, tmp_path) as replicas, bystander(replicas):
        peer = await replicas.link(replicas.entries[1], "replica", "stranger")
        for number in range(asked):
            peer.send(MoveBegin(RequestId(f"x{number}"), 1, RouterId("router-b"), NO_KV, 0))
        await peer.hear(lambda: len(peer.handler.answers) == asked)
        taken = [answer for answer in peer.handler.answers if not answer.refusal]
        assert 0 < len(taken) < most, "the bystander is held too"
        assert {answer.refusal for answer in peer.handler.answers} == {"", ImportRefusal.FULL}

        async def one_more() -> str:
            peer.handler.answers.clear()
            peer.send(MoveBegin(RequestId("later"), 1, RouterId("router-b"), NO_KV, 0))
            await peer.answered()
            return peer.handler.answers[0].refusal

        # Nobody grants them, and the link stays. No load tells of a place that is kept.
        await until(one_more, "".__eq__, within_s=SETTLED_S)
        await replicas.nothing_is_kept()


async def test_a_state_that_can_never_run_ends_its_attempt_with_an_error_and_the_pool_is_whole(
    tiny_model: ModelFolder, tmp_path: Path
) -> None:
    async with running(tiny_model, tmp_path) as replicas, bystander(replicas) as router:
        peer = await replicas.link(replicas.entries[1], "replica", "stranger")
        whole_state = (await travelled(replicas)).state
        impossible: dict[str, dict[str, Any]] = {
            "ids beyond the vocabulary": {"prompt_ids": (10**6,)},
            "no prompt": {"prompt_ids": ()},
            "a prompt over the limit": {"prompt_ids": (5,) * 5000},
            "output beyond the vocabulary": {"emitted_ids": (10**6,) * 3},
        }
        for sequence, (name, changes) in enumerate(impossible.items(), 100):
            of = msgspec.structs.replace(whole_state.request, request_id=RequestId(name), **changes)
            peer.send(MoveBegin(of.request_id, 2, RouterId("router-b"), whole_state.kv_format, 3))
            peer.send(MoveState(2, msgspec.structs.replace(whole_state, request=of, computed_tokens=10**9)))
            router.send(Grant(of.request_id, 2, len(of.emitted_ids), sequence))
            await router.ended(name, 2)
            assert router.handler.ended[name, 2] == FinishReason.ERROR
        of = msgspec.structs.replace(whole_state.request, request_id=RequestId("fewer tokens than granted"))
        peer.send(MoveBegin(of.request_id, 2, RouterId("router-b"), whole_state.kv_format, 3))
        peer.send(MoveState(2, msgspec.structs.replace(whole_state, request=of)))
        router.send(Grant(of.request_id, 2, len(of.emitted_ids) + 1, 200))
        await router.hear(lambda: [n for n in router.handler.notices if n.request_id == of.request_id])
        assert router.handler.notices[-1].stage is MoveStage.OFF
