"""Nothing that processes log, at the level that says most, has a secret, a key or what a client says in it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.model import ModelFolder
from deployments.settings import Profile
from ops.cli import run
from tests.process_parts import POISON_ID
from tests.processes import Cluster, running_cluster
from tests.ray.streams import Reader, body

ROLES = ("controller", "router", "replica")
MARK = "the merger with Halvorsen is off"


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def forebay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command; its exit code, and all that it says."""
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FOREBAY_LOG_LEVEL", "DEBUG")

    def ran(*words: str, **environment: str) -> tuple[int, str]:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        code = run(words)
        said = capsys.readouterr()
        return code, said.out + said.err

    return ran


async def test_no_log_has_a_secret_a_key_or_what_clients_say_and_are_told(
    tiny_model: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forebay: Run
) -> None:
    logs, keys = tmp_path / "logs", tmp_path / "keys.json"
    logs.mkdir()
    loud = staticmethod(lambda _, *arguments: ("tests.loud_parts", str(logs), *arguments))
    monkeypatch.setattr(Cluster, "command", loud)
    _, said = forebay("keys", "create", "--tenant", "acme", "--operator", "--file", str(keys))
    (key,) = [word for word in said.split() if word.startswith("fb-")]
    stranger = f"fb-{secrets.token_hex(6)}-{secrets.token_hex(24)}"
    profile = Profile.model_validate(
        {
            "engine": {"slots": 8, "blocks": 256, "max_model_len": 512},
            "router": {"auth": "keys", "keys_file": str(keys), "open_metrics": True, "drain_notice_s": 0.2},
            "metrics": {"replica_port": 0, "controller_port": 0},
        }
    )
    async with running_cluster(tiny_model, profile, tmp_path, step_s=0.02, routers=2) as cluster:
        told, request_id = await use(cluster, key, stranger)
        # What a client is answered, and what commands say.
        environment = {"FOREBAY_API_KEY": key, "FOREBAY_URL": cluster.url}
        for words in (
            ("status", "--json"),
            ("explain", request_id),
            ("drain", cluster.replicas[-1].replica_id),
        ):
            code, said = await asyncio.to_thread(forebay, *words, **environment)
            assert code == 0, said
            (logs / f"command-{words[0]}.log").write_text(said)
        code, said = await asyncio.to_thread(forebay, "status", FOREBAY_API_KEY=stranger, FOREBAY_URL=cluster.url)
        assert code == 2
        (logs / "command-refused.log").write_text(said)
        ids = (await cluster.client.post("/tokenize", json={"prompt": MARK}, headers=bearer(key))).json()["tokens"]
    written = {path.name: path.read_text() for path in logs.glob("*.log")}
    for role in ROLES:
        assert any(text for name, text in written.items() if name.startswith(role)), "they do speak"
    assert any(request_id in text for name, text in written.items() if name.startswith("router"))
    kept = {
        "the cluster's secret": (tmp_path / "secret").read_text(),
        "the secret that keys are hashed with": keys.with_name("keys.json.pepper").read_text().strip(),
        "a key": key.rsplit("-", 1)[1],
        "a key that nobody has": stranger.rsplit("-", 1)[1],
        "a prompt": MARK,
        "a prompt's tokens": ", ".join(map(str, ids[:6])),
        "an answer": told[:40],
    }
    for name, text in written.items():
        assert [what for what, value in kept.items() if value in text] == [], name


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def use(cluster: Cluster, key: str, stranger: str) -> tuple[str, str]:
    """Every way that goes well and several that do not, told by somebody with a key or with none; an answer, and its id."""
    client = cluster.client
    client.headers.update(bearer(key))
    answer = (await client.post("/v1/completions", json=body(prompt=MARK, stream=False, max_tokens=24))).json()
    told: str = answer["choices"][0]["text"]
    assert len(told) > 8

    async def refused(status: int, headers: dict[str, str] | None = None, **sent: Any) -> None:
        response = await client.post("/v1/chat/completions", headers=headers, **sent)
        assert response.status_code == status, response.text

    chat = {"model": "tiny-llama", "messages": [{"role": "user", "content": MARK}], "max_tokens": 4}
    await refused(200, json=chat)
    await refused(401, bearer(stranger), json=chat)
    await refused(401, {"authorization": stranger}, json=chat)
    await refused(400, content=f'{{"prompt": "{MARK}', headers={"content-type": "application/json"})
    await refused(400, json=chat | {"tools": [{"type": "function", "function": {"name": MARK}}]})
    await refused(400, json=chat | {"service_tier": MARK})
    await refused(404, json=chat | {"model": MARK})
    # A replica is lost under streams, then two to a prompt that kills, and one of the routers leaves.
    readers = [Reader(client, body(prompt=MARK, max_tokens=100)) for _ in range(4)]
    await asyncio.gather(*(reader.begun.wait() for reader in readers))
    await cluster.start_replica()
    cluster.kill(cluster.replicas[0])
    await asyncio.gather(*(reader.task for reader in readers))
    assert all(reader.done for reader in readers)
    poison = asyncio.create_task(client.post("/v1/completions", json=body(prompt=[POISON_ID, 5], stream=False)))
    await asyncio.wait(
        {asyncio.create_task(replica.ended()) for replica in cluster.replicas}, return_when="FIRST_COMPLETED"
    )
    poison.cancel()
    await asyncio.gather(poison, return_exceptions=True)
    await cluster.start_replica()
    await cluster.routers[1].leave()
    return told, str(answer["id"])
