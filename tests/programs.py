"""Other people's servers, for tests: each a process on loopback, ready when it answers.

Owns: their course. Invariant: none outlives its context.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import httpx

from tests.line import until

END_TIMEOUT_S = 10.0


@contextlib.asynccontextmanager
async def serving(
    command: Sequence[str], log: Path, ready_url: str, is_ready: Callable[[int], bool] = (200).__eq__
) -> AsyncIterator[None]:
    """From when `ready_url` answers with a status that `is_ready` until the end of the context.

    Raises:
        AssertionError: it ended instead; its log says why.
    """
    with log.open("w") as sink:
        process = await asyncio.create_subprocess_exec(*command, stdout=sink, stderr=sink)

    def said() -> str:
        return f"{command[0]} ended: {log.read_text()}"

    try:
        async with httpx.AsyncClient(verify=False) as client:  # reading certificates takes long

            async def answers() -> bool:
                assert process.returncode is None, said()
                with contextlib.suppress(httpx.TransportError):
                    return is_ready((await client.get(ready_url)).status_code)
                return False

            await until(answers, bool)
        yield
    finally:
        if process.returncode is None:
            process.terminate()  # at once for all of them; nginx's workers outlive a master that is killed
        try:
            await asyncio.wait_for(process.wait(), END_TIMEOUT_S)
        except TimeoutError:
            process.kill()
            await process.wait()
