"""HAProxy before routers, for tests: a process on a free port, with health checks on /ready."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx
import pytest

from deployments.checks import free_ports
from tests.line import until

HAPROXY = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin")
CHECK_EVERY_S = 0.2
CHECKS = 2
"""In a row, to take a router out or in again."""

needs_haproxy = pytest.mark.skipif(HAPROXY is None, reason="haproxy is not installed (Debian: apt-get install haproxy)")

_CONFIG = """\
defaults
    mode http
    timeout connect 2s
    timeout client 60s
    timeout server 60s
    option httpchk GET /ready
    default-server check inter {every_ms} fall {checks} rise {checks}
frontend clients
    bind 127.0.0.1:{port}
    default_backend routers
backend routers
    balance roundrobin
{servers}
"""


@contextlib.asynccontextmanager
async def balanced(urls: Sequence[str], folder: Path) -> AsyncIterator[str]:
    """The URL of a HAProxy before these routers, once it answers."""
    assert HAPROXY is not None
    port = free_ports("127.0.0.1", 1)
    servers = "\n".join(f"    server router-{n} {url.removeprefix('http://')}" for n, url in enumerate(urls))
    config, log = folder / "haproxy.cfg", folder / "haproxy.log"
    config.write_text(_CONFIG.format(every_ms=round(CHECK_EVERY_S * 1000), checks=CHECKS, port=port, servers=servers))
    url = f"http://127.0.0.1:{port}"

    async def answers() -> bool:
        with contextlib.suppress(httpx.TransportError):
            async with httpx.AsyncClient() as client:
                return (await client.get(f"{url}/ready")).status_code == 200
        return False

    with log.open("w") as sink:
        process = await asyncio.create_subprocess_exec(HAPROXY, "-db", "-f", str(config), stdout=sink, stderr=sink)
    try:
        await until(answers, bool)
        yield url
    finally:
        process.kill()
        await process.wait()
