"""What a batch job is told wrongly: one line says what to change, and nothing else happens."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from deployments.jobs import command
from deployments.jobs.batch import batch
from deployments.settings import Environment, UsageError, checked_environment


def refused(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The one line that a job says that cannot begin."""
    (folder / "in.jsonl").write_text(json.dumps({"custom_id": "a"}) + "\n")
    files = ("--input", str(folder / "in.jsonl"), "--output", str(folder / "out.jsonl"))
    assert command.run("batch", batch, (*files, "--url", "http://127.0.0.1:9", *options)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    return line


@pytest.mark.parametrize("key", ["fb-se\ncret", "fb-sécret", "fb-se cret", "fb-se\x7fcret", "fb-secret\u2028x"])
def test_a_key_that_fits_no_header_is_named_by_its_variable_and_never_said(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FOREBAY_API_KEY", key)
    said = refused(tmp_path, capsys)
    assert said == "batch: FOREBAY_API_KEY: must be one word of printable ASCII characters, as a header has it"
    with pytest.raises(ValueError, match="api_key") as unfit:
        Environment()
    assert "fb-se" not in str(unfit.value)


@pytest.mark.parametrize(("variable", "sent"), [("fb-key\n", {"authorization": "Bearer fb-key"}), (" ", {}), ("", {})])
def test_a_key_is_taken_without_the_newline_of_its_file_and_a_blank_one_is_none(
    variable: str, sent: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREBAY_API_KEY", variable)
    assert checked_environment().credentials == sent


def test_a_token_for_grafana_is_checked_like_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_GRAFANA_TOKEN", "a\nb")
    with pytest.raises(UsageError, match=r"^FOREBAY_GRAFANA_TOKEN: must be one word"):
        checked_environment()


@pytest.mark.parametrize("name", ["früh", "", "a b", "a\nb"])
def test_a_class_that_fits_no_header_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--class: " in refused(tmp_path, capsys, "--class", name)


@pytest.mark.timeout(20)
def test_an_input_that_is_no_file_is_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert f"--input: {pipe} is no regular file" in refused(tmp_path, capsys, "--input", str(pipe))
    assert not (tmp_path / "out.jsonl").exists()
