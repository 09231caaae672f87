"""The embedded engine, in its own thread, under the laws of every engine: each batching mode with each order on the
arithmetic backend, whose output betrays every error of book-keeping, and the orders on a real model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import pytest

from cluster.clock import SystemClock
from cluster.config import BatchingMode, EngineConfig, Order, WithinClass
from cluster.engine.engine import Engine
from cluster.engine.runner import EngineRunner
from cluster.engine.text import TextCodec
from cluster.engine.torch.backend import TorchBackend
from cluster.model import ModelFolder
from cluster.ports import Backend, Row, RowOutput
from tests.conformance.arithmetic_backend import ArithmeticBackend
from tests.conformance.engine_kit import EOS, arithmetic_model, byte_level_codec, vocab_size
from tests.conformance.port_kit import CONFIG, Driver, Law, Reference, Shared
from tests.conformance.port_laws import ENDINGS, laws_of
from tests.conformance.transformers_model import TransformersModel

ORDERS = [(order, WithinClass.FCFS) for order in Order] + [(Order.PRIORITY, WithinClass.SJF)]
ARITHMETIC = [
    CONFIG.model_copy(update={"mode": mode, "order": order, "within_class": within})
    for mode, (order, within) in itertools.product(BatchingMode, ORDERS)
]
REAL = [CONFIG.model_copy(update={"order": order, "host_blocks": 64}) for order in (Order.PRIORITY, Order.SRPT)]
"""The orders that preempt, for it is there that a backend matters. These swap, the arithmetic ones recompute."""


class Mortal(ArithmeticBackend):
    broken = False

    def run(self, rows: Sequence[Row], padding_tokens: int = 0) -> list[RowOutput]:
        if self.broken:
            raise RuntimeError("device lost")
        return super().run(rows, padding_tokens)


@cache
def arithmetic_reference() -> Reference:
    return Reference(arithmetic_model())


def driver(engine: Engine, reference: Reference) -> Driver:
    return Driver(EngineRunner(engine, SystemClock()), engine.config, reference, stands_still=True)


def arithmetic_driver(settings: EngineConfig) -> Driver:
    backend = Mortal(settings.blocks, settings.block_size_tokens, vocab_size())
    made = driver(Engine(settings, backend, byte_level_codec(), (EOS,)), arithmetic_reference())
    made.kill = lambda: setattr(backend, "broken", True)
    return made


@dataclass(frozen=True)
class Llama:
    """One loaded model for one engine after another."""

    folder: ModelFolder
    backend: Backend
    reference: Reference

    def driver(self, settings: EngineConfig) -> Driver:
        codec = TextCodec.from_file(self.folder.tokenizer_path)
        return driver(Engine(settings, self.backend, codec, self.folder.eos_token_ids), self.reference)


def name_of(config: EngineConfig) -> str:
    within = "-sjf" if config.within_class is WithinClass.SJF else ""
    return f"{config.mode.value}-{config.order.value}{within}"


def laws(configs: list[EngineConfig], *endings: Law, slow: tuple[EngineConfig, ...] = ()) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("config", "law"),
        [
            pytest.param(c, law, id=f"{name_of(c)}-{law.name}", marks=[pytest.mark.slow] if c in slow else [])
            for c in configs
            for law in (*laws_of(c), *endings)
        ],
    )


@pytest.fixture(scope="module")
def arithmetic() -> Iterator[Shared]:
    engine = Shared(arithmetic_driver)
    yield engine
    engine.close()


@laws(ARITHMETIC, *ENDINGS)
def test_on_the_arithmetic_backend(arithmetic: Shared, config: EngineConfig, law: Law) -> None:
    arithmetic.hold(config, law)


@pytest.fixture(scope="module")
def llama(tiny_model: ModelFolder) -> Iterator[Shared]:
    loaded = Llama(tiny_model, TorchBackend(tiny_model, CONFIG), Reference(TransformersModel(tiny_model)))
    engine = Shared(loaded.driver)
    yield engine
    engine.close()


@laws(REAL, slow=tuple(c for c in REAL if name_of(c) != "continuous-priority"))
def test_on_a_real_model(llama: Shared, config: EngineConfig, law: Law) -> None:
    llama.hold(config, law)
