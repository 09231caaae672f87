"""A closed loop of clients for the tests of upgrades: each asks again as soon as it has its answer, and checks each.

Owns: the clients and what is counted of them. Half of the requests stream; of the clients, one half keeps its connections
and the other makes a new one for each request. Nothing is tried again: what fails is counted, with why.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

import httpx

from tests.line import until
from tests.ray.streams import Reader, client_of


@dataclass
class Load:
    """What came of it so far. `wrong` says of each request that was not answered whole and exactly what was wrong."""

    url: str
    fields: Mapping[str, object]
    expected: Mapping[str, str]
    """Answer by prompt."""
    whole: int = 0
    wrong: Counter[str] = field(default_factory=Counter)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)

    async def another(self, count: int) -> None:
        """Wait until so many more have been answered, or one wrongly."""
        goal = self.whole + count

        async def seen() -> bool:
            return self.whole >= goal or bool(self.wrong)

        await until(seen, bool, within_s=60)

    async def client(self, number: int) -> None:
        rng = random.Random(number)
        http = client_of(self.url)
        try:
            while not self.stopped.is_set():
                prompt = rng.choice(sorted(self.expected))
                if number % 2:
                    await http.aclose()
                    http = client_of(self.url)
                try:
                    said = await (self._stream if rng.random() < 0.5 else self._whole)(http, prompt)
                except httpx.HTTPError as error:
                    self.wrong[f"{type(error).__name__}: {error}"] += 1
                    continue
                if said == self.expected[prompt]:
                    self.whole += 1
                else:
                    self.wrong[said if said.startswith("!") else "another text"] += 1
        finally:
            await http.aclose()

    def _body(self, prompt: str, stream: bool) -> dict[str, object]:
        return {**self.fields, "prompt": prompt, "stream": stream}

    async def _whole(self, http: httpx.AsyncClient, prompt: str) -> str:
        answer = await http.post("/v1/completions", json=self._body(prompt, False))
        if answer.status_code != 200:
            return f"!{answer.status_code}: {answer.text}"
        return str(answer.json()["choices"][0]["text"])

    async def _stream(self, http: httpx.AsyncClient, prompt: str) -> str:
        reader = Reader(http, self._body(prompt, True))
        try:
            await reader.task
        except AssertionError as error:
            return f"!{error}"
        if reader.errors:
            return f"!{reader.errors[0]['error']['code']}"
        return reader.text if reader.done else "!truncated"


@contextlib.asynccontextmanager
async def running_load(
    url: str, fields: Mapping[str, object], expected: Mapping[str, str], clients: int
) -> AsyncIterator[Load]:
    """So many clients until the context is left; what they have open then, they read to its end."""
    load = Load(url, fields, expected)
    tasks = [asyncio.create_task(load.client(number)) for number in range(clients)]
    try:
        yield load
    finally:
        load.stopped.set()
        await asyncio.gather(*tasks)
