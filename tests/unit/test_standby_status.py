"""`forebay status` says which controller leads and whether another stands by."""

from __future__ import annotations

import asyncio

import pytest

from cluster.messages import ClusterStatus, RouterStatus
from cluster.model import ModelFolder
from cluster.types import Generation, RouterId
from ops import cli
from tests.unit.http_kit import serving


@pytest.mark.parametrize(("standbys", "says"), [((0, 1), "one stands by"), ((0, 0), "none stands by")])
async def test_it_is_there_where_any_router_is_linked_to_it(
    tiny_model: ModelFolder, capsys: pytest.CaptureFixture[str], standbys: tuple[int, ...], says: str
) -> None:
    async with serving(tiny_model) as world:
        world.cluster = ClusterStatus(
            ask_id=1,
            controller_generation=Generation(3, "c"),
            controller_pid=7123,
            uptime_s=1.5,
            replicas=(),
            routers=tuple(
                RouterStatus(RouterId(f"router-{n}"), 0.0, "http://127.0.0.1:1", n, (), standbys=count)
                for n, count in enumerate(standbys)
            ),
        )
        assert await asyncio.to_thread(cli.run, ["status", "--url", world.url]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"pid 7123 leads, up 2 s, generation 3; {says}; 0 replicas, 2 routers" in out
