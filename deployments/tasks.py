"""What health checks ask of a process's own tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence


def raise_if_ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Raises RuntimeError, from what a task raised, where one has ended."""
    for task in tasks:
        if task.done():
            cause = None if task.cancelled() else task.exception()
            raise RuntimeError(f"the task {task.get_name()!r} has ended: {cause!r}") from cause
