"""A worker that drives vLLM in its own environment (`make vllm-cpu`).

Owns: the translation of settings into vLLM's, and stepping it. A plain script: it runs where nothing of ours is
installed and imports nothing of ours; it speaks the lines that lines.py describes, and counts as closed_loop.py does.
Settings: `max_num_batched_tokens`, `max_num_seqs`, `block_size`.

vLLM runs in this one process and is stepped by hand: no second process and no HTTP stands between it and the clock.
It gets token ids, turns none into text and looks for no shared prefixes. It runs without compilation, which on a CPU
takes minutes and gave the same speed.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from typing import Any


def build(message: dict[str, Any]) -> Any:
    from vllm import EngineArgs, LLMEngine  # type: ignore[import-not-found, unused-ignore]

    setting = message["setting"]
    return LLMEngine.from_engine_args(
        EngineArgs(
            model=message["model"],
            dtype=message["dtype"],
            seed=0,
            skip_tokenizer_init=True,
            max_model_len=message["max_model_len"],
            max_num_seqs=setting["max_num_seqs"],
            max_num_batched_tokens=setting["max_num_batched_tokens"],
            block_size=setting["block_size"],
            num_gpu_blocks_override=message["kv_tokens"] // setting["block_size"],
            enforce_eager=True,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
    )


def add(engine: Any, number: int, prompt_ids: list[int], output_tokens: int) -> None:
    from vllm import SamplingParams  # type: ignore[import-not-found, unused-ignore]
    from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found, unused-ignore]

    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=output_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    engine.add_request(str(number), {"prompt_token_ids": prompt_ids}, sampling)


def run(engine: Any, requests: list[tuple[list[int], int]], concurrency: int) -> dict[str, Any]:
    made = [0] * len(requests)
    started_s, cpu_started_s = time.perf_counter(), time.process_time()
    for number in range(concurrency):
        add(engine, number, *requests[number])
    begun, ended, steps = concurrency, 0, 0
    while begun - ended == concurrency:
        for output in engine.step():
            number = int(output.request_id)
            made[number] += len(output.outputs[0].token_ids)
            if output.finished:
                ended += 1
                if made[number] != requests[number][1]:
                    raise RuntimeError(f"request {number} ended with {made[number]} tokens, not {requests[number][1]}")
        steps += 1
        while begun < len(requests) and begun - ended < concurrency:
            add(engine, begun, *requests[begun])
            begun += 1
    seconds, cpu_seconds = time.perf_counter() - started_s, time.process_time() - cpu_started_s
    engine.abort_request([str(number) for number in range(begun)])
    while engine.has_unfinished_requests():
        engine.step()
    return {"is": "measured", "tokens": sum(made), "seconds": seconds, "cpu_seconds": cpu_seconds, "steps": steps}


def main() -> None:
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints must not get between the lines
    import vllm  # type: ignore[import-not-found, unused-ignore]

    engine = None
    for line in sys.stdin:
        message = json.loads(line)
        try:
            if message["is"] == "open":
                engine = None
                gc.collect()  # the cache of the engine before it, which knows itself in circles
                engine = build(message)
                answer = {"is": "opened", "version": vllm.__version__}
            elif message["is"] == "run":
                answer = run(engine, message["requests"], message["concurrency"])
            else:
                raise NotImplementedError("only the embedded engine is profiled")
        except Exception as error:
            answer = {"is": "failed", "error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=out)


if __name__ == "__main__":
    main()
