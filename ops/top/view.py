"""The live view: what is where on the terminal, what keys do, and when routers are asked.

Owns: the textual application. Imports the picture, how it is drawn, and how routers are asked. Invariants: one round of
asking at a time; a router that is gone ends nothing, and the last picture stays, dimmed, with since when it is old; what
is paused does not change.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, ClassVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.events import Resize
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Static

from ops.explain_cli import explained
from ops.top import draw
from ops.top.fetch import Routers
from ops.top.model import Picture, Seen, Watch
from ops.top.said import Trouble

_ROWS_MAX = 200
"""Decisions in the table; the filter looks at all that are remembered."""
_MOVES_SHOWN = 3
_HELP = (
    ("q", "quit"),
    ("p", "pause, and go on"),
    ("m", "the next model"),
    ("/", "show decisions of a class, a request id or an event alone; Escape shows all"),
    ("Enter", "explain the request of the decision that is marked"),
    ("↑ ↓ Page Home End", "go through the decisions"),
    ("?", "this help"),
)
_LEGEND = (
    "Queue, running work and live moves are of all routers of the cluster; tokens, first tokens, preemptions and decisions "
    "are of the routers that were named with --url. p50 and p99 are of first tokens, from arrival on. A replica's bar is "
    "its KV memory: by class, white what no class is charged for, grey cached prefixes, dark free."
)


class Page(ModalScreen[None]):
    """Something to read, until a key sends it away."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("escape", "dismiss", "close"),
        ("q", "dismiss", "close"),
        ("enter", "dismiss", "close"),
        ("question_mark", "dismiss", "close"),
    ]

    def __init__(self, title: str, content: RenderableType) -> None:
        super().__init__()
        self._title, self._content = title, content

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="page") as page:
            page.border_title = Text(self._title)
            page.border_subtitle = "Escape closes"
            yield Static(self._content, id="content")

    def show(self, content: RenderableType) -> None:
        self.query_one("#content", Static).update(content)


class Top(App[None]):
    """`forebay top`."""

    TITLE = "forebay top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { background: #14171c; color: #d5d9e0; }
    #headline { height: 1; background: #20252d; padding: 0 1; }
    #trouble { height: auto; max-height: 3; background: #5a2a2f; color: #ffd7d7; padding: 0 1; display: none; }
    .part { height: auto; border-top: solid #3a4250; border-title-color: #8fb8f0; padding: 0 1; }
    #replicas { max-height: 35%; }
    #decisions { height: 1fr; min-height: 4; border-top: solid #3a4250; border-title-color: #8fb8f0; padding: 0 1; background: #14171c; overflow-x: hidden; }
    #decisions, #replicas, #page { scrollbar-size: 1 1; scrollbar-color: #3a4250; scrollbar-background: #14171c; }
    #decisions > .datatable--odd-row, #decisions > .datatable--even-row { background: #14171c; }
    #decisions > .datatable--header { background: #14171c; color: #8a93a2; text-style: bold; }
    #decisions > .datatable--cursor { background: #2b3442; }
    #filter { display: none; height: 1; border: none; padding: 0 1; background: #20252d; }
    .old { opacity: 45%; }
    .-low #moves { display: none; }
    .-low #replicas { max-height: 4; }
    .-low #trouble { max-height: 1; }
    Footer { background: #20252d; }
    Page { align: center middle; background: #000000 50%; }
    #page { width: 92%; height: auto; max-height: 85%; border: round #5aa9f0; background: #1a1e25; padding: 0 1; }
    """
    VERTICAL_BREAKPOINTS = [(0, "-low"), (20, "-high")]  # noqa: RUF012 - declared so by textual
    BINDINGS: ClassVar[list[BindingType]] = [
        ("q", "quit", "quit"),
        ("p", "pause", "pause"),
        ("slash", "filter", "filter"),
        ("m", "next_model", "model"),
        ("question_mark", "help", "help"),
        ("escape", "show_all", ""),
    ]

    def __init__(self, routers: Routers, interval_s: float, unix: Callable[[], float] = time.time) -> None:
        super().__init__()
        self._routers, self._interval_s, self._unix = routers, interval_s, unix
        self._watch = Watch()
        self._picture: Picture | None = None
        self._model = 0
        self._going = asyncio.Event()
        self._going.set()
        self._wanted = ""
        self._shown: list[Seen] = []
        self._columns: list[tuple[str, int]] = []
        self.rounds = 0
        """Of asking, so far."""

    def compose(self) -> ComposeResult:
        yield Static(Text(f"asking {', '.join(self._routers.urls)} …"), id="headline")
        yield Static(id="trouble")
        yield Static(id="classes", classes="part")
        with VerticalScroll(id="replicas", classes="part", can_focus=False):
            yield Static(id="bars")
        yield Static(id="moves", classes="part")
        yield DataTable(id="decisions", cursor_type="row", cell_padding=0)
        yield Input(id="filter", placeholder="class, request id or event", compact=True)
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        for name, title in (
            ("classes", "queue"),
            ("replicas", "replicas and their KV memory"),
            ("moves", "moves and preemptions"),
            ("decisions", "decisions"),
        ):
            self.query_one(f"#{name}").border_title = title
        self.query_one(DataTable).focus()
        self.run_worker(self._look_again_and_again(), exclusive=True)

    async def _look_again_and_again(self) -> None:
        try:
            while True:
                await self._going.wait()
                found = await self._routers.look(self._watch.after)
                if self._going.is_set():
                    picture = self._watch.take(found, self._unix())
                    self._take(picture, [f for f in found if isinstance(f, Trouble)])
                self.rounds += 1
                await asyncio.sleep(self._interval_s)
        finally:
            await self._routers.close()

    # --- what is shown ---

    def _take(self, picture: Picture | None, troubles: list[Trouble]) -> None:
        if not self.query("#trouble"):
            return  # it is being closed
        if picture is not None:
            self._picture = picture
            self._model = min(self._model, len(picture.models) - 1)
        self._warn(picture, troubles)
        for widget in self.query("#headline, .part, #decisions"):
            widget.set_class(picture is None, "old")
        if picture is not None:
            self._draw()

    def _warn(self, picture: Picture | None, troubles: list[Trouble]) -> None:
        """Say what is wrong, above all else."""
        notes = list(picture.notes) if picture is not None else [trouble.why for trouble in troubles]
        if picture is None and self._picture is not None:
            notes.insert(0, f"no answer since {draw.clock(self._picture.at_unix_s)}; this is how it was then")
        warning = self.query_one("#trouble", Static)
        warning.display = bool(notes)
        warning.update(draw.plain("; ".join(notes)))

    def _draw(self) -> None:
        picture = self._picture
        if picture is None:
            return
        shown, width = picture.models[self._model], self.size.width - 2
        line = draw.headline(picture, self._model)
        if not self._going.is_set():
            line.append("  paused", "bold black on #f0c05a")
        line.no_wrap, line.overflow = True, "ellipsis"
        self.query_one("#headline", Static).update(line)
        self.query_one("#classes", Static).update(draw.class_table(shown))
        self.query_one("#bars", Static).update(draw.replica_table(shown, width))
        self.query_one("#moves", Static).update(draw.move_lines(shown, _MOVES_SHOWN))
        counted = draw.since(picture.window_s)
        self.query_one("#classes").border_title = f"queue; first tokens {counted}"
        self.query_one("#moves").border_title = f"moves and preemptions {counted}"
        self._draw_decisions(picture, width - 1)

    def _draw_decisions(self, picture: Picture, width: int) -> None:
        """The newest first. What is marked stays marked, but for the newest, which is marked until another is."""
        table = self.query_one(DataTable)
        classes = [row.priority_class for row in picture.models[self._model].classes]
        several = len(picture.models) > 1
        model = picture.models[self._model].model
        of_model = [seen for seen in picture.decisions if not several or seen.told.model == model]
        shown = [seen for seen in of_model if wanted(seen, self._wanted)][:_ROWS_MAX]
        missed = f", {picture.missed:,} not seen" if picture.missed else ""
        only = f" of {self._wanted!r} (Escape shows all)" if self._wanted else ""
        table.border_title = Text(f"decisions{only}{missed}")
        columns = draw.decision_columns(width)
        if columns == self._columns and shown == self._shown:
            return
        row = table.cursor_row
        marked = self._shown[row].told if 0 < row < len(self._shown) else None
        table.clear(columns=columns != self._columns)
        if columns != self._columns:
            for title, column_width in columns:
                table.add_column(title, width=column_width)
            self._columns = columns
        for seen in shown:
            table.add_row(*draw.decision_cells(seen, classes, width))
        self._shown = shown
        if marked is not None:
            row = next((i for i, seen in enumerate(shown) if seen.told == marked), 0)
            table.move_cursor(row=row, animate=False)

    def on_resize(self, _: Resize) -> None:
        self._draw()

    # --- keys ---

    def action_pause(self) -> None:
        if self._going.is_set():
            self._going.clear()
        else:
            self._going.set()
        self._draw()

    def action_next_model(self) -> None:
        if self._picture is not None:
            self._model = (self._model + 1) % len(self._picture.models)
            self._draw()

    def action_filter(self) -> None:
        field = self.query_one(Input)
        field.display = True
        field.focus()

    def action_show_all(self) -> None:
        self.query_one(Input).value = ""
        self._leave_filter()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._wanted = event.value.strip()
        self._draw()

    def on_input_submitted(self, _: Input.Submitted) -> None:
        self._leave_filter()

    def _leave_filter(self) -> None:
        self.query_one(Input).display = False
        self.query_one(DataTable).focus()

    def action_help(self) -> None:
        keys = Table.grid(padding=(0, 2))
        keys.add_column(style="bold cyan", no_wrap=True)
        for key, what in _HELP:
            keys.add_row(key, what)
        self.push_screen(Page("forebay top", Group(keys, Text(f"\n{_LEGEND}", "dim"))))

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        if event.cursor_row < len(self._shown):
            self.run_worker(self._explain(self._shown[event.cursor_row]))

    async def _explain(self, seen: Seen) -> None:
        page = Page(f"explain {seen.told.request_id}", Text("asking …", "dim"))
        await self.push_screen(page)
        said = await self._routers.explain(seen.url, seen.told.request_id)
        if page.is_attached:
            page.show(_explanation(said))


def wanted(seen: Seen, words: str) -> bool:
    """Whether a decision is one of those that the filter asks for: every word is in its class, its id or its event."""
    told = seen.told
    return all(
        any(word in part for part in (told.priority_class, told.request_id, told.event)) for word in words.split()
    )


def _explanation(said: dict[str, Any] | Trouble) -> RenderableType:
    if isinstance(said, Trouble):
        return draw.plain(said.why)
    try:
        return explained(said)
    except (LookupError, TypeError) as error:
        return Text(f"another version of Forebay answered ({error!r})")
