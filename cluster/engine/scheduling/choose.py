"""From the names in the configuration to the order and the batching mode that they name."""

from __future__ import annotations

from typing import assert_never

from cluster.config import BatchingMode, EngineConfig
from cluster.config import Order as OrderName
from cluster.engine.scheduling import continuous, dynamic, static
from cluster.engine.scheduling.ageing import Ageing
from cluster.engine.scheduling.fcfs import Fcfs
from cluster.engine.scheduling.order import Order
from cluster.engine.scheduling.plan import Planner
from cluster.engine.scheduling.priority import Priority
from cluster.engine.scheduling.sjf import Sjf
from cluster.engine.scheduling.srpt import Srpt


def order_for(config: EngineConfig) -> Order:
    match config.order:
        case OrderName.FCFS:
            return Fcfs()
        case OrderName.SJF:
            return Sjf(Ageing.of(config))
        case OrderName.SRPT:
            return Srpt(Ageing.of(config), config.srpt_margin_tokens)
        case OrderName.PRIORITY:
            return Priority(config.within_class, Ageing.of(config))
        case _:
            assert_never(config.order)


def planner_for(mode: BatchingMode) -> Planner:
    match mode:
        case BatchingMode.STATIC:
            return static.plan
        case BatchingMode.DYNAMIC:
            return dynamic.plan
        case BatchingMode.CONTINUOUS:
            return continuous.plan
        case _:
            assert_never(mode)
