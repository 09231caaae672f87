"""Alertmanager, for tests: a process on a free port that tells one webhook, which is the test's own, at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.checks import free_ports
from tests.programs import serving

_NAMES = ("prometheus-alertmanager", "alertmanager")  # Debian's, and that of its makers
_PATHS = "/usr/bin:/usr/sbin:/usr/local/bin:/usr/local/sbin"
ALERTMANAGER = next(
    (found for name in _NAMES if (found := shutil.which(name) or shutil.which(name, path=_PATHS))), None
)
GROUP_INTERVAL_S = 1
"""Between two words about one alert."""

needs_alertmanager = pytest.mark.skipif(
    ALERTMANAGER is None, reason="alertmanager is not installed (Debian: apt-get install prometheus-alertmanager)"
)


class Webhook:
    """What has been told, and where."""

    def __init__(self) -> None:
        self.alerts: list[dict[str, Any]] = []
        """Each word about an alert, in the order in which they came."""
        self.url = ""
        self._came = asyncio.Condition()

    async def heard(self, holds: Callable[[dict[str, Any]], bool], within_s: float) -> dict[str, Any]:
        """The first alert told that `holds` is true of, now or later. Raises TimeoutError after `within_s`."""

        def found() -> dict[str, Any] | None:
            return next((alert for alert in self.alerts if holds(alert)), None)

        async with asyncio.timeout(within_s), self._came:
            await self._came.wait_for(found)
        alert = found()
        assert alert is not None
        return alert

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take what a connection says, one message after another."""
        with contextlib.closing(writer), contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = int(head.partition("content-length:")[2].split()[0])
                message = json.loads(await reader.readexactly(length))
                async with self._came:
                    self.alerts += message["alerts"]
                    self._came.notify_all()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                await writer.drain()


@contextlib.asynccontextmanager
async def webhook() -> AsyncIterator[Webhook]:
    hook = Webhook()
    server = await asyncio.start_server(hook.answer, "127.0.0.1", 0)
    hook.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    async with server:
        yield hook


@contextlib.asynccontextmanager
async def alertmanager(hook: Webhook, folder: Path) -> AsyncIterator[str]:
    """The URL of an Alertmanager that tells `hook` of everything, once it answers.

    Raises:
        AssertionError: it did not start; its log is named.
    """
    assert ALERTMANAGER is not None
    config, log = folder / "alertmanager.yml", folder / "alertmanager.log"
    route = {"receiver": "hook", "group_wait": "0s", "group_interval": f"{GROUP_INTERVAL_S}s", "repeat_interval": "1h"}
    receiver = {"name": "hook", "webhook_configs": [{"url": hook.url, "send_resolved": True}]}
    config.write_text(yaml.safe_dump({"route": {**route, "group_by": ["..."]}, "receivers": [receiver]}))
    address = f"127.0.0.1:{free_ports('127.0.0.1', 1)}"
    url = f"http://{address}"
    command = (
        ALERTMANAGER,
        f"--config.file={config}",
        f"--storage.path={folder / 'alertmanager-data'}",
        f"--web.listen-address={address}",
        "--cluster.listen-address=",  # alone
    )
    async with serving(command, log, f"{url}/-/ready"):
        yield url
