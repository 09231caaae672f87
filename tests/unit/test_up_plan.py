"""What `deployments.up` puts to Serve, from what Serve says of itself, and where jobs find routers."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.serve.schema import ServeDeploySchema

from deployments.jobs import endpoint
from deployments.jobs.endpoint import Routers, find_urls
from deployments.local import takes_work
from deployments.router import reached_at
from deployments.serve_app import ServeArgs
from deployments.settings import Environment, UsageError
from deployments.up import Wait, arguments_of, failure, plan_of, standing
from ops.jobs import loadtest
from tests.line import until
from tests.unit.fake_replica import ManualClock

PROFILE = {"models": [{"model": "/models/tiny", "replicas": 2}], "router": {"port": 8001}}
OTHER = {"name": "other", "import_path": "other:app", "route_prefix": "/other"}


def arguments(
    profile: dict[str, Any] = PROFILE, deployed: dict[str, Any] | None = None, **given: str
) -> dict[str, Any]:
    given = given or ({} if deployed else {"secret_path": "/run/secret"})
    return arguments_of(profile, given, deployed or {}, "http://head:8265")


def told(args: dict[str, Any] | None, status: str = "RUNNING", **more: Any) -> dict[str, Any]:
    """As Serve tells of it, beside another application."""
    applications: dict[str, Any] = {"other": {"status": "RUNNING", "deployed_app_config": OTHER}}
    if args is not None:
        config = plan_of({}, args).config["applications"][-1]
        applications["forebay"] = {"status": status, "deployed_app_config": config, **more}
    return {"applications": applications, "proxy_location": "HeadOnly", "target_capacity": None}


def test_where_nothing_is_deployed_all_is_put_that_serves_schema_asks_for() -> None:
    plan = plan_of({"applications": {}}, arguments())
    config = ServeDeploySchema.model_validate(plan.config)
    assert config.proxy_location == "Disabled"
    (application,) = config.applications
    assert (application.name, application.route_prefix) == ("forebay", None)
    assert application.import_path == "deployments.serve_app:build_app"
    assert not application.external_scaler_enabled
    assert ServeArgs.model_validate(application.args).profile.models[0].replicas == 2
    assert plan.changes == ()


def test_what_is_deployed_like_that_is_left_alone_whatever_its_config_left_to_defaults() -> None:
    written_out = ServeArgs.model_validate(arguments()).model_dump(mode="json")
    for status in ("RUNNING", "DEPLOYING"):
        assert plan_of(told(written_out, status), arguments()).config == {}
    assert plan_of(told(written_out, "DEPLOY_FAILED"), arguments()).config != {}


def test_a_change_is_told_by_its_key_and_other_applications_stay() -> None:
    changed = arguments(
        {"models": [{"model": "/models/tiny", "replicas": 3}], "router": {"port": 8001}},
        log_level="DEBUG",
        secret_path="/run/secret",
    )
    plan = plan_of(told(arguments()), changed)
    assert plan.changes == ("profile.models[0].replicas: 2 → 3", 'log_level: "INFO" → "DEBUG"')
    assert plan.config["applications"][0] == OTHER
    assert plan.config["applications"][1]["args"]["profile"]["models"][0]["replicas"] == 3
    assert plan.config["proxy_location"] == "HeadOnly"


def test_what_is_not_said_again_stays_as_it_is_deployed() -> None:
    first = arguments(secret_path="/run/a", token_path="/run/token", log_level="DEBUG")
    kept = arguments(deployed=first)
    assert {name: kept[name] for name in ("secret_path", "token_path", "log_level")} == {
        "secret_path": "/run/a",
        "token_path": "/run/token",
        "log_level": "DEBUG",
    }
    assert arguments(deployed=first, secret_path="/run/b")["secret_path"] == "/run/b"


def test_a_model_with_scale_is_told_through_the_dashboard_of_the_job() -> None:
    scaled = {"models": [{"model": "/models/tiny", "replicas": 1, "scale": {"max": 3}}]}
    args = arguments(scaled)
    assert args["dashboard_url"] == "http://head:8265"
    assert arguments(scaled, secret_path="/s", dashboard_url="http://balancer")["dashboard_url"] == "http://balancer"
    assert arguments(scaled, args)["dashboard_url"] == "http://head:8265"
    assert "dashboard_url" not in arguments(secret_path="/s", dashboard_url="http://balancer")
    assert plan_of({}, args).config["applications"][0]["external_scaler_enabled"]


@pytest.mark.parametrize(
    ("profile", "given", "said"),
    [
        (PROFILE, {"token_path": "/t"}, "--secret must name the file"),
        (PROFILE, {"secret_path": "s"}, "secret_path: s must be a whole path"),
        ({"models": [{}]}, {"secret_path": "/s"}, "must name a folder"),
        (PROFILE, {"secret_path": "/s", "log_level": "LOUD"}, "log_level: Input should be"),
    ],
)
def test_what_cannot_be_asked_for_is_said_by_its_key(profile: dict[str, Any], given: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        arguments_of(profile, given, {}, "http://head:8265")


class Serve:
    """Says one thing after another, the last for ever."""

    def __init__(self, *said: dict[str, Any] | Exception) -> None:
        self._said: Iterator[dict[str, Any] | Exception] = iter(said)
        self._last: dict[str, Any] | Exception = {}

    def get_serve_details(self) -> dict[str, Any]:
        self._last = next(self._said, self._last)
        if isinstance(self._last, Exception):
            raise self._last
        return self._last

    def deploy_applications(self, config: dict[str, Any]) -> None:
        raise AssertionError("nothing is to be deployed")


def test_a_failure_of_what_was_deployed_now_ends_the_wait_with_its_reason_and_one_of_before_does_not() -> None:
    def state(deployed_s: float) -> dict[str, Any]:
        deployments = {
            "Replica-0-tiny": {
                "status": "DEPLOY_FAILED",
                "message": "Traceback …\n  ModelFolderError: no weights\n",
                "replicas": [{"state": "STARTING"}, {"state": "RUNNING"}],
                "target_num_replicas": 2,
            }
        }
        more = {"last_deployed_time_s": deployed_s, "deployments": deployments, "message": "failed"}
        return told(arguments(), "DEPLOY_FAILED", **more)

    lines: list[str] = []
    serve = Serve(state(5.0), ConnectionError("the head is starting"), state(6.0))
    assert Wait(serve, 5.0, lines.append).until_served(time.monotonic() + 30) == ()
    assert lines == [
        "  Ray's dashboard: the head is starting",
        "  deploy failed, Replica-0-tiny 1 of 2",
        "cannot be deployed: ModelFolderError: no weights",
    ]


def test_a_wait_has_an_end_and_says_what_was_missing() -> None:
    more = {"last_deployed_time_s": 6.0, "message": "", "deployments": {}}
    lines: list[str] = []
    wait = Wait(Serve(told(arguments(), "DEPLOYING", **more)), 5.0, lines.append)
    assert wait.until_served(time.monotonic() + 0.1) == ()
    assert lines == ["  deploying", "not served in time: deploying"]


def test_states_and_failures_are_said_where_serve_says_little() -> None:
    bare = {"status": "DEPLOY_FAILED", "message": "", "deployments": {}}
    assert standing(bare) == "deploy failed"
    assert failure(bare) == "Serve does not say why"


@pytest.mark.parametrize(
    ("url", "reached"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://0.0.0.0:8000", "http://10.1.2.3:8000"),
        ("http://[::]:8000", "http://10.1.2.3:8000"),
        ("http://node-7:8000", "http://node-7:8000"),
        ("", ""),
    ],
)
def test_a_router_is_reached_at_its_node_where_it_listens_everywhere(url: str, reached: str) -> None:
    assert reached_at(url, lambda: "10.1.2.3") == reached


def test_a_router_is_named_by_the_option_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_URL", "http://b:1/v1/")
    assert find_urls(None, Environment()) == (("http://b:1",), False)
    assert find_urls("https://a", Environment()) == (("https://a",), False)
    with pytest.raises(UsageError, match="--url: 'a:8000' must begin with http"):
        find_urls("a:8000", Environment())


@pytest.mark.parametrize(
    "url",
    [
        "http://me:pass@a:1", "me:pass@a:1", "https://me:pass@a:1\n", "http://:pass@[", "http://a@pass:b",
        "http://pass\udc80@a",
    ],
)  # fmt: skip
@pytest.mark.parametrize("option", ["--url", "FOREBAY_URL"])
def test_an_address_with_a_password_is_refused_and_not_said(
    url: str, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREBAY_URL", url)
    with pytest.raises(UsageError, match=f"^{option}: ") as refused:
        find_urls(url if option == "--url" else None, Environment())
    assert "pass" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "http://", "http://a b", "http://a?b=c", "http://a?", "http://a/#b", "http://a#", "http://a:b", "http://xn--a",
        "http://a/\udc80",
    ],
)  # fmt: skip
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match=r"^--url: "):
        find_urls(url, Environment())


async def test_a_search_for_routers_that_is_given_up_leaves_no_process_and_takes_no_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint, "_COMMAND", (sys.executable, "-c", "import time; time.sleep(600)"))

    async def searching() -> list[psutil.Process]:
        return [child for child in psutil.Process().children() if "import time; time.sleep(600)" in child.cmdline()]

    clock = ManualClock()
    routers = Routers(("old",), endpoint.find_routers, clock)
    clock.advance(20)
    routers.unreachable("old")
    (child,), _ = await until(searching, bool)
    async with asyncio.timeout(3):  # after which Ray kills a job that it stops
        await routers.close()
    assert not child.is_running()


GOOD = b'{"models": {"a": true, "b": true}}'


@pytest.mark.parametrize(
    ("answer", "ready"),
    [
        (b"HTTP/1.0 200 OK\r\n\r\n" + GOOD, True),
        (b"HTTP/1.0 200 OK\r\n\r\n" + GOOD.replace(b"true}", b"false}"), False),
        (b"HTTP/1.0 503 No\r\n\r\n" + GOOD, False),
        (b"", False),
        (b"SSH-2.0-OpenSSH_9.2\r\n", False),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 99\r\n\r\n" + GOOD[:-1], False),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n99\r\n" + GOOD, False),
        (b"HTTP/1.0 200 OK\r\n\r\n<html>", False),
        (b"HTTP/1.0 200 OK\r\n\r\n\xff", False),
        (b"HTTP/1.0 200 OK\r\n\r\n{}", False),
        (b"HTTP/1.0 200 OK\r\n\r\n[1]", False),
        (b'HTTP/1.0 200 OK\r\n\r\n{"models": {}}', False),
        (b"HTTP/1.0 200 OK\r\n\r\n" + b'{"models":' * 50_000, False),
    ],
)
async def test_only_what_answers_as_a_router_takes_work(answer: bytes, ready: bool) -> None:
    async def tell(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(tell, "127.0.0.1") as server:
        host, port = server.sockets[0].getsockname()
        assert await asyncio.to_thread(takes_work, f"http://{host}:{port}") is ready


async def test_a_router_that_cannot_be_reached_is_not_asked_while_another_can_be() -> None:
    clock = ManualClock()
    routers = Routers(("a", "b"), None, clock)
    assert {routers.next() for _ in range(4)} == {"a", "b"}
    assert routers.unreachable("a")
    assert {routers.next() for _ in range(4)} == {"b"}
    assert not routers.unreachable("b")
    assert {routers.next() for _ in range(4)} == {"a", "b"}
    clock.advance(6)
    assert routers.unreachable("b")
    assert {routers.next() for _ in range(4)} == {"a"}


def next_of(routers: Routers) -> Callable[[], Awaitable[str]]:
    async def ask() -> str:
        return routers.next()

    return ask


async def test_routers_that_moved_are_found_again_once_in_a_while() -> None:
    clock, asked = ManualClock(), 0

    async def find() -> tuple[str, ...]:
        nonlocal asked
        asked += 1
        return (f"new-{asked}",)

    routers = Routers(("old",), find, clock)
    routers.unreachable("old")
    clock.advance(20)
    for _ in range(3):
        routers.unreachable("old")
    await until(next_of(routers), "new-1".__eq__)
    routers.unreachable("new-1")
    assert (routers.next(), asked) == ("new-1", 1)
    await routers.close()


def test_a_load_test_explains_itself_by_its_own_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert loadtest.run(["--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Usage: python -m ops.jobs.loadtest [OPTIONS]" in said
    assert "Example: python -m ops.jobs.loadtest --trace" in said
    assert "FOREBAY_URL, or a router of the Ray cluster of this job" in said
    assert "forebay bench replay" not in said
    assert loadtest.run(["--url", "http://127.0.0.1:1"]) == 2
    assert capsys.readouterr().err.startswith("ops.jobs.loadtest: Missing option '--trace'")


def test_a_load_test_that_cannot_begin_says_so_and_reports_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("FOREBAY_URL", "localhost:8000")
    assert loadtest.run(["--trace", "trace.csv"]) == 2
    assert "FOREBAY_URL: 'localhost:8000' must begin with http" in capsys.readouterr().err
    report = tmp_path / "old.json"
    report.write_text("{}")
    assert loadtest.run(["--trace", "nowhere.csv", "--url=http://127.0.0.1:1", "--json", str(report)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "nowhere.csv" in said.err
