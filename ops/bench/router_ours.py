"""Our router in `bench router`, alone in its process, as Serve runs it: on uvloop, logging a line a request.

python -m ops.bench.router_ours INSTANCE_FILE CONTROLLER_PORT
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from urllib.parse import urlsplit

import uvloop

from deployments.controller_link import Find
from deployments.garbage import settle
from deployments.process import configure_logging
from deployments.router_process import RouterProcess
from deployments.settings import Instance
from ops.bench.router_wire import Listening, say


def find_at(controller_port: int) -> Find:
    """The controller that listens there on this machine."""

    async def find() -> tuple[str, int]:
        return "127.0.0.1", controller_port

    return find


async def started(instance: Instance, *controller_ports: int) -> RouterProcess:
    configure_logging(instance)
    router = RouterProcess(instance, *map(find_at, controller_ports))
    await router.start()
    settle()
    return router


async def run(instance: Instance, controller_port: int) -> None:
    router = await started(instance, controller_port)
    port = urlsplit(router.url).port
    assert port is not None
    say(Listening((port,)))
    await asyncio.to_thread(sys.stdin.buffer.read)
    await router.close()


if __name__ == "__main__":
    uvloop.run(run(Instance.model_validate_json(Path(sys.argv[1]).read_bytes()), int(sys.argv[2])))
