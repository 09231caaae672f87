"""`forebay top` as a command: one picture for pipes and scripts, what is wrong in one line, and a real terminal."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import struct
import subprocess
import sys
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ

import pytest

from cluster.config import Auth
from cluster.model import ModelFolder
from tests.unit.http_kit import World, serving
from tests.unit.test_explain import forebay
from tests.unit.test_top_view import ask, identify

SOON = ("--interval", "0.2")
NOBODY = "http://127.0.0.1:1"


async def test_one_picture_as_text_and_as_json_says_the_same(
    tiny_model: ModelFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    async with serving(tiny_model) as world:
        request_id = await ask(world, "flex")
        code, out, err = await forebay(capsys, "top", "--json", "--url", world.url, *SOON)
        assert (code, err) == (0, "")
        said = json.loads(out)
        (model,) = said["models"]
        assert [row["priority_class"] for row in model["classes"]] == ["interactive", "standard", "batch"]
        events = [(seen["told"]["request_id"], seen["told"]["event"]) for seen in said["decisions"]]
        assert events == [(request_id, "dispatched"), (request_id, "admitted")]
        assert (said["urls"], said["controller"], said["missed"]) == ([world.url], None, 0)
        code, out, err = await forebay(capsys, "top", "--once", "--url", world.url, *SOON)
        assert (code, err) == (0, "")
        assert "no controller" in out
        assert [line.split()[2:4] for line in out.splitlines() if request_id in line] == [
            ["batch", "dispatched"], ["batch", "admitted"],
        ]  # fmt: skip
        assert "\x1b" not in out, "a pipe gets no colours"


def words(out: str) -> list[str]:
    """Of the last column of the decisions: all that was said of why, however it was folded."""
    lines = out.splitlines()
    head = next(n for n, line in enumerate(lines) if "why and numbers" in line)
    begin = lines[head].index("why and numbers")
    return "".join(line[begin:] for line in lines[head + 1 :]).split()


@pytest.mark.alone
async def test_a_pipe_gets_lines_no_wider_than_a_terminal_and_all_that_is_said(
    tiny_model: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As wide as a terminal that is there beside the pipe, or as COLUMNS says, or 80; numbers are folded, not cut off."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("TERM", "xterm")  # of a dumb one nobody asks how wide it is

    async def once(width: int, stdin: int = subprocess.DEVNULL) -> str:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "ops.cli", "top", "--once", "--url", world.url, *SOON,
            stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=Path(__file__).parents[2],
            env=dict(os.environ),  # not what readline adds to it unseen by Python, where somebody has imported that
        )  # fmt: skip
        out = (await process.communicate())[0].decode()
        assert process.returncode == 0
        assert max(map(len, out.splitlines())) <= width
        return out

    async with serving(tiny_model) as world:
        await ask(world, "flex")
        end, inner = pty.openpty()
        ioctl(inner, TIOCSWINSZ, struct.pack("HHHH", 24, 400, 0, 0))
        wide, narrow = await once(400, inner), await once(80)
        monkeypatch.setenv("COLUMNS", "60")
        narrowest = await once(60)
        for one in end, inner:
            os.close(one)
    assert max(map(len, wide.splitlines())) > 80
    assert any("=" in word for word in words(wide))
    together = ["".join(words(out)) for out in (wide, narrow, narrowest)]
    assert together[0] == together[1] == together[2]


async def test_routers_that_are_named_are_shown_together(
    tiny_model: ModelFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(tiny_model) as one, serving(tiny_model) as two:
        ids = {await ask(one), await ask(two)}
        addresses = ("--url", one.url, "--url", f"{two.url}/", "--url", NOBODY, "--url", one.url)
        code, out, _ = await forebay(capsys, "top", "--json", *addresses, *SOON)
        said = json.loads(out)
        assert code == 0
        assert {seen["told"]["request_id"] for seen in said["decisions"]} == ids
        assert len(said["decisions"]) == 4
        assert said["urls"] == [one.url, two.url]
        assert any(NOBODY in note for note in said["notes"])


async def test_what_is_wrong_is_one_line_that_says_what_to_do(
    tiny_model: ModelFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*arguments: str) -> str:
        code, out, err = await forebay(capsys, "top", *arguments, *SOON)
        assert (code, out) == (2, "")
        assert err.count("\n") == 1
        return err

    assert "the live view needs a terminal; --once or --json" in await refused("--url", NOBODY)
    assert f"{NOBODY} does not answer" in await refused("--once", "--url", NOBODY)
    assert "--interval" in (await forebay(capsys, "top", "--interval", "0"))[2]
    async with serving(tiny_model, auth=Auth.KEYS, identify=identify) as world:
        assert "set FOREBAY_API_KEY" in await refused("--once", "--url", world.url)
        monkeypatch.setenv("FOREBAY_API_KEY", "nobodys")
        assert "does not know the key in FOREBAY_API_KEY" in await refused("--json", "--url", world.url)
        monkeypatch.setenv("FOREBAY_API_KEY", "a")
        code, out, _ = await forebay(capsys, "top", "--once", "--url", world.url, *SOON)
        assert (code, "forebay keys create --operator" in out) == (0, True)


class Terminal:
    """A real one, of which what is on it is read as it comes."""

    def __init__(self, world: World, rows: int, columns: int) -> None:
        self.end, inner = pty.openpty()
        ioctl(inner, TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ops.cli", "top", "--url", world.url, *SOON],
            stdin=inner, stdout=inner, stderr=inner, close_fds=True,
            cwd=Path(__file__).parents[2], env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "", "LINES": ""},
        )  # fmt: skip
        os.close(inner)
        self.seen = ""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.end, self._read)

    def _read(self) -> None:
        try:
            self.seen += os.read(self.end, 65536).decode(errors="replace")
        except OSError:  # its other end is closed: the process has ended
            self._loop.remove_reader(self.end)

    def text(self) -> str:
        """All that was written, without what moves the cursor and colours."""
        return re.sub(r"\x1b(\[[0-9;?<>=]*[a-zA-Z]|[^\[])", "", self.seen)

    async def until(self, words: str, within_s: float) -> None:
        async with asyncio.timeout(within_s):
            while words not in self.text():  # noqa: ASYNC110 - what comes in pieces has no event of its own
                await asyncio.sleep(0.02)

    def close(self) -> None:
        self._loop.remove_reader(self.end)
        os.close(self.end)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@pytest.mark.alone
async def test_on_a_terminal_it_draws_answers_to_keys_and_leaves_the_terminal_as_it_was(
    tiny_model: ModelFolder,
) -> None:
    async with serving(tiny_model) as world:
        request_id = await ask(world, "flex")
        terminal = Terminal(world, 24, 80)
        try:
            await terminal.until(request_id[-8:], within_s=30)
            assert "tiny-llama" in terminal.text()
            os.write(terminal.end, b"?")
            await terminal.until("Escape closes", within_s=10)
            os.write(terminal.end, b"\x1b")
            await asyncio.sleep(0.5)  # Escape alone is told from the beginning of another key by what does not follow
            os.write(terminal.end, b"q")
            code = await asyncio.wait_for(asyncio.to_thread(terminal.process.wait), 10)
        finally:
            terminal.close()
        assert code == 0
        assert "\x1b[?1049h" in terminal.seen, "it draws on a screen of its own"
        assert terminal.seen.rindex("\x1b[?1049l") > terminal.seen.rindex("\x1b[?1049h"), "and gives the other one back"
