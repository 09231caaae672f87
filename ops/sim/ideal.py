"""How much of the prompts one cache would find that is as large as those of all replicas together.

Owns: that ideal, and the most that any could find. Imports nothing of ours. Pure. The one cache hears of every request in the
order of their arrivals, has all of a prompt as soon as it has arrived, and holds nothing else. What it gives up first:

- `found`: what was used longest ago, of a prompt's blocks the last, as the replicas do (cluster/engine/kv_cache.py). What
  several replicas find less is what their placement costs: blocks that two of them hold, and prompts that went where
  their beginnings were not.
- `most_found`: what will be wanted latest (Belady, "A study of replacement algorithms for a virtual storage computer", 1966).
  No cache finds more, nor do several with as much room: what they hold it could hold. Nobody can do so without knowing what
  will come: of two conversations, which goes on.

A block behind one that is missing is not found; but of a prompt's blocks each was used, and will be wanted, no later than the
one before it, so that the last always goes first.

A prompt's blocks are given in runs, as the trace names them: of a run that two prompts share the lesser has the beginning.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Sequence

Piece = tuple[int, int]
"""Of a run: its name, and where the piece begins in it."""
Runs = Sequence[tuple[int, int]]
"""Of one prompt: (name, blocks) one after the other. Equal names have equal blocks as far as both go; a name is always at
the same place, behind the same others."""


def most_found(prompts: Sequence[Runs], room: int) -> list[int]:
    """Of each prompt, how many blocks a cache of `room` blocks finds that knows them all."""
    cut = _cut(prompts)
    latest: dict[Piece, int] = {}
    after: list[list[float]] = []
    """When each piece of each prompt is wanted next."""
    for number in range(len(cut) - 1, -1, -1):
        after.append([latest.get(piece, math.inf) for piece, _ in cut[number]])
        latest.update((piece, number) for piece, _ in cut[number])
    after.reverse()

    held: dict[Piece, tuple[int, float]] = {}
    """Piece -> (blocks, when they are wanted next); of a piece that is held in part these are its first."""
    order: list[tuple[float, int, int, Piece]] = []
    """What goes first, foremost; entries of what has changed since are void."""
    used, told = 0, []
    for number, pieces in enumerate(cut):
        told.append(sum(held[piece][0] for piece, _ in pieces if piece in held))
        for depth, ((piece, blocks), next_at) in enumerate(zip(pieces, after[number], strict=True)):
            used -= held.pop(piece, (0, 0.0))[0]
            if next_at < math.inf:
                held[piece] = blocks, next_at
                heapq.heappush(order, (-next_at, -depth, number, piece))
                used += blocks
        while used > room:
            minus_next, _, _, piece = order[0]
            blocks, next_at = held.get(piece, (0, 0.0))
            if next_at != -minus_next:
                heapq.heappop(order)
            elif blocks > used - room:
                held[piece] = blocks - (used - room), next_at
                used = room
            else:
                heapq.heappop(order)
                del held[piece]
                used -= blocks
    return told


def found(prompts: Sequence[Runs], room: int) -> list[int]:
    """Of each prompt, how many blocks a cache of `room` blocks finds that keeps what was used last."""
    held: OrderedDict[Piece, int] = OrderedDict()
    """Piece -> blocks; of a piece that is held in part these are its first. What goes first is foremost."""
    used, told = 0, []
    for pieces in _cut(prompts):
        told.append(sum(held.get(piece, 0) for piece, _ in pieces))
        for piece, blocks in reversed(pieces):
            used += blocks - held.pop(piece, 0)
            held[piece] = blocks
        while used > room:
            piece, blocks = held.popitem(last=False)
            used -= blocks
            if used < room:
                held[piece] = room - used
                held.move_to_end(piece, last=False)
                used = room
    return told


def _cut(prompts: Sequence[Runs]) -> list[list[tuple[Piece, int]]]:
    """Each prompt in pieces of so many blocks, that are wanted whole or not at all."""
    ends: dict[int, set[int]] = {}
    for runs in prompts:
        for name, blocks in runs:
            if blocks:
                ends.setdefault(name, set()).add(blocks)
    pieces: dict[int, list[tuple[int, int]]] = {}
    """Of each run: (begin, end)."""
    for name, cuts in ends.items():
        at = sorted(cuts)
        pieces[name] = list(zip([0, *at[:-1]], at, strict=True))
    return [
        [((name, begin), end - begin) for name, blocks in runs for begin, end in pieces.get(name, ()) if end <= blocks]
        for runs in prompts
    ]
