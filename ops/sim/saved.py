"""A study that can be gone on with: what its file has of the runs that are over.

Owns: the part of the file that is read again, and whether it is of the same study. Imports the runs. Invariants: a run is
taken from a file only if the file is of a study that was not finished, with equal settings to the last; that it was the
same program is not known.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from ops.errors import CommandError
from ops.report import ReportRow
from ops.sim.runs import Ran
from ops.sim.study import Run, Study


class SavedRun(msgspec.Struct, frozen=True):
    """A run that is over, as it is written."""

    replicas: int
    policy: str
    seed: int
    event_log_sha256: str
    violations: tuple[str, ...]
    rows: tuple[ReportRow, ...]
    waits_ms: dict[str, tuple[float, ...]]


class Saved(msgspec.Struct, frozen=True):
    """What is written beside the report."""

    settings_sha256: str
    wanted: int
    """Runs that the study has."""
    runs: tuple[SavedRun, ...]


def settings_sha256(study: Study, runs: Sequence[Run]) -> str:
    """The same for equal studies only: of all settings, the trace's requests, and the runs that are wanted."""
    return hashlib.sha256(repr((study, list(runs))).encode()).hexdigest()


def to_save(sha256: str, wanted: int, results: Mapping[Run, Ran]) -> dict[str, object]:
    """For `ops.report.write_json`."""
    runs = tuple(
        SavedRun(one.replicas, one.policy, one.seed, r.event_log_sha256, r.violations, r.rows, dict(r.waits_ms))
        for one, r in results.items()
    )
    saved: dict[str, object] = msgspec.to_builtins(Saved(sha256, wanted, runs))
    return saved


def begun(path: Path, sha256: str) -> dict[Run, Ran]:
    """What a file has of this study, if it was not finished. A file of a finished one, or of none, is there to be replaced.

    Raises:
        CommandError: it has some runs of another study that was not finished.
    """
    try:
        saved = msgspec.json.decode(path.read_bytes(), type=Saved)
    except (OSError, msgspec.DecodeError):
        return {}
    if len(saved.runs) >= saved.wanted:
        return {}
    if saved.settings_sha256 != sha256:
        raise CommandError(
            f"--json: {path} has {len(saved.runs)} of {saved.wanted} runs of a study with other settings; repeat that command "
            "to go on with it, name another file, or remove this one"
        )
    return {
        Run(one.replicas, one.policy, one.seed): Ran(one.rows, one.event_log_sha256, one.violations, one.waits_ms)
        for one in saved.runs
    }
