"""The figures that alerts are judged by, each with its reason.

Owns: those figures and their defaults, which the rendered file has. Imports the base of our configs only.
"""

from __future__ import annotations

from pydantic import Field, PositiveFloat, PositiveInt

from cluster.config import Config

OBJECTIVE = 0.99
"""Of the first tokens of a class with `first_token_slo_s`, the part that is to come in time."""
LEAST_OBJECTIVE = 0.94
"""With less, even first tokens that are all late would not spend 14.4 times the budget: no fast burn could be seen."""
RUNBOOKS = "ops/runbooks"
"""Where the pages lie in the repository; a chart or `forebay alerts` may put an address in its place."""


class ClassWait(Config):
    """How long the first in a class's queue waits only where something is wrong."""

    priority_class: str
    wait_s: PositiveFloat


class AlertSettings(Config):
    """All of them. Times are seconds, parts are 0 to 1."""

    objective: float = Field(
        OBJECTIVE, ge=LEAST_OBJECTIVE, lt=1, description="See OBJECTIVE; the rest is the error budget."
    )
    late_min: PositiveInt = Field(
        10, description="Requests without a first token in time, in the longer window: fewer say nothing of a rate."
    )
    waits: tuple[ClassWait, ...] = Field(
        (ClassWait(priority_class="interactive", wait_s=10.0), ClassWait(priority_class="standard", wait_s=60.0)),
        description="Of the classes that people and services wait for.",
    )
    other_waits_s: PositiveFloat = Field(
        450.0,
        description="The same of all other classes: three quarters of router.max_queue_s, after which they get a 504.",
    )
    starved_after_s: PositiveFloat = Field(
        300.0, description="Ten times router.ageing_after_s, from which on a class may take its minimum share."
    )
    starved_window_s: PositiveInt = Field(
        600, description="Nothing of the class was sent out in it: as long as router.max_queue_s, the longest wait."
    )
    refused_part: float = Field(0.05, gt=0, lt=1, description="Of a class's arrivals, refused for want of capacity.")
    failing_part: float = Field(
        0.01, gt=0, lt=1, description="Of a class's ended requests, ended by Forebay and not by their client."
    )
    events_min: PositiveInt = Field(3, description="Refusals, failures or preemptions in the window: fewer are chance.")
    window_s: PositiveInt = Field(
        600, description="What rates are taken over: long enough for a few requests of a small deployment."
    )
    kv_part: float = Field(
        0.95, gt=0, lt=1, description="Of a model's KV blocks, in use. A full pool alone is what batch work is for."
    )
    kv_full_per_min: PositiveFloat = Field(
        1.0, description="Preemptions a minute because the pool ran out: with more, what is admitted does not fit."
    )
    urgent_blocked: PositiveInt = Field(
        5, description="Urgent requests in window_s that had to wait because nobody could be preempted any more."
    )
    preemptions_per_request: PositiveFloat = Field(
        1.0,
        description="Preemptions that drop or swap keys and values, per ended request: with more, work is done twice.",
    )
    flaps: PositiveInt = Field(3, description="Engines lost and replicas put out, in flap_window_s.")
    flap_window_s: PositiveInt = Field(900, description="Longer than a replica that is replaced takes to load, mostly.")
    out_replicas: PositiveFloat = Field(
        0.5, description="On the average of window_s: one was of no use for half of the time."
    )
    report_age_s: PositiveFloat = Field(
        3.0, description="router.fenced_after_s: thirty reports have not come, and its work goes on elsewhere."
    )
    standby_seen_s: PositiveInt = Field(
        6 * 3600, description="A standby seen within it is missed; where none was configured none is."
    )
    journal_part: float = Field(
        0.25,
        ge=0,
        lt=1,
        description="Of all that a router's queues may hold: a journal below it may grow as it likes, as with each day's first load.",
    )
    journal_ahead_s: PositiveInt = Field(4 * 3600, description="How far its growth is thought on: half a working day.")
    journal_strays: PositiveInt = Field(
        100, description="Live requests that are neither queued, nor running, nor suspects: there should be none."
    )
    moves_failed_part: float = Field(
        0.1, gt=0, lt=1, description="Of moves, those whose target did not take what it was granted: it costs the KV."
    )
    runbooks: str = Field(
        RUNBOOKS, min_length=1, description="The address, or folder, that the pages' links begin with."
    )
