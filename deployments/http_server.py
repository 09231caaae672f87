"""The HTTP server under a router: uvicorn's, with connections of our own.

Owns: the server's settings. Imports the protocol.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import uvicorn

from deployments.http_exchange import ChunkWrites
from deployments.http_protocol import HEAD_TIMEOUT_S, Connection

KEEP_ALIVE_S = 75
"""A connection may be without a request so long, also before its first."""
BACKLOG = 2048


def uvicorn_config(app: Any, *, head_timeout_s: float = HEAD_TIMEOUT_S, graceful_s: int = 5) -> uvicorn.Config:
    """How an ASGI application is served; `graceful_s` is how long a server that is told to stop waits for exchanges."""
    return uvicorn.Config(
        app,
        http=partial(Connection, head_timeout_s=head_timeout_s, writes=ChunkWrites()),  # type: ignore[arg-type]
        log_config=None,
        access_log=False,
        proxy_headers=False,  # nothing here asks who the client was
        lifespan="on",
        server_header=False,
        ws="none",
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=graceful_s,
    )
