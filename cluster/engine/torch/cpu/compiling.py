"""How this package's kernels are compiled, and where what was compiled is kept.

Owns: numba's settings. Imports numba. Invariant: a kernel runs without the interpreter's lock, on the calling thread only,
and what is found in the cache was made from these very sources: numba looks at the file of the function alone, not at
those of the functions it calls, so the folder, also one that the user names (NUMBA_CACHE_DIR), has a part that is named
after all of them.

Nothing is compiled when a module is imported, only at a kernel's first call; an engine's warm-up makes those calls.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba.misc.appdirs import AppDirs

config: Any = numba.config
log = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])

REORDER = frozenset({"reassoc", "contract"})
"""Sums in another order and fused products: what vector units need. NaN, infinities and signed zeros keep their meaning."""


def _keep_compiled_by_source() -> bool:
    """Name numba's cache folder after the sources; whether it can be written to, for else numba would take another."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    users: str = AppDirs("forebay").user_cache_dir  # type: ignore[no-untyped-call]
    base = Path(config.CACHE_DIR).absolute() if config.CACHE_DIR else Path(users) / "kernels"
    folder = base / digest.hexdigest()[:16]
    try:
        if not folder.is_absolute():  # "~", as it is for a user without a home
            raise OSError(f"{folder} would be another one wherever a process runs")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        log.warning("kernels are compiled at every start: %s", error)
        return False
    config.CACHE_DIR = str(folder)
    return True


KEEPS_COMPILED = _keep_compiled_by_source()


def kernel(function: Function) -> Function:
    """Compile as written, each operation rounded by itself."""
    return _compiled(function, fastmath=False)


def reordering_kernel(function: Function) -> Function:
    """Compile with sums in whatever order is fastest."""
    return _compiled(function, fastmath=set(REORDER))


def _compiled(function: Function, fastmath: bool | set[str]) -> Function:
    options: dict[str, Any] = {"nogil": True, "boundscheck": False, "error_model": "numpy", "fastmath": fastmath}
    compiled: Function = numba.njit(cache=KEEPS_COMPILED, **options)(function)
    return compiled
