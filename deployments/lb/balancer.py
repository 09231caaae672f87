"""The configuration of a load balancer before the routers: HAProxy's, nginx's or Envoy's.

Owns: what a balancer must know of routers, each figure once, and the filling of the templates beside this file. Imports the
limits of the routers' HTTP server. Invariants: no word of a user's reaches a configuration but as an address, a number or a
path; a balancer waits longer than a router in all but connecting, and drops an idle connection before the router does.
"""

from __future__ import annotations

import ipaddress
import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar
from urllib.parse import urlsplit

import jinja2
from pydantic import AfterValidator, BeforeValidator, Field, IPvAnyAddress

from cluster.config import Config
from deployments.http_protocol import HEAD_MAX_BYTES, HEAD_TIMEOUT_S
from deployments.http_server import KEEP_ALIVE_S
from router.errors import ErrorBody, error_json
from router.exchange import MAX_HEADERS

_CHECKS = 2
"""In a row, to take a router out or in again."""
_CHECKS_IN_NOTICE = 5
"""A router that leaves is out after two checks and what the third may be late; the rest of its notice is margin."""
_TRIES = 3
"""Routers at most that a request is tried on, none of which it reached but the last."""
_CONNECT_S = 2.0
"""Longer than a first packet that was dropped takes to be sent again, which is a second."""
_SILENCE_S = 3600.0
"""An answer may stand still so long: queued, parked, or held by a client that does not read. The router ends all of
those sooner, or has a reason."""
_IDLE_MARGIN_S = 15.0
_HEAD_MARGIN = 28
"""Headers that a balancer may add before it counts. A router refuses too many itself, and says so."""
_RETRY_AFTER_S = 1
_CONNECTIONS = 8192
"""That a worker of nginx has, to clients and routers. Twice as many files are asked for, and nginx gets none of them where its
hard limit is lower: so no more."""
_HOST = re.compile(r"(?!-)[A-Za-z0-9.-]{1,253}(?<!-)")
_FOLDER = re.compile(r"/[\w./-]*")
_TEMPLATES = Path(__file__).parent


class Kind(StrEnum):
    HAPROXY = "haproxy"
    NGINX = "nginx"
    ENVOY = "envoy"

    @property
    def file(self) -> str:
        """The template's, and the name that the configuration usually has."""
        return {Kind.HAPROXY: "haproxy.cfg", Kind.NGINX: "nginx.conf", Kind.ENVOY: "envoy.yaml"}[self]


class Address(NamedTuple):
    """Of a router."""

    host: str
    port: int

    @property
    def bracketed(self) -> str:
        """HOST:PORT, an IPv6 address in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


_IP = TypeVar("_IP", bound=ipaddress.IPv4Address | ipaddress.IPv6Address)


def _unscoped(address: _IP) -> _IP:
    """A scope may be any text."""
    if "%" in str(address):
        raise ValueError("must be without a scope")
    return address


def _address(value: object) -> Address:
    try:
        parts = urlsplit(f"//{value}")
        host, port = parts.hostname or "", parts.port
        if ":" in host:
            _unscoped(ipaddress.IPv6Address(host))
        elif not _HOST.fullmatch(host):
            raise ValueError
    except ValueError:
        host, port = "", None
    if not port or parts.netloc != str(value) or "@" in parts.netloc:
        raise ValueError(f"{value!r} is not HOST:PORT of a router, as 10.0.0.1:8000 or [fd00::1]:8000")
    return Address(host, port)


def _all_different(routers: tuple[Address, ...]) -> tuple[Address, ...]:
    if len(set(routers)) < len(routers):
        raise ValueError("a router is named twice")
    return routers


def _plain(folder: Path | None) -> Path | None:
    if folder is not None and not _FOLDER.fullmatch(str(folder)):
        raise ValueError("must be a whole path of letters, digits and . _ - /")
    return folder


class Balancer(Config):
    """What differs from one place to another."""

    routers: Annotated[
        tuple[Annotated[Address, BeforeValidator(_address)], ...], Field(min_length=1), AfterValidator(_all_different)
    ] = Field(description="HOST:PORT of each router, for a balancer must check each by itself.")
    host: Annotated[IPvAnyAddress, AfterValidator(_unscoped)] = Field(
        ipaddress.IPv4Address("0.0.0.0"),  # noqa: S104 - it is there to be reached
        description="The address that clients connect to.",
    )
    port: int = Field(80, ge=1, le=65535, description="The port that clients connect to.")
    drain_notice_s: float = Field(
        5.0,
        ge=0.1,
        le=3600,
        description="The routers' router.drain_notice_s: a router that leaves must be out before it is over, so health "
        "checks are as frequent as that asks for.",
    )
    state_folder: Annotated[Path | None, AfterValidator(_plain)] = Field(
        None, description="Where nginx keeps its pid and temporary files. Without it: where it was built to."
    )

    @property
    def check_every_s(self) -> float:
        """Between two health checks of a router."""
        return self.drain_notice_s / _CHECKS_IN_NOTICE

    @property
    def out_within_s(self) -> float:
        """After it has said that it leaves, a router whose checks are answered at once gets nothing new."""
        return _CHECKS * self.check_every_s


class _Error(NamedTuple):
    """An answer of the balancer's own, which no router has seen or can give."""

    status: int
    json: str
    retry_after_s: int = 0


def _error(status: int, kind: str, code: str, message: str, retry_after_s: int = 0) -> _Error:
    return _Error(status, error_json(ErrorBody(message, kind, None, code)).decode(), retry_after_s)


_ERRORS = {
    "invalid": _error(
        400, "invalid_request_error", "invalid_http", "This is no HTTP request, or its head is too large."
    ),
    "late": _error(408, "invalid_request_error", "head_timeout", "The head of the request did not arrive in time."),
    "failed": _error(
        500,
        "server_error",
        "balancer_failed",
        "The load balancer could not take this request: it has no room for more.",
    ),
    "lost": _error(
        502, "server_error", "router_lost", "The router that had this request is gone or cannot be reached."
    ),
    "nobody": _error(503, "server_error", "no_router", "No router can be reached.", _RETRY_AFTER_S),
    "silent": _error(
        504, "server_error", "router_silent", "The router that has this request has been silent too long."
    ),
}


def render(kind: Kind, balancer: Balancer) -> str:
    """The whole text of the configuration."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - it is no HTML
    )
    host = str(balancer.host)
    return environment.get_template(kind.file).render(
        routers=balancer.routers,
        host=host,
        port=balancer.port,
        listen=Address(host, balancer.port).bracketed,
        state_folder=balancer.state_folder,
        head_bytes=HEAD_MAX_BYTES,
        headers=MAX_HEADERS + _HEAD_MARGIN,
        connections=_CONNECTIONS,
        tries=_TRIES,
        checks=_CHECKS,
        check_ms=round(balancer.check_every_s * 1000),
        kept_ms=round(balancer.out_within_s * 1000),
        connect_ms=round(_CONNECT_S * 1000),
        head_timeout_ms=round(HEAD_TIMEOUT_S * 1000),
        client_idle_ms=KEEP_ALIVE_S * 1000,
        router_idle_ms=round((KEEP_ALIVE_S - _IDLE_MARGIN_S) * 1000),
        silence_ms=round(_SILENCE_S * 1000),
        **_ERRORS,
    )
