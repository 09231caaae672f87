"""What /metrics says: the series of each model, with its name, and those of the whole router.

Owns: the label of the model, which is added where series are shown. A core counts into a registry of its own and knows
nothing of other models, so that nothing is looked up by model for each token. Invariant: one family has all its series
together, and the label's values are the models of the profile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from cluster.metrics import MODEL_LABEL


class ByModel(Collector):
    """All series of several registries. Register it where the router's own are."""

    def __init__(self, registries: Mapping[str, CollectorRegistry]) -> None:
        """By the model's name."""
        self._registries = registries

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for model, registry in self._registries.items():
            for family in registry.collect():
                shown = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type, family.unit)
                )
                shown.samples += [s._replace(labels={MODEL_LABEL: model, **s.labels}) for s in family.samples]
        return families.values()
