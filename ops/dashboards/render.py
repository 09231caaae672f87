"""The dashboards as the JSON that Grafana reads.

Owns: which dashboards there are, and the files in the chart. Invariant: a file follows from the code alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from ops.dashboards.batch import BATCH
from ops.dashboards.decisions import DECISIONS
from ops.dashboards.frame import Dashboard
from ops.dashboards.overview import OVERVIEW
from ops.dashboards.queue import QUEUE
from ops.dashboards.replicas import REPLICAS_AND_KV

DASHBOARDS: tuple[Dashboard, ...] = (OVERVIEW, QUEUE, REPLICAS_AND_KV, DECISIONS, BATCH)
FOLDER = Path(__file__).parents[2] / "helm" / "forebay" / "files" / "dashboards"


def document(dashboard: Dashboard) -> dict[str, Any]:
    """What Grafana's API is sent."""
    made: dict[str, Any] = json.loads(json.dumps(dashboard.build(), cls=JSONEncoder))
    return made


def rendered() -> dict[str, str]:
    """The text of each file, by its name."""
    return {f"{one.name}.json": json.dumps(document(one), indent=1) + "\n" for one in DASHBOARDS}


def differing(folder: Path = FOLDER) -> list[str]:
    """Files that are not as the code would write them, too many or missing, in order."""
    wanted = rendered()
    there = {path.name: path.read_text("utf-8") for path in folder.glob("*.json")}
    return sorted(name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name))


def write(folder: Path = FOLDER) -> list[str]:
    """Make the files as they are to be; returns those that were not."""
    wanted, changed = rendered(), differing(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name in changed:
        if name in wanted:
            (folder / name).write_text(wanted[name], "utf-8")
        else:
            (folder / name).unlink()
    return changed
