"""Who asks: the one place where a request is let in or turned away for its key.

Owns: which paths need no key, how a key is presented, and the refusal of a class that a key may not use. Speaks ASGI and
imports no web framework. Invariants: decided on the path as it came, before anything routes: whatever is not a path of
the fixed list needs a key, a path that nobody thought of too; the refusal is the same whatever was wrong with the key,
and no key is in it or in a log.

Only `Authorization: Bearer KEY` presents a key. Two such headers present none: proxies differ in which of them counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cluster.config import PriorityClass
from router.asgi import Receive, Scope, Send
from router.errors import ApiError
from router.exchange import App, Reply, read_body
from router.keys import Identity

OPEN_PATHS = frozenset({"/health", "/ready"})
"""What whoever watches the process asks; they say a word each, and which models there are."""
METRICS_PATH = "/metrics"
DEFAULT_TENANT = "default"
"""Of everybody where there are no keys."""
ANYBODY = Identity(DEFAULT_TENANT, key_id="", operator=True)
DRAIN_MAX_BYTES = 64 * 2**10
DRAIN_S = 2.0
"""A refused request's body is read and dropped up to so much and so long: its sender may read no answer before."""

_IDENTITY = "forebay.identity"

Identify = Callable[[bytes], Identity | None]


class Guard:
    """Wraps an application: what reaches it has an identity, or asks for an open path."""

    def __init__(
        self,
        app: App,
        identify: Identify | None,
        *,
        open_metrics: bool = False,
        turned_away: Callable[[ApiError], None] = lambda _: None,
    ) -> None:
        """`identify` looks a key up; None takes whoever comes for `ANYBODY`. `turned_away` is told of each refusal."""
        self.app = app
        self._identify = identify
        self._turned_away = turned_away
        self._open = OPEN_PATHS | {METRICS_PATH} if open_metrics else OPEN_PATHS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            identity = ANYBODY if self._identify is None else self._identify(presented_key(scope))
            if identity is not None:
                scope[_IDENTITY] = identity
            elif not self._is_open(scope):
                await self._refuse(scope, receive, send)
                return
        elif scope["type"] != "lifespan":
            return  # WebSockets are not spoken here; the server ends one that nobody accepts
        await self.app(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {"www-authenticate": "Bearer"}
        message = "A valid key is needed here, sent as the header 'Authorization: Bearer KEY'."
        error = ApiError(401, message, code="invalid_api_key", headers=headers)
        self._turned_away(error)
        try:
            if await read_body(scope, receive, DRAIN_MAX_BYTES, DRAIN_S) is None:
                return
        except ApiError:
            error.headers["connection"] = "close"
        await Reply(send, None).error(error)

    def _is_open(self, scope: Scope) -> bool:
        """Only in the one spelling: no other is worth finding out what somebody behind makes of it."""
        path: str = scope["path"]
        return path in self._open and scope.get("raw_path") == path.encode()


def identity_of(scope: Scope) -> Identity:
    """Who asks. KeyError, and so no answer, for a request that no guard has seen."""
    identity: Identity = scope[_IDENTITY]
    return identity


def presented_key(scope: Scope) -> bytes:
    """The key of a request; empty, which is nobody's, where it has none or more than one."""
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(values) != 1:
        return b""
    scheme, _, key = values[0].strip().partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


def check_class(
    priority_class: PriorityClass, param: str, highest: PriorityClass | None, classes: Sequence[PriorityClass]
) -> None:
    """Whether a key may use a class, which the field or header `param` named.

    Raises:
        ApiError: 403 naming the class and what the key may use.
    """
    if highest is None or priority_class.priority <= highest.priority:
        return
    may_use = sorted((c for c in classes if c.priority <= highest.priority), key=lambda c: -c.priority)
    names = ", ".join(repr(c.name) for c in may_use)
    message = f"This key may not use the class {priority_class.name!r}, which {param} names; it may use {names}."
    raise ApiError(403, message, param=param, code="class_not_allowed")
