"""A part of the line that says all that it can: what tests/process_parts.py runs, with every logger at DEBUG.

    python -m tests.loud_parts FOLDER ROLE INSTANCE_FILE ...

Owns: where that goes, a file of FOLDER for each process, with all else that it writes to standard error.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from deployments.settings import Instance
from tests import process_parts


def main(folder: str, role: str, instance_file: str, *rest: str) -> None:
    instance = Instance.model_validate_json(Path(instance_file).read_bytes())
    told = Path(folder) / f"{role}-{os.getpid()}.json"
    told.write_text(instance.model_copy(update={"log_level": "DEBUG"}).model_dump_json())
    log = os.open(Path(folder) / f"{role}-{os.getpid()}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, sys.stderr.fileno())
    logging.basicConfig(level=logging.DEBUG, stream=sys.stderr, force=True)
    process_parts.main(role, str(told), *rest)


if __name__ == "__main__":
    main(*sys.argv[1:])
