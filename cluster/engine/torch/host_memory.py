"""Large arrays in the host's memory.

Owns: how they are reserved. Imports torch. Invariant: the memory is zero, and goes back when its tensor does.
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20


def zeros_on_huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros on huge pages where the system has them: with small ones a walk through the array waits for page tables.

    Raises:
        MemoryError: the address space does not hold it.
    """
    size = math.prod(shape) * dtype.itemsize
    pages = max(1, -(-size // HUGE_PAGE_BYTES))
    # Shared memory, which is the default here, has small pages; a region may begin amid a huge one, hence one more.
    try:
        region = mmap.mmap(-1, (pages + 1) * HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{size} bytes of {dtype} {list(shape)} cannot be reserved") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    address = torch.frombuffer(region, dtype=torch.uint8).data_ptr()
    return torch.frombuffer(region, dtype=dtype, count=math.prod(shape), offset=-address % HUGE_PAGE_BYTES).view(shape)
