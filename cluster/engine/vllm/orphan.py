"""The end of an engine core whose replica has ended.

Owns: the thread that waits for it. Imports nothing of vLLM. Invariant: neither a core nor a worker of it outlives the
process that started the core by more than a moment, however that one ended.

vLLM ends a core when its client says so. Without this, a core whose replica was killed would keep its memory for good; and
a worker, which does end after its core, takes seconds to.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing.process import BaseProcess


def end_with_parent() -> None:
    """Have this process end when the one that started it does. Nothing, where multiprocessing did not start this one."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent,), name="forebay-orphan", daemon=True).start()


def _end_after(parent: BaseProcess) -> None:
    parent.join()  # returns when a pipe closes that the parent alone holds open
    for worker in multiprocessing.active_children():
        worker.kill()
    os._exit(1)
