"""What a replica computed of a prompt is not computed again: the next request goes there and says what it found."""

from __future__ import annotations

from typing import Any

import httpx

from tests.line import Line

LONG = tuple(3 + (7 * k) % 300 for k in range(200))
"""Twelve full blocks of 16, and eight tokens more."""


async def ask(http: httpx.AsyncClient, prompt: tuple[int, ...], **changes: Any) -> dict[str, Any]:
    body = {"model": "tiny-llama", "prompt": list(prompt), "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    answer = await http.post("/v1/completions", json=body | changes)
    assert answer.status_code == 200, answer.text
    said: dict[str, Any] = answer.json()
    return said


async def explained(http: httpx.AsyncClient, request_id: str) -> tuple[str, float, int]:
    """Where it was sent, how many blocks of its prompt were known to be held there, and how many tokens were."""
    said = (await http.get(f"/v1/requests/{request_id}/explain")).json()
    (sent,) = (decision for decision in said["decisions"] if decision["event"] == "dispatched")
    return sent["replica"], sent["numbers"]["prompt_blocks_held"], said["cached_tokens"]


async def test_prompts_that_begin_alike_go_where_their_beginning_is_and_usage_says_what_was_found(line: Line) -> None:
    """Each after the last has ended, with other endings, while requests that begin otherwise fill both replicas."""
    async with httpx.AsyncClient(base_url=line.url, timeout=60) as http:
        first = await ask(http, LONG)
        assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        where, held, cached = await explained(http, first["id"])
        assert (held, cached) == (0, 0)
        for k in range(6):
            await ask(http, (300 + k, *LONG[1:]))
            again = await ask(http, (*LONG, 5 + k, 6 + k))
            assert again["usage"]["prompt_tokens"] == 202
            assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 192}
            assert await explained(http, again["id"]) == (where, 12, 192)
        part = await ask(http, (*LONG[:100], 9), n=2, temperature=1)
        assert part["usage"]["prompt_tokens_details"] == {"cached_tokens": 96}
