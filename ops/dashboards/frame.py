"""What every dashboard has in common.

Owns: names and links, the variables, where panels stand. Imports Grafana's builders. Invariants: a dashboard's uid follows from
its name and never changes; what is built carries no number that one Grafana gave it, so that it is the same everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import dashboard as model

from cluster import metrics
from cluster.metrics import MODEL_LABEL, Metric
from ops.alerts.settings import OBJECTIVE
from ops.alerts.settings import RUNBOOKS as RUNBOOKS_AT
from ops.dashboards.panels import DATASOURCE, RUNBOOKS, Panel
from ops.dashboards.queries import JOB, selector

TAG = "forebay"
"""Of all of them: links lead to whatever carries it."""
DATASOURCE_VARIABLE, RUNBOOKS_VARIABLE, OBJECTIVE_VARIABLE = "datasource", "runbooks", "objective"
ALL = ".+"
"""What the choice of all stands for: what comes later is in it too."""


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One of them, as its module states it."""

    name: str
    """Of its file; `forebay-NAME` is its uid."""
    title: str
    description: str
    rows: tuple[Row, ...]
    of_class: str | None = None
    """The class that it shows at first; None shows all."""

    @property
    def uid(self) -> str:
        return f"{TAG}-{self.name}"

    def build(self) -> model.Dashboard:
        """As Grafana's schema has it."""
        made = (
            build.Dashboard(f"Forebay / {self.title}")
            .uid(self.uid)
            .description(self.description)
            .tags([TAG])
            .tooltip(model.DashboardCursorSync.CROSSHAIR)
            .time("now-1h", "now")
            .refresh("30s")
            .variables(_variables(self.of_class))
            .links(_links())
        )
        number = 0
        for row in self.rows:
            number += 1
            made.with_row(build.Row(row.title).id(number))
            for panel in row.panels:
                number += 1
                made.with_panel(panel.id(number))
        return made.build()


def _variables(of_class: str | None) -> list[Builder[model.VariableModel]]:
    datasource = build.DatasourceVariable(DATASOURCE_VARIABLE).label("Data source").type("prometheus")
    return [
        datasource.allow_custom_value(False),
        _values(JOB, "Job", metrics.REPLICAS_READY, "What Prometheus scrapes: one release of Forebay, or several."),
        _values(MODEL_LABEL, "Model", metrics.REPLICAS_READY, "Only what cannot be told by model ignores it."),
        _values("priority_class", "Class", metrics.QUEUED, "A priority class of the profile.", of_class),
        _values("replica", "Replica", metrics.REPLICA_SLOTS, "Only figures of single replicas heed it."),
        build.TextBoxVariable(OBJECTIVE_VARIABLE)
        .label("SLO objective")
        .description("The part of first tokens that is to be in time; what burn rates are measured by.")
        .default_value(f"{OBJECTIVE:g}"),
        build.TextBoxVariable(RUNBOOKS_VARIABLE)
        .label("Runbooks at")
        .description("The address of the folder that holds the runbooks.")
        .default_value(RUNBOOKS_AT),
    ]


def _values(name: str, label: str, metric: Metric, description: str, value: str | None = None) -> build.QueryVariable:
    """A variable of a label's values, among the series that the variables before it choose."""
    of = metric.name if name == JOB else selector(metric, every=name)
    asked: dict[str, object] = {"qryType": 1, "query": f"label_values({of}, {name})", "refId": "variable"}
    text, chosen = ("All", "$__all") if value is None else (value, value)
    current = model.VariableOption(text=[text], value=[chosen])
    return (
        build.QueryVariable(name)
        .label(label)
        .description(description)
        .datasource(DATASOURCE)
        .query(asked)
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(ALL)
        .current(current)
    )


def _links() -> list[Builder[model.DashboardLink]]:
    others = build.DashboardLink("Forebay").type(model.DashboardLinkType.DASHBOARDS).tags([TAG])
    pages = build.DashboardLink("Runbooks").type(model.DashboardLinkType.LINK).icon("doc").url(RUNBOOKS)
    return [others.keep_time(True).include_vars(True), pages.target_blank(True)]
