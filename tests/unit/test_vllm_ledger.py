"""Where vLLM's requests stand, and what is planned for them; no vLLM is needed for it."""

from __future__ import annotations

from importlib import metadata

import msgspec
import pytest

from cluster.config import EngineConfig, Order
from cluster.engine.scheduling.plan import StepPlan
from cluster.engine.vllm.ledger import Ledger
from cluster.engine.vllm.telling import QUIET_MAX_S, Telling
from cluster.engine.vllm.version import VLLM_VERSION, VllmVersionError, check_version
from cluster.engine.vllm.wire import (
    RequestNote,
    StepNote,
    core_id,
    decode_handle,
    decode_request,
    decode_step,
    encode,
    encode_handle,
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


def test_load_follows_what_is_left_of_each_prompt_wherever_it_stands() -> None:
    def left() -> list[int]:
        for line in (ledger.running, ledger.waiting):
            line.check_integrity(lambda state: state.blocks)
        return [load.prompt_tokens for line in (ledger.running, ledger.waiting) for load in line.loads()]

    ledger = Ledger(CONFIG)
    add(ledger, a_request("long", prompt=40), a_request("waits", prompt=10))
    assert left() == [39 + 9], "the last of each draws a token"
    ledger.run("long", 4)
    ledger.update(ledger.get("long"), tokens=40, computed=16, held_blocks=4)
    assert left() == [23, 9]
    ledger.pause("long")
    ledger.correct(ledger.get("long"), tokens=40, computed=12)
    assert left() == [27 + 9], "blocks were lost while it was paused"
    ledger.freeze("long")
    ledger.correct(ledger.get("long"), tokens=40, computed=0)
    assert left() == [9], "who is aside is in no load"
    ledger.thaw("long")
    ledger.run("long", 11)
    ledger.update(ledger.get("long"), tokens=41, computed=40, held_blocks=11)
    assert left() == [0, 9]
    ledger.drop("long", 41, for_urgent=False)
    assert left() == [40 + 9]


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


def test_who_is_frozen_is_in_no_plan_and_keeps_what_it_holds_until_it_is_thawed() -> None:
    ledger = Ledger(CONFIG)
    add(ledger, a_request("a"), a_request("b", arrived=1.0), a_request("c", arrived=2.0))
    ledger.freeze("a")
    assert ledger.get("a").place == "parked"
    assert admitted(plan(ledger, 16)) == ["b", "c"]
    ledger.thaw("a")
    assert admitted(plan(ledger, 16)) == ["a", "b"]
    decode(ledger, "a", tokens=5, blocks=2)
    ledger.freeze("a")
    ledger.freeze("a")
    assert (ledger.get("a").place, ledger.get("a").held_blocks) == ("frozen", 2)
    assert ledger.running.loads() == ()
    assert [load.requests for load in ledger.waiting.loads()] == [2]
    assert admitted(plan(ledger, 14)) == ["b", "c"]
    made = plan(ledger, 0)
    assert (made.preempted, made.admitted) == ((), ()), "nobody takes its blocks"
    ledger.thaw("a")
    assert ledger.get("a").place == "paused"
    assert [t.core_id for t in ledger.wait_order()] == ["a", "b", "c"]
    chunk = plan(ledger, 14).chunks[0]
    assert (chunk.sequence.identity[0], chunk.tokens) == ("a", 1), "it decodes on from where it was"


def test_a_frozen_one_that_loses_its_blocks_is_parked_and_computes_all_again() -> None:
    ledger = Ledger(CONFIG)
    add(ledger, a_request("a"))
    decode(ledger, "a", tokens=6, blocks=2)
    ledger.freeze("a")
    ledger.drop("a", 6, for_urgent=False)
    assert ledger.get("a").place == "parked"
    assert plan(ledger, 16).chunks == ()
    ledger.thaw("a")
    assert [chunk.tokens for chunk in plan(ledger, 16).chunks] == [6]


def test_one_whose_blocks_are_being_filled_is_in_no_plan_and_then_computes_only_the_rest() -> None:
    ledger = Ledger(CONFIG)
    add(ledger, a_request("a", prompt=12), a_request("b", arrived=1.0))
    ledger.load("a", 2)
    assert ledger.get("a").place == "loading"
    assert admitted(plan(ledger, 14)) == ["b"]
    ledger.loaded("a", computed=8, held_blocks=2)
    assert ledger.get("a").place == "paused"
    made = plan(ledger, 14)
    assert admitted(made) == ["a", "b"]
    assert [(chunk.sequence.identity[0], chunk.tokens) for chunk in made.chunks] == [("a", 4), ("b", 4)]
    assert made.admitted[0].blocks == 2, "13 tokens fill 4 blocks, of which it has 2"


def test_one_that_is_frozen_while_its_blocks_are_filled_stays_frozen_when_they_are() -> None:
    ledger = Ledger(CONFIG)
    add(ledger, a_request("a", prompt=12))
    ledger.load("a", 3)
    ledger.freeze("a")
    ledger.loaded("a", computed=8, held_blocks=3)
    assert ledger.get("a").place == "frozen"
    assert plan(ledger, 13).admitted == ()
    ledger.thaw("a")
    assert [chunk.tokens for chunk in plan(ledger, 13).chunks] == [4]


def test_one_whose_blocks_could_not_be_filled_computes_all() -> None:
    ledger = Ledger(CONFIG)
    add(ledger, a_request("a", prompt=12))
    ledger.load("a", 2)
    ledger.loaded("a", computed=0, held_blocks=0)
    assert ledger.get("a").place == "waiting"
    assert [chunk.tokens for chunk in plan(ledger, 16).chunks] == [12]


def test_one_that_came_by_a_move_goes_before_new_work_of_its_priority_though_it_has_put_out_nothing() -> None:
    ledger = Ledger(CONFIG)
    add(ledger, a_request("new"), a_request("urgent", arrived=3.0, priority=1))
    moved = a_request("moved", arrived=2.0)
    ledger.add("moved", RequestNote.of(moved, 0, (9,), moved=True))
    assert [t.core_id for t in ledger.wait_order()] == ["urgent", "moved", "new"]


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
    names = add(ledger, *(a_request(f"r{n}") for n in range(5)))
    decode(ledger, "r0", tokens=5, blocks=2)
    decode(ledger, "r1", tokens=5, blocks=2)
    ledger.pause("r1")
    ledger.freeze("r2")
    ledger.load("r3", 1)
    for name in names:
        ledger.remove(name)
    assert len(ledger) == len(ledger.waiting) == len(ledger.running) == ledger.promised_blocks() == 0
    assert ledger.loading == set()
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


def test_a_turn_without_a_step_is_told_if_something_happened_or_all_was_quiet_for_long_in_spite_of_work() -> None:
    ledger = Ledger(CONFIG)
    telling = Telling(ledger, slots_total=2, blocks_total=16, block_size_tokens=4, step_tokens=16)
    telling.note(16, 0, 0.0)
    assert not telling.is_due(16, 1000.0), "there is no work"
    assert telling.is_due(15, 0.0), "a block has gone"
    add(ledger, a_request("a"))
    assert not telling.is_due(16, QUIET_MAX_S / 2)
    assert telling.is_due(16, QUIET_MAX_S)
    telling.frozen("a", b"handle")
    assert telling.is_due(16, 0.0)
    assert decode_step(telling.note(16, 0, 0.0)).frozen == (("a", b"handle"),)
    assert not telling.is_due(16, 0.0)
    assert decode_step(telling.note(16, 0, 0.0)).frozen == (), "once"


def test_notes_come_back_as_they_went() -> None:
    r = a_request("née 水", emitted=3, priority=-10, choice=2, stated_output_tokens=7)
    assert decode_request(encode(note(r))) == note(r)
    assert (note(r).prompt_tokens, note(r).emitted_tokens, note(r).eos) == (4, 3, (9,))
    load = EngineLoad(slots_total=1, blocks_total=2, blocks_free=1, block_size_tokens=4)
    preempted = Preempted(r.request_id, 0, None, 3, 12, PreemptionMeans.RECOMPUTE)
    step = StepNote(load=load, preempted=(preempted,), frozen=(("0#a", b"handle"), ("0#b", b"")))
    assert decode_step(encode(step)) == step


def test_a_connectors_handle_comes_back_as_it_went() -> None:
    params = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_host": "née", "expiry": None}
    assert decode_handle(encode_handle(params)) == params
    assert encode_handle(None) == encode_handle({}) == b""
    assert decode_handle(b"") is None
    for broken in (b"no handle", msgspec.msgpack.encode([1])):
        with pytest.raises(msgspec.MsgspecError):
            decode_handle(broken)


def test_one_that_comes_back_to_the_core_has_another_name_there() -> None:
    names = {core_id(RequestId(name), 1, life) for name in ("a", "1#a", "1.1#a") for life in (0, 1, 11)}
    assert len(names) == 9


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
