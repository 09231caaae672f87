"""Who is live in an engine, and where each stands.

Owns: the live requests, the waiting and the running line, those that are frozen for a move, and the ends that are still
to be told. Imports cluster and cluster.engine. Invariant: each live request is in exactly one of waiting, running and
frozen; its key is the order's for its state when it joined the line.
"""

from __future__ import annotations

from collections.abc import Iterator

from cluster.engine.kv_cache import IntegrityError
from cluster.engine.live import Live
from cluster.engine.scheduling.order import Order
from cluster.engine.scheduling.sequence import Identity, Line, SequenceState
from cluster.engine.siblings import Siblings
from cluster.types import TokenDelta


class Book:
    """The requests of one engine."""

    def __init__(self, order: Order) -> None:
        self.live: dict[Identity, Live] = {}
        self.waiting = Line()
        self.running = Line()
        self.frozen: dict[Identity, Live] = {}
        """Live, kept with their keys and values, and out of scheduling until a move is done or cancelled."""
        self.ended: dict[Identity, TokenDelta] = {}
        """Ends that came about outside a step; the next result carries them."""
        self.changes = 0
        """Rises whenever one comes, goes, is frozen or thawed."""
        self.siblings = Siblings()
        self._order = order

    def __len__(self) -> int:
        """Requests that an end is still owed to."""
        return len(self.live) + len(self.ended)

    def of(self, state: SequenceState) -> Live:
        return self.live[state.identity]

    def add(self, live: Live) -> None:
        """A new one; it waits."""
        self.changes += 1
        self.live[live.state.identity] = live
        self.wait(live)
        self.siblings.join(live)

    def end(self, delta: TokenDelta) -> None:
        """An attempt that is live no more, or never was, has ended so."""
        self.ended[delta.request_id, delta.attempt] = delta

    def take_ended(self) -> list[TokenDelta]:
        """The ends that are still to be told, once."""
        ended = list(self.ended.values())
        self.ended.clear()
        return ended

    def wait(self, live: Live) -> None:
        """One that stands in no line joins those that wait, at its place."""
        state = live.state
        state.running = False
        state.yields = 0
        live.hashes.trim()
        self._join(self.waiting, state)

    def run(self, live: Live) -> None:
        """One that stands in no line joins those that run."""
        state = live.state
        state.running = state.started = True
        state.overtaken = 0
        state.leader = None
        self._join(self.running, state)

    def place_again(self, live: Live) -> None:
        """The length of a running one has been estimated anew, by which some orders go."""
        state = live.state
        if self._order.key(state) != state.key:
            self.leave_line(live)
            self._join(self.running, state)

    def leave_line(self, live: Live) -> None:
        """Take it out of the line that it stands in. Its blocks, key and place must not have changed since."""
        state = live.state
        (self.running if state.running else self.waiting).remove(state, state.blocks)

    def grown(self, state: SequenceState, blocks: int) -> None:
        """A running one holds so many blocks more."""
        self.running.grow(state, blocks)

    def ran(self, state: SequenceState, prompt_tokens: int) -> None:
        """So much less is left of a running one's prompt."""
        self.running.ran(state, prompt_tokens)

    def freeze(self, live: Live) -> None:
        """Out of its line, with all that it holds."""
        self.changes += 1
        self.leave_line(live)
        live.state.running = False
        self.siblings.leave(live)
        self.frozen[live.state.identity] = live

    def thaw(self, live: Live) -> None:
        """Back at its place among those that wait."""
        self.changes += 1
        del self.frozen[live.state.identity]
        self.wait(live)
        self.siblings.join(live)

    def remove(self, live: Live) -> None:
        """It is live no more, wherever it stood. Its blocks are given back afterwards."""
        self.changes += 1
        identity = live.state.identity
        if self.frozen.pop(identity, None) is None:
            self.leave_line(live)
            self.siblings.leave(live)
        del self.live[identity]

    def states(self) -> Iterator[SequenceState]:
        return (live.state for live in self.live.values())

    def check_integrity(self) -> None:
        """
        Raises:
            IntegrityError: a request is in no place, or in two; a line is out of order or its load is wrong.
        """
        lines = (self.waiting, self.running)
        placed = [s.identity for line in lines for s in line.items] + list(self.frozen)
        if len(placed) != len(self.live) or set(placed) != self.live.keys():
            raise IntegrityError("a live request is in no place or in two, or a line holds one that has ended")
        for line in lines:
            line.check_integrity(_blocks)
            if any(state.running is not (line is self.running) for state in line.items):
                raise IntegrityError("a request is not in the line that its state says")
        for live in self.live.values():
            if live.state.tokens != live.state.prompt_tokens + len(live.output):
                raise IntegrityError("a sequence's length is not its number of tokens")
            if live.state.computed >= live.state.tokens:
                raise IntegrityError("a sequence has no token left to run")

    def _join(self, line: Line, state: SequenceState) -> None:
        state.key = self._order.key(state)
        line.add(state, state.blocks)


def _blocks(state: SequenceState) -> int:
    return state.blocks
