"""The address of a router, as people give it.

Owns: what may be one, and what is said of what is none. Imports the settings' error. Invariant: who asks at an address may print
it, for no password is in it; what is refused for one is not said either.
"""

from __future__ import annotations

import unicodedata

import httpx

from deployments.settings import UsageError

URL_VARIABLE = "FOREBAY_URL"
"""`Environment.url`."""


def as_shown(url: str) -> str:
    """What is said of an address that is none: itself, where no password can be in it. A wide @ is meant for one, too."""
    return "what is given" if "@" in unicodedata.normalize("NFKC", url) else repr(url)


def checked_address(given: str, option: str) -> str:
    """The address as paths are put behind it. Raises UsageError naming `option`."""
    url = given.strip()
    shown = as_shown(url)
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"{option}: {shown} must begin with http:// or https://")
    try:
        parsed = httpx.URL(url)
        host = parsed.host
    except (httpx.InvalidURL, ValueError) as error:  # ValueError: it cannot be encoded
        raise UsageError(f"{option}: {shown} is no address") from error
    if parsed.userinfo:
        raise UsageError(f"{option}: leave out what stands before the @; FOREBAY_API_KEY is the key")
    if not host or any(c in "?#" or c.isspace() for c in url):  # also where nothing follows them
        raise UsageError(f"{option}: {shown} must be a host, and at most a port and a path: http://HOST:8000")
    return url.rstrip("/").removesuffix("/v1")
