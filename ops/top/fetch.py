"""Asking routers.

Owns: which paths are asked, within which time, and what is said of an answer that cannot be shown. Imports httpx.
Invariant: whatever a router answers, or not, asking it returns; a key that is no operator's is told so and sees the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import httpx
import msgspec

from ops.endpoint import unauthorized
from ops.top.said import Answer, Trouble, read_decisions, read_metrics, read_status

TIMEOUT_S = 5.0
_DECISIONS_PER_ASK = 500


class Routers:
    """Some routers, asked at once."""

    def __init__(self, urls: Sequence[str], credentials: Mapping[str, str], monotonic: Callable[[], float]) -> None:
        self.urls = tuple(dict.fromkeys(url.rstrip("/") for url in urls))
        self._credentials = credentials
        self._monotonic = monotonic
        # Certificates are read where they are of use alone: it takes longer than all else before the first answer.
        verify = not all(url.startswith("http://") for url in self.urls)
        self._client = httpx.AsyncClient(headers=dict(credentials), timeout=TIMEOUT_S, verify=verify)

    async def close(self) -> None:
        await self._client.aclose()

    async def look(self, after: Callable[[str], int | None]) -> list[Answer | Trouble]:
        """What each says now. `after`: from which decision on it is asked; None for the newest."""
        return await asyncio.gather(*(self._look(url, after(url)) for url in self.urls))

    async def explain(self, url: str, request_id: str) -> dict[str, Any] | Trouble:
        """What this router knows of a request, as `forebay explain` is told it."""
        try:
            answer = await self._client.get(f"{url}/v1/requests/{quote(request_id, safe='')}/explain")
            said = answer.json()
            if answer.is_error:
                return Trouble(url, str(said["error"]["message"]))
            return dict(said)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
            return Trouble(url, _why(url, error))

    async def _look(self, url: str, after: int | None) -> Answer | Trouble:
        query = {"limit": _DECISIONS_PER_ASK} | ({} if after is None else {"after": after})
        try:
            status, (metrics, at_s), decisions = await asyncio.gather(
                self._client.get(f"{url}/status"),
                self._counted(url),
                self._client.get(f"{url}/v1/decisions", params=query),
            )
            if httpx.codes.UNAUTHORIZED in (status.status_code, metrics.status_code):
                return Trouble(url, str(unauthorized(url, self._credentials)))
            for answer in (status, metrics):
                answer.raise_for_status()
            told, why = _decisions(url, decisions)
            rising, gauges = read_metrics(metrics.text)
            return Answer(url, at_s, read_status(status.content), rising, gauges, told, why)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError) as error:
            return Trouble(url, _why(url, error))

    async def _counted(self, url: str) -> tuple[httpx.Response, float]:
        """The metrics, and when they came: rates are by that."""
        return await self._client.get(f"{url}/metrics"), self._monotonic()


def _decisions(url: str, answer: httpx.Response) -> tuple[Any, str]:
    """(the decisions, or None; why there are none). Raises ValueError where it is another version's answer."""
    match answer.status_code:
        case httpx.codes.OK:
            return read_decisions(answer.content), ""
        case httpx.codes.FORBIDDEN:
            return None, "decisions are shown to an operator's key alone: `forebay keys create --operator` makes one"
        case status:
            return None, f"{url} tells no decisions (status {status})"


def _why(url: str, error: Exception) -> str:
    match error:
        case httpx.HTTPStatusError():
            return f"{url} answers with status {error.response.status_code}; is it a router of Forebay's?"
        case httpx.HTTPError() | httpx.InvalidURL():
            return f"{url} does not answer ({str(error) or type(error).__name__})"
        case msgspec.ValidationError():
            return f"{url} answers as another version of Forebay does ({error})"
        case _:
            return f"what answers at {url} is no router of Forebay's"
