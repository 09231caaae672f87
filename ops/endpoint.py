"""Asking a running router, for the commands that show what it says.

Owns: which address is meant where none is given, and what is said when it does not answer. Imports deployments for what an
address is, the environment and the instances of this machine. Invariant: an address that is asked or said has no password in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx

from deployments.address import URL_VARIABLE, checked_address
from deployments.instances import running_instances
from deployments.settings import Environment, UsageError, checked_environment
from ops.errors import CommandError

_TIMEOUT_S = 5.0


def read_environment() -> Environment:
    """Raises CommandError naming the variable that does not fit."""
    try:
        return checked_environment()
    except UsageError as error:
        raise CommandError(str(error)) from error


def address_of(settings: Environment, given: str | None = None) -> str:
    """The router that is meant: `given` by --url, else FOREBAY_URL, else the newest instance on this machine.

    Raises:
        CommandError: there is none, or what is given is no address, or has a password in it.
    """
    try:
        if given is not None:
            return checked_address(given, "--url")
        if settings.url:
            return checked_address(settings.url, URL_VARIABLE)
    except UsageError as error:
        raise CommandError(str(error)) from error
    instances = running_instances(settings)
    if not instances:
        raise CommandError("no instance of yours runs on this machine; start one with `make serve`, or give --url")
    address = next((instance.url for instance in instances if instance.url), None)
    if address is None:
        raise CommandError("the instance on this machine is still starting; ask again when it is ready")
    return address


def ask(url: str | None, path: str, part: str, method: str = "GET") -> tuple[str, Any]:
    """(the address that was asked, the JSON that it answered at `path`, in which `part` is a member). Without `url` it is
    FOREBAY_URL, or the newest instance on this machine.

    Raises:
        CommandError: there is none, it does not answer, or it answers with an error, whose words these are.
    """
    settings = read_environment()
    address = address_of(settings, url)
    what = path.rsplit("/", 1)[1] if method == "GET" else "answer"
    try:
        target = f"{address}{path}"
        answer = httpx.request(method, target, headers=settings.credentials, timeout=_TIMEOUT_S)
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            raise unauthorized(address, settings.credentials)
        said = answer.json()
        if answer.is_error:
            raise CommandError(f"{address}: {said['error']['message']}", exit_code=1)
        _ = said[part]
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        why = str(error) or type(error).__name__
        raise CommandError(f"no {what} from {address}; is it running? ({why})") from error
    except (ValueError, LookupError, TypeError) as error:
        raise CommandError(
            f"no {what} from {address}: what answered there (status {answer.status_code}) is no router of Forebay's"
        ) from error
    return address, said


@contextmanager
def understood(address: str) -> Iterator[None]:
    """Around what shows an answer: where it lacks something, another version gave it. Raises CommandError then."""
    try:
        yield
    except (LookupError, TypeError) as error:
        raise CommandError(
            f"{address} answers as another version of Forebay does ({error!r}); --json prints it"
        ) from error


def unauthorized(address: str, credentials: Mapping[str, str]) -> CommandError:
    """What to say where an endpoint answered 401 to these credentials."""
    given = "does not know the key in FOREBAY_API_KEY" if credentials else "asks for a key"
    return CommandError(f"{address} {given}: set FOREBAY_API_KEY to one (`forebay keys create`)")
