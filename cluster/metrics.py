"""Every metric name and label of Forebay, once.

Label values are bounded: priority classes, named tenants and models come from config, outcomes from `types.Outcome`,
replicas from the roster.
"""

from __future__ import annotations

from typing import NamedTuple

MODEL_LABEL = "model"
"""Of every series of a core, added where they are shown; see router/exposition.py."""


class Metric(NamedTuple):
    name: str
    help: str
    labels: tuple[str, ...] = ()


LATENCY_BUCKETS_SECONDS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip

PREEMPTION_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
RATIO_BUCKETS = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 8.0)

REQUESTS = Metric(
    "forebay_requests",
    "Requests that ended, by class and outcome; each choice of a client's n is one.",
    ("priority_class", "outcome"),
)
TTFT = Metric("forebay_ttft_seconds", "From arrival to the first token sent to the client.", ("priority_class",))
TPOT = Metric("forebay_tpot_seconds", "(end - first token) / (tokens - 1) of finished requests.", ("priority_class",))
E2E = Metric("forebay_e2e_seconds", "From arrival to the end of finished requests.", ("priority_class",))
QUEUE_WAIT = Metric("forebay_queue_wait_seconds", "From arrival to the first dispatch.", ("priority_class",))
TOKENS_OUT = Metric("forebay_output_tokens", "Output tokens received from replicas.", ("priority_class",))
TOKENS_IN = Metric("forebay_prompt_tokens", "Prompt tokens of accepted requests.", ("priority_class",))
QUEUED = Metric("forebay_queued_requests", "Requests in the router's queue.", ("priority_class",))
QUEUED_BYTES = Metric("forebay_queued_bytes", "Bytes in the router's queue.", ("priority_class",))
QUEUED_SERVICE = Metric(
    "forebay_queued_service_tokens",
    "What serving the router's queue is expected to take, in weighted tokens.",
    ("priority_class",),
)
DRAIN = Metric(
    "forebay_drain_service_tokens_per_second",
    "Weighted tokens of work that left the queue to be served, per second in which something waited.",
    ("priority_class",),
)
SHARED = Metric(
    "forebay_minimum_share_dispatches",
    "Attempts sent out before more urgent work that waited, out of their class's minimum share.",
    ("priority_class",),
)
GATE_HELD = Metric(
    "forebay_gate_held",
    "Requests that a gate held back while more urgent or earlier work waited on another router.",
    ("priority_class",),
)
GATE_SHUT = Metric(
    "forebay_gate_shut",
    "1 where more urgent work that waits on another router keeps the class back.",
    ("priority_class",),
)
OTHER_TENANTS = "other"
"""Stands for every tenant that the config does not name."""
SERVED = Metric("forebay_tenant_service_tokens", "Weighted tokens that tenants were charged for.", ("tenant",))
IN_FLIGHT = Metric("forebay_in_flight_requests", "Requests dispatched to replicas and not ended.", ("priority_class",))
PREEMPTIONS = Metric(
    "forebay_preemptions",
    "Requests taken out of a running batch, or whose kept blocks were taken, by why and by what became of their KV.",
    ("priority_class", "cause", "means"),
)
PREEMPTIONS_PER_REQUEST = Metric(
    "forebay_request_preemptions", "Preemptions of one request from its arrival to its end.", ("priority_class",)
)
OUTPUT_OVER_STATED = Metric(
    "forebay_output_over_stated",
    "Output tokens of finished requests over the output length that they had stated.",
    ("priority_class",),
)
CONTINUED = Metric("forebay_continued", "Requests continued on another replica, by why.", ("reason",))
MOVES = Metric("forebay_moves", "Live moves of requests between replicas, by what came of them.", ("outcome",))
MOVE_PAUSE = Metric(
    "forebay_move_pause_seconds", "From the word that a moving request stands still to its first token elsewhere."
)
PROPOSALS = Metric(
    "forebay_proposals",
    "The controller's proposals that a request leaves its replica, by what became of them.",
    ("outcome",),
)
CONTROLLER_LEADS = Metric("forebay_controller_leads", "1 where the router is linked to a controller that leads.")
CONTROLLER_STANDBYS = Metric(
    "forebay_controller_standbys", "Controllers that the router is linked to beside the one that leads."
)
CONTROLLER_GENERATION = Metric(
    "forebay_controller_generation",
    "Number of the latest controller that the router has met: each that leads is later.",
)
CONTROLLER_REFUSED = Metric(
    "forebay_controller_refused", "Messages of controllers that have a successor, which the router did not heed."
)
ENGINE_DEATHS = Metric("forebay_engine_deaths", "Replicas that were lost with requests running on them.")
SUSPECTS = Metric("forebay_suspects", "Live requests that ran on an engine when it died and are not cleared yet.")
FENCED = Metric("forebay_fenced_deltas", "Deltas dropped: of an old attempt, or repeats.", ("kind",))
GAPS = Metric("forebay_delta_gaps", "Gaps in a stream that were asked for again.")
TURNED_AWAY = Metric(
    "forebay_requests_turned_away",
    "Requests answered with an error before they reached a queue: no key, a limit, a wrong body; by status and code.",
    ("status", "code"),
)
REFUSALS = Metric("forebay_replica_refusals", "Attempts that a replica refused.", ("reason",))
EJECTIONS = Metric(
    "forebay_replica_ejections", "Times that a replica was put out, by the fault that did it.", ("fault",)
)
REPLICAS_EJECTED = Metric("forebay_replicas_ejected", "Replicas that get nothing new because they failed.")
SCALE = Metric(
    "forebay_scale",
    "Of a model with `scale`, as the controller said last: wanted (replicas that are to take work), and what that is decided "
    "by: demand_per_s and of_one_per_s (what is asked and what one full replica does, in weighted tokens per second), "
    "occupied (replicas), queued (requests), attained (part of first tokens in time). What is not measured is absent.",
    ("figure",),
)
SCALE_FIGURES = ("demand_per_s", "of_one_per_s", "occupied", "queued", "attained")
REPLICAS_READY = Metric("forebay_replicas_ready", "Replicas that new work can be sent to.")
REPLICA_SLOTS = Metric("forebay_replica_slots", "Running-request slots of a replica.", ("replica",))
REPLICA_RUNNING = Metric("forebay_replica_running_requests", "Running requests of a replica.", ("replica",))
REPLICA_WAITING = Metric(
    "forebay_replica_waiting_requests", "Requests held and not running on a replica.", ("replica",)
)
REPLICA_BLOCKS = Metric("forebay_replica_kv_blocks", "KV blocks of a replica.", ("replica",))
REPLICA_BLOCKS_FREE = Metric("forebay_replica_kv_blocks_free", "Free KV blocks of a replica.", ("replica",))
REPLICA_BLOCKS_CACHED = Metric(
    "forebay_replica_kv_blocks_cached", "Free KV blocks of a replica that still hold a prefix.", ("replica",)
)
REPLICA_HOST_BLOCKS_FREE = Metric(
    "forebay_replica_host_blocks_free", "Room of a replica for swapped-out KV blocks in host memory.", ("replica",)
)
REPLICA_URGENT_BLOCKED = Metric(
    "forebay_replica_urgent_blocked",
    "Times an urgent request had to wait on a replica because no victim could be preempted again.",
    ("replica",),
)
REPLICA_PREFILL_TOKENS = Metric(
    "forebay_replica_prefill_tokens", "Tokens of prompts, and of work computed again, that a replica ran.", ("replica",)
)
REPLICA_PREFIX_HIT_TOKENS = Metric(
    "forebay_replica_prefix_hit_tokens", "Tokens that a replica found computed instead of running them.", ("replica",)
)
REPLICA_PADDING_TOKENS = Metric(
    "forebay_replica_padding_tokens", "Tokens that a padding batching mode ran for nobody.", ("replica",)
)
