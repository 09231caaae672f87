"""`forebay status`: what a person is told of replicas and of scaling."""

from __future__ import annotations

import json

import msgspec
import pytest
from rich.console import Console

from cluster.messages import ClusterStatus, ReplicaSummary, RosterEntry, ScaleDecision, ScaleStatus
from cluster.model import ModelFolder
from cluster.types import EngineLoad, Generation, PriorityLoad, ReplicaId, ReplicaReport, ReplicaState
from ops import serve_cli
from tests.unit.http_kit import serving
from tests.unit.test_explain import forebay

NUMBERS = {"demand_per_s": 912.0, "of_one_per_s": 400.0, "occupied": 1.5, "queued": 3.0, "attained": 0.875}
GROWN = ScaleDecision(1_800_000_000.0, 2, 3, "demand is above what they do", NUMBERS)
HELD = ScaleDecision(1_800_000_060.0, 3, 3, "none goes so soon after one was added", NUMBERS)
SCALE = ScaleStatus("m", HELD, kept=3, changes=(GROWN,))


def of(*scale: ScaleStatus) -> ClusterStatus:
    return ClusterStatus(1, Generation(1, "u"), 1, 1.0, (), (), scale=scale)


async def test_status_says_how_many_replicas_are_wanted_why_no_more_by_which_figures_and_the_last_changes(
    tiny_model: ModelFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(tiny_model) as world:
        world.cluster = of(SCALE)
        code, out, _ = await forebay(capsys, "status", "--url", world.url)
        said = " ".join(out.split())
        assert code == 0
        assert "Scale of m: 3 replicas wanted, Serve keeps 3; none goes so soon after one was added" in said
        figures = "asked 912 tokens/s, one replica does 400 tokens/s, 1.5 replicas occupied, 3 queued"
        assert f"{figures}, 88% of first tokens in time" in said
        assert "2 → 3: demand is above what they do" in said
        assert "Serve did not answer" not in said

        unmeasured = msgspec.structs.replace(HELD, numbers={"queued": 0.0})
        world.cluster = of(msgspec.structs.replace(SCALE, now=unmeasured, kept=None, trouble="connection refused"))
        _, out, _ = await forebay(capsys, "status", "--url", world.url)
        said = " ".join(out.split())
        assert "3 replicas wanted; none goes" in said
        assert "tokens/s" not in said, "what is not measured is not shown as nothing"
        assert "Serve did not answer: connection refused" in said


async def test_status_as_json_has_all_of_it_with_the_names_of_its_fields_and_nothing_of_scaling_without_it(
    tiny_model: ModelFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(tiny_model) as world:
        world.cluster = of(SCALE)
        _, out, _ = await forebay(capsys, "status", "--json", "--url", world.url)
        (scale,) = json.loads(out)["cluster"]["scale"]
        assert (scale["model"], scale["now"]["wanted"], scale["now"]["numbers"]) == ("m", 3, NUMBERS)
        assert scale["changes"] == [{"at_unix_s": 1.8e9, "was": 2, "wanted": 3, "why": GROWN.why, "numbers": NUMBERS}]
        world.cluster = of()
        _, out, _ = await forebay(capsys, "status", "--url", world.url)
        assert "Scale" not in out


def replica(
    name: str, model: str, state: ReplicaState = ReplicaState.READY, age_s: float | None = 0.05
) -> ReplicaSummary:
    """One of 24 slots, of which 20 are taken; 4 more wait. `age_s` None: it has reported nothing."""
    generation = Generation(1, "u")
    running, waiting = (PriorityLoad(0, 20, 300),), (PriorityLoad(0, 4, 0),)
    load = EngineLoad(
        24, 1000, 700, 16, running=running, waiting=waiting, preemptions_total=12, blocks_cached=90, steps_total=5
    )
    report = ReplicaReport(ReplicaId(name), generation, state, observed_unix_s=1.0, load=load, step_age_s=None)
    entry = RosterEntry(ReplicaId(name), generation, "127.0.0.1", 1, model)
    return ReplicaSummary(entry, 54321, None if age_s is None else report, age_s)


async def test_the_table_of_replicas_fits_a_terminal_of_80_columns_with_the_names_that_drain_takes(
    tiny_model: ModelFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(serve_cli, "console", lambda: Console(highlight=False, width=80))
    there = [
        replica("glylziyu", "a/model", ReplicaState.DRAINING),
        replica("v4s37u3d", "another", age_s=7.2),
        replica("yet2come", "a/model", age_s=None),
    ]
    async with serving(tiny_model) as world:
        world.cluster = msgspec.structs.replace(of(), replicas=tuple(there))
        code, out, _ = await forebay(capsys, "status", "--url", world.url)
    assert code == 0
    lines = [line.rstrip() for line in out.splitlines()]
    first, second = lines.index("Replicas of a/model"), lines.index("Replicas of another")
    assert " ".join(lines[first + 1].split()) == "replica host pid state running waiting KV cached preempted"
    assert " ".join(lines[first + 2].split()) == "glylziyu 127.0.0.1 54321 draining 20/24 4 30% 9% 12"
    assert " ".join(lines[first + 3].split()) == "yet2come 127.0.0.1 54321 no report"
    assert " ".join(lines[second + 2].split()) == "v4s37u3d 127.0.0.1 54321 silent 7 s 20/24 4 30% 9% 12"
    assert max(map(len, lines)) <= 80


async def test_what_another_version_answers_is_said_to_be_that(
    tiny_model: ModelFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tiny_model) as world:
        address = world.url

    def asked(url: str | None, path: str, part: str) -> tuple[str, object]:
        return address, {"router": {"ready": True, "models": [{"model": "m"}]}, "cluster": None}

    monkeypatch.setattr(serve_cli, "ask", asked)
    code, _, err = await forebay(capsys, "status")
    assert (code, "answers as another version of Forebay does (KeyError('ready')); --json prints it" in err) == (
        2,
        True,
    )
