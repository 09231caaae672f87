"""The router's core under anything that can happen: submits, cancels, losses, breaks, refusals, repeats, gaps, errors and moves.

Safety is checked after every step, liveness at the end: once faults stop, every request has ended, exactly once.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.config import RouterConfig, TenantConfig
from cluster.types import Generation, Outcome, RefusalReason, ReplicaId, ReplicaState, Request, RequestId
from router.live import Live
from router.moving import Stage
from router.queue import Charge
from router.suspects import Trial
from router.terms import Terms
from tests.unit.fake_replica import Bench, FakeReplica, Manner, expected_ids, expected_text, score

NAMES = ("r1", "r2")
REFUSED = {Outcome.REJECTED_DEADLINE, Outcome.REJECTED_WAIT, Outcome.REJECTED_NO_REPLICA, Outcome.REJECTED_QUEUE_FULL}
CLASSES = ("interactive", "standard", "batch")
MAX_ATTEMPTS = 6
TENANTS = ("a", "b", "c")
WEIGHTS = {"b": 2.0}
CONFIG = RouterConfig(
    max_attempts=MAX_ATTEMPTS,
    max_queue_s=1000,
    expected_output_tokens=2,
    minimum_share=0.2,
    ageing_after_s=3,
    moves_at_once=2,
    retry_share=0.25,
    retry_burst=2,
    tenants=tuple(TenantConfig(name=name, weight=weight) for name, weight in WEIGHTS.items()),
)


class WatchedReplica(FakeReplica):
    """Checks at every dispatch that nothing which should go first still waits."""

    def add(
        self, request: Request, attempt: int, *, shared: bool = False, trial: int = 0, trial_tokens: int = 0
    ) -> int:
        core: Any = self.listener
        live, head = core._live[request.request_id], core._dispatcher.queue.peek()
        self.check_trials(core, live)
        if head is not None and head.priority > request.priority:
            assert core.clock.monotonic() - live.queued_s > CONFIG.ageing_after_s, (
                "only a share passes more urgent work"
            )
        elif head is not None and head.priority == request.priority:
            assert live.continued >= head.continued
            if live.trial is Trial.ALONE:
                pass  # it goes out whenever a replica is empty and nothing more urgent waits
            elif live.continued == head.continued and (live.continued or head.tenant == request.tenant):
                own = (request.arrived_unix_s, request.request_id)
                assert own < (head.arrived_unix_s, head.request_id)
            elif live.continued == head.continued:
                charged = 0 if live.first_token_s is not None else live.prompt_charge
                counters = {t: core._dispatcher._tenants.band(head.priority).counters(t)[0] for t in TENANTS}
                before = counters[request.tenant] - charged / WEIGHTS.get(request.tenant, 1)
                assert before <= counters[head.tenant] + 1e-6, "the tenant that was served least is next"
        return super().add(request, attempt, shared=shared, trial=trial, trial_tokens=trial_tokens)

    def grant(self, request_id: RequestId, attempt: int, index: int) -> int:
        core: Any = self.listener
        live = core._live[request_id]
        assert live.suspicion is None, "no suspect moves"
        assert index == live.journal.next_index, "it goes on where its client is"
        self.check_trials(core, live)
        return super().grant(request_id, attempt, index)

    def check_trials(self, core: Any, live: Live) -> None:
        """Before it is sent here."""
        here = [core._live[name] for name in core._fleet[self.replica_id].reservations]
        assert not any(other.trial is Trial.ALONE for other in here), "nobody comes to one that is tried alone"
        assert live.trial is not Trial.ALONE or not here, "it is tried alone"
        assert live.suspicion is None or not any(other.suspicion for other in here), "two suspects are never together"


class RouterMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(CONFIG)
        self.requests: list[Request] = []
        self.cancelled: set[RequestId] = set()
        self.replicas: dict[str, WatchedReplica] = {}
        self.linked: set[str] = set()
        self.old_frames: dict[str, list[Any]] = {}
        self.generation = 0
        for name in NAMES:
            self.start(name)

    def start(self, name: str) -> None:
        self.generation += 1
        replica = WatchedReplica(
            self.bench.core,
            ReplicaId(name),
            Generation(self.generation, f"g{self.generation}"),
            slots=2,
            blocks=30,
            peers=self.bench.peers,
        )
        self.replicas[name] = self.bench.peers[replica.replica_id] = replica
        self.linked.add(name)
        self.old_frames[name] = []
        replica.connect()

    # --- clients ---

    @rule(
        priority_class=st.sampled_from(CLASSES),
        tokens=st.integers(0, 12),
        prompt=st.integers(1, 100),
        logprobs=st.sampled_from([None, 0, 2]),
        echo=st.booleans(),
        tenant=st.sampled_from(TENANTS),
        terms=st.sampled_from([Terms(), Terms(), Terms(ttft_slo_s=2), Terms(timeout_s=5), Terms(session="s")]),
    )
    def submit(
        self, priority_class: str, tokens: int, prompt: int, logprobs: int | None, echo: bool, tenant: str, terms: Terms
    ) -> None:
        name = f"q{len(self.requests)}"
        request = self.bench.submit(
            name,
            priority_class,
            tokens=tokens,
            prompt=prompt,
            tenant=tenant,
            terms=terms,
            logprobs=logprobs,
            prompt_logprobs=logprobs if echo else None,
        )
        self.requests.append(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        if self.bench.outcome(request) is None:
            self.cancelled.add(request.request_id)
        self.bench.core.cancel(request.request_id)

    # --- replicas ---

    @rule(name=st.sampled_from(NAMES), steps=st.integers(1, 4))
    def step(self, name: str, steps: int) -> None:
        for _ in range(steps):
            self.replicas[name].step()

    @rule(name=st.sampled_from(NAMES))
    def deliver(self, name: str) -> None:
        if name in self.linked:
            self.old_frames[name] = (self.old_frames[name] + self.replicas[name].frames)[-5:]
            self.replicas[name].deliver()

    @rule(name=st.sampled_from(NAMES), data=st.data())
    def repeat_frame(self, name: str, data: st.DataObject) -> None:
        if name in self.linked and self.old_frames[name]:
            replica = self.replicas[name]
            frame = data.draw(st.sampled_from(self.old_frames[name]))
            self.bench.core.frame(replica.replica_id, replica.generation, frame)

    @rule(name=st.sampled_from(NAMES))
    def lose_frame(self, name: str) -> None:
        """A gap that later tokens reveal; TCP loses no frame without losing the link, so the last word is spared."""
        frames = self.replicas[name].frames
        if frames and not frames[0].refusals and all(d.finish is None for d in frames[0].deltas):
            del frames[0]

    @rule(name=st.sampled_from(NAMES), reason=st.sampled_from([None, *RefusalReason]))
    def refuse(self, name: str, reason: RefusalReason | None) -> None:
        self.replicas[name].refuse_with = reason

    @rule(name=st.sampled_from(NAMES), state=st.sampled_from(ReplicaState))
    def drain(self, name: str, state: ReplicaState) -> None:
        """Its work is to leave it, or it takes work again."""
        self.replicas[name].state = state

    @precondition(lambda self: self.linked == set(NAMES))
    @rule(source=st.sampled_from(NAMES), tokens=st.integers(4, 12), tenant=st.sampled_from(TENANTS))
    def move(self, source: str, tokens: int, tenant: str) -> None:
        """What runs on one is to go to the other."""
        self.submit("standard", tokens, 8, None, False, tenant, Terms())
        for name in NAMES:
            self.replicas[name].turn()
            self.replicas[name].state = ReplicaState.DRAINING if name == source else ReplicaState.READY
            self.replicas[name].beat()
        self.bench.core.tick()

    @rule(
        name=st.sampled_from(NAMES),
        moving=st.sampled_from([Manner.OBEY, Manner.OBEY, Manner.OBEY, *Manner]),
        taking=st.sampled_from([Manner.OBEY, *Manner]),
        room=st.sampled_from([True, True, True, False]),
    )
    def take_part_in_moves(self, name: str, moving: Manner, taking: Manner, room: bool) -> None:
        replica = self.replicas[name]
        replica.moving, replica.taking, replica.room = moving, taking, room

    @rule(name=st.sampled_from(NAMES))
    def expire(self, name: str) -> None:
        """No word has come of what is frozen there, nor of what has moved there."""
        self.replicas[name].expire()

    @rule(name=st.sampled_from(NAMES), data=st.data())
    def forget(self, name: str, data: st.DataObject) -> None:
        """The engine ends an attempt that a broken link hid from it."""
        held = sorted(self.replicas[name].held)
        if held and name not in self.linked:
            self.replicas[name].forget(data.draw(st.sampled_from(held)))

    @rule(name=st.sampled_from(NAMES), data=st.data())
    def fail(self, name: str, data: st.DataObject) -> None:
        """The engine ends a request with an error."""
        held = sorted(held for held, attempt in self.replicas[name].held.items() if not attempt.frozen)
        if held:
            self.replicas[name].fail(data.draw(st.sampled_from(held)))

    @precondition(lambda self: self.linked == set(NAMES))
    @rule(
        times=st.integers(1, 3), made=st.integers(0, 3), tokens=st.integers(0, 12), logprobs=st.sampled_from([None, 2])
    )
    def fail_at_once(self, times: int, made: int, tokens: int, logprobs: int | None) -> None:
        """What comes now runs for a while, and fails wherever it is."""
        self.submit("interactive", tokens, 8, logprobs, logprobs is not None, "a", Terms())
        for _ in range(times):
            for replica in self.replicas.values():
                for _ in range(made):
                    replica.step()
                replica.fail(*{self.requests[-1].request_id}.intersection(replica.held))
                replica.deliver()

    @rule(name=st.sampled_from(NAMES))
    def break_link(self, name: str) -> None:
        if name in self.linked:
            self.linked.remove(name)
            self.replicas[name].break_link()

    @rule(name=st.sampled_from(NAMES))
    def mend_link(self, name: str) -> None:
        if name not in self.linked:
            self.linked.add(name)
            self.replicas[name].connect()

    @rule(name=st.sampled_from(NAMES), announced=st.booleans())
    def restart(self, name: str, announced: bool) -> None:
        """A new incarnation, with or without word that the old one is lost."""
        old = self.replicas[name]
        if announced:
            old.die()
        self.start(name)
        self.bench.core.replica_lost(old.replica_id, old.generation, "late word of an old incarnation")

    @rule(seconds=st.sampled_from([0.1, 0.6, 1.5, 4.0]), beating=st.sets(st.sampled_from(NAMES)))
    def time_passes(self, seconds: float, beating: set[str]) -> None:
        self.bench.clock.advance(seconds)
        for name in sorted(beating & self.linked):
            self.replicas[name].beat()
        self.bench.core.tick()

    # --- what always holds ---

    @invariant()
    def a_request_is_live_or_has_ended(self) -> None:
        live = self.lives()
        for request in self.requests:
            assert (request.request_id in live) == (self.bench.outcome(request) is None)

    @invariant()
    def a_live_request_is_queued_or_open_on_one_replica_with_its_reservation(self) -> None:
        core: Any = self.bench.core
        lives = self.lives()
        queued = {request_id for request_id in lives if request_id in core._dispatcher.queue}
        aside = {place[3] for line in core._trials._lines.values() for place in line}
        assert core._trials._suspects == {name: live for name, live in lives.items() if live.suspicion is not None}
        assert len(aside) == core._trials.waiting
        assert aside <= core._trials._suspects.keys()
        assert not aside & queued
        reserved = {request_id: replica.replica_id for replica in core._fleet for request_id in replica.reservations}
        assert sum(len(replica.reservations) for replica in core._fleet) == len(reserved)
        assert queued | aside == {request_id for request_id, live in lives.items() if live.replica_id is None}
        assert reserved == {r: live.replica_id for r, live in lives.items() if live.replica_id is not None}
        assert len(core._dispatcher.queue) == len(queued)
        for replica in core._fleet:
            for request_id, reservation in replica.reservations.items():
                live = lives[request_id]
                assert reservation.attempt == live.journal.attempt
                assert reservation.trial is live.trial
                assert not (reservation.parked and live.suspicion), "a suspect is not paused, it is taken back"
                assert reservation.blocks * 16 >= len(live.request.prompt_ids) + live.journal.next_index
        assert all(request_id in reserved for request_id in core._gaps.unanswered(math.inf))
        assert core._deadlines._start_by._at_s.keys() <= lives.keys()

    @invariant()
    def a_move_is_of_one_open_attempt_and_counted_where_it_goes(self) -> None:
        core: Any = self.bench.core
        lives, moves = self.lives(), list(core._moves)
        for move in moves:
            live = lives[move.live.request.request_id]
            assert live is move.live
            granted = move.stage in (Stage.GRANTED, Stage.TAKEN)
            place, attempt = (move.target, move.number) if granted else (move.source, move.attempt)
            assert core._fleet[live.replica_id] is place
            assert live.journal.attempt == attempt
            assert move.stage is Stage.OFF or live.suspicion is None
        for replica in core._fleet:
            asked = {m.live.request.request_id for m in moves if m.target is replica and m.stage is Stage.ASKED}
            assert replica.expected.keys() == asked
            assert core._moves.leaving(replica) <= CONFIG.moves_at_once
        assert max(core._moves.arriving().values(), default=0) <= CONFIG.moves_at_once

    @invariant()
    def charges_are_exact(self) -> None:
        core: Any = self.bench.core
        for name in CLASSES:
            expected = CONFIG.expected_output_tokens
            members = [live.waiting(expected) for live in self.lives().values() if live.replica_id is None]
            members = [w for w in members if w.priority_class == name and w.request_id in core._dispatcher.queue]
            exact = Charge(len(members), sum(w.size_bytes for w in members), sum(w.service for w in members))
            assert core._dispatcher.queue.of_class(name) == exact
            of_tenants = [core._dispatcher.queue.of_tenant(name, tenant) for tenant in TENANTS]
            for tenant, charge in zip(TENANTS, of_tenants, strict=True):
                assert charge.requests == sum(w.tenant == tenant for w in members)
            assert sum(charge.service for charge in of_tenants) == exact.service

    @invariant()
    def what_tenants_are_charged_is_what_they_have_open(self) -> None:
        core: Any = self.bench.core
        lives = [live for live in self.lives().values() if live.replica_id is not None]
        for priority in (10, 0, -10):
            for name, tenant in core._dispatcher._tenants.band(priority)._tenants.items():
                mine = [v for v in lives if (v.request.tenant, v.request.priority) == (name, priority)]
                unpaid = sum(v.prompt_charge for v in mine if v.first_token_s is None) / tenant.weight
                assert tenant.open == len(mine)
                assert tenant.outstanding == pytest.approx(unpaid, abs=1e-6)
                assert 0 <= tenant.refundable <= tenant.outstanding + 1e-9

    @invariant()
    def every_client_has_a_prefix_of_its_text_and_all_of_it_once_finished(self) -> None:
        for request in self.requests:
            text, outcome = self.bench.text(request), self.bench.outcome(request)
            assert expected_text(request).startswith(text)
            if outcome is Outcome.FINISHED:
                assert text == expected_text(request)
            self.check_logprobs(request, finished=outcome is Outcome.FINISHED)
            if request.request_id in self.cancelled:
                assert outcome is Outcome.CANCELLED

    def check_logprobs(self, request: Request, *, finished: bool) -> None:
        """Those of what has come, none missing and none doubled, and of the prompt once, before the first token."""
        parts, sampling = self.bench.scores[request.request_id], request.sampling
        if sampling.logprobs is None:
            assert not parts
            return
        got = [logprob for part in parts for logprob in part.logprobs]
        of_prompt = [logprob for part in parts for logprob in part.prompt_logprobs]
        expected = [score(token, k, sampling.logprobs) for k, token in enumerate(expected_ids(request))]
        assert got == (expected if finished else expected[: len(got)])
        ids = list(enumerate(request.prompt_ids))[1:] if sampling.prompt_logprobs is not None else []
        if got or finished or of_prompt:
            assert of_prompt == [score(token, k, sampling.logprobs) for k, token in ids]

    @invariant()
    def errors_are_retried_within_the_budget_and_each_request_once(self) -> None:
        let_in = sum(self.bench.outcome(r) not in REFUSED for r in self.requests)
        retried = self.bench.metric("forebay_retries_total", outcome="retried")
        assert retried <= CONFIG.retry_share * let_in + CONFIG.retry_burst
        assert all(len(live.erred_on) < CONFIG.retry_attempts for live in self.lives().values())
        ended = self.bench.metric("forebay_retries_total", outcome="failed_again")
        assert ended <= retried

    # --- and in the end ---

    def teardown(self) -> None:
        for name, replica in self.replicas.items():
            replica.refuse_with = None
            replica.state, replica.moving, replica.taking, replica.room = (
                ReplicaState.READY,
                Manner.OBEY,
                Manner.OBEY,
                True,
            )
            self.mend_link(name)
        for turns in range(60 + 20 * len(self.requests)):
            if not self.lives():
                break
            self.bench.clock.advance(0.3)
            for replica in self.replicas.values():
                if turns % 20 == 10:
                    replica.expire()
                replica.turn()
            self.bench.core.tick()
            self.a_live_request_is_queued_or_open_on_one_replica_with_its_reservation()
        assert not self.lives(), "once faults stop, all finish"
        assert not len(self.bench.core._moves)
        for replica in self.replicas.values():
            replica.expire()
            for _ in range(2):
                replica.turn()
            assert not replica.held, "what nobody waits for is ended"
            assert not replica.coming
        self.every_client_has_a_prefix_of_its_text_and_all_of_it_once_finished()
        allowed = {
            Outcome.FINISHED, Outcome.CANCELLED, Outcome.REPLICA_LOST, Outcome.REJECTED_TOO_LARGE,
            Outcome.EXPIRED_IN_QUEUE, Outcome.TIMED_OUT, Outcome.REJECTED_DEADLINE, Outcome.REJECTED_WAIT,
            Outcome.QUARANTINED, Outcome.REJECTED_NO_REPLICA, Outcome.ENGINE_ERROR,
        }  # fmt: skip
        assert {self.bench.outcome(r) for r in self.requests} <= allowed
        total = sum(
            self.bench.metric("forebay_requests_total", priority_class=c, outcome=o.value)
            for c in CLASSES
            for o in Outcome
        )
        assert total == len(self.requests), "each is counted once"
        assert self.bench.core.bands() == ()

    def lives(self) -> dict[RequestId, Live]:
        lives: dict[RequestId, Live] = self.bench.core._live
        return lives


RouterMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
test_router_under_anything_that_can_happen = RouterMachine.TestCase
