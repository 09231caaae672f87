"""An API server, reached directly and through a gate that can fail.

FOREBAY_TEST_KUBECONFIG names a kubeconfig of a cluster, or of an API server alone, in which the tests may make and delete
namespaces and nodes (of names of their own). Where that server lacks events.k8s.io, its Events are made a resource
with the fields and limits that Kubernetes' own has, and stay so. kubectl comes from `make deploy-tools`.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.chart.conftest import TOOLS, kubectl
from tests.kubernetes.gate import Gate

_OBJECT: dict[str, Any] = {
    "type": "object",
    "properties": {
        key: {"type": "string"}
        for key in ("apiVersion", "kind", "name", "namespace", "uid", "resourceVersion", "fieldPath")
    },
}


def _text(longest: int) -> dict[str, Any]:
    return {"type": "string", "minLength": 1, "maxLength": longest}


EVENTS: dict[str, Any] = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {
        "name": "events.events.k8s.io",
        "annotations": {"api-approved.kubernetes.io": "unapproved, stands in for the real one in tests"},
    },
    "spec": {
        "group": "events.k8s.io",
        "scope": "Namespaced",
        "names": {"plural": "events", "singular": "event", "kind": "Event", "listKind": "EventList"},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        # As ValidateEventCreate of Kubernetes has it.
                        "required": [
                            "eventTime",
                            "reportingController",
                            "reportingInstance",
                            "action",
                            "reason",
                            "type",
                        ],
                        "properties": {
                            "apiVersion": {"type": "string"},
                            "kind": {"type": "string"},
                            "metadata": {"type": "object"},
                            "eventTime": {"type": "string", "format": "date-time"},
                            "reportingController": _text(128)
                            | {"pattern": r"^([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"},
                            "reportingInstance": _text(128),
                            "action": _text(128),
                            "reason": _text(128),
                            "note": {"type": "string", "maxLength": 1024},
                            "type": {"type": "string", "enum": ["Normal", "Warning"]},
                            "regarding": _OBJECT,
                            "related": _OBJECT,
                            "series": {
                                "type": "object",
                                "required": ["count", "lastObservedTime"],
                                "properties": {
                                    "count": {"type": "integer", "format": "int32", "minimum": 2},
                                    "lastObservedTime": {"type": "string", "format": "date-time"},
                                },
                            },
                        },
                        "x-kubernetes-validations": [
                            {
                                "rule": f"has(self.{field}) == has(oldSelf.{field}) && "
                                f"(!has(self.{field}) || self.{field} == oldSelf.{field})",
                                "message": f"{field} is immutable",
                            }
                            for field in ("reason", "note", "action", "type", "reportingController", "regarding")
                        ],
                    }
                },
            }
        ],
    },
}


@pytest.fixture(scope="session")
def kubeconfig() -> Path:
    told = os.environ.get("FOREBAY_TEST_KUBECONFIG")
    if not told:
        pytest.skip("needs an API server: FOREBAY_TEST_KUBECONFIG is not set")
    if not (TOOLS / "kubectl").is_file():
        pytest.skip("needs kubectl: `make deploy-tools`")
    return Path(told)


@pytest.fixture(scope="session")
def plain_url(kubeconfig: Path) -> Iterator[str]:
    """The API server without TLS, by `kubectl proxy`."""
    command: list[str | Path] = [TOOLS / "kubectl", "--kubeconfig", kubeconfig, "proxy", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        found = re.search(r"127\.0\.0\.1:\d+", said)
        assert found is not None, said
        url = f"http://{found[0]}"
        with httpx.Client(base_url=url, timeout=10) as client:
            if client.get("/apis/events.k8s.io/v1").status_code == 404:
                answer = client.post("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", json=EVENTS)
                assert answer.status_code in {201, 409}, answer.text  # another test's process may have been sooner
                kubectl(kubeconfig, "wait", "--for=condition=Established", "--timeout=30s", "crd/events.events.k8s.io")
        yield url
    finally:
        process.terminate()
        process.communicate(timeout=10)


class Kube:
    """What a test does in the cluster itself, and what it finds there. Its nodes have the label that `selector` names."""

    def __init__(self, client: httpx.AsyncClient, mark: str) -> None:
        self.client = client
        self.namespace = f"forebay-test-{mark}"
        self.selector = f"forebay-test={mark}"
        self._mark = mark
        self._made: list[str] = []

    def node(self, name: str) -> str:
        """What a node of the test is called in the cluster."""
        return f"{name}-{self._mark}"

    async def add_node(self, name: str, **spec: Any) -> str:
        whole = self.node(name)
        metadata = {"name": whole, "labels": {"forebay-test": self._mark}}
        await self._do("POST", "/api/v1/nodes", json={"metadata": metadata, "spec": spec})
        self._made.append(whole)
        return whole

    async def change_node(self, name: str, **spec: Any) -> None:
        """As `kubectl cordon` and whoever taints do."""
        headers = {"content-type": "application/merge-patch+json"}
        await self._do("PATCH", f"/api/v1/nodes/{name}", json={"spec": spec}, headers=headers)

    async def remove_node(self, name: str) -> None:
        await self._do("DELETE", f"/api/v1/nodes/{name}")
        self._made.remove(name)

    async def events(self) -> list[dict[str, Any]]:
        path = f"/apis/events.k8s.io/v1/namespaces/{self.namespace}/events"
        items: list[dict[str, Any]] = (await self._do("GET", path)).json()["items"]
        return sorted(items, key=lambda event: str(event["eventTime"]))

    async def lease(self, name: str = "forebay") -> dict[str, Any] | None:
        path = f"/apis/coordination.k8s.io/v1/namespaces/{self.namespace}/leases/{name}"
        answer = await self.client.get(path)
        return None if answer.status_code == 404 else answer.raise_for_status().json()

    async def put_lease(self, lease: dict[str, Any]) -> None:
        path = f"/apis/coordination.k8s.io/v1/namespaces/{self.namespace}/leases/{lease['metadata']['name']}"
        await self._do("PUT", path, json=lease)

    async def _do(self, method: str, path: str, **more: Any) -> httpx.Response:
        answer = await self.client.request(method, path, **more)
        assert answer.is_success, answer.text
        return answer

    async def begin(self) -> None:
        await self._do("POST", "/api/v1/namespaces", json={"metadata": {"name": self.namespace}})

    async def end(self) -> None:
        paths = [f"/api/v1/nodes/{name}" for name in self._made] + [f"/api/v1/namespaces/{self.namespace}"]
        await asyncio.gather(*(self.client.delete(path) for path in paths))


@pytest.fixture
async def kube(plain_url: str) -> AsyncIterator[Kube]:
    async with httpx.AsyncClient(base_url=plain_url, timeout=10) as client:
        made = Kube(client, os.urandom(4).hex())
        await made.begin()
        try:
            yield made
        finally:
            await made.end()


@pytest.fixture
async def gate(plain_url: str) -> AsyncIterator[Gate]:
    made = Gate(plain_url)
    await made.start()
    try:
        yield made
    finally:
        await made.close()


def kubeconfig_of(url: str, folder: Path) -> Path:
    """A kubeconfig that leads to `url`, with a token that must be in no log."""
    path = folder / "kubeconfig"
    path.write_text(
        f"""apiVersion: v1
kind: Config
clusters: [{{name: c, cluster: {{server: "{url}"}}}}]
users: [{{name: u, user: {{token: "{TOKEN}"}}}}]
contexts: [{{name: x, context: {{cluster: c, user: u}}}}]
current-context: x
"""
    )
    return path


TOKEN = "secret-of-the-service-account"
