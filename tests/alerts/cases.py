"""For each alert: series for which it fires, and not before its time, and series that just do not suffice.

The figures follow from the settings (ops/alerts/settings.py) and are worked out beside each case. `0+2x10` is 0, 2, … 20;
`5x10` is 5 eleven times. A counter that rises evenly from 0 has risen, in a window, by what it rises in that time.
"""

from __future__ import annotations

from cluster.metrics import (
    ADMISSIONS,
    CONTROLLER_LEADS,
    CONTROLLER_STANDBYS,
    EJECTIONS,
    ENGINE_DEATHS,
    IN_FLIGHT,
    JOURNAL_BYTES,
    JOURNAL_REQUESTS,
    MOVES,
    PREEMPTIONS,
    QUEUE_WAIT,
    QUEUED,
    QUEUED_BYTES_LIMIT,
    QUEUED_OLDEST,
    REPLICA_BLOCKS,
    REPLICA_BLOCKS_FREE,
    REPLICA_REPORT_AGE,
    REPLICA_URGENT_BLOCKED,
    REPLICAS,
    REPLICAS_READY,
    REQUESTS,
    SCALE,
    SLO_FIRST_TOKENS,
    SUSPECTS,
)
from ops.alerts.query import Part
from tests.alerts.kit import MODEL, OTHER, ROUTER, Case, Fires, told

Told = tuple[str, str]
MIB = 2**20
INTERACTIVE = {"model": MODEL, "priority_class": "interactive"}
BATCH = {"model": MODEL, "priority_class": "batch"}


def slo(late: str, in_time: str) -> list[Told]:
    return [
        told(SLO_FIRST_TOKENS, late, Part.TOTAL, priority_class="interactive", attained="false"),
        told(SLO_FIRST_TOKENS, in_time, Part.TOTAL, priority_class="interactive", attained="true"),
    ]


SLO = [
    Case(
        "an hour over 14.4 times the budget, and its last five minutes",
        "ForebaySloBurnFast",
        # 30 of 200 in two minutes are late, after five hours without. In the hour 30 n of 6,000 are, 2 n minutes later: more
        # than 14.4 % from n = 29 on, and two minutes later it fires. In six hours 2.5 % are at most, less than six times 1 %.
        slo("0x150 30+30x31", "0+200x150 30170+170x31"),
        {"358m": [], "360m": [Fires("15%", INTERACTIVE)]},
        "2m",
    ),
    Case(
        "an hour at 14 times the budget is less than 14.4 times",
        "ForebaySloBurnFast",
        slo("0x150 28+28x31", "0+200x150 30172+172x31"),
        {"360m": [], "362m": []},
        "2m",
    ),
    Case(
        "six hours over 6 times the budget, and their last half hour",
        "ForebaySloBurnFast",
        # 5 of 70 a minute; from the second minute on ten are late, and two minutes later it fires.
        slo("0+5x30", "0+65x30"),
        {"3m": [], "4m": [Fires("7.143%", INTERACTIVE)]},
    ),
    Case(
        "six hours at 5.9 times the budget",
        "ForebaySloBurnFast",
        slo("0+59x90", "0+941x90"),
        {"4m": [], "90m": []},
    ),
    Case(
        "an hour over 14.4 times the budget whose last five minutes are not",
        "ForebaySloBurnFast",
        # 40 of 200 in two minutes, and three times 24 at the end: of the hour 27 x 40 + 3 x 24 of 6,000, 19.2 %; of the last
        # minutes 12 %.
        slo("0x150 40+40x26 1104+24x2", "0+200x150 30160+160x26 34336+176x2"),
        {"350m": [Fires("16.67%", INTERACTIVE)], "360m": []},  # 25 x 40 of 6,000
        "2m",
    ),
    Case(
        "six hours over 6 times the budget whose last half hour is not",
        "ForebaySloBurnFast",
        # Of 9,400 in 94 minutes 7 x 60 + 5 x 34 are late, 6.3 %; of the last half hour 5 %.
        slo("0+7x60 425+5x33", "0+93x60 5675+95x33"),
        {"94m": []},
    ),
    Case(
        "half an hour over 6 times the budget, and six hours that are not",
        "ForebaySloBurnFast",
        # Of 9,100 in 91 minutes 4 x 60 + 8 x 31 are late, 5.4 %; of the last half hour 8 %.
        slo("0+4x60 248+8x30", "0+96x60 5852+92x30"),
        {"91m": []},
    ),
    Case("nine late requests, all that there were", "ForebaySloBurnFast", slo("0+1x9 9x20", "0x30"), {"12m": []}),
    Case(
        "a burn that is over stops it, though the hour is still bad",
        "ForebaySloBurnFast",
        # Half are late for 30 minutes and none after: at 62 minutes 28 x 50 of the hour's 6,000 were, and none of the
        # last half hour's.
        slo("0+50x30 1500x40", "0+50x30 1600+100x40"),
        {"25m": [Fires("50%", INTERACTIVE)], "62m": []},
    ),
    Case(
        "a day over 3 times the budget, and its last two hours",
        "ForebaySloBurnSlow",
        # After two days of 3,000 in a quarter of an hour, none late, 40 of 1,000 are: n quarters later 40 n of the day's
        # 1,000 n + 3,000 (96 - n). That is more than 3 % from n = 87 on, the 279th quarter; a quarter later it fires. Of all
        # three days it is less than 1 %.
        slo("0x192 40+40x96", "0+3000x192 576960+960x96"),
        {"4185m": [], "4200m": [Fires("3.143%", INTERACTIVE)]},  # 3,520 of 112,000
        "15m",
    ),
    Case(
        "a day over 3 times the budget whose last two hours are not",
        "ForebaySloBurnSlow",
        # The same for a day, and 25 of 1,000 in nine more quarters: of the day 87 x 40 + 9 x 25 of 96,000, 3.9 %.
        slo("0x192 40+40x95 3865+25x8", "0+3000x192 576960+960x95 669135+975x8"),
        {"4320m": [Fires("4%", INTERACTIVE)], "4455m": []},
        "15m",
    ),
    Case(
        "nine late requests in three days, all that there were",
        "ForebaySloBurnSlow",
        slo("0+1x9 9x20", "0x30"),
        {"2h": [], "7h": []},
        "15m",
    ),
    Case(
        "three days over the budget, and their last six hours",
        "ForebaySloBurnSlow",
        # 5 of 400 in five minutes: ten after ten minutes.
        slo("0+5x12", "0+395x12"),
        {"20m": [], "25m": [Fires("1.25%", INTERACTIVE)]},
        "5m",
    ),
    Case(
        "three days over the budget whose last six hours are not",
        "ForebaySloBurnSlow",
        # 12 of 1,000 in a quarter of an hour for a day, and then 9: of all 1.1 %.
        slo("0+12x96 1161+9x25", "0+988x96 95839+991x25"),
        {"1830m": []},
        "15m",
    ),
    Case(
        "a day at 2.9 times the budget after two without is 0.97 times that of three days",
        "ForebaySloBurnSlow",
        slo("0x192 29+29x96", "0+1000x192 192971+971x96"),
        {"72h": []},
        "15m",
    ),
]


def oldest(values: str, priority_class: str, instance: str = ROUTER) -> Told:
    return told(QUEUED_OLDEST, values, instance=instance, priority_class=priority_class)


def begun(values: str, priority_class: str = "batch") -> Told:
    return told(QUEUE_WAIT, values, Part.COUNT, priority_class=priority_class)


def ready(values: str, instance: str = ROUTER) -> Told:
    return told(REPLICAS_READY, values, instance=instance)


def arrivals(**decisions: str) -> list[Told]:
    return [told(ADMISSIONS, v, Part.TOTAL, priority_class="batch", decision=d) for d, v in decisions.items()]


def ends(**outcomes: str) -> list[Told]:
    return [told(REQUESTS, v, Part.TOTAL, priority_class="batch", outcome=o) for o, v in outcomes.items()]


SERVING = [
    Case(
        "each class has its bound, and the router where it waits longest counts",
        "ForebayQueueWaitLong",
        [
            oldest("11x9", "interactive"),
            oldest("61x9", "standard"),
            oldest("3x9", "batch"),
            oldest("451x9", "batch", OTHER),
        ],
        {
            "1m": [],
            "2m": [
                Fires("11s", INTERACTIVE),
                Fires("1m 1s", {"model": MODEL, "priority_class": "standard"}),
                Fires("7m 31s", BATCH),
            ],
        },
    ),
    Case(
        "waits of just the bounds",
        "ForebayQueueWaitLong",
        [oldest("10x9", "interactive"), oldest("60x9", "standard"), oldest("450x9", "batch")],
        {"9m": []},
    ),
    Case(
        "a wait that is over in between begins anew",
        "ForebayQueueWaitLong",
        [oldest("11 0 11x9", "interactive")],
        {"3m": [], "4m": [Fires("11s", INTERACTIVE)]},
    ),
    Case(
        "a class that waits while none of it is begun",
        "ForebayStarvation",
        # The first waits since 0: longer than 300 s from the sixth minute on.
        [oldest("0+60x20", "batch"), begun("5x20"), ready("1x20")],
        {"7m": [], "8m": [Fires("8m 0s", BATCH)]},
    ),
    Case(
        "a class of which none was ever begun",
        "ForebayStarvation",
        [oldest("0+60x20", "batch"), begun("0+1x20", "interactive"), ready("1x20")],
        {"7m": [], "8m": [Fires("8m 0s", BATCH)]},
    ),
    Case(
        "one that was begun ten minutes ago is enough",
        "ForebayStarvation",
        # In the fourth minute: until the fourteenth the window has it.
        [oldest("0+60x20", "batch"), begun("5x3 6x17"), ready("1x20")],
        {"8m": [], "12m": []},
    ),
    Case(
        "a wait of just the bound",
        "ForebayStarvation",
        [oldest("300x20", "batch"), begun("5x20"), ready("1x20")],
        {"20m": []},
    ),
    Case(
        "no replica, which another alert tells",
        "ForebayStarvation",
        [oldest("0+60x20", "batch"), begun("5x20"), ready("0x20")],
        {"20m": []},
    ),
    Case(
        "6 of 100 refused",
        "ForebayRefusalsHigh",
        arrivals(admitted="0+94x30", rejected_wait="0+4x30", rejected_queue_full="0+2x30"),
        {"10m": [], "11m": [Fires("6%", BATCH)]},
    ),
    Case(
        "4.9 of 100 refused",
        "ForebayRefusalsHigh",
        arrivals(admitted="0+951x30", rejected_wait="0+49x30"),
        {"30m": []},
    ),
    Case(
        "requests refused for what they are, or by a router that leaves",
        "ForebayRefusalsHigh",
        arrivals(
            admitted="0+10x30", rejected_deadline="0+50x30", rejected_too_large="0+50x30", rejected_draining="0+50x30"
        ),
        {"30m": []},
    ),
    Case(
        "half of few",
        "ForebayRefusalsHigh",
        # 0.35 a minute, as a mean: three at least in ten minutes from the ninth minute on.
        arrivals(admitted="0+0.35x30", rejected_wait="0+0.35x30"),
        {"18m": [], "19m": [Fires("50%", BATCH)]},
    ),
    Case(
        "2.8 refused in ten minutes are chance",
        "ForebayRefusalsHigh",
        arrivals(admitted="0+0.28x30", rejected_wait="0+0.28x30"),
        {"30m": []},
    ),
    Case(
        "1.2 of 100 ended by Forebay",
        "ForebayRequestsFailing",
        ends(finished="0+988x9", replica_lost="0+8x9", engine_error="0+4x9"),
        {"1m": [], "2m": [Fires("1.2%", BATCH)]},
    ),
    Case("0.9 of 100", "ForebayRequestsFailing", ends(finished="0+991x9", replica_lost="0+9x9"), {"9m": []}),
    Case(
        "what clients end, and what is refused, is no failure",
        "ForebayRequestsFailing",
        ends(finished="0+10x9", cancelled="0+90x9", rejected_wait="0+90x9", timed_out="0+9x9", slow_client="0+9x9"),
        {"9m": []},
    ),
    Case(
        "half of few",
        "ForebayRequestsFailing",
        ends(finished="0+0.35x20", replica_lost="0+0.35x20"),
        {"9m": [], "10m": [Fires("50%", BATCH)]},
    ),
    Case(
        "2.8 in ten minutes are chance",
        "ForebayRequestsFailing",
        ends(finished="0+0.28x20", replica_lost="0+0.28x20"),
        {"20m": []},
    ),
]


def wanted(values: str) -> Told:
    return told(SCALE, values, figure="wanted")


def deaths(values: str, instance: str = ROUTER) -> Told:
    return told(ENGINE_DEATHS, values, Part.TOTAL, instance=instance)


def put_out(values: str, fault: str) -> Told:
    return told(EJECTIONS, values, Part.TOTAL, fault=fault)


def out(values: str, condition: str) -> Told:
    return told(REPLICAS, values, condition=condition)


def blocks(free: int) -> list[Told]:
    """Of two replicas with 500 each, as two routers tell them."""
    return [
        one
        for instance in (ROUTER, OTHER)
        for replica, left in (("a", free), ("b", 0))
        for one in (
            told(REPLICA_BLOCKS, "500x40", instance=instance, replica=replica),
            told(REPLICA_BLOCKS_FREE, f"{left}x40", instance=instance, replica=replica),
        )
    ]


def preempted(values: str, cause: str, means: str) -> Told:
    return told(PREEMPTIONS, values, Part.TOTAL, priority_class="batch", cause=cause, means=means)


def blocked(values: str, replica: str, instance: str = ROUTER) -> Told:
    return told(REPLICA_URGENT_BLOCKED, values, Part.TOTAL, instance=instance, replica=replica)


def moves(**outcomes: str) -> list[Told]:
    return [told(MOVES, values, Part.TOTAL, outcome=outcome) for outcome, values in outcomes.items()]


OF_MODEL = {"model": MODEL}
REPLICAS_ALERTS = [
    Case(
        "no router has a replica",
        "ForebayNoReplicaReady",
        [ready("0x9"), ready("0x9", OTHER)],
        {"0m": [], "1m": [Fires("0", OF_MODEL)]},
    ),
    Case("one router has one", "ForebayNoReplicaReady", [ready("0x9"), ready("1x9", OTHER)], {"9m": []}),
    Case(
        "none is there and one is wanted",
        "ForebayNoReplicaReady",
        [ready("0x9"), wanted("1x9")],
        {"1m": [Fires("0", OF_MODEL)]},
    ),
    Case("none is wanted", "ForebayNoReplicaReady", [ready("0x9"), wanted("0x9")], {"9m": []}),
    Case(
        "three deaths in three minutes",
        "ForebayReplicaFlapping",
        [deaths("0 1 2 3x9")],
        {"3m": [], "4m": [Fires("3", OF_MODEL)]},
    ),
    Case(
        "a death and two that were put out",
        "ForebayReplicaFlapping",
        [deaths("0 1x9"), put_out("0 0 1x9", "link"), put_out("0 0 0 1x9", "gap")],
        {"3m": [], "4m": [Fires("3", OF_MODEL)]},
    ),
    Case(
        "two deaths that two routers saw are two",
        "ForebayReplicaFlapping",
        [deaths("0 1 2x9"), deaths("0 1 2x9", OTHER)],
        {"9m": []},
    ),
    Case(
        "three deaths of which 15 minutes never had more than two",
        "ForebayReplicaFlapping",
        [deaths("0 1x8 2x8 3x20")],  # in the 1st, 10th and 19th minute
        {"19m": [], "21m": []},
    ),
    Case(
        "two that are stuck",
        "ForebayReplicasOut",
        [out("2x9", "stuck"), out("3x9", "routable")],
        {"0m": [], "1m": [Fires("2.0", {**OF_MODEL, "condition": "stuck"})]},
    ),
    Case(
        "one that is let in for a moment now and then",
        "ForebayReplicasOut",
        # Out in three minutes of five.
        [out("1 1 1 0 0 1 1 1 0 0 1 1 1 0 0 1 1 1 0 0 1", "ejected")],
        {"20m": [Fires("0.6", {**OF_MODEL, "condition": "ejected"})]},
    ),
    Case(
        "one that is out in two minutes of five",
        "ForebayReplicasOut",
        [out("0 0 0 1 1 0 0 0 1 1 0 0 0 1 1 0 0 0 1 1 0", "ejected")],
        {f"{minute}m": [] for minute in range(4, 21)},
    ),
    Case(
        "those that drain or refuse for a moment",
        "ForebayReplicasOut",
        [out("2x9", "draining"), out("2x9", "backing_off"), out("2x9", "silent")],
        {"9m": []},
    ),
    Case(
        "a router that hears nothing of a replica for 3.5 s",
        "ForebayReportsStale",
        [
            told(REPLICA_REPORT_AGE, "0.1x9", replica="a"),
            told(REPLICA_REPORT_AGE, "3.5x9", instance=OTHER, replica="a"),
            told(REPLICA_REPORT_AGE, "0.1x9", replica="b"),
        ],
        {"0m": [], "1m": [Fires("3.5s", {**OF_MODEL, "replica": "a"})]},
    ),
    Case("3 s", "ForebayReportsStale", [told(REPLICA_REPORT_AGE, "3x9", replica="a")], {"9m": []}),
    Case(
        "96 % of the blocks in use, and two preemptions a minute for want of one",
        "ForebayKvPressure",
        # 40 of 1,000 are free; more than 10 preemptions from the sixth minute on.
        [*blocks(40), preempted("0+2x40", "kv_full", "recompute")],
        {"15m": [], "16m": [Fires("96%", OF_MODEL)]},
    ),
    Case(
        "94 % in use",
        "ForebayKvPressure",
        [*blocks(60), preempted("0+2x40", "kv_full", "recompute")],
        {"40m": []},
    ),
    Case(
        "nine preemptions",
        "ForebayKvPressure",
        [*blocks(40), preempted("0+1x9 9x31", "kv_full", "recompute")],
        {"9m": [], "19m": []},
    ),
    Case(
        "preemptions for urgent work",
        "ForebayKvPressure",
        [*blocks(40), preempted("0+9x40", "urgent", "recompute")],
        {"40m": []},
    ),
    Case(
        "five urgent requests blocked on two replicas",
        "ForebayUrgentBlocked",
        [blocked("0 1 2 3x9", "a", router) for router in (ROUTER, OTHER)]
        + [blocked("0 1 2x9", "b", router) for router in (ROUTER, OTHER)],
        {"3m": [], "4m": [Fires("5", OF_MODEL)]},
    ),
    Case(
        "four, which two routers tell",
        "ForebayUrgentBlocked",
        [blocked("0 1 2x9", replica, router) for replica in "ab" for router in (ROUTER, OTHER)],
        {"9m": []},
    ),
    Case(
        "1.2 costly preemptions per request",
        "ForebayPreemptionThrash",
        [
            preempted("0+4x30", "urgent", "recompute"),
            preempted("0+2x30", "kv_full", "swap"),
            *ends(finished="0+4x30", cancelled="0+1x30"),
        ],
        {"10m": [], "11m": [Fires("1.2", BATCH)]},
    ),
    Case(
        "preemptions, and none that ends",
        "ForebayPreemptionThrash",
        [preempted("0+4x30", "urgent", "recompute"), *ends(finished="0x30")],
        {"10m": [], "11m": [Fires("+Inf", BATCH)]},
    ),
    Case(
        "0.83 of them, and pauses",
        "ForebayPreemptionThrash",
        [preempted("0+5x30", "urgent", "recompute"), preempted("0+90x30", "urgent", "pause"), *ends(finished="0+6x30")],
        {"30m": []},
    ),
    Case(
        "few preemptions, and none that ends",
        "ForebayPreemptionThrash",
        [preempted("0+0.35x30", "urgent", "recompute"), *ends(finished="0x30")],
        {"18m": [], "19m": [Fires("+Inf", BATCH)]},
    ),
    Case(
        "2.8 preemptions in ten minutes are chance",
        "ForebayPreemptionThrash",
        [preempted("0+0.28x30", "urgent", "recompute"), *ends(finished="0x30")],
        {"30m": []},
    ),
    Case(
        "one of nine moves fails",
        "ForebayMovesFailing",
        # Three have failed from the third minute on.
        moves(moved="0+8x20", failed="0+1x20"),
        {"7m": [], "8m": [Fires("11.11%", OF_MODEL)]},
    ),
    Case("one of eleven", "ForebayMovesFailing", moves(moved="0+10x20", failed="0+1x20"), {"20m": []}),
    Case(
        "moves that come to nothing do not fail",
        "ForebayMovesFailing",
        moves(moved="0+1x20", refused="0+9x20", called_off="0+9x20", ended="0+9x20"),
        {"20m": []},
    ),
    Case(
        "few moves, of which all fail",
        "ForebayMovesFailing",
        moves(failed="0+0.35x20"),
        {"13m": [], "14m": [Fires("100%", OF_MODEL)]},
    ),
    Case("2.8 in ten minutes are chance", "ForebayMovesFailing", moves(failed="0+0.28x20"), {"20m": []}),
]


def leads(values: str, instance: str = ROUTER) -> Told:
    return told(CONTROLLER_LEADS, values, instance=instance, model="")


def standbys(values: str) -> Told:
    return told(CONTROLLER_STANDBYS, values, model="")


CONTROL = [
    Case(
        "the only router is gone; an hour later nobody knows whose it was",
        "ForebayRouterAbsent",
        [leads("1x5 stale")],  # in the sixth minute
        {"7m": [], "8m": [Fires("1", {})], "65m": [Fires("1", {})], "68m": [Fires("1", {}, scoped=False)]},
    ),
    Case(
        "there never was one",
        "ForebayRouterAbsent",
        [("up{job='other'}", "1x9")],
        {"1m": [], "2m": [Fires("1", {}, scoped=False)]},
    ),
    Case("one of two is gone", "ForebayRouterAbsent", [leads("1x5 stale"), leads("1x9", OTHER)], {"9m": []}),
    Case(
        "no router is linked to a controller",
        "ForebayControllerGone",
        [leads("1 0x9"), leads("1 0x9", OTHER)],
        {"30s": [], "45s": [Fires("0", {})]},
        "15s",
    ),
    Case("one of two is", "ForebayControllerGone", [leads("1 0x9"), leads("1x9", OTHER)], {"135s": []}, "15s"),
    Case(
        "a controller that is back in time",
        "ForebayControllerGone",
        [leads("1 0 0 1x9")],
        {"45s": [], "60s": []},
        "15s",
    ),
    Case(
        "one router of two has none",
        "ForebayRouterAlone",
        [leads("0x9"), leads("1x9", OTHER)],
        {"1m": [], "2m": [Fires("0", {"instance": ROUTER})]},
    ),
    Case("both have none", "ForebayRouterAlone", [leads("0x9"), leads("0x9", OTHER)], {"9m": []}),
    Case(
        "the one that stood by is gone",
        "ForebayNoStandby",
        [standbys("1 0x20"), leads("1x20")],
        {"5m": [], "6m": [Fires("0", {})]},
    ),
    Case("none ever stood by", "ForebayNoStandby", [standbys("0x20"), leads("1x20")], {"20m": []}),
    Case("none leads either", "ForebayNoStandby", [standbys("1 0x20"), leads("1 0x20")], {"20m": []}),
    Case(
        "six hours later it is not missed any more",
        "ForebayNoStandby",
        [standbys("1 0x80"), leads("1x80")],
        {"355m": [Fires("0", {})], "365m": []},
        "5m",
    ),
]


def journal(first_mib: int, more_mib: int) -> list[Told]:
    """Of two models in equal parts, which rise every minute."""
    values = f"{first_mib * MIB // 2}+{more_mib * MIB // 2}x30"
    return [told(JOURNAL_BYTES, values), told(JOURNAL_BYTES, values, model="large")]


def bounds(mib: int) -> list[Told]:
    """What each queue may hold, of three classes and two models."""
    names = ("interactive", "standard", "batch")
    return [
        told(QUEUED_BYTES_LIMIT, f"{mib * MIB}x30", model=model, priority_class=name)
        for model in (MODEL, "large")
        for name in names
    ]


def lives(suspects: int) -> list[Told]:
    """300, of which 150 are queued and 40 are on replicas."""
    queued = [told(QUEUED, "50x30", priority_class=name) for name in ("interactive", "standard", "batch")]
    running = told(IN_FLIGHT, "40x30", priority_class="batch")
    return [*queued, running, told(JOURNAL_REQUESTS, "300x30"), told(SUSPECTS, f"{suspects}x30")]


JOURNAL = [
    Case(
        "a journal that has more in four hours than six queues of 256 MiB, which are 1,536 MiB",
        "ForebayJournalGrowth",
        # 322 MiB and 8 more a minute: more than a quarter, 384, from the eighth minute on. Ten minutes later it has 466, and
        # 240 minutes on 2,386 MiB = 2.33 GiB.
        [*journal(322, 8), *bounds(256)],
        {"17m": [], "18m": [Fires("2.33Gi", {"instance": ROUTER})]},
    ),
    # 490 MiB after half an hour, and 240 minutes on 1,450.
    Case("one that has 1,450 MiB then", "ForebayJournalGrowth", [*journal(370, 4), *bounds(256)], {"30m": []}),
    Case("one that grows faster and is small", "ForebayJournalGrowth", [*journal(10, 20), *bounds(256)], {"28m": []}),
    Case(
        "the same growth on a router whose queues may hold 3,072 MiB, of which it has more than a quarter",
        "ForebayJournalGrowth",
        [*journal(802, 8), *bounds(512)],  # 1,042 MiB after half an hour, and 240 minutes on 2,962
        {"30m": []},
    ),
    Case("on a router whose bounds are not known", "ForebayJournalGrowth", journal(322, 8), {"30m": []}),
    Case(
        "105 requests that are nowhere",
        "ForebayJournalLeak",
        lives(suspects=5),
        {"14m": [], "15m": [Fires("105", {"instance": ROUTER, **OF_MODEL})]},
    ),
    Case("100", "ForebayJournalLeak", lives(suspects=10), {"30m": []}),
]
CASES = [*SLO, *SERVING, *REPLICAS_ALERTS, *CONTROL, *JOURNAL]
