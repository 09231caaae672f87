"""`bench vllm` from beginning to end: the engines, their rounds, and what is shown.

Owns: when engines live, and the clocks. Imports the engine's builder, what is stock, and the report. Invariants: at most
two engines are alive; each wait has an end; whatever was begun is ended before the next measurement.
"""

from __future__ import annotations

import asyncio
import os
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from statistics import mean

import msgspec
from rich.console import Console
from tokenizers import Tokenizer

from cluster.clock import SystemClock
from cluster.config import DType, EngineConfig, EngineKind, Order, VllmConfig
from cluster.engine.vllm.build import ENVIRONMENT, build_vllm_engine, engine_arguments
from cluster.model import ModelFolder
from cluster.ports import StepResult
from cluster.types import FinishReason, Request, RequestId, Sampling
from ops.bench.lengths import SOURCE
from ops.bench.prompts import WORDS
from ops.bench.vllm import (
    CONCURRENCY,
    KINDS,
    LOAD,
    SLOTS,
    Latencies,
    Step,
    Steps,
    Throughputs,
    UrgentWaits,
    VllmPlan,
    arrivals_s,
    mean_latency_s,
    report_rows,
)
from ops.bench.vllm_stock import CoreHere, Stock, without_ours
from ops.bench.workload import OUTPUT_DIVISOR, PROMPT_DIVISOR, WorkItem, work_items
from ops.errors import CommandError
from ops.report import Report, counting_bar, machine_context, print_rows

MAX_MODEL_LEN = 1024
BLOCK_SIZE_TOKENS = 32
KV_TOKENS = 32 * 1024
STEP_TOKEN_BUDGET = 256
PATIENCE_S = 300.0
"""Of silence, while an engine has work."""
URGENT_PROMPT_TOKENS = 40
LOW_OUTPUT_TOKENS = 150
LOW_BEGUN_TOKENS = 8
"""Of each less urgent request before the urgent one comes."""


@dataclass(frozen=True, slots=True)
class VllmBench:
    """What was asked for on the command line."""

    model: ModelFolder
    dtype: DType
    plan: VllmPlan
    seed: int

    def config(self, slots: int, order: Order) -> EngineConfig:
        return EngineConfig(
            kind=EngineKind.VLLM,
            order=order,
            slots=slots,
            step_token_budget=STEP_TOKEN_BUDGET,
            block_size_tokens=BLOCK_SIZE_TOKENS,
            blocks=KV_TOKENS // BLOCK_SIZE_TOKENS,
            max_model_len=MAX_MODEL_LEN,
            prefix_cache=False,
            dtype=self.dtype,
            vllm=VllmConfig(eager=True),
        )

    def items(self, count: int, seed: int) -> list[WorkItem]:
        return work_items(count, self.model.vocab_size, MAX_MODEL_LEN, seed)


class Ours:
    """The engine as a replica has it; to be closed. Its results are read by one thread."""

    def __init__(self, model: ModelFolder, config: EngineConfig) -> None:
        self._results: queue.SimpleQueue[StepResult | str] = queue.SimpleQueue()
        self._engine = build_vllm_engine(model, config, SystemClock())
        self._engine.start(self._results.put, self._results.put)
        self._end_id = model.eos_token_ids[0]
        self._serial = 0
        self._live: set[RequestId] = set()
        self.steps = 0
        """Of the engine, as it said last."""

    def close(self) -> None:
        self._engine.stop()

    def add(self, item: WorkItem, *, priority: int = 0, stated: bool = True) -> RequestId:
        """Greedy, with exactly the item's output. Where that is not `stated`, it ends by itself: the end is the only token
        that it draws, once it may."""
        self._serial += 1
        sampling = Sampling(max_tokens=item.output_tokens, seed=0, temperature=0.0, ignore_eos=True)
        if not stated:
            sampling = Sampling(
                max_tokens=MAX_MODEL_LEN,
                seed=0,
                temperature=0.0,
                min_tokens=item.output_tokens - 1,
                logit_bias=((self._end_id, 100.0),),
            )
        request = Request(
            request_id=RequestId(str(self._serial)),
            tenant="bench",
            priority=priority,
            priority_class="standard",
            arrived_unix_s=time.time(),
            prompt_ids=item.prompt_ids,
            sampling=sampling,
            stated_output_tokens=item.output_tokens if stated else None,
        )
        self._live.add(request.request_id)
        self._engine.add(request, 0)
        return request.request_id

    def take(self, timeout_s: float = PATIENCE_S) -> tuple[dict[RequestId, int], list[RequestId]] | None:
        """Tokens of the next result, and whom it ended; None where none came in time.

        Raises:
            CommandError: the engine died, fell silent or failed a request.
        """
        try:
            result = self._results.get(timeout_s > 0, timeout_s)
        except queue.Empty:
            if timeout_s >= PATIENCE_S:
                raise CommandError(f"bench vllm: the engine said nothing for {PATIENCE_S:.0f} s") from None
            return None
        if isinstance(result, str):
            raise CommandError(f"bench vllm: the engine died: {result}")
        if result.refusals:
            raise CommandError("bench vllm: the engine refused a request")
        self.steps = result.load.steps_total
        ended = [delta.request_id for delta in result.deltas if delta.finish is not None]
        for delta in result.deltas:
            if delta.finish is FinishReason.ERROR:
                raise CommandError(f"bench vllm: a request failed: {delta.error}")
        self._live.difference_update(ended)
        return {delta.request_id: len(delta.token_ids) for delta in result.deltas}, ended

    def abort(self, request_id: RequestId) -> None:
        self._engine.abort(request_id, 0)

    def abandon(self) -> None:
        """End all that runs."""
        for request_id in self._live:
            self.abort(request_id)
        while self._live:
            self.take()


# --- an urgent request ---


def _low_items(bench: VllmBench) -> list[WorkItem]:
    return [WorkItem(item.prompt_ids[:20], LOW_OUTPUT_TOKENS) for item in bench.items(SLOTS, bench.seed)]


def _urgent_item(bench: VllmBench, number: int) -> WorkItem:
    """A prompt of its own, of one step."""
    longer = [ids for item in bench.items(40, bench.seed + 1 + number) for ids in item.prompt_ids]
    return WorkItem(tuple(longer[:URGENT_PROMPT_TOKENS]), 4)


def ours_urgent_steps(engine: Ours, bench: VllmBench, number: int) -> int:
    made = {engine.add(item, priority=-10): 0 for item in _low_items(bench)}
    urgent: RequestId | None = None
    added_at = 0
    while True:
        taken = engine.take()
        assert taken is not None
        tokens, _ = taken
        if urgent is not None and tokens.get(urgent):
            engine.abandon()
            return engine.steps - added_at - 1
        for name in tokens.keys() & made.keys():
            made[name] += tokens[name]
        if urgent is None and min(made.values()) >= LOW_BEGUN_TOKENS:
            while engine.take(0.0) is not None:
                pass  # what came in the meantime
            added_at = engine.steps
            urgent = engine.add(_urgent_item(bench, number), priority=10)


async def stock_urgent_steps(engine: Stock, bench: VllmBench, number: int) -> int:
    """A step gives each of the less urgent that run a token: so many as the longest-lived has got."""
    made = [0] * SLOTS
    begun, answered = asyncio.Event(), asyncio.Event()

    def counts(place: int) -> Callable[[int], None]:
        def took(tokens: int) -> None:
            made[place] += tokens
            if min(made) >= LOW_BEGUN_TOKENS:
                begun.set()

        return took

    low = [
        asyncio.ensure_future(engine.request(item, counts(place), priority=10))
        for place, item in enumerate(_low_items(bench))
    ]
    await asyncio.wait_for(begun.wait(), PATIENCE_S)
    before = list(made)
    urgent = asyncio.ensure_future(
        engine.request(_urgent_item(bench, number), lambda tokens: answered.set() if tokens else None, priority=-10)
    )
    await asyncio.wait_for(answered.wait(), PATIENCE_S)
    steps = max(after - start for after, start in zip(made, before, strict=True))
    for task in (*low, urgent):
        task.cancel()
    await asyncio.gather(*low, urgent, return_exceptions=True)
    return steps - 1


# --- a closed loop: as one request ends, the next begins; it counts while `concurrency` run ---


def ours_tok_s(engine: Ours, items: Sequence[WorkItem], concurrency: int) -> float:
    waiting = iter(items)
    begin_s, tokens, running = time.perf_counter(), 0, 0
    for _ in range(concurrency):
        engine.add(next(waiting))
        running += 1
    while running == concurrency:
        taken = engine.take()
        assert taken is not None
        made, ended = taken
        tokens += sum(made.values())
        running -= len(ended)
        for _ in ended:
            if (item := next(waiting, None)) is not None:
                engine.add(item)
                running += 1
    seconds = time.perf_counter() - begin_s
    engine.abandon()
    return tokens / seconds


async def stock_tok_s(engine: Stock, items: Sequence[WorkItem], concurrency: int) -> float:
    waiting = iter(items)
    tokens = 0

    def took(count: int) -> None:
        nonlocal tokens
        tokens += count

    async def serve() -> None:
        while (item := next(waiting, None)) is not None:
            await engine.request(item, took)

    begin_s = time.perf_counter()
    servers = [asyncio.ensure_future(serve()) for _ in range(concurrency)]
    # The first that finds none left ends the count.
    done, _ = await asyncio.wait(servers, return_when=asyncio.FIRST_COMPLETED, timeout=PATIENCE_S)
    tok_s = tokens / (time.perf_counter() - begin_s)
    for server in servers:
        server.cancel()
    await asyncio.gather(*servers, return_exceptions=True)
    if not done:
        raise CommandError(f"bench vllm: vLLM did not get through its requests in {PATIENCE_S:.0f} s")
    for server in done:
        server.result()  # raises what it raised
    return tok_s


# --- a queue ---


def mean_queued_latency_s(
    engine: Ours, items: Sequence[WorkItem], planned_s: Sequence[float], *, stated: bool
) -> float:
    """Requests arrive when planned, whatever is done by then; from that moment to their end."""
    begin_s = time.perf_counter()
    numbers: dict[RequestId, int] = {}
    ended_s = [0.0] * len(items)
    ended = 0
    while ended < len(items):
        now_s = time.perf_counter() - begin_s
        added = len(numbers)
        if added < len(items) and planned_s[added] <= now_s:
            numbers[engine.add(items[added], stated=stated)] = added
            continue
        taken = engine.take(planned_s[added] - now_s if added < len(items) else PATIENCE_S)
        for name in taken[1] if taken is not None else ():
            ended_s[numbers[name]] = time.perf_counter() - begin_s
            ended += 1
    return mean_latency_s(planned_s, ended_s)


# --- the draw ---


def sampled_steps(core: CoreHere, bench: VllmBench, kind: str, concurrency: int, *, stock: bool = False) -> list[Step]:
    """Steps in which all decode; `stock`: drawn by vLLM's own sampler."""
    from cluster.engine.vllm.translate import core_request
    from ops.bench.vllm_sampler import TimedProcessor

    sampling = msgspec.structs.replace(KINDS[kind], max_tokens=bench.plan.sampled_tokens, ignore_eos=True)
    prompts = _sampled_prompts(bench, concurrency)
    if stock:
        core.add_stock(prompts, sampling, f"{kind}-{concurrency}")
    else:
        requests = [
            Request(
                request_id=RequestId(f"{kind}-{concurrency}-{number}"),
                tenant="bench",
                priority=0,
                priority_class="standard",
                arrived_unix_s=0.0,
                prompt_ids=prompt_ids,
                sampling=msgspec.structs.replace(sampling, seed=bench.seed + number),
            )
            for number, prompt_ids in enumerate(prompts)
        ]
        core.add([core_request(request, 0, ()) for request in requests])
    steps: list[Step] = []
    while core.has_work:
        wall_s, cpu_s, draw_s = time.perf_counter(), time.thread_time(), TimedProcessor.cpu_s
        tokens = core.step()
        step = Step(time.perf_counter() - wall_s, time.thread_time() - cpu_s, TimedProcessor.cpu_s - draw_s)
        if tokens == concurrency:
            steps.append(step)
    return steps[2:]  # the first of them also run prompts


def _sampled_prompts(bench: VllmBench, concurrency: int) -> list[tuple[int, ...]]:
    tokenizer = Tokenizer.from_file(str(bench.model.tokenizer_path))
    prompts = []
    for number in range(concurrency):
        words = [WORDS[(7 * number + 3 * k) % len(WORDS)] for k in range(3)]
        prompts.append(tuple(tokenizer.encode("Tell me about the {}, the {} and the {}.".format(*words)).ids))
    return prompts


# --- all of it ---


def run(bench: VllmBench, out: Console, errors: Console) -> Report:
    """Measure and print the table.

    Raises:
        CommandError: an engine could not be started, died or failed a request.
    """
    # Before vLLM is imported; what its processes have to say must not get into the table.
    os.environ.update(ENVIRONMENT | {"VLLM_LOGGING_STREAM": "ext://sys.stderr", "OMP_NUM_THREADS": "1"})
    with counting_bar(errors) as bar:
        task = bar.add_task("", total=bench.plan.measurements)

        def show(what: str) -> None:
            bar.update(task, description=what)
            bar.advance(task)

        try:
            steps, stock_steps = _steps(bench, show)
            waits = _waits(bench, show)
            latencies = _latencies(bench, show)
            throughputs = _throughputs(bench, show)
        except RuntimeError as error:
            raise CommandError(f"bench vllm: {error}") from error
    context = {
        **machine_context(("torch",)),
        "model": bench.model.name,
        "dtype": str(bench.dtype),
        "threads": 1,
        "slots": {"urgent": SLOTS, "queue": SLOTS, "throughput": CONCURRENCY},
        "step_token_budget": STEP_TOKEN_BUDGET,
        "block_size_tokens": BLOCK_SIZE_TOKENS,
        "urgent_prompt_tokens": URGENT_PROMPT_TOKENS,
        "lengths": SOURCE,
        "prompt_divisor": PROMPT_DIVISOR,
        "output_divisor": OUTPUT_DIVISOR,
        "load": LOAD,
        "queued_requests": bench.plan.queued_requests,
        "requests": bench.plan.served_requests,
        "rounds": bench.plan.rounds,
        "seed": bench.seed,
    }
    report = Report("bench vllm", context, report_rows(waits, latencies, throughputs, steps, stock_steps))
    print_rows(out, report)
    return report


Show = Callable[[str], None]


def _steps(bench: VllmBench, show: Show) -> tuple[Steps, Steps]:
    """With our draw, and with vLLM's own sampler; one core after the other, for they share this process."""
    arguments = {**engine_arguments(bench.model, bench.config(CONCURRENCY, Order.FCFS))}
    ours = arguments | {"logits_processors": ["ops.bench.vllm_sampler:TimedProcessor"]}
    both: list[Steps] = []
    for stock in (False, True):
        steps: dict[tuple[str, int], list[Step]] = {}
        with closing(CoreHere(without_ours(arguments) if stock else ours)) as core:
            for concurrency in bench.plan.sampled_concurrencies:
                for kind in KINDS:
                    show(f"the draw: {kind}, {concurrency} at once{', stock' if stock else ''}")
                    steps[kind, concurrency] = sampled_steps(core, bench, kind, concurrency, stock=stock)
        both.append(steps)
    return both[0], both[1]


@contextmanager
def _both(bench: VllmBench, slots: int, order: Order, policy: str) -> Iterator[tuple[Ours, Stock]]:
    config = bench.config(slots, order)
    with ExitStack() as stack:
        ours = stack.enter_context(closing(Ours(bench.model, config)))
        yield ours, stack.enter_context(closing(Stock(engine_arguments(bench.model, config), policy)))


def _waits(bench: VllmBench, show: Show) -> UrgentWaits:
    ours_steps: list[int] = []
    stock_steps: list[int] = []
    with _both(bench, SLOTS, Order.PRIORITY, "priority") as (ours, stock):
        for number in range(bench.plan.urgent_rounds):
            show("an urgent request")
            ours_steps.append(ours_urgent_steps(ours, bench, number))
            show("an urgent request, stock")
            stock_steps.append(stock.run(stock_urgent_steps(stock, bench, number)))
    return UrgentWaits(ours_steps, stock_steps)


def _latencies(bench: VllmBench, show: Show) -> Latencies:
    seconds: dict[str, list[float]] = {"fcfs": [], "srpt": [], "srpt_learned": []}
    with ExitStack() as stack:
        fcfs = stack.enter_context(closing(Ours(bench.model, bench.config(SLOTS, Order.FCFS))))
        srpt = stack.enter_context(closing(Ours(bench.model, bench.config(SLOTS, Order.SRPT))))
        for number in range(bench.plan.rounds):
            items = bench.items(bench.plan.queued_requests, bench.seed + number)
            tok_s = ours_tok_s(fcfs, items, SLOTS)
            mean_output_tokens = mean(item.output_tokens for item in items)
            planned_s = arrivals_s(len(items), mean_output_tokens, tok_s, bench.seed + number)
            runs = [("fcfs", fcfs, True), ("srpt", srpt, True), ("srpt_learned", srpt, False)]
            for name, engine, stated in runs if number % 2 == 0 else reversed(runs):
                show(f"a queue: {name}")
                seconds[name].append(mean_queued_latency_s(engine, items, planned_s, stated=stated))
    return Latencies(seconds["fcfs"], seconds["srpt"], seconds["srpt_learned"])


def _throughputs(bench: VllmBench, show: Show) -> Throughputs:
    ours_made: list[float] = []
    stock_made: list[float] = []
    warm_up = [WorkItem(item.prompt_ids[:16], 4) for item in bench.items(CONCURRENCY, bench.seed)]
    with _both(bench, CONCURRENCY, Order.PRIORITY, "fcfs") as (ours, stock):

        def measure_ours(items: Sequence[WorkItem]) -> None:
            ours_made.append(ours_tok_s(ours, items, CONCURRENCY))

        def measure_stock(items: Sequence[WorkItem]) -> None:
            stock_made.append(stock.run(stock_tok_s(stock, items, CONCURRENCY)))

        measures = [measure_ours, measure_stock]
        for measure in measures:
            measure(warm_up)
        for number in range(bench.plan.rounds):
            items = bench.items(bench.plan.served_requests, bench.seed + number)
            for measure in measures if number % 2 == 0 else reversed(measures):
                show(f"{CONCURRENCY} at a time")
                measure(items)
    return Throughputs(ours_made[1:], stock_made[1:])
