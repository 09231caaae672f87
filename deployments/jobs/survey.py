"""Which lines of a batch are answered already, known before the first is sent.

Owns: one pass over the input, what it makes of the answers that there are, and the second pass, which gives out what is
left to do. Imports the lines' forms. Invariants: however long lines are, memory is some 120 bytes for each in the first pass
and 22 afterwards; an answer that belongs to no line of the input stops the job, for the input is another then, and so does a
line that changes between the passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from deployments.jobs.lines import NAME_BYTES, Ask, Line, LineError, custom_id_of, lines_of, name_of, parse
from deployments.settings import UsageError

_NAMES = np.dtype(f"S{NAME_BYTES}")
"""numpy takes zeros off the end of what it gives out, and puts them back where it compares."""
_SHOW_EVERY_LINES = 4096

Names = npt.NDArray[np.bytes_]


class StrangerError(Exception):
    """An answer is to no line of the input. `name` is the answer's."""

    def __init__(self, name: bytes) -> None:
        super().__init__(f"answer {name.hex()} is to no line of the input")
        self.name = name


@dataclass(frozen=True, slots=True)
class Survey:
    """Of a file of n lines that are not blank, in their order."""

    names: Names
    """[n], of their answers."""
    before: npt.NDArray[np.uint32]
    """[n], how many lines of the same content stand before each."""
    again: npt.NDArray[np.bool_]
    """[n], whether another has its custom_id that is answered already, or else stands before it."""
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


def survey(hashes: Names, keys: Names, answers: Names) -> Survey:
    """
    Args:
        hashes: [n], of each line's content.
        keys: [n], the same for what no two may have: of lines with one custom_id the same.
        answers: [m], the names of the answers that there are.

    Raises:
        UsageError: two answers are to one line.
        StrangerError: an answer is to no line.
    """
    before = _before(hashes)
    own = hashes.copy()
    for place in np.flatnonzero(before):
        own[place] = name_of(_whole(hashes[place]), int(before[place]))
    known = np.sort(answers)
    if np.any(known[1:] == known[:-1]):
        raise UsageError("the output answers a line twice: it is not of one batch job alone; name another --output")
    answered = np.zeros(len(own), dtype=bool)
    if len(known):
        answered = known[np.minimum(np.searchsorted(known, own), len(known) - 1)] == own
    if np.count_nonzero(answered) < len(known):
        raise StrangerError(_whole(known[~np.isin(known, own)][0]))
    # Of those with one custom_id the first is sent, but none where another was: lines may have changed their order.
    order = np.argsort(~answered, kind="stable")
    again = np.ones(len(keys), dtype=bool)
    again[order[np.unique(keys[order], return_index=True)[1]]] = False
    return Survey(own, before, again, answered)


def _before(hashes: Names) -> npt.NDArray[np.uint32]:
    """[n], how many equal ones stand before each."""
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    places = np.arange(len(hashes))
    new = np.ones(len(hashes), dtype=bool)
    new[1:] = ordered[1:] != ordered[:-1]
    before = np.empty(len(hashes), dtype=np.uint32)
    before[order] = places - np.maximum.accumulate(np.where(new, places, 0))
    return before


def look_through(path: Path, answers: Names, show: Callable[[int], None]) -> Survey:
    """The first pass; `show` is told now and then how many lines it has seen. Raises as `survey` does."""
    hashes, keys = bytearray(), bytearray()
    for place, line in enumerate(lines_of(path)):
        custom_id = custom_id_of(line)
        hashes += line.hashed
        told = b"place:%d" % place if custom_id is None else b"id:" + custom_id.encode(errors="replace")
        keys += xxhash.xxh3_128(told).digest()
        if place % _SHOW_EVERY_LINES == 0:
            show(place)
    return survey(names_of(hashes), names_of(keys), answers)


def work_of(path: Path, survey: Survey) -> Iterator[Work]:
    """The second pass: what is left to do, in the input's order.

    Raises:
        UsageError: the input is not what it was in the first.
    """
    place = -1
    for place, line in enumerate(lines_of(path)):
        if place >= survey.lines:
            raise _changed(path, line)
        name = survey.name(place)
        if survey.answered[place]:
            continue
        if name != name_of(line.hashed, int(survey.before[place])):
            raise _changed(path, line)
        yield Work(name, parse(line, again=bool(survey.again[place])))
    if place + 1 < survey.lines:
        raise UsageError(f"{path} has become shorter while it was read; give the job a file that stays as it is")


def _changed(path: Path, line: Line) -> UsageError:
    return UsageError(f"{path}: line {line.number} changed while it was read; give the job a file that stays as it is")


def _whole(name: bytes) -> bytes:
    return bytes(name).ljust(NAME_BYTES, b"\0")
