"""The figures of simulations: of one, of several seeds together, and of several side by side.

Owns: the names of the rows, and the mean and interval over seeds. Imports the report, the objectives and the bound. Pure.
Invariants: a figure that some seed has not is not told of the others; percentiles are of the requests that had a token,
and those that had none, or were cut short, are told beside them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, stdev

from cluster.types import Outcome
from ops.bench.stats import percentile
from ops.bench.trace import MOONCAKE_BLOCK_TOKENS
from ops.report import ReportRow
from ops.sim.bound import Job, most_good
from ops.sim.ideal import found, most_found
from ops.sim.objectives import PREFILLS, OwnPrefill, is_good, tpot_s, ttft_s
from ops.sim.step_time import a100
from ops.sim.study import Run, Study
from ops.sim.values import RequestRecord, SimResult
from ops.sim.workload import BATCH
from router.moving import MoveOutcome

T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5 % quantiles of Student's distribution with 1, 2, … degrees of freedom."""
MAX_SEEDS = len(T_975) + 1


ATTAINMENT = "attainment_pct"
"""Of a class's requests those that met their objectives."""


def figures(study: Study, replicas: int, result: SimResult) -> list[ReportRow]:
    """Of one simulation."""
    own = OwnPrefill(a100().models[study.model], study.engine.step_token_budget)
    by_class = {name: [r for r in result.requests if r.priority_class == name] for name in (*study.objectives, BATCH)}
    rows: list[ReportRow] = []
    for name, records in by_class.items():
        if records:
            rows += _of_class(name, records, study, own)
            rows.append(ReportRow(f"{name}.gpus_of_work", _done_s(records, study) / result.counted_s, "GPUs"))
    judged = [r for name in study.objectives for r in by_class[name]]
    good = sum(_is_good(r, study, own) for r in judged)
    knows_bound = not any(one.block_ids for one in study.requests)  # the bound takes every prompt as computed
    if knows_bound and (bound := most_good([_job(r, study, own) for r in judged], replicas)):
        rows.append(ReportRow("goodput_over_bound", good / bound, "ratio"))
    done_s = sum(_done_s(records, study) for records in by_class.values())
    rows.append(ReportRow("gpus_of_work", done_s / result.counted_s, "GPUs"))
    if study.batch_only_gpus is not None:
        rows.append(
            ReportRow("work_over_batch_only", done_s / result.counted_s / replicas / study.batch_only_gpus, "ratio")
        )
    prompt_tokens = sum(r.prompt_tokens for r in result.requests if r.first_token_s is not None)
    computed_once = result.prefill_tokens - result.recomputed_tokens + result.tokens
    rows += [
        ReportRow("tokens_per_s", result.tokens / result.virtual_s, "tokens/s"),
        ReportRow("recomputed_token_pct", 100 * result.recomputed_tokens / max(1, computed_once), "%"),
        ReportRow("migrations", result.moves.get(MoveOutcome.MOVED, 0), "moves"),
        *(
            ReportRow(f"migrations_{outcome.value}", result.moves.get(outcome, 0), "moves")
            for outcome in MoveOutcome
            if outcome is not MoveOutcome.MOVED
        ),
        *(
            ReportRow(f"migration_pause_p{p}_ms", 1000 * pause_s, "ms")
            for p in (50, 99)
            if (pause_s := percentile(result.move_pauses_s, p)) is not None
        ),
        ReportRow("preemptions_per_request_max", max(r.preemptions for r in result.requests), "preemptions"),
        ReportRow("cached_token_pct", 100 * sum(r.cached_tokens for r in result.requests) / max(1, prompt_tokens), "%"),
        ReportRow("urgent_blocked", result.urgent_blocked, "requests"),
        ReportRow("sim_over_real_time", result.sim_over_real, "ratio"),
        ReportRow("invariant_violations", len(result.invariant_violations), "violations"),
    ]
    return rows


def prefix_figures(study: Study, one: Run, result: SimResult) -> list[ReportRow]:
    """Of one simulation of prompts that share their beginnings: what was found of what one cache of that size would find, of
    the requests that were begun."""
    size = study.engine.block_size_tokens
    begun = {r.request_id: r for r in result.requests if r.first_token_s is not None}
    prompts = [_runs(arrival.prefix_ids, size) for arrival in study.arrivals(one) if arrival.request_id in begun]
    room = one.replicas * study.engine.blocks
    cached_tokens = sum(r.cached_tokens for r in begun.values())
    prompt_tokens = max(1, sum(r.prompt_tokens for r in begun.values()))
    rows = []
    for name, blocks in (("ideal", found(prompts, room)), ("most", most_found(prompts, room))):
        tokens = size * sum(blocks)
        rows.append(ReportRow(f"{name}_cached_token_pct", 100 * tokens / prompt_tokens, "%"))
        if tokens:
            rows.append(ReportRow(f"prefix_hit_over_{name}", cached_tokens / tokens, "ratio"))
    return rows


def _runs(prefix_ids: Sequence[int], block_size_tokens: int) -> list[tuple[int, int]]:
    """The recorded blocks that a prompt begins with (ops/sim/workload.py), in whole blocks of the engine's."""
    starts = range(0, len(prefix_ids), MOONCAKE_BLOCK_TOKENS)
    ends = (min(start + MOONCAKE_BLOCK_TOKENS, len(prefix_ids)) for start in starts)
    return [(prefix_ids[start], (end - start) // block_size_tokens) for start, end in zip(starts, ends, strict=True)]


def _of_class(name: str, records: Sequence[RequestRecord], study: Study, own: OwnPrefill) -> list[ReportRow]:
    unfinished = sum(r.outcome is not Outcome.FINISHED for r in records)
    rows = [
        ReportRow(f"{name}.requests", len(records), "requests"),
        ReportRow(f"{name}.unfinished", unfinished, "requests"),
    ]
    quantities = {
        "ttft": [1000 * s for r in records if (s := ttft_s(r)) is not None],
        "tpot": [1000 * s for r in records if (s := tpot_s(r)) is not None],
    }
    rows += [
        ReportRow(f"{name}.{quantity}_p{p}_ms", value, "ms")
        for quantity, values in quantities.items()
        for p in (50, 90, 99)
        if (value := percentile(values, p)) is not None
    ]
    if name in study.objectives:
        alone_ms = percentile([1000 * own.seconds(r.prompt_tokens) for r in records], 99)
        good = sum(_is_good(r, study, own) for r in records)
        rows += [
            ReportRow(f"{name}.own_prefill_p99_ms", alone_ms or 0.0, "ms"),
            ReportRow(f"{name}.goodput_rps", good / study.duration_s, "requests/s"),
            ReportRow(f"{name}.{ATTAINMENT}", 100 * good / len(records), "%"),
        ]
    else:
        # What ended later was not beside the work that arrives.
        ended = [r for r in records if r.end_s is not None and r.end_s <= study.duration_s]
        rows.append(ReportRow(f"{name}.tokens_per_s", sum(r.tokens for r in ended) / study.duration_s, "tokens/s"))
    return rows


def _done_s(records: Iterable[RequestRecord], study: Study) -> float:
    """GPU time of what was done of them by the last arrival (`Study.done_s`)."""
    return sum(study.done_s(record.done) for record in records if record.done is not None)


def _is_good(record: RequestRecord, study: Study, own: OwnPrefill) -> bool:
    return is_good(record, study.objectives[record.priority_class], own.seconds(record.prompt_tokens))


def _job(record: RequestRecord, study: Study, own: OwnPrefill) -> Job:
    objective = study.objectives[record.priority_class]
    first_due_s = record.arrived_s + objective.ttft_s + PREFILLS * own.seconds(record.prompt_tokens)
    return Job(
        arrived_s=record.arrived_s,
        prompt_s=study.least.prompt_s(record.prompt_tokens),
        decode_s=study.least.decode_s(record.prompt_tokens, record.output_tokens),
        prompt_due_s=first_due_s,
        due_s=first_due_s + objective.tpot_s * (record.output_tokens - 1),
    )


def over_seeds(runs: Sequence[Sequence[ReportRow]]) -> list[ReportRow]:
    """The mean of each figure over the seeds and, of several, half the width of its 95 % interval (Student's)."""
    values: dict[str, list[float]] = {}
    for rows in runs:
        for row in rows:
            values.setdefault(row.name, []).append(row.value)
    together: list[ReportRow] = []
    for row in runs[0]:
        seen = values[row.name]
        if len(seen) != len(runs):
            continue
        together.append(ReportRow(row.name, mean(seen), row.unit))
        if len(seen) > 1:
            half = T_975[len(seen) - 2] * stdev(seen) / math.sqrt(len(seen))
            together.append(ReportRow(f"{row.name}_ci95", half, row.unit))
    return together


def fewest(sizes: Mapping[int, Sequence[ReportRow]], goal_pct: float) -> int | None:
    """The least number of replicas with which each class's attainment is no less; None: with none."""
    enough = [
        n for n, rows in sizes.items() if all(r.value >= goal_pct for r in rows if r.name.endswith(f".{ATTAINMENT}"))
    ]
    return min(enough, default=None)


def prefixed(parts: Mapping[str, Sequence[ReportRow]]) -> tuple[ReportRow, ...]:
    """Of one part its rows as they are; of several each part's name before them."""
    if len(parts) == 1:
        return tuple(next(iter(parts.values())))
    return tuple(ReportRow(f"{name}.{row.name}", row.value, row.unit) for name, rows in parts.items() for row in rows)
