"""Real models through the whole engine: preempted requests end as if nothing had happened."""

from __future__ import annotations

import queue
import random
import subprocess
import sys

import pytest
from tokenizers import Tokenizer

from cluster.clock import SystemClock
from cluster.config import EngineConfig
from cluster.engine.engine import Engine
from cluster.engine.torch.build import build_embedded_engine, build_engine
from cluster.model import ModelFolder
from cluster.ports import StepResult
from cluster.types import FinishReason, Request, RequestId, Sampling
from tests.conformance.torch_kit import Comparison, Reference, random_prompts

BATCH, URGENT = -10, 10


def request(
    name: str,
    prompt: list[int],
    tokens: int,
    *,
    priority: int = BATCH,
    temperature: float = 0.0,
    emitted: tuple[int, ...] = (),
) -> Request:
    return Request(
        request_id=RequestId(name),
        tenant="t",
        priority=priority,
        priority_class="any",
        arrived_unix_s=float(priority == URGENT) + len(prompt) * 1e-6,
        prompt_ids=tuple(prompt),
        sampling=Sampling(
            max_tokens=tokens, seed=sum(prompt), temperature=temperature, top_p=0.95, top_k=200, ignore_eos=True
        ),
        emitted_ids=emitted,
    )


def run(engine: Engine, late: dict[int, list[Request]]) -> tuple[dict[str, list[int]], dict[str, str], set[str]]:
    """Step until all is done, adding requests before the steps given. Output tokens, texts, and who was preempted."""
    token_ids: dict[str, list[int]] = {}
    texts: dict[str, str] = {}
    preempted: set[str] = set()
    step = 0
    while engine.has_work or any(at >= step for at in late):
        for new in late.get(step, []):
            assert engine.add(new, 1) is None
        result = engine.step()
        step += 1
        preempted |= {str(p.request_id) for p in result.preempted}
        for delta in result.deltas:
            tokens = token_ids.setdefault(delta.request_id, [])
            assert delta.index == len(tokens)
            tokens += delta.token_ids
            texts[delta.request_id] = texts.get(delta.request_id, "") + "".join(delta.pieces)
            assert delta.finish in (None, FinishReason.LENGTH)
    engine.check_integrity()
    assert engine.pool.blocks_free == engine.pool.blocks_total
    return token_ids, texts, preempted


TINY = EngineConfig(slots=4, step_token_budget=24, block_size_tokens=4, blocks=256, max_model_len=256)


def test_urgent_work_takes_a_slot_and_the_preempted_output_equals_generate(tiny_model: ModelFolder) -> None:
    prompts = random_prompts([5, 17, 40, 64, 23], tiny_model.vocab_size, seed=1)
    engine = build_engine(tiny_model, TINY)
    batch = [request(f"batch-{i}", prompt, 40) for i, prompt in enumerate(prompts[:4])]
    urgent = request("urgent", prompts[4], 12, priority=URGENT)
    token_ids, _, preempted = run(engine, {0: batch, 18: [urgent]})
    assert len(preempted) == engine.load().preemptions_total == 1
    reference, comparison = Reference(tiny_model.path), Comparison()
    for r in [*batch, urgent]:
        got = token_ids[r.request_id]
        comparison.check(r.request_id, reference, r.prompt_ids, got, r.sampling.max_tokens)
    comparison.settle()


def test_a_pool_that_runs_out_preempts_and_all_outputs_equal_generate(tiny_model: ModelFolder) -> None:
    """Four requests of up to 120 tokens over a pool of 256: they cannot all be held at once."""
    prompts = random_prompts([30, 50, 64, 41], tiny_model.vocab_size, seed=2)
    engine = build_engine(tiny_model, TINY.model_copy(update={"blocks": 64}))
    batch = [request(f"batch-{i}", prompt, 56) for i, prompt in enumerate(prompts)]
    token_ids, _, preempted = run(engine, {0: batch})
    assert preempted
    reference, comparison = Reference(tiny_model.path), Comparison()
    for r in batch:
        comparison.check(r.request_id, reference, r.prompt_ids, token_ids[r.request_id], 56)
    comparison.settle()


def test_sampled_outputs_and_texts_are_the_same_with_and_without_preemption(tiny_model: ModelFolder) -> None:
    prompts = random_prompts([5, 17, 40, 64, 23, 9], tiny_model.vocab_size, seed=3)
    batch = [request(f"batch-{i}", prompt, 40, temperature=0.9) for i, prompt in enumerate(prompts[:4])]
    urgent = [request(f"urgent-{i}", prompt, 12, priority=URGENT) for i, prompt in enumerate(prompts[4:])]
    disturbed, disturbed_texts, preempted = run(
        build_engine(tiny_model, TINY), {0: batch, 15: urgent[:1], 25: urgent[1:]}
    )
    assert preempted
    engine = build_engine(tiny_model, TINY)
    for r in [*batch, *urgent]:
        alone, texts, _ = run(engine, {0: [r]})
        assert disturbed[r.request_id] == alone[r.request_id]
        assert disturbed_texts[r.request_id] == texts[r.request_id]


def test_a_request_continued_elsewhere_goes_on_with_the_same_tokens(tiny_model: ModelFolder) -> None:
    """Another engine gets the emitted tokens with the request, as after the loss of a replica."""
    prompt = random_prompts([21], tiny_model.vocab_size, seed=4)[0]
    for temperature in (0.0, 0.9):
        whole, _, _ = run(build_engine(tiny_model, TINY), {0: [request("r", prompt, 30, temperature=temperature)]})
        for cut in (1, 13, 29):
            engine = build_engine(tiny_model, TINY)
            emitted = tuple(whole["r"][:cut])
            assert engine.add(request("r", prompt, 30, temperature=temperature, emitted=emitted), 2) is None
            rest: list[int] = []
            while engine.has_work:
                for delta in engine.step().deltas:
                    assert delta.index == cut + len(rest)
                    rest += delta.token_ids
            assert rest == whole["r"][cut:]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_smollm2_preempted_and_resumed_equals_generate(smollm2: ModelFolder) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2.tokenizer_path))
    topics = ["rivers", "the moon", "bread", "trains", "chess", "bees", "volcanoes", "tea", "opera", "maps"]
    rng = random.Random(7)
    prompts = [
        tokenizer.encode(
            f"<|im_start|>user\nTell me {rng.choice(['all', 'a little', 'a story'])} about {topic}.<|im_end|>\n"
            "<|im_start|>assistant\n",
            add_special_tokens=False,
        ).ids
        for topic in topics
    ]
    config = EngineConfig(slots=8, step_token_budget=32, blocks=512)
    batch = [request(f"batch-{i}", prompt, 48) for i, prompt in enumerate(prompts[:8])]
    urgent = [request(f"urgent-{i}", prompt, 16, priority=URGENT) for i, prompt in enumerate(prompts[8:])]
    engine = build_engine(smollm2, config)
    token_ids, _, preempted = run(engine, {0: batch, 25: urgent[:1], 40: urgent[1:]})
    assert preempted
    assert engine.load().preemptions_total == 2
    reference, comparison = Reference(smollm2.path), Comparison()
    for r in [*batch, *urgent]:
        got = token_ids[r.request_id]
        comparison.check(r.request_id, reference, r.prompt_ids, got, r.sampling.max_tokens)
    comparison.settle()


def test_the_engine_as_a_replica_gets_it_answers_and_stops(tiny_model: ModelFolder) -> None:
    prompt = random_prompts([12], tiny_model.vocab_size, seed=5)[0]
    results: queue.Queue[StepResult] = queue.Queue()
    engine = build_embedded_engine(tiny_model, TINY, SystemClock())
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
    comparison.check("r", Reference(tiny_model.path), prompt, got, 8)
    comparison.settle()
    assert not engine.progress().alive


def test_a_prepared_process_computes_in_one_thread() -> None:
    code = "from cluster.engine.torch.build import prepare_process; import torch; torch.set_num_threads(2)\n"
    code += "prepare_process(); assert torch.get_num_threads() == 1"
    subprocess.run([sys.executable, "-c", code], check=True)
