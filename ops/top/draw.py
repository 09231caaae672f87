"""The picture as rich draws it, on a terminal's live view and for a pipe alike.

Owns: colours, columns and how a number looks. Imports the picture. Pure. Invariants: nothing is wider than it is told to
be; what a router said is never read as markup, and no control character of it reaches the terminal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ops.report import format_number
from ops.top.model import ModelPicture, Picture, ReplicaRow, Seen, cells
from ops.top.said import Move

CLASS_COLOURS = ("#ff6b81", "#f0c05a", "#5aa9f0", "#7ad18a", "#b78cf2", "#5fd3d3")
"""Most urgent first; of more classes they begin again."""
CACHED, CACHED_WORD, FREE = "#5c6370", "#8a93a2", "#2b2f36"
_EVENT_COLOURS = {
    "rejected": "#ff6b81",
    "expired": "#ff6b81",
    "blamed": "#ff6b81",
    "preempted": "#f0c05a",
    "not retried": "#ff6b81",
    "returned": "#f0c05a",
    "retried": "#f0c05a",
    "called_back": "#f0c05a",
    "moved": "#b78cf2",
    "stays": "#b78cf2",
    "held": "#5fd3d3",
    "dispatched": "#7ad18a",
    "admitted": "#7ad18a",
}
_STATE_COLOURS = {"ready": "#7ad18a", "draining": "#f0c05a"}
_ID_CHARS, _WHOLE_ID_CHARS = 9, 43
_IDS = re.compile(r"\b(?:chat)?cmpl-\w+(?:-\d+)?")
_NAME_CHARS = 24
_BAR_CHARS = 8
NARROW = 70
"""Columns from which a decision's replica has one of its own."""
WIDE = 110
"""Columns from which a replica's host is shown."""
WIDEST = 160
"""Columns from which the whole ids of requests are."""


def colour_of(classes: Sequence[str], name: str) -> str:
    """The colour of a class, by its place among all of its model."""
    return CLASS_COLOURS[classes.index(name) % len(CLASS_COLOURS)] if name in classes else "white"


def plain(text: str) -> Text:
    """What a router said, as it is but for control characters."""
    return Text("".join(c if c.isprintable() else " " for c in text))


# --- the parts of the view, from top to bottom ---


def headline(picture: Picture, model: int) -> Text:
    """Which model, how much it makes, who leads, and when that was."""
    shown = picture.models[model]
    several = f" {model + 1}/{len(picture.models)}" if len(picture.models) > 1 else ""
    known = [row.tokens_per_s for row in shown.classes if row.tokens_per_s is not None]
    line = Text.assemble(
        ("forebay", "bold"),
        "  ",
        (plain(shown.model).plain, "bold cyan"),
        (several, "cyan"),
        "  ",
        ("ready", _STATE_COLOURS["ready"]) if shown.ready else ("not ready", "bold red"),
        f"  {format_number(round(sum(known)))} tokens/s" if known else "  - tokens/s",
        "  ",
    )
    if picture.controller is None:
        line.append("no controller", "bold yellow")
    else:
        line.append(f"controller {picture.controller.generation}, up {duration(picture.controller.uptime_s)}")
    line.append(f"  {clock(picture.at_unix_s)}", "dim")
    if picture.routers > len(picture.urls):
        line.append(f"  {len(picture.urls)} of {picture.routers} routers", "yellow")
    return line


def since(window_s: float | None) -> str:
    """Over which time first tokens, moves and preemptions are counted."""
    return "since the start" if window_s is None else f"of the last {window_s:.0f} s"


def class_table(shown: ModelPicture) -> Table:
    """Queue, work and first tokens by class."""
    table = _table()
    table.add_column("class", no_wrap=True, overflow="ellipsis")
    for title in ("prio", "queued", "oldest", "running", "tokens/s", "first", "p50", "p99"):
        table.add_column(title, justify="right", no_wrap=True)
    names = [row.priority_class for row in shown.classes]
    for row in shown.classes:
        table.add_row(
            _class_name(names, row.priority_class),
            str(row.priority),
            Text(f"{row.queued:,}", "bold" if row.queued else "dim"),
            duration(row.oldest_s),
            Text(f"{row.running:,}", "" if row.running else "dim"),
            format_number(None if row.tokens_per_s is None else round(row.tokens_per_s)),
            f"{row.first_tokens:,}",
            duration(row.ttft_p50_s),
            duration(row.ttft_p99_s),
        )
    return table


def replica_table(shown: ModelPicture, width: int, *, coloured: bool = True) -> RenderableType:
    """Each replica with a bar of its KV blocks: by class, what else is in use, cached, free."""
    if not shown.replicas:
        return Text("no replica is known", "dim")
    names = [row.priority_class for row in shown.classes]
    rows = [_replica_cells(row, host=width >= WIDE) for row in shown.replicas]
    titles = ["replica", *(["host"] if width >= WIDE else []), "state", "runs", "waits"]
    widths = [min(_NAME_CHARS, max(map(len, column))) for column in zip(map(Text, titles), *rows, strict=True)]
    bar_width = max(_BAR_CHARS, width - sum(widths) - 2 * (len(widths) + 1) - len("100%"))
    table = _table()
    for title, column_width in zip(titles, widths, strict=True):
        justify: Literal["left", "right"] = "right" if title in ("runs", "waits") else "left"
        table.add_column(title, width=column_width, justify=justify, no_wrap=True, overflow="ellipsis")
    table.add_column(_legend(names, coloured=coloured), no_wrap=True, width=bar_width)
    table.add_column("KV", justify="right", no_wrap=True)
    for row, named in zip(shown.replicas, rows, strict=True):
        used = f"{1 - row.blocks_free / row.blocks_total:.0%}" if row.blocks_total else "-"
        table.add_row(*named, kv_bar(row, names, bar_width, coloured=coloured), used)
    return table


def _replica_cells(row: ReplicaRow, *, host: bool) -> list[Text]:
    named = [plain(row.replica_id), *([plain(row.host)] if host else [])]
    named.append(Text(row.state, _STATE_COLOURS.get(row.state, "red")))
    if not row.blocks_total:
        return [*named, Text("-"), Text("-")]
    return [*named, Text(f"{row.running}/{row.slots}"), Text(str(row.waiting), "" if row.waiting else "dim")]


def kv_bar(row: ReplicaRow, classes: Sequence[str], width: int, *, coloured: bool = True) -> Text:
    """A replica's blocks. Without colours a class is its first letter, `+` what no class is charged for, `:` cached.

    Blocks that several requests share are counted for each: where the classes' are more than are in use, they are shown in
    proportion.
    """
    used = row.blocks_total - row.blocks_free
    held = [row.blocks_by_class.get(name, 0) for name in classes]
    if sum(held) > used:
        held = cells(held, used) if used >= sum(h > 0 for h in held) else held
    cached = min(row.blocks_cached, row.blocks_free)
    parts = [*held, max(0, used - sum(held)), cached, row.blocks_free - cached]
    fills = [(name[:1] or "?", colour_of(classes, name)) for name in classes]
    fills += [("+", "white"), (":", CACHED), (".", FREE)]
    bar = Text()
    for count, (letter, colour) in zip(cells(parts, width), fills, strict=True):
        bar.append(("█" if coloured else letter) * count, colour)
    return bar


def move_lines(shown: ModelPicture, most: int, *, fold: bool = False) -> Group:
    """What moves, and how much has been moved and preempted; `most` moves, those under way longest. What is too long is cut off,
    or folded."""
    line = Text("moves: ", "dim")
    line.append(f"{len(shown.moves)} under way", "bold" if shown.moves else "")
    line.append(f", {_counts(shown.moved)}", "not dim")
    line.append("   preemptions: ")
    line.append(_counts(shown.preempted), "not dim")
    names = [row.priority_class for row in shown.classes]
    lines = [line, *(_move_line(move, names) for move in shown.moves[:most])]
    for text in lines:
        text.no_wrap, text.overflow = not fold, "fold" if fold else "ellipsis"
    return Group(*lines)


def _move_line(move: Move, classes: Sequence[str]) -> Text:
    return Text.assemble(
        short_id(move.request_id),
        "  ",
        (move.priority_class, colour_of(classes, move.priority_class)),
        f"  {move.source} → {move.target}  {move.stage} {duration(move.age_s)}  ",
        (plain(move.why).plain, "dim"),
    )


def decision_table(picture: Picture, classes: Sequence[str], width: int, most: int) -> Table:
    """The newest decisions, the newest first; why is folded."""
    table = _table()
    table.padding = (0, 0)
    *named, (why, why_width) = decision_columns(width)
    for title, column_width in named:
        table.add_column(title, width=column_width, no_wrap=True, overflow="ellipsis")
    table.add_column(why, width=why_width, overflow="fold")
    for seen in picture.decisions[:most]:
        table.add_row(*decision_cells(seen, classes, width))
    return table


def decision_columns(width: int) -> list[tuple[str, int]]:
    """(title, width) of each column of the decisions: what is left of `width` tells why."""
    id_chars = _WHOLE_ID_CHARS if width >= WIDEST else _ID_CHARS
    fixed = [("time", 9), ("request", id_chars + 1), ("class", 12), ("decision", 12)]
    if width >= NARROW:
        fixed.append(("replica", 10))
    return [*fixed, ("why and numbers", max(12, width - sum(column_width for _, column_width in fixed)))]


def decision_cells(seen: Seen, classes: Sequence[str], width: int) -> list[Text]:
    told = seen.told
    numbers = "  ".join(f"{name}={format_number(value)}" for name, value in told.numbers.items())
    why = (
        plain(told.why).plain if width >= WIDEST else _IDS.sub(lambda found: short_id(found[0]), plain(told.why).plain)
    )
    reason = Text.assemble(why, "  " if told.why and numbers else "", (plain(numbers).plain, "dim"))
    return [
        Text(clock(told.at_unix_s), "dim"),
        plain(told.request_id if width >= WIDEST else short_id(told.request_id)),
        _class_name(classes, told.priority_class),
        Text(told.event.replace("_", " "), _EVENT_COLOURS.get(told.event, "")),
        *([plain(told.replica)] if width >= NARROW else []),
        reason,
    ]


def snapshot(picture: Picture, width: int, decisions: int, *, coloured: bool) -> Group:
    """All of it once, for every model."""
    parts: list[RenderableType] = []
    for number, shown in enumerate(picture.models):
        parts += [
            headline(picture, number),
            Text(),
            class_table(shown),
            Text(f"first tokens, moves and preemptions are {since(picture.window_s)}", "dim"),
            Text(),
            replica_table(shown, width, coloured=coloured),
            Text(),
            move_lines(shown, most=10, fold=True),
            Text(),
        ]
    classes = [row.priority_class for row in picture.models[0].classes]
    parts.append(decision_table(picture, classes, width, decisions))
    parts += [Text(plain(note).plain, "yellow") for note in picture.notes]
    return Group(*parts)


# --- words ---


def short_id(request_id: str) -> str:
    """The end of an id, which tells requests of the same kind apart."""
    return request_id if len(request_id) <= _ID_CHARS else "…" + request_id[1 - _ID_CHARS :]


def clock(at_unix_s: float) -> str:
    """The time of day here."""
    return datetime.fromtimestamp(at_unix_s).strftime("%H:%M:%S")


def duration(seconds: float | None) -> str:
    """In the unit that suits it; a dash where there is none."""
    if seconds is None:
        return "-"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.0f} h"


def _counts(counts: Mapping[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in ordered) or "none"


def _class_name(classes: Sequence[str], name: str) -> Text:
    return Text(name, colour_of(classes, name))


def _legend(classes: Sequence[str], *, coloured: bool) -> Text:
    """What the bar's colours, or letters, stand for."""
    legend = Text(" ").join(Text(name, colour_of(classes, name)) for name in classes)
    legend.append(" cached" if coloured else " +other :cached", CACHED_WORD)
    return legend


def _table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold #8a93a2")
