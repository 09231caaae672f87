"""`forebay simulate` as a person meets it: what it refuses, in one line, and what it tells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ops import cli
from ops.errors import CommandError
from ops.sim.chart import draw_attainment, draw_waits

TRACE = str(Path(__file__).parents[1] / "data" / "trace_azure.csv")


def simulated(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.run(("simulate", "--trace", TRACE, *arguments))
    said = capsys.readouterr()
    return code, said.out, said.err


def written(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return document


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--gpu", "h100"), "--gpu: 'h100' is none of a100-llama3-8b"),
        (("--policy", "best"), "--policy: 'best' is none of forebay, round-robin"),
        (("--policy", "forebay,forebay"), "names one twice"),
        (("--replicas", "many"), "--replicas: 'many' is no number"),
        (("--replicas", "0"), "--replicas: '0': each at least 1"),
        (("--replicas", "2,4", "--load", "0.9"), "--load: it grows with the replicas"),
        (("--load", "0.9", "--times", "2"), "--times: with --load"),
        (("--faults", "flood@1+2"), "--faults: unknown kind 'flood'"),
        (("--faults", "replica_death@soon+2"), "write kind@at+for:number"),
        (("--faults", "move_source_death@1+2"), "points: asked, begun"),
        (("--faults", "move_source_death@1+2:halfway"), "'halfway' is not a valid MovePoint"),
        (("--faults", "replica_death@1+2:7", "--replicas", "2"), "--faults: replica_death: there is no number 7"),
        (("--classes", "code"), "--classes: 'code' is not of the form"),
        (("--batch", "/nowhere.csv"), "--batch: /nowhere.csv cannot be read"),
        (("--plot", "/nowhere/x.png"), "--plot: the folder /nowhere does not exist"),
        (("--json", "/nowhere/x.json"), "--json: the folder /nowhere does not exist"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str
) -> None:
    code, out, err = simulated(capsys, *arguments)
    assert code == 2
    assert says in err
    assert len(err.splitlines()) == 1
    assert not out


def test_one_run_tells_the_rows_by_their_plain_names_and_its_conditions(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file, plot = tmp_path / "one.json", tmp_path / "one.png"
    code, out, _ = simulated(
        capsys, "--replicas", "1", "--times", "4", "--duration", "5", "--json", str(file), "--plot", str(plot)
    )
    assert code == 0
    assert "interactive.ttft_p99_ms" in out
    document = written(file)
    rows = {row["name"]: row["value"] for row in document["rows"]}
    assert rows["interactive.requests"] + rows["standard.requests"] == 20  # the trace has one a second
    assert rows["invariant_violations"] == 0
    assert {"standard.tpot_p99_ms", "standard.goodput_rps", "tokens_per_s", "goodput_over_bound"} <= rows.keys()
    assert len(document["context"]["event_log_sha256"]) == 64
    assert document["context"]["classes"] == {"code": "interactive", "conversation": "standard"}
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_same_seed_gives_the_same_event_log_and_another_a_different_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def log_of(seed: str) -> str:
        file = tmp_path / "run.json"
        assert simulated(capsys, "--replicas", "2", "--times", "4", "--seed", seed, "--json", str(file))[0] == 0
        return str(written(file)["context"]["event_log_sha256"])

    assert log_of("1") == log_of("1") != log_of("2")


def test_several_sizes_and_policies_stand_side_by_side(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file, plot = tmp_path / "sizes.json", tmp_path / "sizes.png"
    code, out, _ = simulated(
        capsys, "--replicas", "1,2", "--policy", "forebay,llumnix", "--duration", "5", "--seeds", "2",
        "--json", str(file), "--plot", str(plot),
    )  # fmt: skip
    assert code == 0
    assert "llumnix.2" in out
    names = {row["name"] for row in written(file)["rows"]}
    for part in ("forebay.1", "forebay.2", "llumnix.1", "llumnix.2"):
        assert {f"{part}.standard.attainment_pct", f"{part}.standard.attainment_pct_ci95"} <= names
    assert len(written(file)["context"]["event_log_sha256"]) == 8
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_replica_that_dies_or_drains_costs_no_request(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "fault.json"
    code, _, _ = simulated(
        capsys, "--replicas", "2", "--times", "8", "--duration", "10",
        "--faults", "replica_death@4+3:1,drain@1+2:0", "--faults", "move_link_break@1+0:copied",
        "--json", str(file),
    )  # fmt: skip
    assert code == 0
    rows = {row["name"]: row["value"] for row in written(file)["rows"]}
    assert rows["interactive.unfinished"] == rows["standard.unfinished"] == 0
    assert "migrations" in rows
    told = ["replica_death@4+3:1", "drain@1+2:0", "move_link_break@1+0:copied"]
    assert written(file)["context"]["faults"] == told


def test_a_chart_that_cannot_be_written_is_told_by_its_option(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="--plot: "):
        draw_waits({"a": [1.0]}, "waits", tmp_path)
    with pytest.raises(CommandError, match="--plot: "):
        draw_attainment({"a": [(1, 9.0)]}, "sizes", tmp_path)
