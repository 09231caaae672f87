"""The one uniform number of each token.

Owns: the map from (seed, choice, token index) to [0, 1). Imports xxhash. Invariant: it has no history, so a request
that is preempted, moved or resumed on another machine draws the number that it would have drawn undisturbed.
"""

from __future__ import annotations

import struct

import xxhash

_KEY = struct.Struct("<QQQ")
_MASK = 2**64 - 1
_SCALE = 2.0**-53


def uniform(seed: int, choice: int, token_index: int) -> float:
    """The number in [0, 1) that draws output token `token_index` of a choice.

    XXH64 (seed 0) over the three numbers as little-endian unsigned 64-bit words (negative ones in two's complement);
    its upper 53 bits, times 2**-53. All of it is exact, hence the same on every machine.
    """
    digest = xxhash.xxh64_intdigest(_KEY.pack(seed & _MASK, choice & _MASK, token_index))
    return (digest >> 11) * _SCALE
