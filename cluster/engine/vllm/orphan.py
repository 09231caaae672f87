"""The end of an engine core whose replica has ended, and of a worker whose core has.

Owns: the thread that waits for it. Imports nothing of vLLM. Invariant: no core outlives its replica, and no worker its core,
by more than a moment, however that one ended.

vLLM ends a core when its client says so. Without this, a core whose replica was killed would keep its memory for good; and
a worker, which does end after its core, takes seconds to.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing.process import BaseProcess

_THREAD = "forebay-orphan"


def end_with_parent() -> None:
    """Have this process end when the one that started it does. Nothing, where multiprocessing did not start this one, or
    where it was asked before."""
    parent = multiprocessing.parent_process()
    if parent is not None and all(thread.name != _THREAD for thread in threading.enumerate()):
        threading.Thread(target=_end_after, args=(parent,), name=_THREAD, daemon=True).start()


def _end_after(parent: BaseProcess) -> None:
    parent.join()  # returns when a pipe closes that the parent alone holds open
    for worker in multiprocessing.active_children():
        worker.kill()
    os._exit(1)
