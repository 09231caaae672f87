"""An engine under test, whichever it is: an `EnginePort` that runs by itself, driven and heard through the port alone.

What holds at every result is checked at every result (`Driver.take`): the books of its load, that counters only rise,
that each token comes once and in order, that each end comes once, and whom a preemption was for.

Some engines stand still while a result is told, since they tell it between two steps: `stands_still`. There what the test
does after a result happens before the next step, so that every run is the same. Elsewhere a step or more may lie between.
"""

from __future__ import annotations

import queue
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec
import pytest

from cluster.config import EngineConfig, Order
from cluster.engine.prefix import extend, root
from cluster.ports import EnginePort, StepResult
from cluster.types import (
    EngineLoad,
    FinishReason,
    Preempted,
    PrefixChange,
    Refusal,
    Request,
    RequestId,
    Sampling,
    TokenLogprob,
)
from tests.conformance.engine_kit import Output, PlainModel, undisturbed

PATIENCE_S = 60.0
"""How long a test waits for an event that comes at once unless something is broken."""
LOGPROB_GAP = 1e-3
URGENT, LOW = 10, -10

CONFIG = EngineConfig(
    slots=4,
    step_token_budget=64,
    block_size_tokens=32,
    blocks=24,
    max_model_len=512,
    max_held=48,
    max_recomputes=2,
    host_blocks=0,
    ageing_tokens_per_s=4.0,
    longest_wait_s=60.0,
)
"""Small enough to be short of slots, blocks and budget with a few requests; what every engine here is started with."""

_COUNTERS = (
    "adds_total",
    "steps_total",
    "tokens_total",
    "preemptions_total",
    "urgent_blocked_total",
    "prefix_hit_tokens_total",
    "prefill_tokens_total",
    "padding_tokens_total",
)
_serial = count()


def request(
    label: str,
    *,
    prompt: int | tuple[int, ...] = 24,
    max_tokens: int = 24,
    priority: int = 0,
    arrived: float | None = None,
    emitted: tuple[int, ...] = (),
    tenant: str = "t",
    group: str = "",
    choice: int = 0,
    stated: int | None = None,
    **sampling: object,
) -> Request:
    """`prompt` is its ids, or a length to be filled with ids derived from the label that every tokenizer here has. Names
    are unique, arrivals rise, a second apart; all else follows from the arguments."""
    number = next(_serial)
    rng = random.Random(label)
    ids = prompt if isinstance(prompt, tuple) else tuple(rng.randrange(3, 400) for _ in range(prompt))
    base = Sampling(max_tokens=max_tokens, seed=rng.randrange(2**40), temperature=0.0, ignore_eos=True)
    return Request(
        request_id=RequestId(f"{label}-{number}"),
        tenant=tenant,
        priority=priority,
        priority_class="c",
        arrived_unix_s=1000.0 + number if arrived is None else arrived,
        prompt_ids=ids,
        emitted_ids=emitted,
        sampling=msgspec.structs.replace(base, **sampling),
        group_id=group,
        choice=choice,
        stated_output_tokens=stated,
    )


def low(label: str, **changes: Any) -> Request:
    return request(label, **{"priority": LOW, "max_tokens": 60, **changes})


@dataclass
class Reference:
    """What each request puts out alone. Knows no engine; remembers what it was asked, for several engines."""

    model: PlainModel
    undecided: int = 0
    _known: dict[tuple[object, ...], Output] = field(default_factory=dict)

    def output(self, r: Request, max_model_len: int = CONFIG.max_model_len) -> Output:
        """The whole, with what was emitted before."""
        key = (r.prompt_ids, r.sampling, r.choice, max_model_len)
        if key not in self._known:
            self._known[key] = undisturbed(r, max_model_len=max_model_len, model=self.model)
            self.undecided += self._known[key].undecided
            assert self.undecided <= 3 + len(self._known) / 20, "too much is not judged"
        return self._known[key]


@dataclass(frozen=True)
class Death:
    why: str


class BrokenCallbackError(Exception):
    """The listener's, on purpose."""


@dataclass
class Driver:
    port: EnginePort
    config: EngineConfig
    reference: Reference
    stands_still: bool = False
    kill: Callable[[], object] | None = None
    """Ends what computes, from outside."""

    outputs: dict[str, Output] = field(default_factory=dict)
    preempted: list[Preempted] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    load: EngineLoad | None = None
    first_step: dict[str, int] = field(default_factory=dict)
    """The engine's step that gave a request's first token."""
    held: set[bytes] = field(default_factory=set)
    """Hashes of the blocks in its prefix cache: the sum of all that it has told, since it began."""
    came_after_step: dict[str, int] = field(default_factory=dict)
    """The last of its steps at whose end it did not have the request."""

    def __post_init__(self) -> None:
        self._events: queue.Queue[StepResult | Death] = queue.Queue()
        self._requests: dict[str, Request] = {}
        self._attempts: dict[str, int] = {}
        self._sent = 0
        self._coming: dict[str, int] = {}
        """Number of each add that no load has counted yet."""
        self._live: dict[str, Request] = {}
        """Added, and its end not told."""
        self._aborts: set[str] = set()
        self._text_ended = False
        """Since it was last idle a stop string has ended a request."""
        self._go = threading.Semaphore(0)
        self._holding = False
        self._released = False
        self._broken = False

    # --- the engine's side ---

    def start(self) -> None:
        self.port.start(self._hear, lambda why: self._events.put(Death(why)))

    def _hear(self, result: StepResult) -> None:
        if self._broken:
            raise BrokenCallbackError
        self._events.put(result)
        if self.stands_still and not self._released:
            self._go.acquire()

    # --- deeds ---

    def begin(self) -> None:
        """A law begins, on an idle engine: what was told before is forgotten."""
        self.until_idle()
        for told in (self.outputs, self.preempted, self.refusals, self.first_step, self.came_after_step):
            told.clear()

    def add(self, *requests: Request, attempt: int = 0) -> None:
        for r in requests:
            if r.request_id not in self.outputs:
                self.outputs[r.request_id] = Output()
                self._requests[r.request_id] = self._live[r.request_id] = r
                self._attempts[r.request_id] = attempt
            self._sent += 1
            self._coming.setdefault(r.request_id, self._sent)
            self.port.add(r, attempt)

    def abort(self, *requests: Request) -> None:
        for r in requests:
            self._aborts.add(r.request_id)
            self.port.abort(r.request_id, self._attempts[r.request_id])

    def stop(self) -> None:
        self._let_go()
        self.port.stop()

    def break_callback(self) -> None:
        """From now on a result that is told raises."""
        self._broken = True
        self._let_go()

    def _let_go(self) -> None:
        """It stands still no more."""
        self._released = True
        self._go.release()

    def death(self) -> str:
        """Why it died. What it tells before is dropped."""
        self._let_go()
        while isinstance(event := self._events.get(timeout=PATIENCE_S), StepResult):
            pass
        return event.why

    def has_events(self) -> bool:
        return not self._events.empty()

    # --- what it tells ---

    def take(self) -> StepResult:
        """The next result, checked."""
        if self._holding:
            self._go.release()
        result = self._events.get(timeout=PATIENCE_S)
        assert not isinstance(result, Death), f"the engine died: {result.why}"
        self._holding = self.stands_still
        load, before = result.load, self.load
        for name in [name for name, number in self._coming.items() if number <= load.adds_total]:
            del self._coming[name]
            self.came_after_step[name] = 0 if before is None else before.steps_total
        self.load = load
        for preempted in result.preempted:
            self._check_preempted(preempted)
        self.preempted.extend(result.preempted)
        self._take_refusals(result)
        for delta in result.deltas:
            name = delta.request_id
            assert delta.attempt == self._attempts[name]
            first_index = len(self._requests[name].emitted_ids)
            self.outputs[name].take(delta, load.steps_total, first_index=first_index)
            if delta.token_ids:
                self.first_step.setdefault(name, load.steps_total)
            if delta.finish is not None:
                del self._live[name]
                self._text_ended |= delta.finish is FinishReason.STOP and bool(self._requests[name].sampling.stop)
        if result.prefixes is not None:
            self._take_prefixes(result.prefixes)
        self._check_load(load, before)
        return result

    def until(self, happened: Callable[[], bool]) -> None:
        while not happened():
            self.take()

    def until_tokens(self, tokens: int, *requests: Request) -> None:
        self.until(lambda: all(len(self.outputs[r.request_id].token_ids) >= tokens for r in requests))

    def until_ended(self, *requests: Request) -> None:
        self.until(lambda: all(self.outputs[r.request_id].ends for r in requests))

    def until_known(self) -> EngineLoad:
        """Every add is in the load."""
        self.until(lambda: self.load is not None and self.load.adds_total == self._sent)
        assert self.load is not None
        return self.load

    def until_idle(self) -> EngineLoad:
        """Everything has been told, nothing is held, and every block is free."""

        def idle() -> bool:
            load = self.load
            return not self._live and load is not None and load.adds_total == self._sent and not requests_in(load)

        if self._sent:
            self.until(idle)
        self._text_ended = False
        load = self.port.progress().load
        assert (load.blocks_free, load.running, load.waiting) == (self.config.blocks, (), ())
        assert load.host_blocks_free == self.config.host_blocks
        assert self.port.progress().step_age_s is None
        return load

    def blocks_held(self, r: Request) -> int:
        """How many full blocks of its prompt, from the first on, it has told to be in its prefix cache; without the block of
        the last token, which is always run."""
        size, parent = self.config.block_size_tokens, root(r.tenant)
        for index in range((len(r.prompt_ids) - 1) // size):
            parent = extend(parent, r.prompt_ids[index * size : (index + 1) * size])
            if parent[:8] not in self.held:
                return index
        return (len(r.prompt_ids) - 1) // size

    def run(self, *requests: Request) -> list[Output]:
        self.add(*requests)
        self.until_ended(*requests)
        return [self.outputs[r.request_id] for r in requests]

    def run_undisturbed(self, *requests: Request) -> list[Output]:
        outputs = self.run(*requests)
        self.assert_undisturbed(*requests)
        return outputs

    def finish(self, *requests: Request) -> None:
        """All of these end, as if each had been alone."""
        self.until_ended(*requests)
        self.assert_undisturbed(*requests)

    # --- judging it ---

    def expected(self, r: Request) -> Output:
        return self.reference.output(r, self.config.max_model_len)

    def output(self, r: Request) -> Output:
        return self.outputs[r.request_id]

    def started(self, r: Request) -> int:
        return self.first_step[r.request_id]

    def steps_to_first_token(self, r: Request) -> int:
        """Of the engine's steps after it had the request, the number of the one that gave the first token."""
        return self.first_step[r.request_id] - self.came_after_step[r.request_id]

    def assert_undisturbed(self, *requests: Request) -> None:
        for r in requests:
            assert_continues(self.output(r), self.expected(r), len(r.emitted_ids))

    def assert_aborted(self, *requests: Request) -> None:
        """They ended so, after a beginning of what each would have put out."""
        for r in requests:
            got = self.output(r)
            assert got.finish is FinishReason.ABORT
            told = [*r.emitted_ids, *got.token_ids]
            sampling = msgspec.structs.replace(r.sampling, max_tokens=len(told))
            expected = self.expected(msgspec.structs.replace(r, sampling=sampling))
            assert told[: len(expected.token_ids)] == expected.token_ids
            if not expected.undecided:
                assert len(told) == len(expected.token_ids)
                assert got.text in expected.text

    def means(self) -> set[str]:
        return {p.means.value for p in self.preempted}

    # --- parts of `take` ---

    def _take_prefixes(self, change: PrefixChange) -> None:
        held, gone = ({told[k : k + 8] for k in range(0, len(told), 8)} for told in (change.held, change.gone))
        assert held or gone, "nothing is told of nothing"
        assert not held & gone
        assert not change.afresh
        self.held -= gone
        self.held |= held
        assert len(self.held) <= self.config.blocks

    def _take_refusals(self, result: StepResult) -> None:
        for refusal in result.refusals:
            name = refusal.request_id
            assert refusal.attempt == self._attempts[name]
            assert self.outputs[name] == Output(), "it was refused after it had been taken"
            del self._live[name]
        self.refusals.extend(result.refusals)

    def _check_preempted(self, told: Preempted) -> None:
        known = self._live if self.stands_still else self._requests
        assert told.request_id in known, "preempted before it came or after its end"
        if told.for_request_id is None or self.config.order is Order.SRPT:
            return
        assert self.config.order is Order.PRIORITY, "no other order pushes anybody out for anybody"
        urgent, victim = self._requests[told.for_request_id], self._requests[told.request_id]
        assert urgent.priority > victim.priority

    def _check_load(self, load: EngineLoad, before: EngineLoad | None) -> None:
        settings = self.config
        assert (load.slots_total, load.blocks_total) == (settings.slots, settings.blocks)
        assert load.block_size_tokens == settings.block_size_tokens
        if before is not None:
            assert all(getattr(load, name) >= getattr(before, name) for name in _COUNTERS)
        assert sum(p.requests for p in load.running) <= settings.slots
        held = sum(p.blocks for p in (*load.running, *load.waiting))
        used = load.blocks_total - load.blocks_free
        assert used <= held if self._may_share() else used == held
        if load.adds_total != self._sent:
            return
        told, live = requests_in(load), Counter(r.priority for r in self._live.values())
        gone = Counter() if self.stands_still else Counter(self._live[name].priority for name in self._aborted())
        assert told >= live - gone, "somebody who has not ended is missing"
        assert told <= live or (self._text_ended and not self.stands_still), "somebody is counted after his end"

    def _aborted(self) -> set[str]:
        """Whose abort may have been done, while its end is still to be told."""
        return self._aborts & self._live.keys()

    def _may_share(self) -> bool:
        """Whether two of those that have not ended, or whose end the engine may not know yet, begin alike."""
        begins = {(r.tenant, r.prompt_ids[: self.config.block_size_tokens]) for r in self._live.values()}
        return len(begins) < len(self._live) or self._text_ended


@dataclass(frozen=True)
class Law:
    holds: Callable[[Driver], None]
    applies: Callable[[EngineConfig], bool] = lambda config: True
    ends: bool = False
    """Whether the engine has ended after it."""

    @property
    def name(self) -> str:
        return self.holds.__name__


@dataclass
class Shared:
    """One engine for as many laws in a row as there are for its configuration; after one that failed, another.

    (A parametrised fixture would do, but pytest takes it down after each test where another parameter changes with it.)
    """

    make: Callable[[EngineConfig], Driver]
    _driver: Driver | None = None

    def hold(self, config: EngineConfig, law: Law) -> None:
        if self._driver is not None and self._driver.config != config:
            self.close()
        if self._driver is None:
            self._driver = self.make(config)
            self._driver.start()
        try:
            self._driver.begin()
            law.holds(self._driver)
            if law.ends:
                self.close()
            else:
                self._driver.until_idle()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._driver is not None:
            self._driver.stop()
            self._driver = None


def requests_in(load: EngineLoad) -> Counter[int]:
    """By priority, running or waiting."""
    held: Counter[int] = Counter()
    for p in (*load.running, *load.waiting):
        held[p.priority] += p.requests
    return held


def assert_continues(got: Output, expected: Output, cut: int = 0) -> None:
    """`got` is what `expected` says from output token `cut` on, as far as that is decided: the same tokens, text and end,
    and logprobs but for rounding."""
    if expected.undecided:
        print("not judged:", len(got.token_ids) + cut - len(expected.token_ids), "tokens")
        assert got.token_ids[: max(0, len(expected.token_ids) - cut)] == expected.token_ids[cut:]
        assert got.ends == 1
        return
    assert got.token_ids == expected.token_ids[cut:]
    assert got.text == expected.text if cut == 0 else expected.text.endswith(got.text)
    assert (got.finish, got.ends, got.error) == (expected.finish, 1, "")
    assert_close(got.logprobs, expected.logprobs[cut:])
    assert_close(got.prompt_logprobs or (), (expected.prompt_logprobs or ()) if cut == 0 else ())


def assert_close(got: Sequence[TokenLogprob], expected: Sequence[TokenLogprob]) -> None:
    assert len(got) == len(expected)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=LOGPROB_GAP)
        # By rank, since two that are close may change places, and by token, since they must not have moved far.
        assert [v for _, v in ours.top] == pytest.approx([v for _, v in theirs.top], abs=LOGPROB_GAP)
        known = dict(theirs.top)
        assert all(v == pytest.approx(known[k], abs=LOGPROB_GAP) for k, v in ours.top if k in known)
