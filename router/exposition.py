"""What /metrics says: the series of each model, with its name, and those of the whole router.

Owns: the label of the model, which is added where series are shown. A core counts into a registry of its own and knows
nothing of other models, so that nothing is looked up by model for each token. Invariants: one family has all its series
together, and the label's values are the models of the profile; a page is made family by family, between which tokens go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from cluster.metrics import MODEL_LABEL

_CREATED = "_created"
"""When a series began: a line for each that nobody asks for, a quarter of all."""


class ByModel(Collector):
    """All series of several registries. Register it where the router's own are."""

    def __init__(self, registries: Mapping[str, CollectorRegistry]) -> None:
        """By the model's name."""
        self._registries = registries

    def collect(self) -> Iterator[Metric]:
        """Family by family, each of the moment when it is taken. Every core registers the same ones in the same order."""
        for families in zip(*(registry.collect() for registry in self._registries.values()), strict=True):
            first = families[0]
            shown = Metric(first.name, first.documentation, first.type, first.unit)
            for model, family in zip(self._registries, families, strict=True):
                assert family.name == shown.name, "another core has other families"
                shown.samples += [s._replace(labels={MODEL_LABEL: model, **s.labels}) for s in family.samples]
            yield shown


class _One(Collector):
    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        return (self._family,)


async def page(registry: CollectorRegistry) -> bytes:
    """All series in Prometheus' text form. They are taken and written down family by family, and whatever waits on this event
    loop goes on in between: it all takes milliseconds. Gauges are all of the moment when the first is taken."""
    parts: list[bytes] = []
    for family in registry.collect():
        family.samples = [s for s in family.samples if not s.name.endswith(_CREATED)]
        parts.append(generate_latest(_One(family)))
        await asyncio.sleep(0)
    return b"".join(parts)
