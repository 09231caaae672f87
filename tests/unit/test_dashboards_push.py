"""The laws of `forebay dashboards`: what is there as it is to be is not touched, nothing else ever is, and each refusal says what
to do.

No Grafana can run here: a server of the tests' own speaks what Grafana's documentation says of its HTTP API, and keeps state.
"""

from __future__ import annotations

import copy
import json
import logging
import re
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from ops import cli
from ops.alerts.settings import RUNBOOKS
from ops.dashboards.grafana import State, Stored, state_for, uid_of_folder
from ops.dashboards.render import DASHBOARDS, document

TOKEN = "glsa_0123456789abcdef_5ecre7"
PROMETHEUS: dict[str, Any] = {
    "id": 1,
    "uid": "prom-1",
    "name": "Prometheus / main",
    "type": "prometheus",
    "access": "proxy",
}
LOKI: dict[str, Any] = {"id": 2, "uid": "loki-1", "name": "Logs", "type": "loki", "access": "proxy"}
UIDS = [one.uid for one in DASHBOARDS]

Answer = tuple[int, Any]


def settings(version: str) -> dict[str, Any]:
    return {"appSubUrl": "", "buildInfo": {"buildstamp": 1, "commit": "abc", "version": version}}


@dataclass
class GrafanaServer:
    """State of a Grafana, and what its API answers."""

    url: str = ""
    settings: Any = field(default_factory=lambda: settings("11.6.0"))
    """What it tells of itself."""
    token: str = TOKEN
    may_write: bool = True
    folders: dict[str, str] = field(default_factory=dict)
    """Title by uid."""
    dashboards: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Each with the members `dashboard` and `meta`."""
    datasources: list[dict[str, Any]] = field(default_factory=lambda: [PROMETHEUS, LOKI])
    asked: list[tuple[str, str]] = field(default_factory=list)
    """Method and path of every request."""
    agents: set[str] = field(default_factory=set)
    before_save: Callable[[], None] | None = None
    fails: Any = None
    moved_to: str = ""

    def writes(self) -> list[tuple[str, str]]:
        return [(method, path) for method, path in self.asked if method != "GET"]

    def answer(self, method: str, path: str, token: str, body: Any) -> Answer:
        if self.moved_to:
            return 301, {}
        if self.fails is not None:
            return 500, self.fails
        if token != self.token:
            return 401, {"message": "Unauthorized"}
        if method != "GET" and not self.may_write:
            return 403, {"message": "You'll need additional permissions to perform this action."}
        match method, path.split("/")[2:]:
            case "GET", ["frontend", "settings"]:
                return 200, self.settings
            case "GET", ["folders"]:
                return 200, [self._folder(uid) for uid in self.folders]
            case "GET", ["folders", uid]:
                return (200, self._folder(uid)) if uid in self.folders else (404, {"message": "folder not found"})
            case "POST", ["folders"]:
                if body["uid"] in self.folders:
                    return 409, {"message": "a folder with the same UID already exists"}
                self.folders[body["uid"]] = body["title"]
                return 200, self._folder(body["uid"])
            case "GET", ["dashboards", "uid", uid]:
                return (
                    (200, self.dashboards[uid]) if uid in self.dashboards else (404, {"message": "Dashboard not found"})
                )
            case "POST", ["dashboards", "db"]:
                return self._save(body)
            case "GET", ["datasources"]:
                return 200, self.datasources
            case "GET", ["datasources", "name", name]:
                found = [one for one in self.datasources if one["name"] == unquote(name)]
                return (200, found[0]) if found else (404, {"message": "Data source not found"})
        return 404, {"message": "Not found"}

    def _folder(self, uid: str) -> dict[str, Any]:
        return {"id": 7, "uid": uid, "title": self.folders[uid], "url": f"/dashboards/f/{uid}/", "canSave": True}

    def _save(self, body: dict[str, Any]) -> Answer:
        if self.before_save is not None:
            self.before_save()
        asked = body["dashboard"]
        uid, folder_uid = asked["uid"], body["folderUid"]
        assert asked["id"] is None, "a number of another Grafana may be anybody's here"
        there = self.dashboards.get(uid)
        version = 0 if there is None else there["dashboard"]["version"]
        if folder_uid not in self.folders:
            return 400, {"message": "folder not found"}
        if there is not None and there["meta"]["provisioned"]:
            return 400, {"message": "Cannot save provisioned dashboard"}
        if there is not None and asked.get("version", 0) != version and not body["overwrite"]:
            said = {"message": "The dashboard has been changed by someone else", "status": "version-mismatch"}
            return 412, said
        stored = {**asked, "id": 40 + len(self.dashboards), "version": version + 1}
        self.dashboards[uid] = {"dashboard": stored, "meta": {"folderUid": folder_uid, "provisioned": False}}
        return 200, {"id": stored["id"], "uid": uid, "status": "success", "version": version + 1, "slug": "x"}

    def edit(self, uid: str, **fields: Any) -> None:
        """As somebody does in a browser."""
        there = self.dashboards[uid]["dashboard"]
        there |= fields | {"version": there["version"] + 1}


@pytest.fixture
def grafana(monkeypatch: pytest.MonkeyPatch) -> Iterator[GrafanaServer]:
    monkeypatch.setenv("FOREBAY_GRAFANA_TOKEN", TOKEN)
    state = GrafanaServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # an answer leaves in one piece

        def do_GET(self) -> None:
            self._do()

        def do_POST(self) -> None:
            self._do()

        def _do(self) -> None:
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = urlsplit(self.path).path.removeprefix("/under/a/path")
            state.asked.append((self.command, path))
            state.agents.add(self.headers["User-Agent"])
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            status, said = state.answer(self.command, path, token, json.loads(raw) if raw else None)
            body = said if isinstance(said, bytes) else json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/html" if isinstance(said, bytes) else "application/json")
            self.send_header("Content-Length", str(len(body)))
            if state.moved_to:
                self.send_header("Location", f"{state.moved_to}{path}")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        state.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield state
        server.shutdown()
        thread.join()


Push = Callable[..., tuple[int, str, str]]


@pytest.fixture
def push(grafana: GrafanaServer, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> Push:
    """Exit code, standard output and standard error of `forebay dashboards push`. The token is in none of it, nor in a log."""
    caplog.set_level(logging.DEBUG)

    def run(*arguments: str, url: str | None = None) -> tuple[int, str, str]:
        code = cli.run(("dashboards", "push", "--grafana", url or grafana.url, *arguments))
        said = capsys.readouterr()
        assert TOKEN not in said.out + said.err + caplog.text
        assert len(said.err.splitlines()) <= 1
        return code, said.out, said.err

    return run


def states(push: Push, *arguments: str, code: int = 0) -> list[str]:
    ended, out, err = push("--json", *arguments)
    assert (ended, err) == (code, "")
    told = json.loads(out)["dashboards"]
    assert [one["uid"] for one in told] == UIDS
    return [one["state"] for one in told]


# --- what is written ---


def test_a_push_makes_the_folder_and_the_dashboards_and_the_next_one_writes_nothing(
    push: Push, grafana: GrafanaServer
) -> None:
    assert states(push) == ["created"] * len(UIDS)
    assert grafana.folders == {"forebay": "Forebay"}
    for one in DASHBOARDS:
        stored = grafana.dashboards[one.uid]
        assert stored["meta"]["folderUid"] == "forebay"
        assert {k: v for k, v in stored["dashboard"].items() if k not in {"id", "version"}} == document(one)
    grafana.asked.clear()
    assert states(push) == ["unchanged"] * len(UIDS)
    assert grafana.writes() == []


def test_only_what_differs_is_written_again_and_hand_made_changes_are_put_right(
    push: Push, grafana: GrafanaServer
) -> None:
    states(push)
    grafana.edit(UIDS[1], title="mine")
    grafana.dashboards[UIDS[3]]["meta"]["folderUid"] = "elsewhere"
    grafana.asked.clear()
    assert states(push) == ["unchanged", "updated", "unchanged", "updated", "unchanged"]
    assert grafana.writes() == [("POST", "/api/dashboards/db")] * 2
    assert grafana.dashboards[UIDS[1]]["dashboard"]["title"] == document(DASHBOARDS[1])["title"]
    assert grafana.dashboards[UIDS[3]]["meta"]["folderUid"] == "forebay"


def test_nothing_is_asked_for_but_dashboards_folders_and_data_sources(push: Push, grafana: GrafanaServer) -> None:
    """So that alerts, contact points, other dashboards and their folders stay as they are."""
    mine = {"dashboard": {"uid": "mine", "version": 3}, "meta": {"folderUid": "other", "provisioned": False}}
    grafana.folders["other"], grafana.dashboards["mine"] = "Other", copy.deepcopy(mine)
    states(push, "--datasource", PROMETHEUS["name"])
    allowed = r"/api/(frontend/settings|folders(/forebay)?|dashboards/(uid/forebay-[a-z]+|db)|datasources/name/[^/]+)"
    assert [path for _, path in grafana.asked if not re.fullmatch(allowed, path)] == []
    assert {method for method, _ in grafana.asked} == {"GET", "POST"}
    assert grafana.dashboards["mine"] == mine
    assert grafana.folders["other"] == "Other"


def test_a_dry_run_says_what_would_become_of_each_and_writes_nothing(push: Push, grafana: GrafanaServer) -> None:
    assert states(push, "--dry-run") == ["created"] * len(UIDS)
    assert (grafana.writes(), grafana.folders) == ([], {})


def test_a_folder_with_the_title_is_used_whatever_its_uid(push: Push, grafana: GrafanaServer) -> None:
    grafana.folders["abc123"] = "Serving & more"
    states(push, "--folder", "Serving & more")
    assert grafana.folders == {"abc123": "Serving & more"}
    assert {one["meta"]["folderUid"] for one in grafana.dashboards.values()} == {"abc123"}


def test_a_folder_that_was_given_another_title_is_still_the_one(push: Push, grafana: GrafanaServer) -> None:
    grafana.folders["forebay"] = "Language models"
    states(push)
    assert grafana.folders == {"forebay": "Language models"}


def test_data_source_and_runbooks_are_what_the_variables_begin_with(push: Push, grafana: GrafanaServer) -> None:
    states(push, "--datasource", PROMETHEUS["name"], "--runbooks", "https://pages.example/runbooks/")
    for uid in UIDS:
        variables = {one["name"]: one for one in grafana.dashboards[uid]["dashboard"]["templating"]["list"]}
        assert variables["datasource"]["current"] == {"text": "Prometheus / main", "value": "prom-1"}
        assert variables["runbooks"]["query"] == "https://pages.example/runbooks"
    assert states(push, "--datasource", PROMETHEUS["name"], "--runbooks", "https://pages.example/runbooks") == [
        "unchanged"
    ] * len(UIDS)
    variables = {one["name"]: one for one in document(DASHBOARDS[0])["templating"]["list"]}
    assert variables["runbooks"]["query"] == RUNBOOKS, "what is shipped stays as it is"


def test_a_grafana_under_a_path_is_reached(push: Push, grafana: GrafanaServer) -> None:
    for url in (f"{grafana.url}/under/a/path", f"{grafana.url}/under/a/path/", f"{grafana.url}/"):
        code, _, err = push(url=url)
        assert (code, err) == (0, "")
    assert ("GET", "/api/frontend/settings") in grafana.asked


def test_people_see_a_line_for_each(push: Push, grafana: GrafanaServer) -> None:
    _, out, _ = push()
    lines = out.splitlines()
    assert [line.split()[-2:] for line in lines[1:]] == [[uid, "created"] for uid in UIDS]


# --- what is refused ---


def test_what_is_provisioned_from_files_is_left_and_said(push: Push, grafana: GrafanaServer) -> None:
    states(push)
    for uid in UIDS[:2]:
        grafana.dashboards[uid]["meta"] = {"folderUid": "sidecar", "provisioned": True}
    grafana.edit(UIDS[0], title="older")
    grafana.asked.clear()
    code, out, _ = push()
    assert code == 1
    assert f"{UIDS[0]}: it is provisioned from files there" in out
    assert out.count("unchanged") == len(UIDS) - 1, "one that the files keep as it is to be is as it is to be"
    assert grafana.writes() == []


def test_what_somebody_saves_meanwhile_is_not_overwritten(push: Push, grafana: GrafanaServer) -> None:
    states(push)
    grafana.edit(UIDS[2], title="before")
    grafana.before_save = lambda: grafana.edit(UIDS[2], title="meanwhile")
    code, out, _ = push()
    assert code == 1
    assert f"{UIDS[2]}: The dashboard has been changed by someone else" in out
    assert grafana.dashboards[UIDS[2]]["dashboard"]["title"] == "meanwhile"
    grafana.before_save = None
    assert states(push)[2] == "updated", "and once it is still it is put right"


@pytest.mark.parametrize("given", ["glsa_another", ""])
def test_a_wrong_token_and_none_are_told_apart(
    given: str, push: Push, grafana: GrafanaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    if given:
        monkeypatch.setenv("FOREBAY_GRAFANA_TOKEN", given)
    else:
        monkeypatch.delenv("FOREBAY_GRAFANA_TOKEN")
    code, out, err = push()
    assert (code, out) == (2, "")
    assert ("does not take this token" if given else "asks for a token") in err
    assert "FOREBAY_GRAFANA_TOKEN" in err
    assert "another" not in err


def test_a_token_that_may_only_read_is_told_so(push: Push, grafana: GrafanaServer) -> None:
    grafana.may_write = False
    code, _, err = push()
    assert code == 2
    assert "does not let this token do that" in err
    assert "permission" in err


def test_a_data_source_that_is_missing_is_told_with_those_that_there_are(push: Push, grafana: GrafanaServer) -> None:
    code, _, err = push("--datasource", "Prom")
    assert code == 2
    assert "no data source 'Prom' (of Prometheus there are: Prometheus / main)" in err
    code, _, err = push("--datasource", "Logs")
    assert code == 2
    assert "'Logs' is of the type loki" in err
    assert grafana.writes() == []


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (settings("10.4.2"), "is Grafana 10.4.2; these dashboards need 11 or later"),
        ({"status": "success"}, "is no Grafana"),
        (b"<html>a page</html>", "is no Grafana"),
        ([], "is no Grafana"),
    ],
)
def test_what_is_no_grafana_or_too_old_is_written_nothing(
    told: Any, said: str, push: Push, grafana: GrafanaServer
) -> None:
    grafana.settings = told
    code, _, err = push()
    assert code == 2
    assert said in err
    assert grafana.writes() == []


def test_a_grafana_that_hides_its_version_is_taken_at_its_word(push: Push, grafana: GrafanaServer) -> None:
    grafana.settings = settings("")
    assert states(push) == ["created"] * len(UIDS)


def test_one_that_does_not_answer_is_named(push: Push) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    code, _, err = push(url=url)
    assert code == 2
    assert f"no answer from {url}" in err


def test_one_that_sends_to_another_address_is_not_followed_with_the_token(push: Push, grafana: GrafanaServer) -> None:
    grafana.moved_to = f"{grafana.url}/under/a/path"
    code, _, err = push()
    assert code == 2
    assert "sends to another address: give that one" in err
    assert len(grafana.asked) == 1


def test_one_that_fails_is_told_with_its_words(push: Push, grafana: GrafanaServer) -> None:
    grafana.fails = {"message": "database is\nlocked"}
    code, _, err = push()
    assert code == 2
    assert f"{grafana.url} answered 500: database is locked" in err


def test_one_that_takes_too_long_is_not_waited_for(push: Push, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ops.dashboards.grafana._TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        code, _, err = push(url=f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert code == 2
    assert "did not answer within 0.2 s" in err


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("grafana.example:3000", "must begin with http:// or https://"),
        ("ftp://grafana.example", "must begin with http:// or https://"),
        ("http://", "name a host"),
        ("http://grafana.example:port", "is no address"),
        ("http://[::1", "is no address"),
        ("http://admin:admin@grafana.example:port", "leave name and password out"),
        ("http://admin:admin@grafana.example", "leave name and password out"),
        ("admin:admin@grafana.example", "what is given must begin with http:// or https://"),
        ("http://admin:admin@grafana.example\u2100", "what is given is no address"),
        ("http://grafana.example/?orgId=1", "leave out what is behind"),
    ],
)
def test_an_address_that_cannot_be_asked_is_told_before_anything_is(url: str, said: str, push: Push) -> None:
    code, _, err = push(url=url)
    assert code == 2
    assert said in err
    assert "admin:admin" not in err


def test_a_token_comes_from_a_file_or_the_environment_and_never_from_the_command_line(
    push: Push, grafana: GrafanaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FOREBAY_GRAFANA_TOKEN")
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    assert states(push, "--token-file", str(file)) == ["created"] * len(UIDS)
    for wrong in ("", "two words", "glsa_\x00"):
        file.write_text(wrong)
        code, _, err = push("--token-file", str(file))
        assert code == 2
        assert f"{file} holds no token" in err
        assert not wrong or wrong not in err
    code, _, err = push("--token-file", str(tmp_path / "none"))
    assert code == 2
    assert "cannot be read" in err
    code, _, err = push("--token", TOKEN[:6])
    assert code == 2
    assert "No such option" in err


# --- the decision, and what there is to push ---


def test_what_is_to_be_done_follows_from_what_is_there() -> None:
    wanted = {"uid": "a", "title": "A"}
    there = {**wanted, "id": 3, "version": 9}
    cases = [
        (None, State.CREATED),
        (Stored(there, "f", provisioned=False), State.UNCHANGED),
        (Stored(there, "g", provisioned=False), State.UPDATED),
        (Stored({**there, "more": 1}, "f", provisioned=False), State.UPDATED),
        (Stored(there, "g", provisioned=True), State.UNCHANGED),
        (Stored({**there, "title": "B"}, "f", provisioned=True), State.REFUSED),
    ]
    assert [state_for(wanted, "f", stored) for stored, _ in cases] == [state for _, state in cases]


def test_the_uid_of_a_folder_has_the_letters_that_grafana_takes() -> None:
    assert [uid_of_folder(title) for title in ("Forebay", "Serving & more!", "x" * 60, "éà")] == [
        "forebay",
        "serving-more",
        "x" * 40,
        "",
    ]


def test_list_shows_every_dashboard(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(("dashboards", "list", "--json")) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["uid"] for one in told] == UIDS
    assert all(one["panels"] and one["description"] for one in told)
