"""What every panel has in common.

Owns: how a panel looks: units, legends, tooltips, the colour of a class. Imports Grafana's builders. Invariant: a class has
one colour wherever it is shown (its name begins the legend), and every panel says how it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from grafana_foundation_sdk.builders import common, prometheus, stat, timeseries
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.common import (
    AxisPlacement,
    BigValueColorMode,
    BigValueGraphMode,
    GraphThresholdsStyleMode,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
)

DATASOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")
RUNBOOKS = "${runbooks}"
"""The variable that says where the runbooks are."""

CLASS_COLOURS = {"interactive": "blue", "standard": "green", "batch": "orange"}
"""Of the classes that a profile has where it names none; others get one by their name, the same in every panel."""

_LINES_HEIGHT, _STAT_HEIGHT = 8, 4

SECONDS, SHARE, BYTES, COUNT = "s", "percentunit", "bytes", "short"
PER_MINUTE, REQUESTS_PER_S, TOKENS_PER_S = "cpm", "reqps", "suffix: tokens/s"
TOKENS, REQUESTS, BLOCKS, REPLICAS, TIMES = (
    f"suffix: {thing}" for thing in ("tokens", "requests", "blocks", "replicas", "x")
)

Panel: TypeAlias = timeseries.Panel | stat.Panel
_P = TypeVar("_P", timeseries.Panel, stat.Panel)


@dataclass(frozen=True, slots=True)
class Query:
    """A query and what its series are called; `{{label}}` stands for a label's value."""

    expression: str
    legend: str
    unit: str | None = None
    """Where it is another than the panel's: it has the axis on the right then."""


@dataclass(frozen=True, slots=True)
class Step:
    """From this value on, this colour."""

    value: float
    colour: str


def lines(
    title: str,
    reading: str,
    unit: str,
    *queries: Query,
    width: int = 8,
    stacked: bool = False,
    limits: Sequence[Step] = (),
    most: float | None = None,
    runbook: str | None = None,
) -> timeseries.Panel:
    """Values over time.

    Args:
        reading: What is seen, and what it means.
        unit: As Grafana names it.
        width: Of 24.
        stacked: The height is the sum.
        limits: Lines drawn across.
        most: Upper end of the axis.
        runbook: Name of the page that tells what to do.
    """
    panel = timeseries.Panel().height(_LINES_HEIGHT).min(0).fill_opacity(25 if stacked else 5).line_width(1)
    panel = panel.show_points(VisibilityMode.NEVER).legend(
        common.VizLegendOptions()
        .display_mode(LegendDisplayMode.TABLE)
        .placement(LegendPlacement.BOTTOM)
        .show_legend(True)
        .calcs(["lastNotNull", "max"])
    )
    panel.tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
    panel.color_scheme(build.FieldColor().mode(model.FieldColorModeId.PALETTE_CLASSIC_BY_NAME))
    if stacked:
        panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL).group("A"))
    if most is not None:
        panel.max(most)
    if limits:
        panel.thresholds(_thresholds(Step(0, "transparent"), *limits))
        panel.thresholds_style(common.GraphThresholdsStyleConfig().mode(GraphThresholdsStyleMode.DASHED))
    for name, colour in CLASS_COLOURS.items():
        fixed = {"mode": model.FieldColorModeId.FIXED.value, "fixedColor": colour}
        panel.override_by_regexp(rf"/^{name}\b/", [model.DynamicConfigValue("color", fixed)])
    dashes = {"fill": "dash", "dash": [8, 6]}  # beside the same class's upper quantile, in the same colour
    panel.override_by_regexp(r"/\bp50$/", [model.DynamicConfigValue("custom.lineStyle", dashes)])
    return _panel(panel, title, reading, unit, queries, width, runbook)


def figure(
    title: str,
    reading: str,
    unit: str,
    query: Query,
    *,
    width: int = 4,
    steps: Sequence[Step] = (),
    runbook: str | None = None,
) -> stat.Panel:
    """One figure, the latest, with its course behind it. `steps` colour it; other arguments as those of `lines`."""
    panel = stat.Panel().height(_STAT_HEIGHT).graph_mode(BigValueGraphMode.AREA).color_mode(BigValueColorMode.VALUE)
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    panel.thresholds(_thresholds(*(steps or (Step(0, "text"),))))
    return _panel(panel, title, reading, unit, (query,), width, runbook)


def _panel(
    panel: _P, title: str, reading: str, unit: str, queries: Sequence[Query], width: int, runbook: str | None
) -> _P:
    panel.title(title).description(reading).unit(unit).span(width).datasource(DATASOURCE)
    for number, query in enumerate(queries):
        target = prometheus.Dataquery().expr(query.expression).legend_format(query.legend).range()
        letter = chr(ord("A") + number)
        panel.with_target(target.ref_id(letter).datasource(DATASOURCE))
        if query.unit is not None:
            other = {"unit": query.unit, "custom.axisPlacement": AxisPlacement.RIGHT.value}
            panel.override_by_query(letter, [model.DynamicConfigValue(*one) for one in other.items()])
    if runbook is not None:
        link = build.DashboardLink(f"Runbook: {runbook}").type(model.DashboardLinkType.LINK)
        panel.links([link.url(f"{RUNBOOKS}/{runbook}.md").target_blank(True)])
    return panel


def _thresholds(*steps: Step) -> build.ThresholdsConfig:
    """The first holds below all others, whatever its value."""
    made = [model.Threshold(value=s.value if n else None, color=s.colour) for n, s in enumerate(steps)]
    return build.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(made)
