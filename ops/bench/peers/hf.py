"""A worker that drives transformers: its static batches and its own continuous batching.

Owns: the translation of settings into transformers', and the static batches. Imports torch and transformers.
Settings: `mode`; for `static` the `batch`, for `continuous` the `page_tokens` of its cache and the `batch_tokens` of a
step.
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.utils import logging

from ops.bench.peers.closed_loop import Progress, run_closed_loop
from ops.bench.peers.lines import Measured, Open, Opened, Peer, Profile, Profiled, Run, claim_stdout, serve

SILENT_AFTER_S = 60.0
"""A step of continuous batching that takes so long will not end: it is out of pages, or its thread has died."""
PAD = 0
"""Any token will do: it is masked."""
NO_END = -1
"""No token has this id, so that every answer is of exact length."""


class _Continuous:
    """`closed_loop.Stepped` over transformers' manager, whose thread steps by itself."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._made: dict[str, int] = {}

    def add(self, number: int, prompt_ids: Sequence[int], output_tokens: int) -> None:
        name = str(number)
        self._made[name] = 0
        self._manager.add_request(
            list(prompt_ids), request_id=name, max_new_tokens=output_tokens, streaming=True, eos_token_id=NO_END
        )

    def step(self) -> Iterable[Progress]:
        """One token of one request."""
        result = self._manager.get_result(timeout=SILENT_AFTER_S)
        if result is None:
            why = self._manager.background_thread_status.fatal_error
            raise RuntimeError(str(why) if why else f"no token for {SILENT_AFTER_S:.0f} s")
        if result.error:
            raise RuntimeError(result.error)
        new = len(result.generated_tokens) - self._made[result.request_id]
        self._made[result.request_id] += new
        return [Progress(int(result.request_id), new, result.is_finished())]

    def abandon(self) -> None:
        for name in self._made:
            self._manager.cancel_request(name)


class Transformers:
    """`lines.Peer` over one model, loaded once."""

    def __init__(self) -> None:
        self._model: Any = None
        self._opened: Open | None = None

    def open(self, message: Open) -> Opened:
        if self._model is None:
            model: Any = AutoModelForCausalLM.from_pretrained(message.model, dtype=getattr(torch, message.dtype))
            self._model = model.eval()
        self._opened = message
        return Opened(importlib.metadata.version("transformers"))

    def run(self, message: Run) -> Measured:
        assert self._opened is not None, "open comes first"
        setting = self._opened.setting
        if setting["mode"] == "static":
            return self._static(message.requests, int(setting["batch"]))
        return self._continuous(message, self._opened)

    def profile(self, message: Profile) -> Profiled:
        raise NotImplementedError("only the embedded engine is profiled")

    def _static(self, requests: Sequence[tuple[Sequence[int], int]], batch: int) -> Measured:
        """Batches in the order of the list, padded on the left; each lasts as long as its longest answer."""
        begin_s, cpu_begin_s = time.perf_counter(), time.process_time()
        steps = 0
        for first in range(0, len(requests), batch):
            steps += self._generate(requests[first : first + batch])
        return Measured(
            tokens=sum(tokens for _, tokens in requests),
            seconds=time.perf_counter() - begin_s,
            cpu_seconds=time.process_time() - cpu_begin_s,
            steps=steps,
        )

    def _generate(self, batch: Sequence[tuple[Sequence[int], int]]) -> int:
        """Returns the tokens of the longest answer, which is the number of steps."""
        width = max(len(prompt) for prompt, _ in batch)
        longest = max(tokens for _, tokens in batch)
        padding = [width - len(prompt) for prompt, _ in batch]
        ids = torch.tensor([[PAD] * pad + list(prompt) for pad, (prompt, _) in zip(padding, batch, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in padding])
        with torch.inference_mode():
            whole = self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=longest,
                do_sample=False,
                eos_token_id=NO_END,
                pad_token_id=PAD,
            )
        if whole.shape[1] != width + longest:
            raise RuntimeError(f"a batch ended after {whole.shape[1] - width} tokens, not {longest}")
        return longest

    def _continuous(self, message: Run, opened: Open) -> Measured:
        page_tokens = int(opened.setting["page_tokens"])
        config = ContinuousBatchingConfig(
            page_size=page_tokens,
            num_blocks=opened.kv_tokens // page_tokens,
            max_batch_tokens=int(opened.setting["batch_tokens"]),
            max_requests_per_batch=message.concurrency,
            allow_block_sharing=False,
            use_async_batching=False,
        )
        longest = max(tokens for _, tokens in message.requests)
        generation = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=False, max_new_tokens=longest, eos_token_id=NO_END, pad_token_id=PAD
        )
        with self._model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=config, warmup=False, timeout=5.0
        ) as manager:
            return run_closed_loop(_Continuous(manager), message.requests, message.concurrency)


def main() -> None:
    out = claim_stdout()
    torch.set_num_threads(1)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    peer: Peer = Transformers()
    serve(peer, out)


if __name__ == "__main__":
    main()
