"""Several hosts with a Ray node each on one machine: network namespaces on a private bridge, so that one can be cut off.

Owns: the namespaces, Ray's processes in them, the deployment on them, and the end of all that. Needs root and `ip` (Debian:
iproute2). The first host has no GPU and begins alone, so that controller and router are there; every other host has A100s
that are imitated (their replicas run the engine on the CPU).

Invariant: whatever a test has done, every process in the namespaces and the namespaces themselves are gone when the context
is left; nobody else's are touched.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest

from cluster.model import ModelFolder
from deployments.app import replica_deployments
from deployments.settings import Instance, Profile, url_of
from tests.ray.conftest import Endpoint

PORT = 8000
"""Of the router, on the first host's address."""
_GCS_PORT = 6379
_REDIS_PORT = 6390
_START_S = 120.0
_NETWORKS = itertools.count()
_END_S = 30.0
_POLL_S = 0.05
REDIS = shutil.which("redis-server")
"""Where it is installed, GCS keeps what it knows in it and can be killed."""
_STARTS = 4
"""Of a node: on a busy machine its agents may not be there when its raylet wants them, which then gives up."""
_RAY = (sys.executable, "-m", "ray.scripts.scripts")


def cannot() -> str:
    """Why this machine cannot have such hosts; empty where it can."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "hosts in network namespaces need root and `ip` (Debian: apt-get install iproute2)"
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
        return "this machine makes no network namespaces"
    return ""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=_END_S)


def wait_for(holds: Callable[[], object], what: str, within_s: float = _START_S) -> None:
    """What `ip` and Ray do cannot be awaited. Raises TimeoutError."""
    deadline_s = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{what}: not within {within_s:g} s")
        time.sleep(_POLL_S)


@dataclass(frozen=True)
class Host:
    """One of them: a namespace of this name, and the end of its cable that others hold."""

    name: str
    cable: str
    address: str
    gpus: int

    def cut(self) -> None:
        """Pull its cable."""
        _ip("link", "set", self.cable, "down")

    def heal(self) -> None:
        _ip("link", "set", self.cable, "up")

    def start(
        self, *command: str, environment: Mapping[str, str], log: Path, talks: bool = False
    ) -> subprocess.Popen[str]:
        """A process there. One that `talks` is written and read by lines; others say it all in the log."""
        with log.open("a") as sink:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, *command],
                stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
                stdout=subprocess.PIPE if talks else sink,
                stderr=sink,
                env=os.environ | environment,
                text=True,
            )

    def pids(self) -> list[int]:
        """Of all that runs there."""
        said = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=False)
        return [int(pid) for pid in said.stdout.split()]

    def processes(self, name: str = "") -> list[psutil.Process]:
        """Those that run there, of this name or all."""
        found = []
        for pid in self.pids():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE and name in {"", process.name()}:
                    found.append(process)
        return found

    def kill(self, name: str) -> None:
        """SIGKILL to the one process there that has this name."""
        (process,) = self.processes(name)
        process.kill()

    def end(self) -> None:
        """Kill all that runs there."""

        def ended() -> bool:
            alive = self.processes()
            for process in alive:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            return not alive

        wait_for(ended, f"the processes on {self.name} end", _END_S)


@dataclass
class Hosts(Endpoint):
    """They, and Forebay on them. `url` is the router's."""

    all: list[Host]
    folder: Path
    model: ModelFolder
    environment: dict[str, str]
    logs: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def head(self) -> Host:
        """The first: GCS, Serve's own controller, ours and the router."""
        return self.all[0]

    @property
    def workers(self) -> list[Host]:
        return self.all[1:]

    def on(self, host: Host) -> dict[str, int]:
        """Process ids of the replicas on a host, by replica."""
        cluster = self.status()["cluster"]
        told = cluster["replicas"] if cluster else ()
        return {r["entry"]["replica_id"]: r["pid"] for r in told if r["entry"]["host"] == host.address}

    def start_ray(self, host: Host) -> None:
        """A node there."""
        options, environment = self._node(host)
        for _ in range(_STARTS):
            if host is self.head and REDIS is not None:
                self._start(host, REDIS, "--bind", "127.0.0.1", "--port", str(_REDIS_PORT), "--save", "")
            if self._start(host, *_RAY, "start", *options, environment=environment).wait(_START_S) == 0:
                return
            host.end()
        raise AssertionError(self.said())

    def start_pod(self, host: Host, leave_s: float) -> subprocess.Popen[str]:
        """A node there as the first process of a pod is one: on SIGTERM what runs on it is given `leave_s` to leave it.
        Returns once it has replicas."""
        options, environment = self._node(host)
        environment["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = str(leave_s)
        for _ in range(_STARTS):
            pod = self._start(host, *_RAY, "start", "--block", *options, environment=environment)
            wait_for(lambda pod=pod: pod.poll() is not None or self.on(host), f"replicas on {host.name}")  # type: ignore[misc]
            if pod.poll() is None:
                return pod
            host.end()
        raise AssertionError(self.said())

    def _node(self, host: Host) -> tuple[list[str], dict[str, str]]:
        """How `ray start` is told of it: options and environment."""
        address = f"{self.head.address}:{_GCS_PORT}"
        of_head = ["--head", f"--port={_GCS_PORT}", "--include-dashboard=false"]
        of_worker = [f"--address={address}"]
        of_gpus = ["--resources", json.dumps({"accelerator_type:A100": 1})] if host.gpus else []
        options = [
            *(of_head if host is self.head else of_worker),
            f"--node-ip-address={host.address}",
            # One for each, or two that start at once might name their sockets alike.
            f"--temp-dir={self.folder / host.name}",
            "--num-cpus=2",
            f"--num-gpus={host.gpus}",
            f"--object-store-memory={80 * 2**20}",
            "--disable-usage-stats",
            *of_gpus,
        ]
        environment = {}
        if host is self.head and REDIS is not None:
            environment["RAY_REDIS_ADDRESS"] = f"127.0.0.1:{_REDIS_PORT}"
        if host.gpus:
            environment["RAY_OVERRIDE_LABELS"] = json.dumps({"ray.io/accelerator-type": "A100"})
        return options, environment

    def mend(self) -> None:
        """Put every cable back and start a node where there is none."""
        for host in self.all:
            host.heal()
        for host in self.workers:
            if not host.processes("raylet"):
                self.start_ray(host)

    def deploy(self, *words: str, talks: bool = False) -> subprocess.Popen[str]:
        """tests/ray/deploy.py on the first host."""
        command = (sys.executable, "-m", "tests.ray.deploy", str(self.folder), f"{self.head.address}:{_GCS_PORT}")
        return self._start(self.head, *command, *words, talks=talks)

    @contextlib.contextmanager
    def scaling(self) -> Iterator[Callable[[int], None]]:
        """A function that has Serve keep so many replicas; whom it stops is its choice."""
        (deployment,) = replica_deployments([self.model.name])
        with self.deploy("scale", deployment, talks=True) as process:
            asks, answers = process.stdin, process.stdout
            assert asks is not None
            assert answers is not None
            assert answers.readline(), self.said()

            def scale(replicas: int) -> None:
                asks.write(f"{replicas}\n")
                asks.flush()
                assert answers.readline(), self.said()

            yield scale

    @contextlib.contextmanager
    def without_gcs(self) -> Iterator[None]:
        """Ray's GCS is killed, and started again as it was."""
        (gcs,) = self.head.processes("gcs_server")
        command, environment = gcs.cmdline(), gcs.environ()
        gcs.kill()
        try:
            yield
        finally:
            self._start(self.head, *command, environment=environment)

    def ended(self, process: subprocess.Popen[str]) -> None:
        """Wait for the end of what was started. Raises AssertionError where it failed."""
        assert process.wait(_START_S) == 0, self.said()

    def said(self) -> str:
        """The end of what was printed on each host."""
        return "\n".join(f"{log.name}: {log.read_text()[-3000:]}" for log in sorted(self.logs.glob("*.log")))

    def _start(
        self, host: Host, *command: str, environment: Mapping[str, str] | None = None, talks: bool = False
    ) -> subprocess.Popen[str]:
        with_ours = self.environment | dict(environment or {})
        process = host.start(*command, environment=with_ours, log=self.logs / f"{host.name}.log", talks=talks)
        self.started.append(process)
        return process


@contextlib.contextmanager
def hosts(model: ModelFolder, folder: Path, profile: Mapping[str, object], gpus: Sequence[int]) -> Iterator[Hosts]:
    """A first host and one for each of `gpus`, which has so many, once every replica is known. Skips the test that asks
    where this machine cannot have them."""
    if why := cannot():
        pytest.skip(why)
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(network(1 + len(gpus), gpus))
        # Short, for Ray puts sockets deep below it and their paths may have 107 characters.
        ray_folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fb-", ignore_cleanup_errors=True)))
        for name in ("ray-token", "secret"):
            (ray_folder / name).touch(mode=0o600)
            (ray_folder / name).write_text(os.urandom(32).hex())
        address = made[0].address
        fields = {"replicas": sum(gpus), "gpus_per_replica": 1, "accelerator_type": "A100", "listen": "node"}
        router = {"host": address, "port": PORT, "auth": "none"}
        whole = Profile.model_validate({**fields, "router": router, **profile})
        instance = Instance(profile=whole, model_folders=(model.path,), secret_path=ray_folder / "secret")
        instance_file = ray_folder / "instance.json"
        instance_file.write_text(instance.model_dump_json())
        folder.mkdir(parents=True, exist_ok=True)
        running = Hosts(
            url_of(address, PORT),
            made,
            ray_folder,
            model,
            {
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN_PATH": str(ray_folder / "ray-token"),
                "RAY_USAGE_STATS_ENABLED": "0",
                # A host that is silent is given up after 20 s, where Ray takes a minute.
                "RAY_health_check_period_ms": "2000",
                "RAY_health_check_timeout_ms": "2000",
                "RAY_health_check_failure_threshold": "5",
                "RAY_worker_niceness": "0",
                "RAY_prestart_worker_first_driver": "0",
                "OMP_NUM_THREADS": "1",
            },
            folder,
        )
        stack.callback(_end, running)
        running.start_ray(running.head)
        deployed = running.deploy("run", str(instance_file))
        wait_for(lambda: _answers(running) or deployed.poll(), "the router answers")
        for host in running.workers:
            running.start_ray(host)
        running.ended(deployed)
        wait_for(lambda: len(running.replicas()) == sum(gpus), "every replica is known")
        yield running


def _answers(running: Hosts) -> bool:
    try:
        return httpx.get(f"{running.url}/health", timeout=2).is_success
    except httpx.TransportError:
        return False


def _end(running: Hosts) -> None:
    for host in running.all:
        host.end()
    for process in running.started:
        process.wait(_END_S)


@contextlib.contextmanager
def network(count: int, gpus: Sequence[int]) -> Iterator[list[Host]]:
    """So many namespaces that reach each other and this machine."""
    # Another name each time: the kernel may still be at removing what was there before.
    tag = f"fb{os.getpid()}-{next(_NETWORKS)}"
    bridge = f"{tag}b"
    subnet = _free_subnet()
    with contextlib.ExitStack() as stack:
        _ip("link", "add", bridge, "type", "bridge")
        stack.callback(_ip, "link", "del", bridge)
        _ip("addr", "add", f"{subnet}.1/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        made = []
        for number in range(count):
            name, cable, address = f"{tag}n{number}", f"{tag}v{number}", f"{subnet}.{10 + number}"
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name)
            _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", cable, "master", bridge, "up")
            inside = ("netns", "exec", name, "ip")
            _ip(*inside, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _ip(*inside, "link", "set", device, "up")
            # Ray finds a host's address by asking how the world is reached.
            _ip(*inside, "route", "add", "default", "via", f"{subnet}.1")
            made.append(Host(name, cable, address, 0 if number == 0 else gpus[number - 1]))
        yield made


def _free_subnet() -> str:
    """The first three numbers of 256 addresses that no interface of this machine has."""
    taken = {address.address for of in psutil.net_if_addrs().values() for address in of}
    return next(subnet for n in range(256) if f"{(subnet := f'10.99.{n}')}.1" not in taken)
