"""`forebay` as a person meets it: help, version, one line for every error, and the exit code."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer

from ops import cli
from ops.bench.schedule import DEFAULT_SERVICE_CLASSES, SERVICE_TIERS, parse_classes
from ops.bench.stats import DEFAULT_SLOS, parse_slos
from tests.unit.test_bench_client import ScriptedServer, Send, serving, start, whole_answer, write

DATA = Path(__file__).parents[1] / "data"
TRACE = str(DATA / "trace_azure.csv")
NOBODY = "http://127.0.0.1:1"


def forebay(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of one command line."""
    code = cli.run(arguments)
    said = capsys.readouterr()
    return code, said.out, said.err


def test_help_names_every_command_and_where_to_begin(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = forebay(capsys, "--help")
    assert code == 0
    assert all(command in out for command in ("serve", "status", "bench", "--version", "Begin with: forebay serve"))


def test_help_shows_all_that_is_written_in_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "500")

    def plain(text: str) -> str:
        return " ".join(re.sub("[│╭╮╰╯─]", " ", text).replace("`", "").split())

    def check(command: Any, path: tuple[str, ...]) -> None:
        said = plain(forebay(capsys, *path, "--help")[1])
        parts = [getattr(one, "help", None) or "" for one in (command, *command.params)]
        for paragraph in (paragraph for part in parts for paragraph in part.split("\n\n")):
            assert plain(paragraph) in said, f"forebay {' '.join(path)} --help"
        for name, inner in getattr(command, "commands", {}).items():
            check(inner, (*path, name))

    check(typer.main.get_command(cli.app), ())
    assert "FOREBAY_URL, or the newest instance" in forebay(capsys, "status", "--help")[1]


def test_version_is_the_installed_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert forebay(capsys, "--version") == (0, "forebay 0.1.0\n", "")


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = forebay(capsys)
    assert code == 2
    assert "serve" in out + err
    assert "forebay:" not in err


def test_replay_help_states_the_definitions(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    code, out, _ = forebay(capsys, "bench", "replay", "--help")
    text = " ".join(out.split())
    assert code == 0
    assert "TPOT = (end − first token) ÷ (tokens − 1)" in text
    assert "Goodput = requests that meet all their SLOs ÷ duration" in text
    for option in ("--trace", "--url", "--time-scale", "--token-scale", "--limit", "--classes", "--slo", "--json"):
        assert option in text


def test_replay_help_states_the_defaults_in_force(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    _, out, _ = forebay(capsys, "bench", "replay", "--help")
    stated = [match.group(1) for match in re.finditer(r"Default: (\w+=[^.]*)\.", out)]
    assert len(stated) == 2
    classes, slos = stated
    assert {e.partition("=")[0].strip() for e in classes.split(",")} == DEFAULT_SERVICE_CLASSES.keys()
    assert parse_classes([classes]) == DEFAULT_SERVICE_CLASSES
    assert parse_slos(slos.split("; "), SERVICE_TIERS) == DEFAULT_SLOS
    assert {e.partition("=")[0].strip() for e in slos.split(";")} == DEFAULT_SLOS.keys()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["fly"], "No such command 'fly'"),
        (["bench", "replay"], "Missing option '--trace'"),
        (["bench", "replay", "--trace", TRACE], "Missing option '--url'"),
        (["bench", "replay", "--trace", "/no/file", "--url", NOBODY], "/no/file cannot be read"),
        (["bench", "replay", "--trace", __file__, "--url", NOBODY], "line 1"),
        (["bench", "replay", "--trace", TRACE, "--url", "127.0.0.1:8000"], "must begin with http://"),
        (["bench", "replay", "--trace", TRACE, "--url", NOBODY, "--limit", "0"], "--limit"),
        (["bench", "replay", "--trace", TRACE, "--url", NOBODY, "--skip", "3"], "--skip"),
        (["bench", "replay", "--trace", TRACE, "--url", NOBODY, "--token-scale", "1/0"], "--token-scale"),
        (["bench", "replay", "--trace", TRACE, "--url", NOBODY, "--api", "grpc"], "--api"),
        (["bench", "replay", "--trace", TRACE, "--url", NOBODY, "--json", "/no/folder/x"], "/no/folder does not exist"),
    ],
)
def test_unusable_input_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    code, out, err = forebay(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("forebay: ")
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "option"),
    [
        *(
            (command.split(), option)
            for command in ("status", "top --once", "explain cmpl-1", "drain r0")
            for option in ("--url", "FOREBAY_URL")
        ),
        (["bench", "replay", "--trace", TRACE], "--url"),
    ],
)
@pytest.mark.parametrize("address", ["http://me:hush@a:1", "me:hush@a:1", "http://:hush@[", "http://a@hush:b"])
def test_an_address_with_a_password_is_refused_by_every_command_and_not_said(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    option: str,
    address: str,
) -> None:
    if option == "--url":
        command = [*command, option, address]
    monkeypatch.setenv("FOREBAY_URL", address)
    code, out, err = forebay(capsys, *command)
    assert (code, out) == (2, "")
    assert err.startswith(f"forebay: {option}: ")
    assert "hush" not in err


def test_nobody_at_the_address_is_told_after_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = forebay(capsys, "bench", "replay", "--trace", TRACE, "--url", NOBODY)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith(f"forebay: --url: no answer from {NOBODY}/v1")
    assert "Traceback" not in err


def test_interrupt_is_one_line_and_exit_code_130(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ops.bench.trace.read_trace", interrupt)
    assert forebay(capsys, "bench", "replay", "--trace", TRACE, "--url", NOBODY) == (130, "", "forebay: interrupted\n")


async def test_replay_prints_a_table_and_writes_the_agreed_rows(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The whole command, as a person runs it, against a server that answers all but the interactive request."""

    async def answer(body: dict[str, Any], send: Send) -> None:
        if body["service_tier"] == "priority":
            await start(send, 503, b"text/plain")
            await write(send, b"busy", more=False)
        else:
            await whole_answer(body, send)

    file = tmp_path / "out.json"
    scales = ("--token-scale", "1/16", "--time-scale", "0.01")
    async with serving(ScriptedServer(answer)) as url:
        arguments = ("bench", "replay", "--trace", TRACE, "--url", url, *scales, "--json", str(file))
        code, out, err = await asyncio.to_thread(forebay, capsys, *arguments)

    assert code == 1, "a request failed"
    header, requests, errors = (line.split() for line in out.splitlines()[:3])
    assert header == ["interactive", "standard", "all"]
    assert requests == ["requests", "1", "2", "3"]
    assert errors == ["errors", "1", "0", "1"]
    assert "gaps × 1/100, lengths × 1/16" in out
    assert "code → interactive" in out
    assert "1 failed with http_503, the first: busy" in err
    document = json.loads(file.read_text())
    assert document.keys() == {"command", "context", "rows"}
    rows = {row["name"]: row["value"] for row in document["rows"]}
    # 48/16 and 1/16 tokens, the latter rounded up to one.
    assert (rows["all.requests"], rows["all.errors"], rows["standard.output_tokens"]) == (3, 1, 4)
    assert {"standard.ttft_p50_ms", "standard.tpot_p50_ms", "standard.e2e_p99_ms", "all.tokens_per_s"} <= rows.keys()
