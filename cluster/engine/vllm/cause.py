"""Why an engine core did not start, in one line.

Owns: the file in which the core's processes leave it. Imports nothing of vLLM. Invariant: all else that vLLM logs, and where
it logs it, stays as it is.

Whoever starts a core hears only that it has ended. The cause is an exception that the core or a worker of it logs, the first
of them if there are several: the others follow from it.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

CONFIG_VARIABLE = "VLLM_LOGGING_CONFIG_PATH"
"""Names the file of vLLM's logging configuration to the processes that it starts."""
_CHARACTERS_MAX = 500


class CauseHandler(logging.Handler):
    """Adds a line to a file for each exception that is logged, as long as the file's folder is there."""

    def __init__(self, path: str) -> None:
        super().__init__(logging.ERROR)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            line = f"{type(error).__name__}: {' '.join(str(error).split())}"[:_CHARACTERS_MAX]
            with suppress(OSError), Path(self._path).open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")


@contextmanager
def causes_kept(logging_config: Mapping[str, Any]) -> Iterator[Callable[[], str]]:
    """Processes that vLLM starts meanwhile leave their exceptions. Yields what gives the first; empty where there is none,
    or where the environment has a logging configuration of its own.

    Args:
        logging_config: vLLM's default.
    """
    if os.environ.get(CONFIG_VARIABLE):
        yield str
        return
    with tempfile.TemporaryDirectory(prefix="forebay-core-") as folder:
        causes = Path(folder) / "causes"
        config: dict[str, Any] = copy.deepcopy(dict(logging_config))
        config["handlers"]["forebay"] = {"class": f"{__name__}.{CauseHandler.__name__}", "path": str(causes)}
        config["loggers"]["vllm"]["handlers"].append("forebay")
        path = Path(folder) / "logging.json"
        path.write_text(json.dumps(config), encoding="utf-8")
        os.environ[CONFIG_VARIABLE] = str(path)
        try:
            yield lambda: causes.read_text(encoding="utf-8").splitlines()[0] if causes.exists() else ""
        finally:
            del os.environ[CONFIG_VARIABLE]
