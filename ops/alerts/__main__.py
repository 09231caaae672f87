"""Keeps the chart's file of rules in step with the alerts.

    python -m ops.alerts [--check]

Owns: helm/forebay/files/alerts.yaml. With --check nothing is written, and the exit code is 1 where it differs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ops.alerts.render import rules_file
from ops.alerts.settings import AlertSettings

RULES_FILE = Path(__file__).parents[2] / "helm" / "forebay" / "files" / "alerts.yaml"


def main(arguments: list[str] | None = None, path: Path = RULES_FILE) -> int:
    parser = argparse.ArgumentParser(prog="python -m ops.alerts", description="Render the alerts into the chart.")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 where the file is another")
    check = parser.parse_args(arguments).check
    text = rules_file(AlertSettings())
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return 0
    if check:
        print(f"{path} is not what ops/alerts says: run python -m ops.alerts", file=sys.stderr)
        return 1
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
