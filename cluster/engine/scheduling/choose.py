"""From the names in the configuration to the order and the batching mode that they name."""

from __future__ import annotations

from typing import assert_never

from cluster.config import BatchingMode
from cluster.config import Order as OrderName
from cluster.engine.scheduling import continuous
from cluster.engine.scheduling.fcfs import Fcfs
from cluster.engine.scheduling.order import Order
from cluster.engine.scheduling.plan import Planner
from cluster.engine.scheduling.priority import Priority


def order_for(name: OrderName) -> Order:
    match name:
        case OrderName.FCFS:
            return Fcfs()
        case OrderName.PRIORITY:
            return Priority()
        case _:
            assert_never(name)


def planner_for(mode: BatchingMode) -> Planner:
    match mode:
        case BatchingMode.CONTINUOUS:
            return continuous.plan
        case _:
            assert_never(mode)
