"""The tenants' bands of every priority.

Owns: which of them are remembered. Imports config and `fairness`. Single writer. Invariants: a band is the same one as long
as anything of it waits or runs; there are no more idle ones than MAX_IDLE_BANDS.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping

from cluster.config import RouterConfig
from router.fairness import TenantBand

MAX_IDLE_BANDS = 64
"""Bands that are remembered without having work: clients may name any priority."""


class FairShares:
    """The tenant bands of every priority, those too in which nothing waits: what was got there is still owed for."""

    def __init__(self, config: RouterConfig) -> None:
        self._weights = {t.name: t.weight for t in config.tenants}
        self._bands: OrderedDict[int, TenantBand] = OrderedDict()
        """Least recently filled first."""
        self._heard: dict[int, tuple[float, bool]] = {}
        """Where the other routers stand, by priority: see `TenantBand.hear`."""

    def __iter__(self) -> Iterator[tuple[int, TenantBand]]:
        """Each priority with its band, the one that was filled last first."""
        return iter([*self._bands.items()][::-1])

    def known(self, priority: int) -> TenantBand | None:
        """The band of a priority, if there is one."""
        return self._bands.get(priority)

    def band(self, priority: int) -> TenantBand:
        """The band of a priority; it is the same one as long as anything of it waits or runs."""
        band = self._bands.get(priority)
        if band is None:
            if len(self._bands) >= MAX_IDLE_BANDS:
                idle = [p for p, b in self._bands.items() if not b.open]
                for old in idle[: len(self._bands) - MAX_IDLE_BANDS + 1]:
                    del self._bands[old]
            band = self._bands[priority] = TenantBand(self._weights)
            if priority in self._heard:
                level, waits = self._heard[priority]
                band.hear(level, waits=waits)
        self._bands.move_to_end(priority)
        return band

    def hear(self, levels: Mapping[int, tuple[float, bool]]) -> None:
        """Where the other routers stand, in every band that they know."""
        self._heard = dict(levels)
        for priority, band in self._bands.items():
            if priority in levels:
                level, waits = levels[priority]
                band.hear(level, waits=waits)
            else:
                band.alone(apart=False)

    def alone(self, *, apart: bool) -> None:
        """As `TenantBand.alone`."""
        self._heard = {}
        for band in self._bands.values():
            band.alone(apart=apart)
