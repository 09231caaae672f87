"""Real models through the whole engine: whatever interrupts a request, it ends as if nothing had happened.

Interrupted requests are held against the same request alone on an engine of its own, greedy ones and logprobs also
against transformers.
"""

from __future__ import annotations

import queue
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers

from cluster.clock import SystemClock
from cluster.config import EngineConfig
from cluster.engine.engine import Engine
from cluster.engine.text import TextCodec
from cluster.engine.torch.backend import TorchBackend
from cluster.engine.torch.build import build_embedded_engine
from cluster.model import ModelFolder
from cluster.ports import StepResult
from cluster.types import FinishReason, PreemptionMeans, Request, RequestId, Sampling
from tests.conformance.torch_kit import (
    LOGPROB_GAP,
    Comparison,
    Reference,
    Told,
    assert_continues,
    note,
    random_prompts,
    serve,
)

BATCH, URGENT = -10, 10
TINY = EngineConfig(slots=4, step_token_budget=24, block_size_tokens=4, blocks=256, max_model_len=256)
END_ID = 2
"""The tiny model's <|im_end|>, and SmolLM2's."""


@dataclass(frozen=True)
class Rig:
    """A loaded model that one engine after another is put on."""

    model: ModelFolder
    config: EngineConfig
    backend: TorchBackend
    said_alone: dict[Request, Told] = field(default_factory=dict)

    @staticmethod
    def load(model: ModelFolder, config: EngineConfig) -> Rig:
        assert model.eos_token_ids == (END_ID,)
        return Rig(model, config, TorchBackend(model, config))

    def engine(self, **changes: object) -> Engine:
        config = EngineConfig.model_validate({**self.config.model_dump(), **changes})
        return Engine(config, self.backend, TextCodec.from_file(self.model.tokenizer_path), self.model.eos_token_ids)

    def alone(self, r: Request) -> Told:
        """What is said of a request that nothing else runs beside, and nothing was cached before."""
        if r not in self.said_alone:
            self.said_alone[r] = serve(self.engine(prefix_cache=False, host_blocks=0), {0: [r]})[r.request_id]
        return self.said_alone[r]


@pytest.fixture(scope="module")
def tiny(tiny_model: ModelFolder) -> Rig:
    return Rig.load(tiny_model, TINY)


@pytest.fixture(scope="module")
def tiny_reference(tiny_model: ModelFolder) -> Reference:
    return Reference(tiny_model.path)


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "ignore_eos": True},
    "greedy with penalties": {
        "temperature": 0.0,
        "presence_penalty": 0.8,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.2,
        "ignore_eos": True,
        "logprobs": 3,
    },
    "seeded": {"temperature": 0.9, "top_p": 0.95, "top_k": 200, "ignore_eos": True},
    # The end token is likely, so that it would come before min_tokens and does come soon after.
    "seeded with everything": {
        "temperature": 1.1,
        "top_p": 0.97,
        "top_k": 300,
        "min_p": 0.01,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.2,
        "repetition_penalty": 1.15,
        "logit_bias": ((END_ID, 13.0), (70, 2.0), (71, -5.0)),
        "min_tokens": 24,
        "logprobs": 4,
    },
}
IN_EACH_RUN = ("greedy", "seeded with everything")
each_setting = pytest.mark.parametrize(
    "setting", [pytest.param(s, marks=[] if s in IN_EACH_RUN else [pytest.mark.slow]) for s in SETTINGS]
)


def request(
    name: str,
    prompt: list[int],
    tokens: int,
    setting: str = "greedy",
    *,
    priority: int = BATCH,
    emitted: tuple[int, ...] = (),
    choice: int = 0,
    group: str = "",
    **changes: Any,
) -> Request:
    return Request(
        request_id=RequestId(name),
        tenant="t",
        priority=priority,
        priority_class="any",
        arrived_unix_s=float(priority == URGENT) + len(prompt) * 1e-6,
        prompt_ids=tuple(prompt),
        sampling=Sampling(max_tokens=tokens, seed=sum(prompt), **{**SETTINGS[setting], **changes}),
        emitted_ids=emitted,
        choice=choice,
        group_id=group,
    )


def assert_all_as_alone(rig: Rig, requests: list[Request], told: dict[str, Told]) -> None:
    for r in requests:
        assert_continues(told[r.request_id], rig.alone(r))


def assert_equal_to_generate(reference: Reference, requests: list[Request], told: dict[str, Told]) -> None:
    comparison = Comparison()
    for r in requests:
        got = told[r.request_id].token_ids
        comparison.check(r.request_id, reference, r.prompt_ids, got, r.sampling.max_tokens)
    comparison.settle()


# --- preempted ---


def crowd(rig: Rig, setting: str, seed: int) -> list[Request]:
    """Four long requests: all slots, and nearly twice the blocks of a pool of 64."""
    prompts = random_prompts([30, 50, 64, 41], rig.model.vocab_size, seed=seed)
    return [request(f"batch-{i}", prompt, 56, setting) for i, prompt in enumerate(prompts)]


PREEMPTIONS: dict[PreemptionMeans, dict[str, Any]] = {
    PreemptionMeans.PAUSE: {"blocks": 256},
    PreemptionMeans.SWAP: {"blocks": 64},
    PreemptionMeans.RECOMPUTE: {"blocks": 64, "host_blocks": 0, "prefix_cache": False},
}


@each_setting
@pytest.mark.parametrize("means", PREEMPTIONS)
def test_a_preempted_request_ends_as_if_it_had_run_alone(tiny: Rig, setting: str, means: PreemptionMeans) -> None:
    batch = crowd(tiny, setting, seed=2)
    prompts = random_prompts([23, 9], tiny.model.vocab_size, seed=3)
    urgent = [request(f"urgent-{i}", p, 12, setting, priority=URGENT) for i, p in enumerate(prompts)]
    engine = tiny.engine(**PREEMPTIONS[means])
    told = serve(engine, {0: batch, 12: urgent[:1], 22: urgent[1:]})
    assert any(means in t.means for t in told.values())
    assert not any(told[r.request_id].means for r in urgent)
    assert_all_as_alone(tiny, [*batch, *urgent], told)


@pytest.mark.parametrize("means", PREEMPTIONS)
def test_preempted_greedy_outputs_equal_generate(tiny: Rig, tiny_reference: Reference, means: PreemptionMeans) -> None:
    batch = crowd(tiny, "greedy", seed=4)
    urgent = request("urgent", random_prompts([23], tiny.model.vocab_size, seed=5)[0], 12, priority=URGENT)
    told = serve(tiny.engine(**PREEMPTIONS[means]), {0: batch, 18: [urgent]})
    assert any(means in t.means for t in told.values())
    assert_equal_to_generate(tiny_reference, [*batch, urgent], told)


# --- cut, and continued elsewhere from the emitted tokens ---


def assert_continued_from_every_cut(rig: Rig, r: Request, **changes: object) -> Told:
    """As after the loss of a replica: another engine gets the request with what had been emitted."""
    whole = rig.alone(r)
    again = [
        msgspec.structs.replace(r, request_id=RequestId(f"cut-{k:02}"), emitted_ids=tuple(whole.token_ids[:k]))
        for k in range(len(whole.token_ids) + 1)
    ]
    told = serve(rig.engine(slots=16, step_token_budget=32, **changes), {0: again}, attempt=2)
    for k, c in enumerate(again):
        assert_continues(told[c.request_id], whole, k)
    return whole


@each_setting
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_request_cut_at_any_token_goes_on_with_the_same_tokens(tiny: Rig, setting: str, prefix_cache: bool) -> None:
    prompt = random_prompts([21], tiny.model.vocab_size, seed=4)[0]
    whole = assert_continued_from_every_cut(tiny, request("r", prompt, 30, setting), prefix_cache=prefix_cache)
    assert len(whole.token_ids) > 20


def test_a_request_cut_inside_its_stop_string_still_stops_there(tiny: Rig) -> None:
    prompt = random_prompts([17], tiny.model.vocab_size, seed=6)[0]
    free = tiny.alone(request("r", prompt, 40, "seeded"))
    # Text of three tokens in the middle, less its first and last character: the stop string begins and ends in a token.
    stop = "".join(free.pieces[20:23])[1:-1]
    assert len(stop) >= 3
    whole = assert_continued_from_every_cut(tiny, request("r", prompt, 40, "seeded", stop=(stop,)))
    assert whole.finish is FinishReason.STOP
    assert whole.text == free.text[: free.text.index(stop)]


def test_a_request_cut_inside_a_character_still_completes_it(tiny: Rig) -> None:
    """Four byte tokens in turn: a bias puts them far above all others, and a frequency penalty takes turns."""
    tokenizer = Tokenizer.from_file(str(tiny.model.tokenizer_path))
    signs = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("🙂")[0][0]
    first, second, third, fourth = (tokenizer.token_to_id(sign) for sign in signs)
    r = request(
        "r",
        random_prompts([9], tiny.model.vocab_size, seed=7)[0],
        12,
        frequency_penalty=400.0,
        logit_bias=((first, 1_900.0), (second, 1_800.0), (third, 1_700.0), (fourth, 1_600.0)),
    )
    whole = assert_continued_from_every_cut(tiny, r)
    assert whole.token_ids == [first, second, third, fourth] * 3
    assert whole.text == "🙂🙂🙂"


def test_the_end_token_is_not_drawn_before_min_tokens_and_ends_the_request_after(tiny: Rig) -> None:
    for i, prompt in enumerate(random_prompts([5, 9, 30], tiny.model.vocab_size, seed=8)):
        eager = tiny.alone(request(f"r-{i}", prompt, 60, "seeded with everything", min_tokens=0))
        patient = tiny.alone(request(f"r-{i}", prompt, 60, "seeded with everything"))
        assert eager.token_ids.index(END_ID) == len(eager.token_ids) - 1 < 24
        assert patient.token_ids.index(END_ID) == len(patient.token_ids) - 1 >= 24
        assert eager.finish is patient.finish is FinishReason.STOP


# --- moved with its keys and values ---


@pytest.fixture(scope="module")
def other(tiny_model: ModelFolder) -> Rig:
    """Where requests move to: the same model in other memory, its blocks full of what others left."""
    rig = Rig.load(tiny_model, TINY)
    for pool in (*rig.backend.cache.keys, *rig.backend.cache.values):
        pool.fill_(3.0)
    return rig


def move(source: Engine, target: Engine, told: dict[str, Told]) -> None:
    """Move request `r` as attempt 2: the full blocks while it goes on for two steps, then the rest in a stop."""
    name = RequestId("r")
    assert target.moves.import_begin(name, 2, source.moves.kv_format, 1) is None
    sent = source.moves.exportable_blocks(name, 1)
    if sent:
        assert target.moves.import_blocks(name, 2, 0, source.moves.export_blocks(name, 1, 0, sent)) is None
    for _ in range(2):
        note(source.step(), told, {})
    state = source.moves.freeze(name, 1)
    assert state is not None
    rest = source.moves.exportable_blocks(name, 1) - sent
    if rest:
        assert target.moves.import_blocks(name, 2, sent, source.moves.export_blocks(name, 1, sent, rest)) is None
    assert target.moves.import_commit(state, 2) is None
    assert source.moves.release(name, 1)
    assert state.request.emitted_ids == tuple(told["r"].token_ids if "r" in told else ())


@each_setting
def test_a_request_moved_at_any_step_goes_on_with_the_same_tokens_and_computes_none_again(
    tiny: Rig, other: Rig, setting: str
) -> None:
    prompt = random_prompts([27], tiny.model.vocab_size, seed=9)[0]
    r = request("r", prompt, 26, setting)
    whole = tiny.alone(r)
    prefill_steps = 2  # 27 tokens at 24 a step
    for at in range(len(whole.token_ids) - 3 + prefill_steps):
        source, target = tiny.engine(), other.engine()
        told = serve(source, {0: [r]}, steps=at) if at else {}
        if not at:
            assert source.add(r, 1) is None
        move(source, target, told)
        assert not source.has_work
        source.check_integrity()
        cut = len(told["r"].token_ids) if "r" in told else 0
        moved = serve(target, {}, told={"r": Told()}, first={"r": cut})
        assert_continues(moved["r"], whole, cut)
        assert target.load().prefill_tokens_total == (0 if cut else 27 - 24 if at + 2 < prefill_steps else 0)


# --- shared keys and values ---


@pytest.mark.parametrize("length", [24, 25, 27])
def test_choices_differ_from_each_other_repeat_and_equal_the_same_choice_alone(tiny: Rig, length: int) -> None:
    """They share the blocks of their prompt; the last one is copied where it is not full (lengths 24, 27), for the last
    token is always run."""
    prompt = random_prompts([length], tiny.model.vocab_size, seed=10)[0]
    choices = [request(f"r-{i}", prompt, 24, "seeded", choice=i, group="g") for i in range(4)]
    engine = tiny.engine()
    told = serve(engine, {0: choices})
    outputs = [tuple(told[c.request_id].token_ids) for c in choices]
    assert len(set(outputs)) == 4
    assert engine.load().prefix_hit_tokens_total == 3 * (length - 1)
    again = serve(tiny.engine(), {0: choices})
    assert [tuple(again[c.request_id].token_ids) for c in choices] == outputs
    assert_all_as_alone(tiny, choices, told)


def test_choices_that_are_preempted_and_recomputed_end_as_alone(tiny: Rig) -> None:
    prompt = random_prompts([50], tiny.model.vocab_size, seed=11)[0]
    choices = [request(f"r-{i}", prompt, 60, "seeded with everything", choice=i, group="g") for i in range(4)]
    for host_blocks in (0, 64):
        told = serve(tiny.engine(blocks=64, max_model_len=200, host_blocks=host_blocks), {0: choices})
        assert_all_as_alone(tiny, choices, told)


@each_setting
def test_a_prompt_whose_beginning_is_cached_gives_the_same_tokens(tiny: Rig, setting: str) -> None:
    prompt = random_prompts([61], tiny.model.vocab_size, seed=12)[0]
    first, same = request("first", prompt, 20, setting), request("same", prompt, 20, setting)
    longer = request("longer", [*prompt[:45], 7, 8, 9], 20, setting)
    engine = tiny.engine()
    told = serve(engine, {0: [first]})
    assert engine.load().prefix_hit_tokens_total == 0
    serve(engine, {0: [same]}, told=told)
    assert engine.load().prefix_hit_tokens_total == 60
    serve(engine, {0: [longer]}, told=told)
    assert engine.load().prefix_hit_tokens_total == 60 + 44
    assert_all_as_alone(tiny, [first, same, longer], told)


# --- against transformers ---


def test_a_repetition_penalty_gives_the_tokens_of_generate(tiny: Rig, tiny_reference: Reference) -> None:
    for penalty in (1.3, 0.9):
        prompts = random_prompts([5, 17, 40], tiny.model.vocab_size, seed=13)
        requests = [request(f"r-{i}", p, 32, repetition_penalty=penalty) for i, p in enumerate(prompts)]
        told = serve(tiny.engine(), {0: requests})
        for r in requests:
            assert told[r.request_id].token_ids == tiny_reference.generate(r.prompt_ids, 32, penalty)


def assert_scores(told: Told, reference: Reference, prompt: list[int], top: int) -> None:
    """Prompt and output logprobs are the log-softmax of the reference's logits, teacher-forced."""
    tokens = [*prompt, *told.token_ids]
    wanted = reference.logits(tokens).double().log_softmax(-1)
    said = [*told.prompt_logprobs, *told.logprobs]
    assert len(said) == len(tokens) - 1
    for place, score in enumerate(said):
        assert abs(score.logprob - float(wanted[place, tokens[place + 1]])) < LOGPROB_GAP
        best = wanted[place].topk(top).values.tolist()
        assert [x for _, x in score.top] == pytest.approx(best, abs=LOGPROB_GAP)
        assert [x for _, x in score.top] == pytest.approx(
            wanted[place, [token_id for token_id, _ in score.top]].tolist(), abs=LOGPROB_GAP
        )


@pytest.mark.parametrize("setting", ["greedy", "seeded with everything"])
def test_logprobs_of_prompt_and_output_are_those_of_the_model(
    tiny: Rig, tiny_reference: Reference, setting: str
) -> None:
    """The prompt is cut into several chunks, and beside it another one is scored and others decode."""
    prompts = random_prompts([61, 40, 9, 1], tiny.model.vocab_size, seed=14)
    requests = [request(f"r-{i}", p, 8, setting, logprobs=3, prompt_logprobs=3) for i, p in enumerate(prompts)]
    told = serve(tiny.engine(), {0: requests[:2], 1: requests[2:]})
    for r, prompt in zip(requests, prompts, strict=True):
        assert_scores(told[r.request_id], tiny_reference, prompt, 3)


def test_a_prompt_can_be_scored_without_generating(tiny: Rig, tiny_reference: Reference) -> None:
    prompt = random_prompts([50], tiny.model.vocab_size, seed=15)[0]
    engine = tiny.engine()
    told = serve(engine, {0: [request("r", prompt, 0, prompt_logprobs=1)]})
    assert (told["r"].token_ids, told["r"].finish) == ([], FinishReason.LENGTH)
    assert_scores(told["r"], tiny_reference, prompt, 1)
    # A cached prompt has no scores in the cache: it is run again for them.
    again = serve(engine, {0: [request("again", prompt, 0, prompt_logprobs=1)]})
    assert_scores(again["again"], tiny_reference, prompt, 1)


@pytest.mark.parametrize("setting", ["greedy", "seeded"])
def test_a_request_whose_numbers_are_spoilt_ends_alone(tiny: Rig, setting: str) -> None:
    """Its keys in the cache become NaN; those beside it go on as if nothing had happened."""
    prompts = random_prompts([20, 21, 22], tiny.model.vocab_size, seed=16)
    requests = [request(f"r-{i}", p, 16, setting, logprobs=2) for i, p in enumerate(prompts)]
    engine = tiny.engine()
    told = serve(engine, {0: requests}, steps=6)
    block = engine.pool.table((requests[1].request_id, 1))[0]
    for keys in tiny.backend.cache.keys:
        keys[block] = torch.nan
    serve(engine, {}, told=told)
    assert told["r-1"].finish is FinishReason.ERROR
    assert "no numbers" in told["r-1"].error
    assert_all_as_alone(tiny, [requests[0], requests[2]], told)


# --- the real model ---


@pytest.fixture(scope="module")
def real(smollm2: ModelFolder) -> Rig:
    return Rig.load(smollm2, EngineConfig(slots=8, step_token_budget=32, blocks=512))


TOPICS = ["rivers", "the moon", "bread", "trains", "chess", "bees", "volcanoes", "tea", "opera", "maps"]


def chat_prompts(model: ModelFolder) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(model.tokenizer_path))
    return [
        tokenizer.encode(
            f"<|im_start|>user\nTell me {('all', 'a little', 'a story')[i % 3]} about {topic}.<|im_end|>\n"
            "<|im_start|>assistant\n",
            add_special_tokens=False,
        ).ids
        for i, topic in enumerate(TOPICS)
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "changes", [{}, {"blocks": 24, "max_model_len": 128}, {"blocks": 24, "max_model_len": 128, "host_blocks": 0}]
)
def test_smollm2_preempted_and_resumed_equals_generate(real: Rig, changes: dict[str, Any]) -> None:
    prompts = chat_prompts(real.model)
    batch = [request(f"batch-{i}", prompt, 48) for i, prompt in enumerate(prompts[:8])]
    urgent = [request(f"urgent-{i}", prompt, 16, priority=URGENT) for i, prompt in enumerate(prompts[8:])]
    told = serve(real.engine(**changes), {0: batch, 25: urgent[:1], 40: urgent[1:]})
    assert sum(len(t.means) for t in told.values()) >= 2
    assert_equal_to_generate(Reference(real.model.path), [*batch, *urgent], told)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("setting", ["greedy with penalties", "seeded with everything"])
def test_smollm2_cut_at_any_token_goes_on_the_same(real: Rig, setting: str) -> None:
    prompt = chat_prompts(real.model)[3]
    assert_continued_from_every_cut(real, request("r", prompt, 16, setting, min_tokens=12))


# --- its thread and process ---


def test_the_engine_as_a_replica_gets_it_answers_and_stops(tiny: Rig, tiny_reference: Reference) -> None:
    prompt = random_prompts([12], tiny.model.vocab_size, seed=5)[0]
    results: queue.Queue[StepResult] = queue.Queue()
    engine = build_embedded_engine(tiny.model, TINY, SystemClock())
    engine.start(results.put, lambda why: pytest.fail(why))
    try:
        engine.add(request("r", prompt, 8), 1)
        got: list[int] = []
        while len(got) < 8:
            for delta in results.get(timeout=60).deltas:
                got += delta.token_ids
        assert engine.progress().alive
    finally:
        engine.stop()
    comparison = Comparison()
    comparison.check("r", tiny_reference, prompt, got, 8)
    comparison.settle()
    assert not engine.progress().alive


def test_a_prepared_process_computes_in_one_thread() -> None:
    code = "from cluster.engine.torch.build import prepare_process; import torch; torch.set_num_threads(2)\n"
    code += "prepare_process(); assert torch.get_num_threads() == 1"
    subprocess.run([sys.executable, "-c", code], check=True)
