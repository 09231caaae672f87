"""`forebay alerts`.

Owns: how the rules are printed. What they are lies in ops/alerts, which is imported when the command runs. Asks nobody.
"""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from ops.errors import CommandError


def alerts(
    runbooks: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="What the links to the runbooks begin with.",
            show_default="ops/runbooks, their folder in the repository",
        ),
    ] = None,
    objective: Annotated[
        float | None,
        typer.Option(
            metavar="PART",
            help="Of the first tokens of a class with first_token_slo_s, the part that is to come in time.",
            show_default="0.99",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Print Prometheus' rules for Forebay: alerts, and the recordings that they use.

    For a Prometheus that the chart does not reach: `forebay alerts > forebay.yaml`, and name that file in its `rule_files`.
    """
    from ops.alerts.render import document, rules_file
    from ops.alerts.settings import LEAST_OBJECTIVE, AlertSettings

    if objective is not None and not LEAST_OBJECTIVE <= objective < 1:
        raise CommandError(
            f"--objective: {objective:g} must be {LEAST_OBJECTIVE:g} at least and less than 1, as 0.999 is"
        )
    if runbooks is not None and not runbooks.strip("/"):
        raise CommandError("--runbooks: the address is empty; give what the links to the runbooks are to begin with")
    given = {"runbooks": runbooks, "objective": objective}
    settings = AlertSettings.model_validate({name: value for name, value in given.items() if value is not None})
    if as_json:
        json.dump(document(settings), sys.stdout, indent=2, ensure_ascii=False)
        print()
    else:
        sys.stdout.write(rules_file(settings))
