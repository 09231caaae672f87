"""The Dockerfile, as far as it can be held to something without building it."""

from __future__ import annotations

import re
import subprocess
import tomllib
from fnmatch import fnmatch

from tests.chart.conftest import CHART, ROOT, TOOLS

DOCKERFILE = ROOT / "deployments" / "Dockerfile"
LINES = DOCKERFILE.read_text().replace("\\\n", "").splitlines()


def test_it_passes_hadolint() -> None:
    ended = subprocess.run([TOOLS / "hadolint", DOCKERFILE], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stdout


def test_both_stages_are_of_a_base_that_has_no_default_and_is_named_by_its_digest() -> None:
    stages = [line for line in LINES if line.startswith("FROM ")]
    assert len(stages) == 2
    for stage in stages:
        said = re.findall(r"\$\{(\w+):\?([\w-]+)\}", stage)
        assert [name for name, _ in said] == ["BASE_IMAGE", "BASE_DIGEST"]
        assert all(name in message for name, message in said), "what is missing is named"
    arguments = [line.removeprefix("ARG ") for line in LINES if line.startswith("ARG ")]
    assert {"BASE_IMAGE", "BASE_DIGEST"} <= set(arguments), "no default"


def test_it_runs_as_the_user_that_the_chart_says() -> None:
    (user,) = [line for line in LINES if line.startswith("USER ")]
    assert LINES.index(user) > max(n for n, line in enumerate(LINES) if line.startswith("FROM "))
    assert f"uid: {user.removeprefix('USER ').split(':')[0]}\n" in (CHART / "values.yaml").read_text()


def test_what_is_copied_is_sent_to_the_build_and_is_all_that_is_installed() -> None:
    sources = {
        source for line in LINES if line.startswith("COPY ") and "--from" not in line for source in line.split()[1:-1]
    }
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert all((ROOT / source).exists() and any(fnmatch(source, k) for k in kept) for source in sources)
    assert set(kept) == sources
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert set(packages["packages"]) <= sources
