"""`forebay top` on a terminal: what keys do, at every size, and while its router is gone."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence

import httpx
import pytest
from rich.console import Console
from textual.pilot import Pilot
from textual.widgets import DataTable, Input, Static

from cluster.config import Auth
from cluster.messages import ClusterStatus, ReplicaSummary, RosterEntry
from cluster.model import ModelFolder
from cluster.types import Generation
from ops.top import draw
from ops.top.fetch import Routers
from ops.top.model import Watch
from ops.top.said import Answer, Move, Trouble
from ops.top.view import Page, Top
from router.keys import Identity
from tests.unit.http_kit import TEXT, World, listening, plain_client, serving
from tests.unit.test_router_models import FIRST, SECOND, serving_two
from tests.unit.top_kit import CLASSES, answer, band, cluster, decisions, page, replica, said, told

OFTEN_S = 0.2
NOON = 1_800_000_000.0


def drawn(app: Top) -> list[str]:
    """The lines that are on the terminal."""
    width, height = app.size
    screen = app.screen_stack[0]
    return ["".join(s.text for s in line)[:width].rstrip() for line in screen._compositor.render_strips()][:height]


def text_of(app: Top, name: str) -> str:
    console = Console(width=app.size.width, highlight=False, color_system=None)
    with console.capture() as captured:
        console.print(app.screen_stack[0].query_one(name, Static).content)
    return captured.get()


def rows(app: Top) -> list[list[str]]:
    table = app.screen_stack[0].query_one(DataTable)
    return [[str(cell) for cell in table.get_row_at(number)] for number in range(table.row_count)]


@contextlib.asynccontextmanager
async def watching(
    *urls: str, size: tuple[int, int] = (80, 24), key: str = "", interval_s: float = OFTEN_S
) -> AsyncIterator[tuple[Top, Pilot[None]]]:
    credentials = {"authorization": f"Bearer {key}"} if key else {}
    app = Top(Routers(urls, credentials, time.monotonic), interval_s)
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: app.rounds > 0)
        yield app, pilot


async def until(pilot: Pilot[None], holds: Callable[[], object]) -> None:
    """Wait for what the view does by itself: it asks again and again, and no event tells of an answer."""
    async with asyncio.timeout(10):
        while not holds():
            await pilot.pause(0.005)
    await pilot.pause()


async def press(app: Top, pilot: Pilot[None], *keys: str) -> None:
    """As a person does. (The pilot's own way waits until the process is idle, which one that serves is not.)"""
    for key in keys:
        app.simulate_key(key)
        await pilot.pause(0)


async def filtered(app: Top, pilot: Pilot[None], words: str) -> None:
    await press(app, pilot, "slash")
    await until(pilot, lambda: app.focused is app.query_one(Input))
    app.query_one(Input).value = words


async def ask(world: World, tier: str = "auto") -> str:
    async with plain_client(world) as http:
        told: httpx.Response = await http.post("/v1/completions", json=TEXT | {"service_tier": tier})
        return str(told.json()["id"])


def known(world: World) -> ClusterStatus:
    """A controller that knows the world's replica."""
    entry = RosterEntry(world.replica.replica_id, world.replica.generation, "127.0.0.1", 5, "tiny-llama")
    there = ReplicaSummary(entry, 8, world.replica.report(), 0.05)
    return ClusterStatus(1, Generation(3, "c"), 7, 90.0, (there,), ())


# --- with a router ---


async def test_it_shows_queue_replicas_and_every_decision_and_enter_explains_the_one_that_is_marked(
    tiny_model: ModelFolder,
) -> None:
    async with serving(tiny_model) as world:
        world.cluster = known(world)
        async with watching(world.url) as (app, pilot):
            first, second = await ask(world), await ask(world, "flex")
            await until(pilot, lambda: len(rows(app)) == 4)
            assert [(row[1], row[2], row[3]) for row in rows(app)] == [
                (draw.short_id(request_id), name, event)
                for request_id, name in ((second, "batch"), (first, "standard"))
                for event in ("dispatched", "admitted")
            ]
            assert "attempt=1" in rows(app)[0][5]
            assert rows(app)[0][4] == "r1"
            assert "controller 3, up 2 min" in text_of(app, "#headline")
            assert "r1" in text_of(app, "#bars")
            assert all(name in text_of(app, "#classes") for name in ("interactive", "standard", "batch"))
            await press(app, pilot, "down", "down", "enter")
            await until(pilot, lambda: first in text_of_page(app) and "admitted" in text_of_page(app))
            await press(app, pilot, "escape")
            await until(pilot, lambda: len(app.screen_stack) == 1)


def text_of_page(app: Top) -> str:
    """What the page says that is before the view; empty while there is none."""
    console = Console(width=100, highlight=False, color_system=None)
    with console.capture() as captured:
        for content in app.screen.query("#content").results(Static):
            console.print(content.content)
    return captured.get()


async def test_paused_nothing_changes_and_going_on_nothing_was_missed(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model) as world, watching(world.url) as (app, pilot):
        await ask(world)
        await until(pilot, lambda: len(rows(app)) == 2)
        await press(app, pilot, "p")
        await until(pilot, lambda: "paused" in text_of(app, "#headline"))
        before = rows(app)
        await ask(world)
        await asyncio.sleep(3 * OFTEN_S)
        assert rows(app) == before
        await press(app, pilot, "p")
        await until(pilot, lambda: len(rows(app)) == 4)
        assert rows(app)[2:] == before
        assert "paused" not in text_of(app, "#headline")
        assert "not seen" not in str(app.query_one(DataTable).border_title)


async def test_the_filter_shows_a_class_an_id_or_an_event_alone(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model) as world, watching(world.url) as (app, pilot):
        standard, batch = await ask(world), await ask(world, "flex")
        await until(pilot, lambda: len(rows(app)) == 4)
        await filtered(app, pilot, "batch")
        await until(pilot, lambda: len(rows(app)) == 2)
        assert {row[2] for row in rows(app)} == {"batch"}
        await filtered(app, pilot, "batch admitted")
        await until(pilot, lambda: len(rows(app)) == 1)
        assert rows(app)[0][1:4] == [draw.short_id(batch), "batch", "admitted"]
        await press(app, pilot, "enter")
        await until(pilot, lambda: not app.query_one(Input).display)
        assert len(rows(app)) == 1, "Enter keeps what is shown, and gives the keys back"
        await press(app, pilot, "escape")
        await until(pilot, lambda: len(rows(app)) == 4)
        await filtered(app, pilot, standard[-12:])
        await until(pilot, lambda: len(rows(app)) == 2)
        await press(app, pilot, "escape")
        await until(pilot, lambda: len(rows(app)) == 4)


async def test_the_row_that_is_marked_stays_marked_while_newer_decisions_come(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model) as world, watching(world.url) as (app, pilot):
        first = await ask(world)
        await until(pilot, lambda: len(rows(app)) == 2)
        await press(app, pilot, "down")
        await until(pilot, lambda: app.query_one(DataTable).cursor_row == 1)
        await ask(world)
        await until(pilot, lambda: len(rows(app)) == 4)
        marked = rows(app)[app.query_one(DataTable).cursor_row]
        assert marked[1:4] == [draw.short_id(first), "standard", "admitted"]


async def test_a_router_that_goes_away_leaves_its_last_picture_dimmed_and_is_shown_again_when_it_is_back(
    tiny_model: ModelFolder,
) -> None:
    async with serving(tiny_model) as world:
        assert world.app is not None
        async with contextlib.AsyncExitStack() as stack:
            port = await stack.enter_async_context(listening(world.app))
            async with watching(f"http://127.0.0.1:{port}") as (app, pilot):
                await ask(world)
                await until(pilot, lambda: len(rows(app)) == 2)
                before = rows(app)
                await stack.aclose()
                await until(pilot, lambda: app.query_one("#decisions").has_class("old"))
                assert f"no answer since {draw.clock(app._picture.at_unix_s)}" in text_of(app, "#trouble")  # type: ignore[union-attr]
                assert app.query_one("#trouble").display
                assert rows(app) == before
                await press(app, pilot, "down", "p", "p", "question_mark", "escape", "m")
                async with listening(world.app, port=port):
                    await ask(world)
                    await until(pilot, lambda: len(rows(app)) == 4)
                    assert not app.query_one("#decisions").has_class("old")
                    assert not app.query_one("#trouble").display


async def test_a_router_that_was_never_there_is_waited_for(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model) as world:
        assert world.app is not None
        async with listening(world.app) as port:
            pass
        async with watching(f"http://127.0.0.1:{port}") as (app, pilot):
            assert "does not answer" in text_of(app, "#trouble")
            await press(app, pilot, "down", "enter", "m", "p", "p")
            async with listening(world.app, port=port):
                await until(pilot, lambda: "tiny-llama" in text_of(app, "#headline"))


async def test_one_of_two_routers_that_is_gone_is_named_and_the_other_is_shown(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model) as one, serving(tiny_model) as two:
        async with watching(one.url, two.url) as (app, pilot):
            first, second = await ask(one), await ask(two)
            await until(pilot, lambda: len(rows(app)) == 4)
            assert {row[1] for row in rows(app)} == {draw.short_id(first), draw.short_id(second)}
        async with watching(one.url, "http://127.0.0.1:1") as (app, pilot):
            await until(pilot, lambda: len(rows(app)) == 2)
            assert "http://127.0.0.1:1 does not answer" in text_of(app, "#trouble")
            assert not app.query_one("#decisions").has_class("old")


async def test_two_models_have_one_feed_and_each_its_own_picture(
    tiny_model: ModelFolder, other_model: ModelFolder
) -> None:
    async with serving_two((tiny_model, other_model)) as two:
        worlds = (two.first, two.second)
        turning = [asyncio.create_task(world.replica.run()) for world in worlds]
        async with watching(two.first.url) as (app, pilot):
            bodies = [TEXT | {"model": model} for model in (FIRST, SECOND, SECOND)]
            ids = [(await two.post("/v1/completions", body)).json()["id"] for body in bodies]
            rounds = app.rounds
            await until(pilot, lambda: app.rounds >= rounds + 2)
            assert app._picture is not None
            newest_first = [seen.told.request_id for seen in app._picture.decisions]
            assert newest_first == [request_id for request_id in reversed(ids) for _ in range(2)]
            await until(pilot, lambda: len(rows(app)) == 2)
            first_tokens = {m.model: m.classes[1].first_tokens for m in app._picture.models}
            assert first_tokens == {FIRST: 1, SECOND: 2}
            await press(app, pilot, "m")
            await until(pilot, lambda: len(rows(app)) == 4)
            assert f"{SECOND} 2/2" in text_of(app, "#headline")
        for task in turning:
            task.cancel()


def identify(key: bytes) -> Identity | None:
    return {b"o": Identity("tenant-o", "o", operator=True), b"a": Identity("tenant-a", "a")}.get(key)


async def test_who_has_no_key_or_no_operators_is_told_so_and_what_to_do(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model, auth=Auth.KEYS, identify=identify) as world:
        async with watching(world.url) as (app, _):
            assert "asks for a key: set FOREBAY_API_KEY" in " ".join(text_of(app, "#trouble").split())
        async with watching(world.url, key="wrong") as (app, _):
            assert "does not know the key in FOREBAY_API_KEY" in " ".join(text_of(app, "#trouble").split())
        async with watching(world.url, key="a") as (app, pilot):
            await until(pilot, lambda: "tiny-llama" in text_of(app, "#headline"))
            assert "forebay keys create --operator" in " ".join(text_of(app, "#trouble").split())
            assert "standard" in text_of(app, "#classes"), "the rest is shown"
        async with watching(world.url, key="o") as (app, pilot):
            await until(pilot, lambda: "tiny-llama" in text_of(app, "#headline"))
            assert not app.query_one("#trouble").display


async def test_what_is_no_router_is_said_to_be_none() -> None:
    async def garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello")
        writer.close()

    server = await asyncio.start_server(garbage, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with watching(url) as (app, _):
            assert f"what answers at {url} is no router of Forebay's" in " ".join(text_of(app, "#trouble").split())


# --- without one: what is drawn of answers that are made by hand ---


class Scripted(Routers):
    """Says what the test has it say."""

    def __init__(self, *found: Answer | Trouble) -> None:
        super().__init__(["http://a"], {}, time.monotonic)
        self.found: Sequence[Answer | Trouble] = found

    async def look(self, after: Callable[[str], int | None]) -> list[Answer | Trouble]:
        return list(self.found)


@contextlib.asynccontextmanager
async def showing(scripted: Scripted, size: tuple[int, int]) -> AsyncIterator[tuple[Top, Pilot[None]]]:
    app = Top(scripted, OFTEN_S, unix=lambda: NOON)
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: app.rounds > 0)
        yield app, pilot


def busy(models: Sequence[str] = ("m",)) -> Answer:
    made = [
        told(n, NOON + n, "preempted", why=f"for cmpl-{n:032d}: pause", replica=f"replica-{n % 3}") for n in range(60)
    ]
    there = [
        replica(f"replica-{n}", model=model, running=[(10, 1, 10), (-10, 2, 30)], free=40, cached=20)
        for n in range(3)
        for model in models
    ]
    moves = [Move(f"cmpl-{n}", "batch", "replica-0", "replica-1", "asked", 0.25, "it drains") for n in range(9)]
    shown = [said(band("batch", 3 + n, 2, 12.0), model=model, moves=moves) for n, model in enumerate(models)]
    return answer(*shown, of=cluster(*there), metrics=page(10, {0.1: 5, 0.5: 9}), recent=decisions(*made))


@pytest.mark.parametrize("size", [(80, 24), (100, 30), (200, 60), (60, 15)])
async def test_nothing_is_wider_than_the_terminal_and_every_part_is_on_it(size: tuple[int, int]) -> None:
    async with showing(Scripted(busy()), size) as (app, _):
        lines = drawn(app)
        whole = "\n".join(lines)
        assert len(lines) == size[1]
        for title in ("queue", "replicas", "decisions", *(["moves and preemptions"] if size[1] >= 24 else [])):
            assert title in whole
        assert "interactive" in whole
        assert "preempted" in whole, "at least one decision is seen"
        if size[1] >= 24:
            moving = [line.split() for line in lines if "replica-0 → replica-1" in line]
            assert [line[:2] for line in moving] == [[f"cmpl-{n}", "batch"] for n in range(3)]
            assert all("asked 250 ms it drains" in " ".join(line) for line in moving)
        table = app.query_one(DataTable)
        assert table.virtual_size.width <= size[0]
        if size[0] >= 80:
            assert "…" not in text_of(app, "#classes")


async def test_it_follows_the_size_of_the_terminal() -> None:
    async with showing(Scripted(busy()), (80, 24)) as (app, pilot):
        short, whole = "for …00000059: pause", f"for cmpl-{59:032d}: pause"
        assert short in rows(app)[0][5]
        assert "host" not in text_of(app, "#bars")
        await pilot.resize_terminal(180, 50)
        await until(pilot, lambda: whole in rows(app)[0][5])
        assert "host" in text_of(app, "#bars")
        await pilot.resize_terminal(80, 24)
        await until(pilot, lambda: short in rows(app)[0][5])
        assert "host" not in text_of(app, "#bars")


async def test_m_goes_from_model_to_model() -> None:
    async with showing(Scripted(busy(("m", "n"))), (80, 24)) as (app, pilot):
        seen = []
        for place in ("1/2", "2/2", "1/2"):
            await until(pilot, lambda: place in text_of(app, "#headline"))  # noqa: B023
            seen.append((text_of(app, "#headline").split()[1], len(rows(app)) > 0))
            await press(app, pilot, "m")
        assert seen == [("m", True), ("n", False), ("m", True)]


async def test_help_names_every_key() -> None:
    async with showing(Scripted(busy()), (80, 24)) as (app, pilot):
        await press(app, pilot, "question_mark")
        await until(pilot, lambda: text_of_page(app))
        assert {line.split()[0] for line in text_of_page(app).splitlines()[:7]} >= {"q", "p", "m", "/", "Enter", "?"}
        await press(app, pilot, "question_mark")
        await until(pilot, lambda: len(app.screen_stack) == 1)
        await press(app, pilot, "q")
        await until(pilot, lambda: app._exit)


async def test_what_a_router_says_is_no_markup_and_brings_no_control_character_to_the_terminal() -> None:
    evil = told(1, NOON, why="[bold]\x1b[31mred\x07[/nope]", request_id="[i]x[/i]", replica="[/]")
    async with showing(Scripted(answer(recent=decisions(evil))), (160, 24)) as (app, _):
        assert rows(app)[0][1] == "[i]x[/i]"
        assert rows(app)[0][5].startswith("[bold] [31mred [/nope]")
        assert not any(c in "".join(drawn(app)) for c in "\x1b\x07")


async def test_what_is_looked_for_and_what_a_page_is_called_are_no_markup() -> None:
    async with showing(Scripted(answer(recent=decisions(told(1, NOON)))), (160, 24)) as (app, pilot):
        for words in ("[/", "[x]", "[/x]"):
            await filtered(app, pilot, words)
            await until(pilot, lambda words=words: f"decisions of {words!r}" in "".join(drawn(app)))  # type: ignore[misc]
            await press(app, pilot, "escape")
        await app.push_screen(Page("explain x[/b]y", "words"))
        title = app.screen.query_one("#page")._border_title  # as it is drawn
        assert title is not None
        assert title.plain == "explain x[/b]y"


def plain_text(drawing: object, width: int) -> list[str]:
    console = Console(width=width, highlight=False, color_system=None)
    with console.capture() as captured:
        console.print(drawing)
    return [line.rstrip() for line in captured.get().splitlines()]


def test_a_bar_shows_each_classs_part_of_the_blocks() -> None:
    there = replica("r", running=[(10, 1, 20), (-10, 2, 30)], free=40, cached=10)
    picture = Watch().take([answer(of=cluster(there))], NOON)
    assert picture is not None
    (row,) = picture.models[0].replicas
    assert draw.kv_bar(row, list(CLASSES), 20, coloured=False).plain == "iiiibbbbbb++::......"
    assert draw.kv_bar(row, list(CLASSES), 10, coloured=False).plain == "iibbb+:..."
    bar = draw.kv_bar(row, list(CLASSES), 20)
    spans = {str(span.style): span.end - span.start for span in bar.spans if span.end > span.start}
    colours = draw.CLASS_COLOURS
    assert spans == {colours[0]: 4, colours[2]: 6, "white": 2, draw.CACHED: 2, draw.FREE: 6}
    shared = replica("r", running=[(10, 1, 80), (-10, 2, 80)], free=20)
    picture = Watch().take([answer(of=cluster(shared))], NOON)
    assert picture is not None
    bar = draw.kv_bar(picture.models[0].replicas[0], list(CLASSES), 10, coloured=False)
    assert bar.plain == "iiiibbbb..", "blocks that both hold are not in use twice"


def test_one_picture_for_a_pipe_has_all_models_and_the_newest_decisions() -> None:
    picture = Watch().take([busy(("m", "n"))], NOON)
    assert picture is not None
    lines = plain_text(draw.snapshot(picture, 100, 5, coloured=False), 100)
    assert max(map(len, lines)) <= 100
    assert sum("replica-0" in line for line in lines) >= 2
    assert [line.split()[1] for line in lines if "preempted" in line.split()] == [
        f"cmpl-{n}" for n in range(59, 54, -1)
    ]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (None, "-"),
        (0.0834, "83 ms"),
        (0.9996, "1.0 s"),
        (9.96, "10.0 s"),
        (59.96, "60.0 s"),
        (61, "1 min"),
        (7300, "2 h"),
    ],
)
def test_a_duration_is_shown_in_the_unit_that_suits_it(seconds: float | None, shown: str) -> None:
    assert draw.duration(seconds) == shown
