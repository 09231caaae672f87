"""When a process looks for garbage. Imports nothing of ours."""

from __future__ import annotations

import gc

_YOUNG_OBJECTS, _YOUNG_ROUNDS, _OLD_ROUNDS = 10_000, 20, 20
"""So many objects made and not freed, and how many such rounds go before a wider one."""


def settle() -> None:
    """Once all is loaded: what lives now lives as long as the process, and Ray's and the model's hundreds of thousands of
    objects need not be looked through for what can be freed, again and again, while streams wait: it takes 0.2 s and more."""
    gc.collect()
    gc.freeze()
    # What requests leave behind is freed at once; a collection looks for circles, of which they make next to none.
    gc.set_threshold(_YOUNG_OBJECTS, _YOUNG_ROUNDS, _OLD_ROUNDS)
