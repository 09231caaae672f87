"""Which lines of a batch are answered already, known before the first is sent.

Owns: one pass over the input, what it makes of the answers that there are, and the second pass, which gives out what is
left to do. Imports the lines' forms. Invariants: however long lines are, memory is some 120 bytes for each in the first pass
and 20 afterwards; an answer that belongs to no line of the input stops the job, for the input is another then, and so does a
line that changes between the passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from deployments.jobs.lines import NAME_BYTES, Ask, Line, LineError, custom_id_of, lines_of, parse, place_name
from deployments.settings import UsageError

_NAMES = np.dtype(f"S{NAME_BYTES}")
"""numpy takes zeros off the end of what it gives out, and puts them back where it compares."""
_SHOW_EVERY_LINES = 4096

Names = npt.NDArray[np.bytes_]


class StrangerError(Exception):
    """An answer is to no line of the input. `place` is its place among the answers, from 0."""

    def __init__(self, place: int) -> None:
        super().__init__(f"answer {place} is to no line of the input")
        self.place = place


@dataclass(frozen=True, slots=True)
class Survey:
    """Of a file of n lines that are not blank, in their order."""

    names: Names
    """[n], of their answers."""
    again: npt.NDArray[np.bool_]
    """[n], whether an earlier one has its custom_id."""
    answered: npt.NDArray[np.bool_]
    """[n]"""

    @property
    def lines(self) -> int:
        return len(self.names)

    @property
    def lines_answered(self) -> int:
        return int(np.count_nonzero(self.answered))

    def name(self, place: int) -> bytes:
        return _whole(self.names[place])


@dataclass(frozen=True, slots=True)
class Work:
    """A line that is to be answered: `name` is its answer's."""

    name: bytes
    what: Ask | LineError


def names_of(raw: bytes | bytearray) -> Names:
    """[n] of n × NAME_BYTES bytes."""
    return np.frombuffer(raw, dtype=_NAMES)


def survey(names: Names, keys: Names, answers: Names) -> Survey:
    """
    Args:
        names: [n], what names each line if nothing else than its content does.
        keys: [n], the same for what no two may have: of lines with one custom_id the same.
        answers: [m], the names of the answers that there are.

    Raises:
        UsageError: two answers are to one line.
        StrangerError: an answer is to no line.
    """
    again = np.ones(len(keys), dtype=bool)
    again[np.unique(keys, return_index=True)[1]] = False
    own = names.copy()
    for place in np.flatnonzero(again):
        own[place] = place_name(_whole(names[place]), int(place))
    known = np.sort(answers)
    if np.any(known[1:] == known[:-1]):
        raise UsageError("the output answers a line twice: it is not of one batch job alone; name another --output")
    if not len(known):
        return Survey(own, again, np.zeros(len(own), dtype=bool))
    answered = known[np.minimum(np.searchsorted(known, own), len(known) - 1)] == own
    if np.count_nonzero(answered) < len(known):
        raise StrangerError(int(np.flatnonzero(~np.isin(answers, own))[0]))
    return Survey(own, again, answered)


def look_through(path: Path, answers: Names, show: Callable[[int], None]) -> Survey:
    """The first pass; `show` is told now and then how many lines it has seen. Raises as `survey` does."""
    names, keys = bytearray(), bytearray()
    for place, line in enumerate(lines_of(path)):
        custom_id = custom_id_of(line)
        names += (name := line.hashed if custom_id is not None else place_name(line.hashed, place))
        keys += name if custom_id is None else xxhash.xxh3_128(b"id:" + custom_id.encode(errors="replace")).digest()
        if place % _SHOW_EVERY_LINES == 0:
            show(place)
    return survey(names_of(names), names_of(keys), answers)


def work_of(path: Path, survey: Survey) -> Iterator[Work]:
    """The second pass: what is left to do, in the input's order.

    Raises:
        UsageError: the input is not what it was in the first.
    """
    place = -1
    for place, line in enumerate(lines_of(path)):
        if place >= survey.lines:
            raise _changed(path, line)
        name, again = survey.name(place), bool(survey.again[place])
        if survey.answered[place]:
            continue
        what = parse(line, again=again)
        by_place = again or custom_id_of(line) is None
        if name != (place_name(line.hashed, place) if by_place else line.hashed):
            raise _changed(path, line)
        yield Work(name, what)
    if place + 1 < survey.lines:
        raise UsageError(f"{path} has become shorter while it was read; give the job a file that stays as it is")


def _changed(path: Path, line: Line) -> UsageError:
    return UsageError(f"{path}: line {line.number} changed while it was read; give the job a file that stays as it is")


def _whole(name: bytes) -> bytes:
    return bytes(name).ljust(NAME_BYTES, b"\0")
