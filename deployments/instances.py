"""The instances of this user on this machine, as each says it of itself in a file.

Owns: the form of that file, and the removal of what killed instances left behind.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import msgspec
import psutil

from deployments.settings import Environment

FOLDER_PREFIX = "forebay-"
"""Of the temporary folder of an instance."""


class InstanceState(msgspec.Struct, frozen=True):
    """What an instance writes of itself for other commands of the same user."""

    url: str
    """Empty while it starts."""
    pid: int
    models: tuple[str, ...]
    folder: str

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".new")
        temporary.write_bytes(msgspec.json.encode(self))
        temporary.replace(path)


def running_instances(environment: Environment) -> list[InstanceState]:
    """Newest first. What killed ones left behind is removed."""
    found: list[tuple[float, InstanceState]] = []
    for path in environment.run_dir.glob("*.json"):
        try:
            state = msgspec.json.decode(path.read_bytes(), type=InstanceState)
            modified_s = path.stat().st_mtime
        except (OSError, msgspec.DecodeError):
            path.unlink(missing_ok=True)
            continue
        if psutil.pid_exists(state.pid):
            found.append((modified_s, state))
        else:
            folder = Path(state.folder)
            if folder.parent == Path(tempfile.gettempdir()) and folder.name.startswith(FOLDER_PREFIX):
                shutil.rmtree(folder, ignore_errors=True)
            path.unlink(missing_ok=True)
    return [state for _, state in sorted(found, key=lambda item: -item[0])]
