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
        (("--policy", "best"), "--policy: 'best' is none of forebay, load-only, round-robin"),
        (("--policy", "forebay,forebay"), "names one twice"),
        (("--replicas", "many"), "--replicas: 'many' is no number"),
        (("--replicas", "0"), "--replicas: '0': each at least 1"),
        (("--replicas", "1000000"), "at most 10,000"),
        (("--replicas", "1-1000000000000"), "more than 100 sizes"),
        (("--duration", "inf"), "'--duration': Input should be less than or equal to 86400"),
        (("--times", "inf"), "'--times': Input should be less than or equal to 100000"),
        (("--times", "100000", "--duration", "86400"), "requests would arrive, more than 10,000,000"),
        (("--times", "0.001", "--duration", "1"), "no request arrives in 1 s; lengthen --duration, or raise --times"),
        (("--routers", "1000000"), "'--routers': Input should be less than or equal to 64"),
        (("--batch-waiting", "1000000000"), "'--batch-waiting': Input should be less than or equal to 100000"),
        (("--budget", "1000000000"), "'--budget': Input should be less than or equal to 16384"),
        (("--faults", "replica_death@nan+2:0"), "times must be finite"),
        (("--faults", "replica_death@1+inf:0"), "times must be finite"),
        (("--faults", "replica_death@61+1:0"), "replica_death@61: requests arrive for 60 s (--duration)"),
        (("--replicas", "4-2"), "--replicas: '4-2': each at least 1"),
        (("--replicas", "1-3,2"), "and none twice"),
        (("--replicas", "2,4", "--load", "0.9"), "--load: it grows with the replicas"),
        (("--load", "0.9", "--times", "2"), "--times: with --load"),
        (("--faults", "flood@1+2"), "--faults: unknown kind 'flood'"),
        (("--faults", "replica_death@soon+2"), "write kind@at+for:number"),
        (("--faults", "move_source_death@1+2"), "points: asked, begun"),
        (("--faults", "move_source_death@1+2:halfway"), "'halfway' is not a valid MovePoint"),
        (("--faults", "replica_death@1+2:7", "--replicas", "2"), "--faults: replica_death: there is no number 7"),
        (("--classes", "code"), "--classes: 'code' is not of the form"),
        (("--slo", "batch=1:2"), "--slo: unknown class 'batch'"),
        (("--slo", "standard=fast"), "write standard=TTFT_MS:TPOT_MS"),
        (("--slo", "standard=500:0"), "must be above 0"),
        (("--batch", "/nowhere.csv"), "--batch: /nowhere.csv cannot be read"),
        (("--plot", TRACE), f"--plot: {TRACE} is what the simulation reads; name another file"),
        (("--json", TRACE), f"--json: {TRACE} is what the simulation reads; name another file"),
        (("--plot", "/"), "--plot: / is a folder; name a file"),
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


def test_a_study_that_was_not_finished_is_gone_on_with_and_one_of_other_settings_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "study.json"
    command = ("--replicas", "1", "--duration", "3", "--seeds", "3", "--jobs", "1", "--json", str(file))
    assert simulated(capsys, *command)[0] == 0
    whole = written(file)
    assert (whole["context"]["runs"], whole["context"]["runs_done"]) == (3, 3)
    assert [run["seed"] for run in whole["runs"]] == [0, 1, 2]

    # As it was after its first run, whose figure is marked.
    first = {**whole["runs"][0], "rows": [{"name": "mark", "value": 7.0, "unit": "x"}]}
    file.write_text(json.dumps({**whole, "runs": [first]}))
    code, _, said = simulated(capsys, *command)
    assert code == 0
    assert "has 1 of 3 runs: going on with the others" in said
    document = written(file)
    assert document["context"]["event_log_sha256"] == whole["context"]["event_log_sha256"]
    assert document["runs"][0] == first
    assert [run["rows"][0]["name"] for run in document["runs"][1:]] == [whole["runs"][0]["rows"][0]["name"]] * 2

    file.write_text(json.dumps({**whole, "runs": [first]}))
    for other in (("--duration", "4"), ("--seeds", "2"), ("--times", "2")):
        code, _, said = simulated(capsys, *command, *other)
        assert code == 2
        assert "has 1 of 3 runs of a study with other settings" in said
    assert written(file)["runs"] == [first]

    file.write_text(json.dumps(whole))  # a study that is finished is begun anew
    assert simulated(capsys, *command)[0] == 0
    assert written(file)["runs"][0]["rows"] != [first]


def test_the_answer_to_how_many_are_needed_is_a_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot = tmp_path / "sizes.png"
    sizes = ("--replicas", "1-2", "--times", "30", "--duration", "5", "--jobs", "1", "--plot", str(plot))
    _, out, _ = simulated(capsys, *sizes, "--goal", "0")
    assert out.splitlines()[-1].startswith(
        "1 replica (a100-llama3-8b) is enough, fewer were not tried: 0 % of each class's"
    )
    _, out, _ = simulated(capsys, "--replicas", "1", "--times", "60", "--duration", "5", "--goal", "100")
    assert out.splitlines()[-1].startswith(
        "Not enough: 100 % of each class's requests meet their objectives with none of 1 "
    )
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
        draw_attainment({"a": [(1, 9.0)]}, 99.0, "sizes", tmp_path)


def test_batch_requests_that_the_model_has_no_room_for_are_left_out_and_counted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("num_prefill_tokens,num_decode_tokens\n16000,385\n")
    code, _, err = simulated(capsys, "--batch", str(lengths))
    assert (code, "--batch: no request has at most 16384 tokens" in err) == (2, True)
    with lengths.open("a") as file:
        file.write("16000,384\n")
    code, _, err = simulated(capsys, "--replicas", "1", "--duration", "2", "--times", "4", "--batch", str(lengths))
    assert code == 0
    assert "1 requests are longer than the model's 16384 tokens and left out" in err
