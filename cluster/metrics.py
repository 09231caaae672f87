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

ITL_BUCKETS_SECONDS = (
    0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
"""Fine about the time of a step, and long enough for a move or a wait in between."""

DECISION_BUCKETS_SECONDS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3)
PREEMPTION_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
RATIO_BUCKETS = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 8.0)

REQUESTS = Metric(
    "forebay_requests",
    "Requests that ended, by class and outcome; each choice of a client's n is one.",
    ("priority_class", "outcome"),
)
TTFT = Metric("forebay_ttft_seconds", "From arrival to the first token sent to the client.", ("priority_class",))
ITL = Metric(
    "forebay_itl_seconds",
    "Between two arrivals of tokens of a request, whatever lay between: a preemption or a move too. Tokens that come "
    "together are one arrival.",
    ("priority_class",),
)
TPOT = Metric("forebay_tpot_seconds", "(end - first token) / (tokens - 1) of finished requests.", ("priority_class",))
E2E = Metric("forebay_e2e_seconds", "From arrival to the end of finished requests.", ("priority_class",))
ADMISSIONS = Metric(
    "forebay_admissions",
    "What was decided of requests at arrival, by class: admitted (begins at once), queued, or the outcome of one that is "
    "refused; each choice of a client's n is one.",
    ("priority_class", "decision"),
)
SLO_FIRST_TOKENS = Metric(
    "forebay_slo_requests",
    "Requests of classes with first_token_slo_s, by whether the first token came in time, true or false; refused "
    "and lost ones count as late. One that its client left, or read too slowly, or that times of its own have ended, counts "
    "only where it was late by then; one that no replica could ever hold, or that asks for no token, never.",
    ("priority_class", "attained"),
)
SLO_FIRST_TOKEN_TARGET = Metric(
    "forebay_slo_first_token_seconds", "first_token_slo_s of the classes that have one.", ("priority_class",)
)
QUEUE_WAIT = Metric("forebay_queue_wait_seconds", "From arrival to the first dispatch.", ("priority_class",))
TOKENS_OUT = Metric("forebay_output_tokens", "Output tokens received from replicas.", ("priority_class",))
TOKENS_IN = Metric("forebay_prompt_tokens", "Prompt tokens of accepted requests.", ("priority_class",))
QUEUED = Metric("forebay_queued_requests", "Requests in the router's queue.", ("priority_class",))
QUEUED_BYTES = Metric("forebay_queued_bytes", "Bytes in the router's queue.", ("priority_class",))
QUEUED_BYTES_LIMIT = Metric(
    "forebay_queued_limit_bytes",
    "max_queued_bytes of the classes: what has no room in it is refused.",
    ("priority_class",),
)
QUEUED_OLDEST = Metric(
    "forebay_queued_oldest_seconds",
    "How long the request in the router's queue that has waited longest has waited; 0 where none waits.",
    ("priority_class",),
)
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
TENANT_QUEUED = Metric("forebay_tenant_queued_requests", "Requests in the router's queue.", ("tenant",))
JOURNAL_REQUESTS = Metric("forebay_journal_requests", "Live requests in the router's journal.")
JOURNAL_BYTES = Metric(
    "forebay_journal_bytes", "Bytes that the journal's requests are charged for, with what they have emitted."
)
DECISION = Metric(
    "forebay_decision_seconds",
    "Time that a decision took: arrival (admission and placement of one), dispatch (a turn over what waits).",
    ("decision",),
)
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
RETRIES = Metric(
    "forebay_retries",
    "Attempts that an engine has ended with an error, by what was decided: retried, or why not.",
    ("outcome",),
)
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
REPLICAS = Metric("forebay_replicas", "Replicas of the roster, by what the router makes of them.", ("condition",))
REPLICA_REPORT_AGE = Metric(
    "forebay_replica_report_age_seconds", "Age of a replica's last report, when the router was asked.", ("replica",)
)
REPLICA_CLASS_BLOCKS = Metric(
    "forebay_replica_class_kv_blocks",
    "KV blocks that running and paused requests of a class hold on a replica.",
    ("replica", "priority_class"),
)
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

# What a replica itself shows at its own port, under the names that gateways and dashboards for model servers know (vLLM's).
SERVER_RUNNING = Metric("vllm:num_requests_running", "Requests in the running batch.", ("model_name",))
SERVER_WAITING = Metric("vllm:num_requests_waiting", "Requests held and not running.", ("model_name",))
SERVER_KV_USAGE = Metric("vllm:kv_cache_usage_perc", "Part of the KV blocks that is in use, 0 to 1.", ("model_name",))
SERVER_CACHE = Metric(
    "vllm:cache_config_info", "Size of the KV cache, in labels.", ("model_name", "block_size", "num_gpu_blocks")
)
OUTPUT_OVER_PREDICTED = Metric(
    "forebay_output_over_predicted",
    "Output tokens of requests that ended by themselves over the length that was predicted when the replica took them; not "
    "of those that came with a part of their output.",
    (MODEL_LABEL, "priority_class"),
)

# What a controller shows at its own port.
TICK = Metric("forebay_controller_tick_seconds", "Time that one tick of the controller took: observe, decide, act.")
TICK_DECISIONS = Metric("forebay_controller_decisions", "What the controller ordered or proposed, by kind.", ("kind",))

# Kubernetes: what a controller that watches nodes shows at its own port.
KUBERNETES_WATCH_AGE = Metric(
    "forebay_kubernetes_watch_age_seconds",
    "Since Kubernetes' API server was last heard about nodes; absent before the first time.",
)
KUBERNETES_WATCHES = Metric(
    "forebay_kubernetes_watches",
    "Watches over nodes that ended: agreed (as was asked for), gone (a full listing followed), failed (as did each listing "
    "that failed).",
    ("ended",),
)
KUBERNETES_NODES_GOING = Metric("forebay_kubernetes_nodes_going", "Nodes that are about to go, as far as is known.")
KUBERNETES_LEASE_HELD = Metric("forebay_kubernetes_lease_held", "1 where the controller holds the Lease.")
KUBERNETES_EVENTS = Metric(
    "forebay_kubernetes_events", "Events that were written, or were not (dropped).", ("outcome",)
)
