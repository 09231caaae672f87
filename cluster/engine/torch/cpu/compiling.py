"""How this package's kernels are compiled, and where what was compiled is kept.

Owns: numba's settings. Imports numba. Invariant: a kernel runs without the interpreter's lock, on the calling thread only,
and what is found in the cache was made from these very sources: numba looks at the file of the function alone, not at
those of the functions it calls, so the folder is named after all of them.

Nothing is compiled when a module is imported, only at a kernel's first call; an engine's warm-up makes those calls.
"""

from __future__ import annotations

import hashlib
import logging
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


def _keep_compiled_by_source() -> None:
    """Name numba's cache folder after the sources, unless its user has named one."""
    if config.CACHE_DIR:
        return
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    folder: str = AppDirs("forebay").user_cache_dir  # type: ignore[no-untyped-call]
    config.CACHE_DIR = str(Path(folder) / "kernels" / digest.hexdigest()[:16])


def kernel(function: Function) -> Function:
    """Compile as written, each operation rounded by itself."""
    return _compiled(function, fastmath=False)


def reordering_kernel(function: Function) -> Function:
    """Compile with sums in whatever order is fastest."""
    return _compiled(function, fastmath=set(REORDER))


def _compiled(function: Function, fastmath: bool | set[str]) -> Function:
    options: dict[str, Any] = {"nogil": True, "boundscheck": False, "error_model": "numpy", "fastmath": fastmath}
    try:
        compiled: Function = numba.njit(cache=True, **options)(function)
    except RuntimeError as error:  # no folder can be written to
        log.warning("kernels are compiled at every start: %s", error)
        compiled = numba.njit(**options)(function)
    return compiled


_keep_compiled_by_source()
