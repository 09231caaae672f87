"""The few calls of Kubernetes' API that Forebay makes, through its official client.

Owns: their form, and the only import of `kubernetes`. Imports the config and the values that a decision takes; decides
nothing. Synchronous, to be called in a thread: each call ends within about twice `call_timeout_s`, a watch within that
after `watch_s`. Invariants: what comes back is a value of ours, or a KubeError of one line, without headers or bodies that
could hold a credential; nothing is tried twice here.

Nodes are read by msgspec from the bytes of the answer, only as far as notices go: the client's own models take seconds for
a thousand nodes, in which the controller's loop would stand still for want of the interpreter.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import msgspec
from kubernetes import client
from kubernetes import config as access
from kubernetes.client.exceptions import ApiException

from cluster.config import KubernetesConfig
from cluster.control.nodes import Node
from deployments.kube.objects import micro_time

T = TypeVar("T")

_PAGE = 250
"""Nodes of one answer, a few megabytes at most."""
_LINE_MAX_BYTES = 8 << 20
"""Of a watch; etcd holds no object of two."""
_CHUNK_BYTES = 1 << 16
_OBJECT = re.compile(r"<\S+ object at 0x[0-9a-f]+>:?")
"""As the client's libraries name their own connections."""
_TOLD = 300
"""Characters of an error."""
MANAGER = "forebay"
"""By this name the API server knows who wrote a field."""


class KubeError(Exception):
    """A call came to nothing. `status` is the API server's, None where it did not answer."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Seen(NamedTuple):
    """One event of a watch."""

    version: str
    """To watch on from."""
    node: Node | None
    """None: only the version is new."""
    gone: bool = False


class _Meta(msgspec.Struct, rename="camel"):
    name: str = ""
    resource_version: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class _Taint(msgspec.Struct):
    key: str
    effect: str = ""
    value: str | None = None


class _Spec(msgspec.Struct):
    unschedulable: bool | None = None
    taints: list[_Taint] | None = None


class _Condition(msgspec.Struct):
    type: str
    status: str = ""


class _Status(msgspec.Struct):
    conditions: list[_Condition] | None = None


class _Node(msgspec.Struct):
    metadata: _Meta
    spec: _Spec = msgspec.field(default_factory=_Spec)
    status: _Status = msgspec.field(default_factory=_Status)


class _ListMeta(msgspec.Struct, rename={"more": "continue", "resource_version": "resourceVersion"}):
    resource_version: str = ""
    more: str = ""


class _Nodes(msgspec.Struct):
    metadata: _ListMeta
    items: list[_Node] | None = None


class _Failure(msgspec.Struct):
    """A `Status`."""

    code: int | None = None
    message: str = ""


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


_nodes = msgspec.json.Decoder(_Nodes).decode
_event = msgspec.json.Decoder(_Event).decode
_node = msgspec.json.Decoder(_Node).decode
_failure = msgspec.json.Decoder(_Failure).decode


class KubeApi:
    """For one thread: calls made through one of these wait for each other."""

    def __init__(self, config: KubernetesConfig, rng: random.Random) -> None:
        self._config = config
        self._rng = rng
        # To connect, and to wait for what comes next.
        self._timeouts_s = config.call_timeout_s, config.call_timeout_s

    @cached_property
    def _client(self) -> Any:
        """Raises KubeError where there is no access; asked again, it is looked for again."""
        configuration, file = client.Configuration(), self._config.kubeconfig
        try:
            if file is None:
                access.load_incluster_config(client_configuration=configuration)
            else:
                access.load_kube_config(config_file=str(file.expanduser()), client_configuration=configuration)
        except Exception as error:  # a file of the wrong form raises nearly anything
            what = f"kubernetes.kubeconfig: {file} is of no use"
            if file is None:
                what = "the pod has no service account's token (the chart's kubernetesAccess gives it one)"
            raise KubeError(_short(f"{what}: {error}")) from error
        configuration.retries = False
        return client.ApiClient(configuration)

    def close(self) -> None:
        """Its connections. Asked again, it makes new ones."""
        if (made := self.__dict__.pop("_client", None)) is not None:
            made.rest_client.pool_manager.clear()
            made.close()

    # --- nodes ---

    def list_nodes(self) -> tuple[str, list[Node]]:
        """(the version to watch from, all nodes). Raises KubeError."""
        found: list[Node] = []
        more = None
        while True:
            options = {"limit": _PAGE} | ({} if more is None else {"_continue": more})
            page = _decoded(_nodes, self._nodes_call(self._timeouts_s, **options).data)
            found += [_as_node(node) for node in page.items or ()]
            more = page.metadata.more
            if not more:
                return page.metadata.resource_version, found

    def watch_nodes(self, version: str) -> Iterator[Seen]:
        """What changes from `version` on, for `watch_s` or a little less. Raises KubeError; its status is 410 where that
        version is too old."""
        watch_s = max(1, round(self._config.watch_s * self._rng.uniform(0.75, 1.0)))
        connect_s, silent_s = self._timeouts_s
        response = self._nodes_call(
            (connect_s, watch_s + silent_s),
            watch=True,
            resource_version=version,
            allow_watch_bookmarks=True,
            timeout_seconds=watch_s,
        )
        try:
            yield from map(_as_seen, _lines(response))
        finally:
            response.close()

    def _nodes_call(self, timeouts_s: tuple[float, float], **options: Any) -> Any:
        if self._config.nodes:
            options["label_selector"] = self._config.nodes
        core = client.CoreV1Api(self._client)
        return _asked(lambda: core.list_node(**options, _preload_content=False, _request_timeout=timeouts_s))

    # --- the lease ---

    def read_lease(self) -> dict[str, Any] | None:
        """As the API has it; None where there is none. Raises KubeError."""
        leases = client.CoordinationV1Api(self._client)
        try:
            return self._plain(lambda: leases.read_namespaced_lease(*self._lease, _request_timeout=self._timeouts_s))
        except KubeError as error:
            if error.status == 404:
                return None
            raise

    def write_lease(self, lease: dict[str, Any]) -> None:
        """Make it, or replace the one that has the resourceVersion which `lease` names. Raises KubeError; its status is 409
        where somebody else was sooner."""
        leases = client.CoordinationV1Api(self._client)
        options = {"field_manager": MANAGER, "_request_timeout": self._timeouts_s}
        if lease["metadata"].get("resourceVersion"):
            name, namespace = self._lease
            _asked(lambda: leases.replace_namespaced_lease(name, namespace, lease, **options))
        else:
            _asked(lambda: leases.create_namespaced_lease(self._config.namespace, lease, **options))

    @property
    def _lease(self) -> tuple[str, str]:
        return self._config.name, self._config.namespace

    # --- events ---

    def write_event(self, event: dict[str, Any]) -> None:
        """A new one. Raises KubeError."""
        events = client.EventsV1Api(self._client)
        options = {"field_manager": MANAGER, "_request_timeout": self._timeouts_s}
        _asked(lambda: events.create_namespaced_event(self._config.namespace, event, **options))

    def count_event(self, name: str, count: int, last_unix_s: float) -> None:
        """One that is there has happened so many times. Raises KubeError."""
        events = client.EventsV1Api(self._client)
        body = {"series": {"count": count, "lastObservedTime": micro_time(last_unix_s)}}
        options = {"field_manager": MANAGER, "_request_timeout": self._timeouts_s}
        _asked(
            lambda: events.patch_namespaced_event(
                name, self._config.namespace, body, _content_type="application/merge-patch+json", **options
            )
        )

    def _plain(self, call: Callable[[], Any]) -> dict[str, Any]:
        """The answer as the API writes it."""
        plain: dict[str, Any] = self._client.sanitize_for_serialization(_asked(call))
        return plain


def _asked(call: Callable[[], T]) -> T:
    try:
        return call()
    except ApiException as error:
        said = ""
        if isinstance(error.body, str | bytes):
            try:
                said = _failure(error.body).message
            except msgspec.MsgspecError:
                said = ""
        raise KubeError(
            _short(f"the API server answers {error.status} {error.reason}: {said}"), error.status
        ) from error
    except Exception as error:  # of whichever library below: what is called lives on
        raise KubeError(_short(f"the API server does not answer: {error}")) from error


def _short(text: str) -> str:
    return " ".join(_OBJECT.sub("", text).split())[:_TOLD].rstrip(" :")


def _decoded(decode: Callable[[bytes | msgspec.Raw], T], data: bytes | msgspec.Raw) -> T:
    try:
        return decode(data)
    except msgspec.MsgspecError as error:
        raise KubeError(f"the API server's answer cannot be read: {error}") from error


def _lines(response: Any) -> Iterator[bytes]:
    """Of a watch, each an event. Raises KubeError where the connection ends, rather than the watch."""
    rest = b""
    chunks = response.stream(_CHUNK_BYTES)
    while (chunk := _asked(lambda: next(chunks, None))) is not None:
        *whole, rest = (rest + chunk).split(b"\n")
        yield from filter(None, whole)
        if len(rest) > _LINE_MAX_BYTES:
            raise KubeError(f"the API server tells of a node in more than {_LINE_MAX_BYTES} bytes")
    if rest:
        raise KubeError("the API server ended in the middle of an event")


def _as_seen(line: bytes) -> Seen:
    event = _decoded(_event, line)
    if event.type == "ERROR":
        failure = _decoded(_failure, event.object)
        raise KubeError(_short(f"the watch ends: {failure.message}"), failure.code)
    node = _decoded(_node, event.object)
    if event.type == "BOOKMARK":
        return Seen(node.metadata.resource_version, None)
    return Seen(node.metadata.resource_version, _as_node(node), event.type == "DELETED")


def _as_node(node: _Node) -> Node:
    return Node(
        name=node.metadata.name,
        unschedulable=bool(node.spec.unschedulable),
        deleted=node.metadata.deletion_timestamp is not None,
        taints=tuple((t.key, t.value or "", t.effect) for t in node.spec.taints or ()),
        conditions={c.type: c.status for c in node.status.conditions or ()},
        labels=node.metadata.labels or {},
        annotations=node.metadata.annotations or {},
    )
