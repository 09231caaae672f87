"""Where vLLM's requests stand, and what is planned for them; no vLLM is needed for it."""

from __future__ import annotations

from importlib import metadata

import msgspec
import pytest

from cluster.config import BatchingMode, EngineConfig, Order
from cluster.engine.kv_cache import IntegrityError
from cluster.engine.scheduling.plan import StepPlan
from cluster.engine.vllm.ledger import Ledger
from cluster.engine.vllm.version import VLLM_VERSION, VllmVersionError, check_version
from cluster.engine.vllm.wire import (
    RequestNote,
    StepNote,
    core_id,
    decode_request,
    decode_step,
    encode,
)
from cluster.types import EngineLoad, Preempted, PreemptionMeans, Request, RequestId, Sampling

CONFIG = EngineConfig(slots=2, step_token_budget=16, block_size_tokens=4, blocks=16, max_model_len=64)


def a_request(name: str, *, prompt: int = 4, priority: int = 0, emitted: int = 0, **changes: object) -> Request:
    return Request(
        request_id=RequestId(name),
        tenant="t",
        priority=priority,
        priority_class="c",
        arrived_unix_s=float(changes.pop("arrived", 0.0)),  # type: ignore[arg-type]
        prompt_ids=(1,) * prompt,
        emitted_ids=(2,) * emitted,
        sampling=Sampling(max_tokens=int(changes.pop("max_tokens", 20)), seed=0),  # type: ignore[call-overload]
        **changes,  # type: ignore[arg-type]
    )


def note(r: Request) -> RequestNote:
    return RequestNote.of(r, 0, (9,))


def add(ledger: Ledger, *requests: Request) -> list[str]:
    for r in requests:
        ledger.add(r.request_id, note(r))
    return [r.request_id for r in requests]


def plan(ledger: Ledger, pool_blocks_free: int) -> StepPlan:
    """Of requests that share no blocks."""
    return ledger.plan(pool_blocks_free, lambda name: (0, 0), lambda name: ())


def decode(ledger: Ledger, name: str, *, tokens: int, blocks: int) -> None:
    ledger.run(name, blocks)
    ledger.update(ledger.get(name), tokens=tokens, computed=tokens - 1, held_blocks=blocks)


def admitted(made: StepPlan) -> list[str]:
    return [a.sequence.identity[0] for a in made.admitted]


def test_a_prompt_that_runs_in_chunks_keeps_the_blocks_of_its_rest_promised() -> None:
    """40 tokens and the next fill 11 blocks of 4; vLLM has given 4 of them for the first chunk."""
    ledger = Ledger(CONFIG)
    add(ledger, a_request("long", prompt=40))
    ledger.run("long", 4)
    ledger.update(ledger.get("long"), tokens=40, computed=16, held_blocks=4)
    assert ledger.promised_blocks() == 11 - 4
    add(ledger, a_request("other", prompt=24))  # 7 blocks, and the pool has 12, of which 7 are promised
    assert admitted(plan(ledger, 12)) == []
    ledger.update(ledger.get("long"), tokens=41, computed=40, held_blocks=11)
    assert ledger.promised_blocks() == 0
    assert admitted(plan(ledger, 12)) == ["other"]


def test_who_only_waits_for_its_last_token_keeps_its_slot_and_runs_no_more() -> None:
    ledger = Ledger(CONFIG)
    add(ledger, a_request("last", max_tokens=5), a_request("next"))
    decode(ledger, "last", tokens=9, blocks=3)
    decode(ledger, "next", tokens=5, blocks=2)
    add(ledger, a_request("waits"))
    made = plan(ledger, 10)
    assert [chunk.sequence.identity[0] for chunk in made.chunks] == ["next"]
    assert admitted(made) == []


def test_a_paused_request_waits_at_its_place_with_its_blocks_and_a_dropped_one_without() -> None:
    ledger = Ledger(CONFIG)
    add(ledger, a_request("new", arrived=1.0), a_request("old", arrived=2.0))
    decode(ledger, "old", tokens=6, blocks=2)
    ledger.pause("old")
    assert [t.core_id for t in ledger.wait_order()] == ["old", "new"]  # started before new
    assert ledger.waiting.loads()[0].blocks == 2
    ledger.drop("old", 7, for_urgent=True)
    assert [t.core_id for t in ledger.wait_order()] == ["old", "new"]
    assert ledger.waiting.loads()[0].blocks == 0
    state = ledger.get("old").state
    assert (state.tokens, state.computed, state.pushed_out) == (7, 0, 1)


def test_who_is_parked_is_in_no_plan_until_it_is_unparked() -> None:
    ledger = Ledger(CONFIG)
    add(ledger, a_request("a"), a_request("b", arrived=1.0))
    ledger.park("a")
    assert admitted(plan(ledger, 16)) == ["b"]
    ledger.unpark("a")
    assert admitted(plan(ledger, 16)) == ["a", "b"]
    decode(ledger, "a", tokens=5, blocks=2)
    with pytest.raises(IntegrityError):
        ledger.park("a")


def test_only_where_a_plan_would_change_nothing_none_is_needed() -> None:
    ledger = Ledger(CONFIG)
    add(ledger, a_request("a"), a_request("b"))
    assert not ledger.settled(16)  # they wait
    decode(ledger, "a", tokens=5, blocks=2)
    decode(ledger, "b", tokens=5, blocks=2)
    assert ledger.settled(2)
    assert not ledger.settled(1)  # both could want a block
    ledger.update(ledger.get("b"), tokens=9, computed=5, held_blocks=2)
    assert not ledger.settled(16)  # a prompt shares the budget


def test_an_ended_request_leaves_nothing_behind_wherever_it_stood() -> None:
    ledger = Ledger(CONFIG)
    names = add(ledger, *(a_request(f"r{n}") for n in range(4)))
    decode(ledger, "r0", tokens=5, blocks=2)
    decode(ledger, "r1", tokens=5, blocks=2)
    ledger.pause("r1")
    ledger.park("r2")
    for name in names:
        ledger.remove(name)
    assert len(ledger) == len(ledger.waiting) == len(ledger.running) == ledger.promised_blocks() == 0
    assert ledger.waiting.loads() == ledger.running.loads() == ()


def test_it_learns_how_long_output_becomes() -> None:
    ledger = Ledger(CONFIG.model_copy(update={"order": Order.SJF, "ageing_tokens_per_s": 1e6}))
    for _ in range(40):
        for tenant, length in (("brief", 2), ("wordy", 18)):
            r = a_request(tenant)
            ledger.add(tenant, RequestNote.of(_of_tenant(r, tenant), 0, ()))
            ledger.learn(ledger.remove(tenant), length)
    ledger.add("w", RequestNote.of(_of_tenant(a_request("w"), "wordy"), 0, ()))
    ledger.add("b", RequestNote.of(_of_tenant(a_request("b"), "brief"), 0, ()))
    assert [t.core_id for t in ledger.wait_order()] == ["b", "w"]


def _of_tenant(r: Request, tenant: str) -> Request:
    return msgspec.structs.replace(r, tenant=tenant)


@pytest.mark.parametrize("mode", [BatchingMode.STATIC, BatchingMode.DYNAMIC])
def test_modes_that_vllm_has_not_are_refused_by_name(mode: BatchingMode) -> None:
    with pytest.raises(ValueError, match=mode.value):
        Ledger(CONFIG.model_copy(update={"mode": mode}))


def test_notes_come_back_as_they_went() -> None:
    r = a_request("née 水", emitted=3, priority=-10, choice=2, stated_output_tokens=7)
    assert decode_request(encode(note(r))) == note(r)
    assert (note(r).prompt_tokens, note(r).emitted_tokens, note(r).eos) == (4, 3, (9,))
    load = EngineLoad(slots_total=1, blocks_total=2, blocks_free=1, block_size_tokens=4)
    preempted = Preempted(r.request_id, 0, None, 3, 12, PreemptionMeans.RECOMPUTE)
    step = StepNote(load=load, preempted=(preempted,))
    assert decode_step(encode(step)) == step


def test_attempts_of_one_request_have_names_of_their_own() -> None:
    assert core_id(RequestId("1#a"), 0) != core_id(RequestId("a"), 1)
    assert len({core_id(RequestId(name), attempt) for name in ("a", "0#a", "1#a") for attempt in (0, 1, 10)}) == 9


@pytest.mark.parametrize("found", [None, "0.31.1", "0.32.1", "1.32.0"])
def test_another_vllm_is_refused_naming_the_version_that_is_wanted(
    monkeypatch: pytest.MonkeyPatch, found: str | None
) -> None:
    def installed(name: str) -> str:
        if found is None or name != "vllm":
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(metadata, "version", installed)
    with pytest.raises(VllmVersionError, match=VLLM_VERSION):
        check_version()


@pytest.mark.parametrize("found", [VLLM_VERSION, VLLM_VERSION + "+cu130"])
def test_its_own_vllm_is_accepted_in_whatever_build(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: found)
    check_version()
