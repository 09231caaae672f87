"""A worker that drives Forebay's embedded engine, stepped by hand as its runner's thread steps it.

Owns: the translation of settings into `EngineConfig`, and the profile of a step. Imports the engine and its torch
backend. Settings: `step_token_budget` and `slots`.
"""

from __future__ import annotations

import cProfile
import importlib.metadata
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import CodeType

from cluster.config import DType, EngineConfig, Order
from cluster.engine.engine import Engine
from cluster.engine.text import TextCodec
from cluster.engine.torch.backend import TorchBackend
from cluster.engine.torch.build import prepare_process, warm_up
from cluster.model import ModelFolder
from cluster.ports import Row, RowOutput
from cluster.types import Request, RequestId, Sampling
from ops.bench.batching_loop import MeteredBackend
from ops.bench.peers.closed_loop import Progress, run_closed_loop
from ops.bench.peers.lines import Measured, Open, Opened, Peer, Profile, Profiled, Run, Share, claim_stdout, serve

BLOCK_SIZE_TOKENS = 16
FUNCTIONS = 12
"""Shown of a profile."""


class _TimedBackend(MeteredBackend):
    """Adds up the processor's time inside of the backend."""

    run_cpu_s = 0.0

    def run(self, rows: Sequence[Row], padding_tokens: int = 0) -> Sequence[RowOutput]:
        begin_s = time.process_time()
        try:
            return super().run(rows, padding_tokens)
        finally:
            self.run_cpu_s += time.process_time() - begin_s


class _Stepped:
    """`closed_loop.Stepped` over an engine that is idle."""

    def __init__(self, engine: Engine, run_name: str) -> None:
        self._engine = engine
        self._run_name = run_name
        self._live: dict[RequestId, int] = {}

    def add(self, number: int, prompt_ids: Sequence[int], output_tokens: int) -> None:
        request_id = RequestId(f"{self._run_name}-{number}")
        self._live[request_id] = number
        request = Request(
            request_id=request_id,
            tenant="bench",
            priority=0,
            priority_class="standard",
            arrived_unix_s=float(number),
            prompt_ids=tuple(prompt_ids),
            sampling=Sampling(max_tokens=output_tokens, seed=0, temperature=0.0, ignore_eos=True),
        )
        if self._engine.add(request, 0) is not None:
            raise RuntimeError("the engine is full")

    def step(self) -> Iterable[Progress]:
        progress = []
        for delta in self._engine.step().deltas:
            ended = delta.finish is not None
            number = self._live.pop(delta.request_id) if ended else self._live[delta.request_id]
            if delta.error:
                raise RuntimeError(f"request {number} failed: {delta.error}")
            progress.append(Progress(number, len(delta.token_ids), ended))
        return progress

    def abandon(self) -> None:
        for request_id in self._live:
            self._engine.abort(request_id, 0)
        while self._engine.has_work:
            self._engine.step()


class Embedded:
    """`lines.Peer` over the embedded engine. The weights are loaded anew for each engine."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._backend: _TimedBackend | None = None
        self._runs = 0

    def open(self, message: Open) -> Opened:
        self._engine = self._backend = None
        config = EngineConfig(
            order=Order.FCFS,
            slots=int(message.setting["slots"]),
            step_token_budget=int(message.setting["step_token_budget"]),
            block_size_tokens=BLOCK_SIZE_TOKENS,
            blocks=message.kv_tokens // BLOCK_SIZE_TOKENS,
            max_model_len=message.max_model_len,
            prefix_cache=False,
            host_blocks=0,
            dtype=DType(message.dtype),
        )
        model = ModelFolder.open(Path(message.model))
        backend = TorchBackend(model, config)
        cost = warm_up(backend, config)
        self._backend = _TimedBackend(backend)
        codec = TextCodec.from_file(model.tokenizer_path)
        self._engine = Engine(config, self._backend, codec, model.eos_token_ids, cost)
        return Opened(importlib.metadata.version("forebay"))

    def run(self, message: Run | Profile) -> Measured:
        assert self._engine is not None, "open comes first"
        self._runs += 1
        return run_closed_loop(_Stepped(self._engine, str(self._runs)), message.requests, message.concurrency)

    def profile(self, message: Profile) -> Profiled:
        assert self._backend is not None, "open comes first"
        before_s = self._backend.run_cpu_s
        plain = self.run(message)
        inside_s = self._backend.run_cpu_s - before_s
        profiler = cProfile.Profile(time.process_time)
        profiled = profiler.runcall(self.run, message)
        functions = sorted(profiler.getstats(), key=lambda one: one.inlinetime, reverse=True)
        return Profiled(
            plain.cpu_seconds / plain.steps * 1000,
            (plain.cpu_seconds - inside_s) / plain.steps * 1000,
            tuple(
                Share(_name(one.code), one.inlinetime / profiled.steps * 1000, one.callcount / profiled.steps)
                for one in functions[:FUNCTIONS]
            ),
        )


def _name(code: CodeType | str) -> str:
    """File and function; the text that Python has for one that is built in."""
    return code if isinstance(code, str) else f"{Path(code.co_filename).stem}.{code.co_name}"


def main() -> None:
    out = claim_stdout()
    prepare_process()
    peer: Peer = Embedded()
    serve(peer, out)


if __name__ == "__main__":
    main()
