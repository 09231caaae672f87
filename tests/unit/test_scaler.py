"""What is decided about the number of replicas is done, step by step, whatever Serve and a dead controller leave undone."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from cluster.config import ScaleConfig
from cluster.control.demand import Meter
from cluster.control.scale import Deployed
from cluster.messages import DrainOrder, Leave, RosterEntry, ScaleStatus
from cluster.types import ReplicaId, ReplicaState
from deployments.scaler import (
    LOOK_S,
    PAUSE_MAX_S,
    PERIOD_S,
    SETTLE_S,
    Scaled,
    Scaler,
    ServeCallError,
    ServeDashboard,
    scalers,
)
from deployments.settings import ServeAccess, UsageError
from tests.unit.fake_replica import ManualClock
from tests.unit.scale_model import ROUTER, engine_load, entry, report, router_demand


@dataclass
class Living:
    """A replica as the controller sees it."""

    of: RosterEntry
    requests: int = 0
    state: ReplicaState = ReplicaState.READY
    retiring: bool = False


@dataclass
class Ray:
    """Serve and the replicas, as the scaler reaches them: it stops what starts first, else the newest."""

    clock: ManualClock
    target: int = 1
    replicas: dict[ReplicaId, Living] = field(default_factory=dict)
    starting: int = 0
    unseen: set[ReplicaId] = field(default_factory=set)
    kept: list[int] = field(default_factory=list)
    looks: int = 0
    down: bool = False
    numbers: int = 0
    leads: bool = True
    told: list[ScaleStatus] = field(default_factory=list)
    doubted: bool = False
    """Another controller may lead."""

    def __post_init__(self) -> None:
        self.restart(self.target)

    def restart(self, count: int) -> None:
        for _ in range(count):
            self.numbers += 1
            of = entry(f"r{self.numbers}", number=self.numbers)
            self.replicas[of.replica_id] = Living(of)

    def busy(self) -> None:
        for replica in self.replicas.values():
            replica.requests = 1

    # --- ServePort ---

    async def deployed(self, deployment: str) -> Deployed:
        self.looks += 1
        if self.down:
            raise ServeCallError("GET: connection refused")
        assert deployment == "Replica-0-m"
        return Deployed(self.target, frozenset(self.replicas) | self.unseen, self.starting)

    async def keep(self, deployment: str, replicas: int) -> None:
        assert deployment == "Replica-0-m"
        assert replicas >= self.target or self.starting, "Serve would choose by itself"
        self.kept.append(replicas)
        self.target = replicas
        self.starting = replicas - len(self.replicas)

    # --- Orders ---

    def vouched_by(self, running: frozenset[ReplicaId]) -> bool:
        assert running == frozenset(self.replicas) | self.unseen
        return not self.doubted

    def scaled(self, status: ScaleStatus) -> None:
        self.told.append(status)

    def tell_replica(self, replica_id: ReplicaId, message: DrainOrder | Leave) -> None:
        replica = self.replicas[replica_id]
        match message:
            case DrainOrder(drain=drain, retire=retire):
                assert retire
                assert replica.retiring is not drain
                replica.retiring = drain
                replica.state = ReplicaState.DRAINING if drain else ReplicaState.READY
            case Leave():
                assert replica.retiring
                assert not replica.requests
                del self.replicas[replica_id]
                self.unseen.add(replica_id)

    # --- time ---

    def sees(self) -> None:
        """Serve sees who has left, and starts others in their places."""
        self.starting += len(self.unseen)
        self.unseen.clear()

    def started(self) -> None:
        count, self.starting = self.starting, 0
        self.restart(count)


class Bench:
    def __init__(self, target: int = 1, **scale: Any) -> None:
        self.clock = ManualClock()
        self.ray = Ray(self.clock, target)
        fields = {"min": 1, "max": 4, "up_after_s": 1, "down_after_s": 20, "idle_after_s": 20} | scale
        self.scaled = Scaled(model="m", deployment="Replica-0-m", scale=ScaleConfig.model_validate(fields))
        self.queued = 0
        self.new_controller()

    def new_controller(self) -> None:
        self.meter = Meter(1.0, 1.0, self.clock.monotonic(), self.scaled.scale.average_s)
        self.scaler = Scaler(self.scaled, self.meter, self.ray, self.ray, self.clock, random.Random(0))
        self.meter.router_here(ROUTER)

    def told(self) -> None:
        now_s = self.clock.monotonic()
        for r in self.ray.replicas.values():
            load = report(r.of, engine_load(r.requests), r.state)
            self.meter.replica(r.of, load, retiring=r.retiring, now_s=now_s)
        for name in [r.replica_id for r in self.meter.load(now_s).replicas]:
            if name not in self.ray.replicas:
                self.meter.replica_gone(name, entry(name, number=int(name[1:])).generation)
        self.meter.router(ROUTER, router_demand(self.queued, 100.0 * self.queued, 0.0), now_s)

    async def run(self, seconds: float, *, tells: bool = True) -> None:
        until_s = self.clock.monotonic() + seconds
        while self.clock.monotonic() < until_s:
            if tells:
                self.told()
            self.clock.advance(await self.scaler.turn())


async def test_replicas_are_added_for_what_waits_and_leave_one_by_one_when_they_are_empty_and_not_needed() -> None:
    bench = Bench()
    await bench.run(2)
    bench.queued = 9
    await bench.run(5)
    assert bench.ray.kept == [2], "and no more before it is seen what the second changes"
    bench.ray.started()
    bench.queued = 0
    bench.ray.busy()
    await bench.run(40)
    (leaving,) = [r for r in bench.ray.replicas.values() if r.retiring]
    assert bench.ray.kept == [2], "it has work"
    leaving.requests = 0
    await bench.run(3)
    assert leaving.of.replica_id in bench.ray.unseen
    assert bench.ray.kept == [2], "Serve would stop the other one"
    bench.ray.sees()
    await bench.run(3)
    assert bench.ray.kept == [2, 1]
    await bench.run(60)
    assert (bench.ray.kept, len(bench.ray.replicas)) == ([2, 1], 1)


async def test_all_can_see_what_was_decided_and_why_and_what_holds_it_back_and_by_which_numbers() -> None:
    bench = Bench()
    await bench.run(5)
    held = bench.ray.told[-1]
    assert (held.model, held.kept, held.now.was, held.now.wanted, held.changes) == ("m", 1, 1, 1, ())
    assert held.now.why == "there are as few as there may be"
    assert held.now.numbers["queued"] == 0
    assert "of_one_per_s" not in held.now.numbers, "none was full"
    bench.queued = 9
    await bench.run(5)
    grown = bench.ray.told[-1]
    assert (grown.kept, [(c.was, c.wanted) for c in grown.changes]) == (2, [(1, 2)])
    assert grown.changes[0].numbers["queued"] == 9
    bench.ray.down, bench.queued = True, 0
    bench.ray.started()
    bench.ray.busy()
    await bench.run(60)
    assert "connection refused" in bench.ray.told[-1].trouble
    bench.ray.down = False
    for turn in range(60):
        for r in bench.ray.replicas.values():
            r.requests = turn % 2
        await bench.run(5)
        bench.ray.sees()
    assert bench.ray.told[-1].trouble == ""
    assert [(c.was, c.wanted) for c in bench.ray.told[-1].changes] == [(2, 1), (1, 2)], "the latest first"


async def test_a_new_controller_goes_on_where_the_last_one_was_killed() -> None:
    """At every stage of a replica's leaving, and with one that an operator drains beside it."""
    for stage in range(4):
        bench = Bench(target=3, down_after_s=5)
        aside = next(iter(bench.ray.replicas.values()))
        aside.state = ReplicaState.DRAINING
        bench.ray.busy()
        await bench.run(10)
        (leaving,) = [r for r in bench.ray.replicas.values() if r.retiring]
        leaving.requests = int(stage == 0)
        if stage > 1:
            bench.ray.tell_replica(leaving.of.replica_id, Leave())
        if stage > 2:
            bench.ray.sees()
        bench.new_controller()
        await bench.run(4)
        leaving.requests = 0
        for _ in range(12):
            await bench.run(2)
            bench.ray.sees()
        assert bench.ray.target == 2, stage
        assert set(bench.ray.replicas) >= {aside.of.replica_id}
        assert (aside.state, aside.retiring) == (ReplicaState.DRAINING, False)
        assert len(bench.ray.replicas) == 2


async def test_one_that_retires_takes_work_again_when_requests_wait() -> None:
    bench = Bench(target=2, down_after_s=5)
    bench.ray.busy()
    await bench.run(10)
    assert [r.retiring for r in bench.ray.replicas.values()].count(True) == 1
    bench.queued = 9
    await bench.run(1.5)
    bench.queued = 0
    await bench.run(2)
    assert not any(r.retiring for r in bench.ray.replicas.values())
    assert bench.ray.kept == []


async def test_the_last_one_goes_when_nothing_has_come_and_the_first_request_wakes_the_model_at_once() -> None:
    bench = Bench(min=0)
    for _ in range(40):
        await bench.run(1)
        bench.ray.sees()
    assert (bench.ray.target, bench.ray.kept) == (0, [0])
    bench.queued = 1
    bench.told()
    await bench.scaler.turn()
    assert bench.ray.kept == [0, 1]
    bench.ray.started()
    bench.queued = 0
    await bench.run(10)
    assert bench.ray.kept == [0, 1]


async def test_a_request_that_comes_while_the_last_one_empties_has_it_back() -> None:
    bench = Bench(min=0)
    await bench.run(21)
    (last,) = bench.ray.replicas.values()
    assert last.retiring
    last.requests = 1
    await bench.run(2)
    bench.queued = 1
    await bench.run(PERIOD_S)
    bench.queued = 0
    await bench.run(2)
    assert (last.retiring, last.state, bench.ray.kept) == (False, ReplicaState.READY, [])


async def test_nothing_is_decided_before_each_replica_reports_or_has_had_its_time() -> None:
    bench = Bench(target=3, down_after_s=0.5)
    await bench.run(SETTLE_S - 1, tells=False)
    assert not any(r.retiring for r in bench.ray.replicas.values())
    bench.ray.busy()
    await bench.run(8)
    assert any(r.retiring for r in bench.ray.replicas.values())


async def test_a_controller_that_stands_by_asks_nothing_and_goes_on_where_the_other_left_off_once_it_leads() -> None:
    bench = Bench(target=2)
    bench.ray.busy()
    bench.queued, bench.ray.leads = 9, False
    await bench.run(60)
    assert (bench.ray.looks, bench.ray.kept) == (0, [])
    bench.queued, bench.ray.leads = 0, True
    await bench.run(5)
    assert (bench.ray.looks > 0, bench.ray.kept, len(bench.ray.replicas)) == (True, [], 2)
    bench.queued = 9
    await bench.run(5)
    assert bench.ray.kept == [3]


async def test_one_that_has_stood_by_for_an_hour_knows_what_is_asked_now_when_it_leads() -> None:
    bench, done = Bench(), 0.0
    (replica,) = bench.ray.replicas.values()
    bench.ray.leads = False
    for second in range(3600):
        done += 300 if second >= 3480 else 10
        now_s = bench.clock.monotonic()
        load = report(replica.of, engine_load(1, tokens_total=round(done)))
        bench.meter.replica(replica.of, load, retiring=False, now_s=now_s)
        bench.meter.router(ROUTER, router_demand(0, 0.0, done), now_s)
        for _ in range(round(1 / PERIOD_S)):
            bench.clock.advance(await bench.scaler.turn())
    assert bench.meter.load(bench.clock.monotonic()).demand_per_s == pytest.approx(300, rel=0.05)


async def test_while_another_may_lead_nobody_is_told_anything() -> None:
    bench = Bench(target=2, down_after_s=5)
    bench.ray.doubted = True
    await bench.run(20)
    bench.queued = 9
    await bench.run(20)
    assert (bench.ray.kept, [r.retiring for r in bench.ray.replicas.values()]) == ([], [False, False])
    bench.ray.doubted = False
    await bench.run(2)
    assert bench.ray.kept == [3]


async def test_without_a_router_nothing_is_decided() -> None:
    bench = Bench(target=3, down_after_s=0.5, min=0, idle_after_s=0.5)
    bench.meter.router_gone(ROUTER)
    until_s = bench.clock.monotonic() + 60
    while bench.clock.monotonic() < until_s:
        for r in bench.ray.replicas.values():
            load = report(r.of, engine_load(0))
            bench.meter.replica(r.of, load, retiring=False, now_s=bench.clock.monotonic())
        bench.clock.advance(await bench.scaler.turn())
    assert (bench.ray.kept, [r.retiring for r in bench.ray.replicas.values()]) == ([], [False] * 3)


async def test_while_nothing_changes_serve_is_asked_seldom() -> None:
    bench = Bench()
    await bench.run(5)
    before = bench.ray.looks
    await bench.run(100)
    assert bench.ray.looks - before <= 100 / LOOK_S + 1
    bench.queued = 9
    await bench.run(6)
    assert bench.ray.starting == 1
    before = bench.ray.looks
    await bench.run(100)
    assert bench.ray.looks - before <= 100 / LOOK_S + 1, "a replica that starts is Serve's concern"


async def test_a_call_that_fails_is_followed_by_longer_and_longer_pauses_and_then_by_what_is_right_by_then(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logging.getLogger("forebay").propagate = True
    bench = Bench()
    await bench.run(3)
    bench.queued, bench.ray.down = 9, True
    pauses: list[float] = []
    while len(pauses) < 12:
        bench.told()
        pause_s = await bench.scaler.turn()
        bench.clock.advance(pause_s)
        if pause_s != PERIOD_S:
            pauses.append(pause_s)
    assert max(pauses) <= PAUSE_MAX_S
    assert all(PERIOD_S * 2**n / 2 <= pause <= PERIOD_S * 2**n for n, pause in enumerate(pauses[:5], 1))
    assert all(pause >= PAUSE_MAX_S / 2 for pause in pauses[-4:])
    said = [record.getMessage() for record in caplog.records if "cannot scale now" in record.getMessage()]
    assert len(said) == len(pauses)
    assert "m: cannot scale now, tried again in" in said[0]
    assert "connection refused" in said[0]
    bench.queued, bench.ray.down = 0, False
    bench.told()
    assert await bench.scaler.turn() == PERIOD_S
    await bench.run(60)
    assert (bench.ray.target, len(bench.ray.replicas)) == (1, 1), "nobody waits any more: the second has come and gone"


# --- the calls themselves ---


class Dashboard:
    """An HTTP server that answers as Ray's dashboard does (Ray 2.60, python/ray/dashboard/modules/serve)."""

    def __init__(self) -> None:
        self.answer: tuple[int, Any] = (200, {})
        self.asked: list[tuple[str, str, str | None, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                outer.asked.append((self.command, self.path, self.headers.get("Authorization"), body))
                status, answer = outer.answer
                payload = json.dumps(answer).encode() if not isinstance(answer, bytes) else answer
                self.send_response(status)
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            do_GET = do_POST = _answer  # noqa: N815 - as the base class names them

            def log_message(self, format: str, *args: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def dashboard() -> Iterator[Dashboard]:
    running = Dashboard()
    yield running
    running.close()


def told(*states: str, target: int = 3) -> dict[str, Any]:
    replicas = [{"replica_id": f"r{number}", "state": state, "pid": 1} for number, state in enumerate(states)]
    deployment = {"name": "D", "target_num_replicas": target, "replicas": replicas}
    return {"applications": {"forebay": {"deployments": {"D": deployment}}}}


async def test_serve_is_asked_and_told_with_the_token(dashboard: Dashboard, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret-token\n")
    serve = ServeDashboard(ServeAccess(url=dashboard.url + "/", token_path=token), "forebay")
    dashboard.answer = (200, told("RUNNING", "STARTING", "RUNNING", "STOPPING", "RECOVERING"))
    assert await serve.deployed("D") == Deployed(3, frozenset({ReplicaId("r0"), ReplicaId("r2")}), 1)
    dashboard.answer = (200, {"message": "Scaling request received. Deployment will get scaled asynchronously."})
    await serve.keep("Replica-0-a b", 2)
    assert dashboard.asked == [
        ("GET", "/api/serve/applications/", "Bearer secret-token", None),
        (
            "POST",
            "/api/v1/applications/forebay/deployments/Replica-0-a%20b/scale",
            "Bearer secret-token",
            {"target_num_replicas": 2},
        ),
    ]


@pytest.mark.parametrize(
    ("status", "answer", "said"),
    [
        (412, {"error": "external_scaler_enabled=false"}, "answered 412: .*external_scaler_enabled=false"),
        (503, {"error": "Serve controller is not available"}, "answered 503"),
        (200, b"<html>", "Expecting value"),
        (200, {"applications": {}}, "says nothing of D that can be read: KeyError"),
        (200, told("RUNNING") | {"applications": None}, "says nothing of D that can be read: TypeError"),
    ],
)
async def test_what_serve_does_not_answer_is_said(dashboard: Dashboard, status: int, answer: Any, said: str) -> None:
    dashboard.answer = (status, answer)
    with pytest.raises(ServeCallError, match=said) as error:
        await ServeDashboard(ServeAccess(url=dashboard.url), "forebay").deployed("D")
    assert "Bearer" not in str(error.value)


async def test_a_dashboard_that_is_not_there_and_a_token_that_cannot_be_read_are_said(tmp_path: Path) -> None:
    gone = Dashboard()
    gone.close()
    with pytest.raises(ServeCallError, match="refused"):
        await ServeDashboard(ServeAccess(url=gone.url), "forebay").keep("D", 1)
    access = ServeAccess(url=gone.url, token_path=tmp_path / "nothing-here")
    with pytest.raises(ServeCallError, match="nothing-here"):
        await ServeDashboard(access, "forebay").keep("D", 1)


def test_a_model_with_scale_needs_the_dashboard() -> None:
    scaled = [Scaled(model="m", deployment="D", scale=ScaleConfig(max=2))]
    bench_clock = ManualClock()
    ray = Ray(bench_clock)
    with pytest.raises(UsageError, match="set the instance's serve"):
        scalers(scaled, {"m": Meter(1, 1, 0.0, 1)}, None, "forebay", ray, bench_clock)
    assert scalers([], {}, None, "forebay", ray, bench_clock) == []


async def test_it_runs_until_it_is_cancelled() -> None:
    bench = Bench()
    task = asyncio.create_task(bench.scaler.run())
    await asyncio.sleep(0)
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
