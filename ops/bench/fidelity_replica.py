"""The replica of `bench fidelity`: a process on one core, which measures its engine's steps and then serves with it.

    python -m ops.bench.fidelity_replica INSTANCE_FILE CONTROLLER_PORT CORE STEPS SEED

Owns: the work in which steps are measured, which has nothing of the trace. Imports the engine and what runs it in
production. It says `Measured` once it can be used, and ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from cluster.clock import SystemClock
from cluster.config import EngineConfig
from cluster.engine.engine import Engine
from cluster.engine.runner import EngineRunner
from cluster.engine.text import TextCodec
from cluster.engine.torch.backend import TorchBackend
from cluster.engine.torch.build import prepare_process, warm_up
from cluster.model import ModelFolder
from cluster.ports import Backend, Row, RowOutput
from cluster.types import ReplicaId, Request, RequestId, Sampling
from deployments.garbage import settle
from deployments.replica_process import ReplicaProcess
from deployments.settings import Instance
from ops.bench.batching_loop import MeteredBackend
from ops.bench.router_ours import find_at
from ops.bench.router_wire import Line, say
from ops.bench.step_fit import StepSample

OUTPUTS = (2, 48)
"""Lengths of the answers in the work that is measured."""


class Measured(Line, frozen=True):
    samples: tuple[StepSample, ...]


class _RowsBackend(MeteredBackend):
    """Keeps the rows of the last run."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.last: Sequence[Row] = ()

    def run(self, rows: Sequence[Row], padding_tokens: int = 0) -> Sequence[RowOutput]:
        self.last = rows
        return super().run(rows, padding_tokens)


def measure(engine: Engine, backend: _RowsBackend, steps: int, seed: int) -> list[StepSample]:
    """Steps of random work, with one request at a time, then two, four, … and as many as there are slots."""
    rng, config = random.Random(seed), engine.config
    levels = [n for k in range(config.slots.bit_length()) if (n := 1 << k) < config.slots] + [config.slots]
    samples: list[StepSample] = []
    number = 0
    for level in levels:
        running = 0
        end = len(samples) + -(-steps // len(levels))
        while len(samples) < end or running:
            while running < level and len(samples) < end:
                number, running = number + 1, running + 1
                engine.add(_request(rng, number, config, backend.vocab_size), 1)
            began_s = time.perf_counter()
            result = engine.step()
            ms = (time.perf_counter() - began_s) * 1000
            running -= sum(delta.finish is not None for delta in result.deltas)
            samples.append(_sample(backend.last, ms))
    return samples


def _request(rng: random.Random, number: int, config: EngineConfig, vocab_size: int) -> Request:
    output_tokens = rng.randint(*OUTPUTS)
    longest = min(2 * config.step_token_budget, config.max_model_len - OUTPUTS[1] - 1)
    prompt_tokens = round(2 ** rng.uniform(1, longest.bit_length() - 1))
    return Request(
        request_id=RequestId(f"measure-{number}"),
        tenant="bench",
        priority=0,
        priority_class="standard",
        arrived_unix_s=float(number),
        prompt_ids=tuple(rng.randrange(vocab_size) for _ in range(prompt_tokens)),
        sampling=Sampling(max_tokens=output_tokens, seed=0, temperature=0.0, ignore_eos=True),
    )


def _sample(rows: Sequence[Row], ms: float) -> StepSample:
    decodes = [row.start for row in rows if len(row.token_ids) == 1]
    prefills = tuple((len(row.token_ids), row.start) for row in rows if len(row.token_ids) > 1)
    return StepSample(prefills, len(decodes), sum(decodes), ms)


async def run(
    instance: Instance, controller_port: int, steps: int, seed: int, around: Callable[[Backend], Backend]
) -> None:
    prepare_process()
    (served,) = instance.models().values()
    config = served.config.engine
    loaded = TorchBackend(served.folder, config)
    cost = warm_up(loaded, config)
    backend = around(loaded)
    codec, eos = TextCodec.from_file(served.folder.tokenizer_path), served.folder.eos_token_ids
    metered = _RowsBackend(backend)
    settle()
    samples = measure(Engine(config, metered, codec, eos, cost), metered, steps, seed)

    def load(model: ModelFolder) -> EngineRunner:
        del model  # it is loaded
        return EngineRunner(Engine(config, backend, codec, eos, cost), SystemClock())

    process = ReplicaProcess(instance, served.folder, ReplicaId("replica-0"), find_at(controller_port), load, _die)
    await process.start("127.0.0.1")
    await process.meet_routers()
    settle()
    say(Measured(tuple(samples)))
    await asyncio.to_thread(sys.stdin.buffer.read)
    await process.close()


def _die(why: str) -> None:
    print(f"the engine died: {why}", file=sys.stderr, flush=True)
    os._exit(1)


def _as_it_is(backend: Backend) -> Backend:
    return backend


def main(arguments: Sequence[str], around: Callable[[Backend], Backend] = _as_it_is) -> None:
    """`around`: makes the backend that is measured and used of the one that is loaded."""
    instance_file, controller_port, core, steps, seed = arguments
    os.sched_setaffinity(0, {int(core)})
    instance = Instance.model_validate_json(Path(instance_file).read_bytes())
    asyncio.run(run(instance, int(controller_port), int(steps), int(seed), around))


if __name__ == "__main__":
    main(sys.argv[1:])
