"""Streams of a served instance, as a client reads them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

TOKENS = 400


def body(**changes: Any) -> dict[str, Any]:
    fields = {"model": "tiny-llama", "prompt": "once", "temperature": 0, "ignore_eos": True, "stream": True}
    return fields | {"max_tokens": TOKENS} | changes


class Reader:
    """One stream read to its end: its text, its events, and whether it ended as streams must."""

    def __init__(self, client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
        self.text = ""
        self.events = 0
        self.errors: list[dict[str, Any]] = []
        self.done = False
        self.begun = asyncio.Event()
        self.task = asyncio.create_task(self._read(client, fields))

    async def _read(self, client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
        async with client.stream("POST", "/v1/completions", json=fields) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    self.done = True
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    self.errors.append(event)
                    continue
                self.events += 1
                self.begun.set()
                self.text += event["choices"][0]["text"]


def client_of(url: str) -> httpx.AsyncClient:
    """As many connections as are asked for, without the second that reading certificates takes."""
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=120, limits=limits, verify=False)
