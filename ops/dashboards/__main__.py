"""Write the dashboards into the chart, or with --check say which files are not up to date.

    python -m ops.dashboards [--check]

Exit code 1: with --check, some are not.
"""

from __future__ import annotations

import argparse
import sys

from ops.dashboards.render import FOLDER, differing, write


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m ops.dashboards", description="Render the Grafana dashboards.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a file is not up to date")
    check = parser.parse_args().check
    changed = differing(FOLDER) if check else write(FOLDER)
    for name in changed:
        print(f"{FOLDER / name}: {'is not up to date; run python -m ops.dashboards' if check else 'written'}")
    return 1 if check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
