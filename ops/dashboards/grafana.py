"""Dashboards in a running Grafana, through its HTTP API (grafana-client).

Owns: what is asked of Grafana, and what its refusals are called. Imports grafana-client. Invariants: nothing but the dashboards
and their folder is written; a dashboard that is there as it is to be is not written again; one that another person saves
meanwhile is not overwritten; the token is in no message.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NoReturn
from urllib.parse import SplitResult, quote, urlsplit

import niquests
from grafana_client.api import GrafanaApi
from grafana_client.client import GrafanaClientError, GrafanaException, GrafanaTimeoutError

from deployments.address import as_shown
from ops.dashboards.frame import DATASOURCE_VARIABLE, RUNBOOKS_VARIABLE
from ops.errors import CommandError

LEAST_VERSION = 11
"""Major version of the Grafana whose schema the dashboards have."""
_TIMEOUT_S = 10.0
_UID_LONGEST = 40
"""Of a folder, as Grafana has it."""
_NOT_FOUND, _FORBIDDEN, _PRECONDITION_FAILED, _BAD_REQUEST, _UNAUTHORIZED = 404, 403, 412, 400, 401
_GIVEN_BY_GRAFANA = ("id", "version")


class State(StrEnum):
    CREATED = "created"
    UPDATED = "updated"
    UNCHANGED = "unchanged"
    REFUSED = "refused"
    """By Grafana; it is as it was."""


@dataclass(frozen=True, slots=True)
class Pushed:
    """What became of one dashboard."""

    uid: str
    title: str
    state: State
    why: str = ""
    """Of one that was refused."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A dashboard as Grafana has it."""

    document: Mapping[str, Any]
    folder_uid: str
    provisioned: bool
    """From files, which alone change it."""


def state_for(document: Mapping[str, Any], folder_uid: str, stored: Stored | None) -> State:
    """What writing a dashboard would make of it."""
    if stored is None:
        return State.CREATED
    content = {key: value for key, value in stored.document.items() if key not in _GIVEN_BY_GRAFANA}
    if content == document and (stored.folder_uid == folder_uid or stored.provisioned):
        return State.UNCHANGED
    return State.REFUSED if stored.provisioned else State.UPDATED


def uid_of_folder(title: str) -> str:
    """The uid of a folder that is made: the title in the letters that uids have."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:_UID_LONGEST]


def fitted(document: Mapping[str, Any], datasource: Mapping[str, Any] | None, runbooks: str | None) -> dict[str, Any]:
    """A dashboard whose variables begin with this data source, as Grafana describes it, and this address of the runbooks.
    None leaves what the dashboard says."""
    made = dict(document)
    variables = [dict(variable) for variable in document["templating"]["list"]]
    for variable in variables:
        if variable["name"] == DATASOURCE_VARIABLE and datasource is not None:
            variable["current"] = {"text": datasource["name"], "value": datasource["uid"]}
        elif variable["name"] == RUNBOOKS_VARIABLE and runbooks is not None:
            variable["query"] = runbooks.rstrip("/")
    made["templating"] = {**document["templating"], "list": variables}
    return made


class Grafana:
    """One Grafana. Every method raises CommandError where it does not answer as a Grafana does, or refuses."""

    def __init__(self, url: str, token: str | None) -> None:
        """Raises CommandError for an address that cannot be asked. Asks nothing yet."""
        self.url = url.rstrip("/")
        parts = _checked(url)
        path = parts.path.strip("/")
        host = parts.hostname or ""
        self._api: Any = GrafanaApi(
            token,
            protocol=parts.scheme,
            host=f"[{host}]" if ":" in host else host,
            port=parts.port,
            url_path_prefix=f"{path}/" if path else "",
            timeout=_TIMEOUT_S,
        )
        self._api.client.s.max_redirects = 0  # what is posted would arrive as a question, and the token elsewhere
        self._has_token = token is not None

    def close(self) -> None:
        self._api.client.s.close()

    def version(self) -> str:
        """As it says it; empty where it is told to hide it.

        Raises:
            CommandError: it does not answer, is no Grafana, or is too old.
        """
        with self._said():
            try:
                built = self._api.health.check()
            except AttributeError:  # what answered is no mapping, and the client looks into it
                built = None
        if not isinstance(built, dict):
            self._no_grafana()
        version = str(built.get("version", ""))
        major = re.match(r"\d+", version)
        if major is not None and int(major[0]) < LEAST_VERSION:
            raise CommandError(
                f"{self.url} is Grafana {version}; these dashboards need {LEAST_VERSION} or later: update it, or import the "
                "files of helm/forebay/files/dashboards by hand"
            )
        return version

    def datasource(self, name: str) -> Mapping[str, Any]:
        """A data source by its name. Raises CommandError where it is missing, naming those that there are, or none of
        Prometheus's."""
        with self._said():
            try:
                found: Mapping[str, Any] = self._api.datasource.get_datasource_by_name(quote(name, safe=""))
            except GrafanaClientError as error:
                if error.status_code != _NOT_FOUND:
                    raise
                there = [one["name"] for one in self._api.datasource.list_datasources() if one["type"] == "prometheus"]
                known = ", ".join(sorted(there)) or "none"
                raise CommandError(
                    f"--datasource: {self.url} has no data source {name!r} (of Prometheus there are: {known})"
                ) from error
            if found["type"] != "prometheus":
                raise CommandError(f"--datasource: {name!r} is of the type {found['type']}; name one of Prometheus")
            return found

    def folder(self, title: str) -> str | None:
        """The uid of a folder: that of the one whose uid follows from the title, else of one with the title; None where there
        is neither."""
        uid = uid_of_folder(title)
        with self._said():
            try:
                return str(self._api.folder.get_folder(uid)["uid"])
            except GrafanaClientError as error:
                if error.status_code != _NOT_FOUND:
                    raise
            return next((str(one["uid"]) for one in self._api.folder.get_all_folders() if one["title"] == title), None)

    def make_folder(self, title: str) -> str:
        """Its uid."""
        with self._said():
            return str(self._api.folder.create_folder(title, uid_of_folder(title))["uid"])

    def dashboard(self, uid: str) -> Stored | None:
        with self._said():
            try:
                said = self._api.dashboard.get_dashboard(uid)
            except GrafanaClientError as error:
                if error.status_code != _NOT_FOUND:
                    raise
                return None
            meta = said["meta"]
            return Stored(said["dashboard"], str(meta.get("folderUid", "")), bool(meta.get("provisioned", False)))

    def save(self, document: Mapping[str, Any], folder_uid: str, stored: Stored | None, message: str) -> str:
        """Write a dashboard. Returns why Grafana refused it, or nothing.

        Args:
            stored: What it takes the place of. If that has changed meanwhile, Grafana refuses.
            message: For the list of its versions.
        """
        version = {} if stored is None else {"version": stored.document.get("version", 0)}
        asked = {
            "dashboard": {**document, "id": None, **version},
            "folderUid": folder_uid,
            "message": message,
            "overwrite": False,
        }
        with self._said():
            try:
                self._api.dashboard.update_dashboard(asked)
            except GrafanaClientError as error:
                words = _words(error)
                provisioned = error.status_code == _BAD_REQUEST and "provisioned" in words
                if provisioned or error.status_code == _PRECONDITION_FAILED:
                    return words
                raise
        return ""

    @contextmanager
    def _said(self) -> Iterator[None]:
        """Around what asks Grafana: its refusals in words that a person can act on."""
        try:
            yield
        except GrafanaTimeoutError as error:
            raise CommandError(f"{self.url} did not answer within {_TIMEOUT_S:g} s") from error
        except GrafanaException as error:
            raise CommandError(self._refusal(error)) from error
        except niquests.exceptions.JSONDecodeError:
            self._no_grafana()
        except niquests.exceptions.TooManyRedirects as error:
            raise CommandError(
                f"{self.url} sends to another address: give that one, which often begins with https://"
            ) from error
        except (niquests.exceptions.RequestException, OSError) as error:
            why = type(error).__name__
            raise CommandError(f"no answer from {self.url}; is Grafana running there? ({why})") from error
        except (LookupError, TypeError) as error:
            raise CommandError(f"{self.url} answers as no known Grafana does ({error!r})") from error

    def _refusal(self, error: GrafanaException) -> str:
        status, words = error.status_code, _words(error)
        if status == _UNAUTHORIZED:
            given = "does not take this token" if self._has_token else "asks for a token"
            return f"{self.url} {given}: set FOREBAY_GRAFANA_TOKEN, or --token-file, to one of a service account"
        if status == _FORBIDDEN:
            return f"{self.url} does not let this token do that ({words}): give its service account the permission"
        if status == _NOT_FOUND:
            return f"{self.url} answers as no Grafana does ({words}); give the address that a browser shows, less what follows"
        return f"{self.url} answered {status}: {words}"

    def _no_grafana(self) -> NoReturn:
        raise CommandError(f"what answers at {self.url} is no Grafana; give the address of its first page")


def push(
    grafana: Grafana, documents: Sequence[Mapping[str, Any]], folder_title: str, *, message: str, dry: bool = False
) -> list[Pushed]:
    """Bring dashboards to a Grafana, each only where it is not there as it is to be.

    Args:
        dry: Write nothing, and say what would become of each.

    Raises:
        CommandError: as the methods of Grafana. What was brought until then stays.
    """
    folder_uid = grafana.folder(folder_title)
    if folder_uid is None and not dry:
        folder_uid = grafana.make_folder(folder_title)
    done = []
    for document in documents:
        uid, title = document["uid"], document["title"]
        stored = grafana.dashboard(uid)
        state, why = state_for(document, folder_uid or "", stored), ""
        if state is State.REFUSED:
            why = "it is provisioned from files there, as the chart's ConfigMaps are: change it where they come from"
        elif state is not State.UNCHANGED and not dry:
            assert folder_uid is not None
            why = grafana.save(document, folder_uid, stored, message)
        done.append(Pushed(uid, title, State.REFUSED if why else state, why))
    return done


def _checked(url: str) -> SplitResult:
    """Its parts, or CommandError for one that cannot be asked; a password that is in it is not repeated."""
    shown = as_shown(url)
    try:
        parts = urlsplit(url)
        if "@" in parts.netloc:
            raise CommandError(
                "--grafana: leave name and password out of the address; a token goes by FOREBAY_GRAFANA_TOKEN"
            )
        _ = parts.port  # raises where it is no number
    except ValueError as error:
        raise CommandError(f"--grafana: {shown} is no address") from error
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise CommandError(f"--grafana: {shown} must begin with http:// or https:// and name a host")
    if parts.query or parts.fragment:
        raise CommandError(f"--grafana: {shown} must end with its path: leave out what is behind ? or #")
    return parts


def _words(error: GrafanaException) -> str:
    """What Grafana says of a refusal, in one short line."""
    response = error.response
    said = response.get("message") if isinstance(response, dict) else None
    words = " ".join(str(said or "no reason given").split())
    return words if len(words) <= 200 else f"{words[:197]}..."
