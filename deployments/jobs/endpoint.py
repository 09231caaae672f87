"""Where a job that runs on a Ray cluster finds the routers of the Forebay that runs there.

    python -m deployments.jobs.endpoint    # prints their addresses, a JSON list

Owns: that question, and which router is asked next. Ray is asked in a process of its own, and left again: a job that only
sends requests is no driver of the cluster, keeps its own signal handlers, and lives on where the cluster's head restarts.
Invariant: a router that cannot be reached is not asked again at once while another can be.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from cluster.ports import Clock
from deployments.address import URL_VARIABLE, checked_address
from deployments.settings import Environment, UsageError

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

_FIND_TIMEOUT_S = 60.0
_ANSWER_TIMEOUT_S = 15.0
_FIND_AGAIN_S = 15.0
_AVOID_S = 5.0
_ASK_AGAIN_S = 0.2
_HOW = "give --url, or set FOREBAY_URL"
_COMMAND = (sys.executable, "-m", "deployments.jobs.endpoint")


def find_urls(given: str | None, environment: Environment) -> tuple[tuple[str, ...], bool]:
    """The routers' addresses, and whether they were found through Ray, so that they can be looked for again: `given`, else
    FOREBAY_URL, else what Serve says in the cluster of this job.

    Raises:
        UsageError: an address is none, or nothing was found.
    """
    if url := given or environment.url:
        return (checked_address(url, "--url" if given else URL_VARIABLE),), False
    return ask_ray(), True


def ask_ray() -> tuple[str, ...]:
    """As `find_routers`, where no loop runs."""
    return asyncio.run(find_routers())


async def find_routers() -> tuple[str, ...]:
    """Of all routers that Serve keeps. Raises UsageError where there are none. Cancelled, it leaves no process behind."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*_COMMAND, stdout=pipe, stderr=pipe)
    try:
        async with asyncio.timeout(_FIND_TIMEOUT_S):
            out, err = await process.communicate()
    except TimeoutError as error:
        raise UsageError(
            f"the Ray cluster did not say within {_FIND_TIMEOUT_S:g} s where routers are; {_HOW}"
        ) from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        lines = err.decode(errors="replace").strip().splitlines()
        raise UsageError(f"no router found through Ray ({lines[-1] if lines else 'it said nothing'}); {_HOW}")
    try:
        return tuple(json.loads(out.splitlines()[-1]))
    except (ValueError, IndexError) as error:
        raise UsageError(f"no router found through Ray (its answer cannot be read); {_HOW}") from error


class Routers:
    """Those that are asked, in turn."""

    def __init__(self, urls: Sequence[str], find: Callable[[], Awaitable[Sequence[str]]] | None, clock: Clock) -> None:
        """`find` finds them anew, and raises UsageError; None where they stay where they are."""
        self._urls = list(urls)
        self._find = find
        self._clock = clock
        self._turn = 0
        self._avoided: dict[str, float] = {}
        self._found_s = clock.monotonic()
        self._finding: asyncio.Task[None] | None = None

    def next(self) -> str:
        """Whom to ask."""
        now_s = self._clock.monotonic()
        after = [(self._turn + step) % len(self._urls) for step in range(1, len(self._urls) + 1)]
        free = (turn for turn in after if self._avoided.get(self._urls[turn], 0.0) <= now_s)
        self._turn = next(free, after[0])
        return self._urls[self._turn]

    def unreachable(self, url: str) -> bool:
        """It did not answer, and may be somewhere else by now. Returns whether another is there to be asked at once."""
        now_s = self._clock.monotonic()
        self._avoided[url] = now_s + _AVOID_S
        if self._find is not None and self._finding is None and now_s - self._found_s >= _FIND_AGAIN_S:
            self._finding = asyncio.create_task(self._look(self._find), name="find routers")
        return any(self._avoided.get(other, 0.0) <= now_s for other in self._urls)

    async def close(self) -> None:
        """Who is looked for is not looked for any more."""
        if self._finding is not None:
            self._finding.cancel()
            await asyncio.wait([self._finding])

    async def _look(self, find: Callable[[], Awaitable[Sequence[str]]]) -> None:
        try:
            # Serve may be starting too, and this machine may be short of processes.
            with contextlib.suppress(UsageError, OSError):
                if urls := await find():
                    self._urls, self._avoided, self._turn = list(urls), {}, 0
        finally:
            self._found_s, self._finding = self._clock.monotonic(), None


def _reached(routers: DeploymentHandle[Any]) -> list[str]:
    """Serve tells a new handle of the replicas that there are some time after it was made."""
    end_s = time.monotonic() + _ANSWER_TIMEOUT_S
    while True:
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            return []
        urls = routers.broadcast("address").results(timeout_s=left_s, return_exceptions=True)
        if reached := sorted({url for url in urls if isinstance(url, str) and url}):
            return reached
        time.sleep(_ASK_AGAIN_S)


def main() -> int:
    """Exit code 0, or 1 with a line that says why not."""
    import logging

    import ray
    from ray import serve
    from ray.serve.exceptions import RayServeException

    from deployments.app import APPLICATION

    try:
        ray.init(address="auto", namespace="forebay", log_to_driver=False, logging_level=logging.ERROR)
        try:
            routers = serve.get_deployment_handle("Router", APPLICATION)
            reached = _reached(routers)
        finally:
            ray.shutdown()
    except (ray.exceptions.RayError, RayServeException, ConnectionError, TimeoutError, RuntimeError) as error:
        print(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", file=sys.stderr)
        return 1
    if not reached:
        print("Serve keeps no router that serves", file=sys.stderr)
        return 1
    print(json.dumps(reached), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
