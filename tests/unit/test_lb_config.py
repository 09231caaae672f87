"""The configurations of load balancers: what is refused, and the figures that must fit a router's.

That each program takes its own is in tests/e2e/test_load_balancers.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cluster.config import RouterConfig
from deployments.http_protocol import HEAD_MAX_BYTES
from deployments.http_server import KEEP_ALIVE_S
from deployments.lb.__main__ import main
from deployments.lb.balancer import Address, Balancer, Kind, render
from deployments.settings import Profile

ROUTERS = ("10.0.0.1:8000", "[fd00::2]:8001", "router-3.example:8002")


def rendered(kind: Kind, **changes: object) -> str:
    return render(kind, Balancer.model_validate({"routers": ROUTERS} | changes))


@pytest.mark.parametrize("kind", Kind)
def test_each_router_and_the_port_are_in_the_configuration(kind: Kind) -> None:
    text = rendered(kind, port=18_123)
    assert "18123" in text
    for host, port in (("10.0.0.1", 8000), ("fd00::2", 8001), ("router-3.example", 8002)):
        assert re.search(rf"{re.escape(host)}\D{{1,20}}{port}\b", text), host
    assert "{{" not in text
    assert "{%" not in text


def test_envoys_is_yaml_with_one_endpoint_for_each_router() -> None:
    (cluster,) = yaml.safe_load(rendered(Kind.ENVOY))["static_resources"]["clusters"]
    (locality,) = cluster["load_assignment"]["endpoints"]
    addresses = [e["endpoint"]["address"]["socket_address"] for e in locality["lb_endpoints"]]
    assert [a["address"] for a in addresses] == ["10.0.0.1", "fd00::2", "router-3.example"]


@pytest.mark.parametrize("notice_s", [0.5, 5.0, 60.0])
def test_a_router_that_leaves_is_out_well_before_its_notice_is_over(notice_s: float) -> None:
    """As the configurations say it: the checks that it must fail, a check that had just passed, and as much to spare."""
    changes = {"drain_notice_s": notice_s}
    found = re.search(r"inter (\d+)ms fall (\d+)", rendered(Kind.HAPROXY, **changes))
    assert found is not None
    every_ms, fall = map(int, found.groups())
    assert 2 * every_ms * fall <= notice_s * 1000
    (cluster,) = yaml.safe_load(rendered(Kind.ENVOY, **changes))["static_resources"]["clusters"]
    (check,) = cluster["health_checks"]
    every_s = float(check["interval"].removesuffix("s"))
    assert check["no_traffic_interval"] == check["interval"]
    assert 2 * every_s * check["unhealthy_threshold"] <= notice_s
    # nginx asks for nothing: it must have let go of its kept connections.
    kept = re.search(r"upstream.*?keepalive_timeout (\d+)ms", rendered(Kind.NGINX, **changes), re.DOTALL)
    assert kept is not None
    assert 2 * int(kept[1]) <= notice_s * 1000


def test_nginx_asks_for_two_files_for_each_connection() -> None:
    text = rendered(Kind.NGINX)
    asked, connections = (
        re.findall(rf"^\s*{word} (\d+);", text, re.MULTILINE) for word in ("worker_rlimit_nofile", "worker_connections")
    )
    assert int(asked[0]) >= 2 * int(connections[0])


def test_the_default_notice_is_that_of_routers_with_a_balancer_before_them() -> None:
    assert Balancer.model_validate({"routers": ROUTERS}).drain_notice_s == Profile(routers=2).drain_notice_s


def test_a_balancer_is_more_patient_than_a_router_and_lets_go_of_connections_sooner() -> None:
    envoy = yaml.safe_load(rendered(Kind.ENVOY))["static_resources"]
    (cluster,) = envoy["clusters"]
    (options,) = cluster["typed_extension_protocol_options"].values()
    assert float(options["common_http_protocol_options"]["idle_timeout"].removesuffix("s")) < KEEP_ALIVE_S
    for kind, pattern in (
        (Kind.HAPROXY, r"timeout server (\d+)ms"),
        (Kind.NGINX, r"proxy_read_timeout (\d+)ms"),
        (Kind.ENVOY, r"stream_idle_timeout: (\d+)"),
    ):
        found = re.search(pattern, rendered(kind))
        assert found is not None, kind
        patience_s = int(found[1]) / (1 if kind is Kind.ENVOY else 1000)
        assert patience_s > 2 * RouterConfig().max_queue_s
    found = re.search(r"tune\.bufsize (\d+)", rendered(Kind.HAPROXY))
    assert found is not None
    assert int(found[1]) > HEAD_MAX_BYTES + 1024  # HAProxy keeps so much of it for what it adds


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("haproxy", "--router"),
        ("apache --router a:1", "apache"),
        ("haproxy --router 10.0.0.1", "'10.0.0.1' is not HOST:PORT"),
        ("haproxy --router http://10.0.0.1:8000", "is not HOST:PORT"),
        ("haproxy --router 10.0.0.1:0", "is not HOST:PORT"),
        ("haproxy --router 10.0.0.1:65536", "is not HOST:PORT"),
        ("haproxy --router fd00::1:8000", "is not HOST:PORT"),
        ("haproxy --router [fe80::1%x]:8000", "is not HOST:PORT"),
        ("haproxy --router a:1 --router a:1", "named twice"),
        ("haproxy --router a:1 --port 0", "--port"),
        ("haproxy --router a:1 --port x", "--port"),
        ("haproxy --router a:1 --host nowhere", "--host"),
        ("haproxy --router a:1 --host fe80::1%x", "--host"),
        ("haproxy --router a:1 --drain-notice-s 0", "--drain-notice-s"),
        ("haproxy --router a:1 --drain-notice-s nan", "--drain-notice-s"),
        ("nginx --router a:1 --state-folder some;where", "--state-folder"),
    ],
)
def test_bad_words_are_one_line_that_names_what_to_change(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    shown = capsys.readouterr()
    assert (ended.value.code, shown.out, shown.err.count("\n")) == (2, "", 1)
    assert said in shown.err


def test_the_command_prints_the_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    words = "nginx --router 10.0.0.1:8000 --port 81 --host ::1 --drain-notice-s 2 --state-folder /run/forebay"
    main(words.split())
    balancer = Balancer.model_validate(
        {"routers": ["10.0.0.1:8000"], "port": 81, "host": "::1", "drain_notice_s": 2, "state_folder": "/run/forebay"}
    )
    assert capsys.readouterr().out == render(Kind.NGINX, balancer)
    assert "listen [::1]:81 " in render(Kind.NGINX, balancer)


@given(st.text(max_size=40))
def test_whatever_is_said_of_a_router_it_becomes_an_address_or_is_refused(word: str) -> None:
    """So that no word can say more in a configuration than an address does."""
    for said in (word, f"{word}:8000", f"[{word}]:8000"):
        try:
            balancer = Balancer.model_validate({"routers": [said]})
        except ValidationError:
            continue
        (router,) = balancer.routers
        assert re.fullmatch(r"[A-Za-z0-9.:-]+", router.host)
        assert 0 < router.port < 65536
        # Letters of a host count alike, and zeros before a port count nothing.
        assert Address(*router).bracketed.rpartition(":")[0] == said.rpartition(":")[0].lower()


def test_the_folder_of_nginx_is_where_it_keeps_what_it_writes(tmp_path: Path) -> None:
    text = rendered(Kind.NGINX, state_folder=str(tmp_path))
    assert len(re.findall(rf"^\s*(?:pid|\w+_temp_path) {re.escape(str(tmp_path))}/", text, re.MULTILINE)) == 6
    assert "_temp_path" not in rendered(Kind.NGINX)
