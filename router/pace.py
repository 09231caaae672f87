"""How fast work is served: what admission predicts from.

Owns: the measured drain of a queue, and how long first tokens and later tokens take. Imports nothing of ours. Times are
monotonic. Invariants: what has not been measured is None, never zero and never a guess; memory is bounded.
"""

from __future__ import annotations

import math

WINDOW_S = 30.0
"""About how far back a drain rate looks, in time during which something waited."""
FORGOTTEN_AFTER_S = 300.0
"""With nothing waiting for so long, the next backlog is measured anew."""
BUSY_MIN_S = 1.0
DEPARTURES_MIN = 4
"""A drain rate is known once something has waited for so long and so many have left."""
MEMORY = 64
"""A mean time follows about so many of the latest observations."""
OBSERVATIONS_MIN = 8
"""A mean time is known from so many observations on."""


class DrainRate:
    """Service that leaves a queue per second, over the time in which something waits there.

    Weighted exponentially over about `window_s`, unbiased from the beginning: service and time fade alike. A queue that
    is empty says nothing about how fast it would drain, so that time does not count.
    """

    __slots__ = ("_busy_s", "_departures", "_service", "_updated_s", "_waiting", "_window_s")

    def __init__(self, now_s: float, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._updated_s = now_s
        self._waiting = False
        self._busy_s = 0.0
        self._service = 0.0
        self._departures = 0

    def waits(self, now_s: float, waiting: bool) -> None:
        """From now on something waits, or nothing does."""
        if waiting == self._waiting:
            return
        if waiting and now_s - self._updated_s > FORGOTTEN_AFTER_S:
            self._busy_s, self._service, self._departures = 0.0, 0.0, 0
        self._advance(now_s)
        self._waiting, self._updated_s = waiting, now_s

    def left(self, now_s: float, service: float) -> None:
        """Something that had waited has left to be served."""
        self._advance(now_s)
        self._service += service
        self._departures += 1

    def came_back(self, now_s: float, service: float) -> None:
        """What has left returned unserved."""
        self._advance(now_s)
        self._service = max(0.0, self._service - service)

    def per_s(self, now_s: float) -> float | None:
        """None: not enough has been seen."""
        self._advance(now_s)
        if self._busy_s < BUSY_MIN_S or self._departures < DEPARTURES_MIN:
            return None
        return self._service / self._busy_s

    def _advance(self, now_s: float) -> None:
        if not self._waiting or now_s <= self._updated_s:
            return
        keep = math.exp((self._updated_s - now_s) / self._window_s)
        self._service *= keep
        self._busy_s = self._busy_s * keep + self._window_s * (1 - keep)
        self._updated_s = now_s


class MeanTime:
    """A mean that follows its latest observations."""

    __slots__ = ("_count", "_mean_s")

    def __init__(self) -> None:
        self._count = 0
        self._mean_s = 0.0

    def observe(self, seconds: float) -> None:
        self._count = min(self._count + 1, MEMORY)
        self._mean_s += (seconds - self._mean_s) / self._count

    @property
    def mean_s(self) -> float | None:
        return self._mean_s if self._count >= OBSERVATIONS_MIN else None


class ServiceTimes:
    """What a request takes once it has been sent out, whatever replica that was."""

    __slots__ = ("_first_token", "_next_token", "_prompts")

    def __init__(self) -> None:
        self._first_token: dict[int, MeanTime] = {}
        """By the prompt's length to a power of two."""
        self._prompts: dict[str, tuple[MeanTime, MeanTime]] = {}
        """By class: how many steps the prompts up to a first token filled when it was sent out, one at least, and the
        seconds until it came."""
        self._next_token = MeanTime()

    def first_token(self, prompt_tokens: int, seconds: float) -> None:
        self._first_token.setdefault(prompt_tokens.bit_length(), MeanTime()).observe(seconds)

    def next_tokens(self, seconds_each: float) -> None:
        self._next_token.observe(seconds_each)

    def prompts(self, priority_class: str, steps: float, seconds: float) -> None:
        """The prompts ahead of a request and its own filled so many steps; after so long it had its first token.

        However little they fill, it has that after a whole step.
        """
        means = self._prompts.get(priority_class)
        if means is None:
            means = self._prompts[priority_class] = MeanTime(), MeanTime()
        means[0].observe(max(1.0, steps))
        means[1].observe(seconds)

    def prompt_step_s(self, priority_class: str) -> float | None:
        """How long a class takes for each step that prompts fill, with all that comes in between: decodes, and more urgent
        work that came later. None where too few have been seen."""
        means = self._prompts.get(priority_class)
        steps, seconds = (None, None) if means is None else (means[0].mean_s, means[1].mean_s)
        return seconds / steps if steps and seconds is not None else None

    def first_token_s(self, prompt_tokens: int) -> float | None:
        """From being sent out to the first token; None where prompts about so long have not been seen."""
        times = self._first_token.get(prompt_tokens.bit_length())
        return None if times is None else times.mean_s

    @property
    def next_token_s(self) -> float | None:
        return self._next_token.mean_s
