"""Replicas that ask for GPUs, on a machine whose A100s are imitated: Ray counts them, and the engine runs on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.model import ModelFolder
from tests.ray.conftest import PROFILE, Served, served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ON_A100 = PROFILE | {"gpus_per_replica": 1, "accelerator_type": "A100"}
ASK_WHAT_IS_LEFT = "import json, ray; ray.init(log_to_driver=False); print(json.dumps(ray.available_resources()))"


def imitate(monkeypatch: pytest.MonkeyPatch, gpus: int, kind: str) -> None:
    monkeypatch.setenv("RAY_OVERRIDE_RESOURCES", json.dumps({"GPU": gpus, f"accelerator_type:{kind}": 1}))
    monkeypatch.setenv("RAY_OVERRIDE_LABELS", json.dumps({"ray.io/accelerator-type": kind}))


def what_is_left(instance: Served) -> dict[str, float]:
    """Resources that Ray has not given away, asked as a second driver of the same cluster."""
    (state,) = (instance.cache / "run").glob("*.json")
    (raylet,) = [process for process in instance.family() if process.name() == "raylet"]
    (address,) = [part.partition("=")[2] for part in raylet.cmdline() if part.startswith("--gcs-address=")]
    environment = os.environ | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(Path(json.loads(state.read_text())["folder"]) / "ray-token"),
        "RAY_ADDRESS": address,
    }
    command = [sys.executable, "-c", ASK_WHAT_IS_LEFT]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    left: dict[str, float] = json.loads(said.stdout.splitlines()[-1])
    return left


def test_each_replica_is_given_an_a100_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tiny_model: ModelFolder, tmp_path: Path
) -> None:
    imitate(monkeypatch, 3, "A100")
    with served(tiny_model, tmp_path, profile=ON_A100) as instance:
        assert len(instance.replicas()) == 2
        left = what_is_left(instance)
    assert left["GPU"] == 1
    assert left["accelerator_type:A100"] < 1, "they did not ask for the kind"


@pytest.mark.parametrize(("gpus", "kind", "said"), [(1, "A100", "too few GPUs"), (2, "H100", "no A100 here")])
def test_a_machine_without_what_they_need_is_one_clear_line(
    gpus: int, kind: str, said: str, monkeypatch: pytest.MonkeyPatch, tiny_model: ModelFolder, tmp_path: Path
) -> None:
    imitate(monkeypatch, gpus, kind)
    profile = tmp_path / "a100.yaml"
    profile.write_text(json.dumps(ON_A100))
    command = [sys.executable, "-m", "ops.cli", "serve", "--port", "0", "--profile", str(profile)]
    command += ["--model", str(tiny_model.path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert said in line
