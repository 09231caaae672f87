"""What tests of the vLLM engine share: a listener, requests, and a reference that knows no engine.

`Reference` runs transformers' model over the whole sequence for each token, one request at a time: no cache, no batch, no
scheduler, no preemption.
"""

from __future__ import annotations

import queue
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import torch

from cluster.engine.chance import uniform
from cluster.engine.torch.sampling import draw
from cluster.engine.vllm.adapter import VllmEngine
from cluster.model import ModelFolder
from cluster.ports import EnginePort, Penalties, SampleSpec, StepResult
from cluster.types import EngineLoad, Preempted, Request, RequestId, Sampling
from tests.conformance.engine_kit import Output

PATIENCE_S = 60.0
"""How long a test waits for an event that comes at once unless something is broken."""


@dataclass
class Listener:
    """Keeps an engine's results for the test's thread."""

    engine: VllmEngine
    results: queue.Queue[StepResult] = field(default_factory=queue.Queue)
    deaths: queue.Queue[tuple[float, str]] = field(default_factory=queue.Queue)
    outputs: dict[str, Output] = field(default_factory=dict)
    preempted: list[Preempted] = field(default_factory=list)
    load: EngineLoad | None = None
    first_step: dict[str, int] = field(default_factory=dict)
    """The core's step that gave a request's first token."""
    came_after_step: dict[str, int] = field(default_factory=dict)
    """The last of the core's steps at whose end it did not have the request."""
    added: int = 0
    number: dict[str, int] = field(default_factory=dict)
    first_index: dict[str, int] = field(default_factory=dict)

    def start(self) -> None:
        port: EnginePort = self.engine
        port.start(self.results.put, lambda why: self.deaths.put((time.monotonic(), why)))

    def add(self, *requests: Request) -> None:
        for r in requests:
            self.outputs[r.request_id] = Output()
            self.first_index[r.request_id] = len(r.emitted_ids)
            self.added += 1
            self.number[r.request_id] = self.added
            self.engine.add(r, 0)

    def steps_to_first_token(self, r: Request) -> int:
        """Of the core's steps after it had the request, the number of the one that gave the first token."""
        return self.first_step[r.request_id] - self.came_after_step[r.request_id]

    def take_one(self) -> StepResult:
        result = self.results.get(timeout=PATIENCE_S)
        for name in [name for name, number in self.number.items() if number <= result.load.adds_total]:
            del self.number[name]
            self.came_after_step[name] = 0 if self.load is None else self.load.steps_total
        self.load = result.load
        self.preempted.extend(result.preempted)
        for delta in result.deltas:
            name = delta.request_id
            self.outputs[name].take(delta, result.load.steps_total, first_index=self.first_index[name])
            if delta.token_ids:
                self.first_step.setdefault(name, result.load.steps_total)
        return result

    def until(self, happened: Callable[[], bool]) -> None:
        while not happened():
            self.take_one()

    def until_tokens(self, count: int, *requests: Request) -> None:
        self.until(lambda: all(len(self.outputs[r.request_id].token_ids) >= count for r in requests))

    def until_ended(self, *requests: Request) -> None:
        self.until(lambda: all(self.outputs[r.request_id].ends for r in requests))

    def until_idle(self) -> EngineLoad:
        """Everything has been told and nothing is held."""
        self.until(lambda: self.load is not None and not self.load.running and not self.load.waiting)
        assert self.load is not None
        return self.load

    def places(self) -> dict[str, str]:
        return {name.split("#", 1)[1]: place for name, place in self.engine.places().result(PATIENCE_S).items()}

    def run(self, *requests: Request) -> list[Output]:
        self.add(*requests)
        self.until_ended(*requests)
        return [self.outputs[r.request_id] for r in requests]


_serial = iter(range(10**9))


def request(
    label: str,
    *,
    prompt: int | tuple[int, ...] = 24,
    max_tokens: int = 24,
    priority: int = 0,
    arrived: float | None = None,
    emitted: tuple[int, ...] = (),
    tenant: str = "t",
    choice: int = 0,
    stated: int | None = None,
    **sampling: object,
) -> Request:
    """`prompt` is its ids, or a length to be filled with ids derived from the label; names are unique, arrivals rise."""
    number = next(_serial)
    rng = random.Random(label)
    ids = prompt if isinstance(prompt, tuple) else tuple(rng.randrange(3, 1024) for _ in range(prompt))
    base = Sampling(max_tokens=max_tokens, seed=number, temperature=0.0, ignore_eos=True)
    return Request(
        request_id=RequestId(f"{label}-{number}"),
        tenant=tenant,
        priority=priority,
        priority_class="c",
        arrived_unix_s=1000.0 + number if arrived is None else arrived,
        prompt_ids=ids,
        emitted_ids=emitted,
        sampling=msgspec.structs.replace(base, **sampling),
        choice=choice,
        stated_output_tokens=stated,
    )


class Reference:
    def __init__(self, model: ModelFolder) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32)
        self._eos = model.eos_token_ids

    @torch.inference_mode()
    def output_ids(self, r: Request) -> list[int]:
        """The output of a request whose end no stop string brings."""
        made: list[int] = []
        while len(made) < r.sampling.max_tokens:
            logits = self._model(torch.tensor([[*r.prompt_ids, *made]])).logits[0, -1:]
            (token_id,) = draw(logits, [self._spec(r, made)])
            assert token_id is not None
            made.append(token_id)
            if token_id in self._eos and not r.sampling.ignore_eos:
                break
        return made

    @torch.inference_mode()
    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """[len(ids), vocabulary], of what may follow each token."""
        logits: torch.Tensor = self._model(torch.tensor([ids])).logits[0]
        return logits.log_softmax(dim=-1)

    def _spec(self, r: Request, made: list[int]) -> SampleSpec:
        s = r.sampling
        penalties = Penalties(
            s.presence_penalty, s.frequency_penalty, s.repetition_penalty, Counter(made), r.prompt_ids
        )
        banned = self._eos if len(made) < s.min_tokens and not s.ignore_eos else ()
        chance = uniform(s.seed, r.choice, len(made))
        return SampleSpec(s.temperature, s.top_p, s.top_k, chance, s.min_p, s.logit_bias, banned, penalties, s.logprobs)
