"""`bench router` from beginning to end: the environment of the peers, the processes, the rounds, what is shown.

Owns: starting and ending every process, and the order of the rounds. Imports the measurement, the workers and the
report. Invariants: no process outlives the benchmark; all run at once, and only one router has work at a time.
"""

from __future__ import annotations

import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import httpx
import msgspec
import psutil
from rich.console import Console

from cluster.metrics import REPLICAS_READY
from cluster.model import ModelFolder
from deployments.checks import free_ports
from deployments.settings import Instance, Profile
from ops.bench.peers.routers import HEALTH_PATH, command
from ops.bench.router import (
    OURS,
    REQUEST_CONCURRENCY,
    ROUTER,
    SOURCE,
    Figures,
    RouterPlan,
    added_ttft,
    open_streams,
    per_request,
    per_token,
    report_rows,
    singly,
    table,
)
from ops.bench.router_wire import (
    REPLICAS,
    WINDOW_S,
    Answer,
    Counted,
    Failed,
    Line,
    Listening,
    Opened,
    OpenStreams,
    Pace,
    Probed,
    Probes,
    Question,
    Requests,
    Streams,
    Windows,
)
from ops.bench.worker import Worker, WorkerError
from ops.errors import CommandError
from ops.report import Context, Report, counting_bar, machine_context, print_table

ROOT = Path(__file__).parents[2]
PEERS_BIN = ROOT / ".venv-routers" / "bin"
START_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 180.0
"""More than any question takes, whose own waits are bounded."""
_POLL_S = 0.05

T = TypeVar("T")

_listening = msgspec.json.Decoder(Listening).decode
_pace = msgspec.json.Decoder(Pace).decode
_answer: Callable[[bytes], Answer] = msgspec.json.Decoder(Answer).decode


@dataclass(frozen=True, slots=True)
class RouterBench:
    """What was asked for on the command line."""

    model: ModelFolder
    against: tuple[str, ...]
    plan: RouterPlan
    seed: int


class Part(Worker):
    """One process of the benchmark. It ends when this is closed."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        super().__init__(name, command, {})

    def pids(self) -> tuple[int, ...]:
        """Its own and those of its children."""
        process = psutil.Process(self._process.pid)
        return (process.pid, *(child.pid for child in process.children(recursive=True)))

    def tell(self, line: Line) -> None:
        self._write(msgspec.json.encode(line) + b"\n")

    def hear(self, decode: Callable[[bytes], T], timeout_s: float) -> T:
        """Its next line.

        Raises:
            WorkerError: it said something else, nothing in that time, or ended.
        """
        line = self._read_line(timeout_s)
        if line is None:
            raise WorkerError(f"{self.name}: no answer for {timeout_s:.0f} s{self._last_words()}")
        try:
            return decode(line)
        except msgspec.MsgspecError as error:
            raise WorkerError(f"{self.name}: {error}{self._last_words()}") from error

    def until_up(self, url: str) -> None:
        """Wait until this URL answers 200.

        Raises:
            WorkerError: it does not, in START_TIMEOUT_S, or the process ended.
        """
        self.until(partial(_answers, url), f"no answer at {url}")

    def until(self, holds: Callable[[], bool], otherwise: str) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not holds():
            if self._process.poll() is not None:
                raise WorkerError(f"{self.name}: ended with {self._process.returncode}{self._last_words()}")
            if time.monotonic() > deadline_s:
                raise WorkerError(f"{self.name}: {otherwise} in {START_TIMEOUT_S:.0f} s{self._last_words()}")
            time.sleep(_POLL_S)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=1.0).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def _all_linked(url: str) -> bool:
    try:
        text = httpx.get(f"{url}/metrics", timeout=1.0).text
    except httpx.TransportError:
        return False
    found = re.search(rf"^{REPLICAS_READY.name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
    return found is not None and float(found[1]) == REPLICAS


@dataclass(frozen=True, slots=True)
class Target:
    """One router that can be asked, and the process that makes its tokens."""

    name: str
    router: Part
    port: int
    source: Part

    @property
    def processes(self) -> Mapping[str, tuple[int, ...]]:
        return {ROUTER: self.router.pids(), SOURCE: self.source.pids()}


class Bench:
    """All processes, and the questions to the load client."""

    def __init__(self, bench: RouterBench, folder: Path, stack: ExitStack) -> None:
        self._model = bench.model.name
        self._folder = folder
        self._stack = stack
        self._seed = bench.seed
        self._client = self._start("load client", "ops.bench.router_load")
        self._mock = self._start("mock servers", "ops.bench.router_mock")
        self.mock_ports = self._mock.hear(_listening, START_TIMEOUT_S).ports
        self.ours = self._ours(bench.model)
        self.targets = [self.ours, *(self._peer(name) for name in bench.against)]

    def _start(self, name: str, module: str, *arguments: str) -> Part:
        return self._stack.enter_context(_closing(Part(name, (sys.executable, "-m", module, *arguments))))

    def _ours(self, model: ModelFolder) -> Target:
        secret_path = self._folder / "secret"
        secret_path.touch(mode=0o600)
        secret_path.write_text(secrets.token_hex(32))
        # Without affinity: the chats' common beginning would bring all of them to one replica, and the others take turns.
        router_config = {"port": 0, "affinity_weight": 0.0}
        profile = Profile.model_validate({"served_name": model.name, "replicas": REPLICAS, "router": router_config})
        instance = Instance(profile=profile, model_folders=(model.path,), secret_path=secret_path)
        instance_path = self._folder / "instance.json"
        instance_path.write_text(instance.model_dump_json())
        replicas = self._start("mock replicas", "ops.bench.router_replicas", str(instance_path))
        (controller_port,) = replicas.hear(_listening, START_TIMEOUT_S).ports
        router = self._start(OURS, "ops.bench.router_ours", str(instance_path), str(controller_port))
        (port,) = router.hear(_listening, START_TIMEOUT_S).ports
        router.until(partial(_all_linked, f"http://127.0.0.1:{port}"), "not all replicas are linked")
        return Target(OURS, router, port, replicas)

    def _peer(self, name: str) -> Target:
        port = free_ports("127.0.0.1", 2)
        started = command(name, PEERS_BIN, port, port + 1, self.mock_ports)
        # Whatever it logs goes to the file that `Worker` keeps; nobody reads its standard output.
        router = Part(name, ("/bin/sh", "-c", 'exec "$0" "$@" >&2', *started))
        self._stack.enter_context(_closing(router))
        router.until_up(f"http://127.0.0.1:{port}{HEALTH_PATH}")
        return Target(name, router, port, self._mock)

    def ask(self, question: Question) -> Answer:
        """Raises CommandError where it could not be measured."""
        self._client.tell(question)
        line = self._client.hear(_answer, ANSWER_TIMEOUT_S)
        if isinstance(line, Failed):
            raise CommandError(f"the load client: {line.error}")
        return line

    def next_seed(self) -> int:
        """Prompts of no two questions are alike."""
        self._seed += 1
        return self._seed

    def streams(self, target: Target, count: int, plan: RouterPlan) -> tuple[Counted, ...]:
        answer = self.ask(
            Streams((target.port,), self._model, self.next_seed(), count, plan.warm_s, plan.windows, target.processes)
        )
        assert isinstance(answer, Windows), answer
        return answer.counted

    def pace(self, pace: Pace) -> None:
        """Of our replicas."""
        self.ours.source.tell(pace)
        self.ours.source.hear(_pace, START_TIMEOUT_S)

    def requests(self, target: Target, pretokenised: bool, plan: RouterPlan) -> Counted:
        answer = self.ask(
            Requests(
                (target.port,),
                self._model,
                self.next_seed(),
                REQUEST_CONCURRENCY,
                pretokenised,
                plan.warm_s,
                plan.request_s,
                target.processes,
            )
        )
        assert isinstance(answer, Counted), answer
        return answer

    def open_streams(self, count: int) -> int:
        """What so many hold in our router, in bytes of resident memory."""
        self.pace(Pace(idle=True))
        port, pids = self.ours.port, self.ours.router.pids()
        answer = self.ask(OpenStreams((port,), self._model, self.next_seed(), count, pids))
        self.pace(Pace())
        assert isinstance(answer, Opened), answer
        return answer.grown_bytes

    def probes(self, ports: tuple[int, ...], plan: RouterPlan) -> tuple[float, ...]:
        answer = self.ask(Probes(ports, self._model, self.next_seed(), plan.half_load, plan.warm_s, plan.probes))
        assert isinstance(answer, Probed), answer
        return answer.ttft_ms


@contextmanager
def _closing(part: Part) -> Iterator[Part]:
    try:
        yield part
    finally:
        part.close()


def ensure_peers() -> None:
    """Make the peers' environment where it is absent or out of date.

    Raises:
        CommandError: this is no checkout, or it could not be made.
    """
    if not (ROOT / "Makefile").is_file():
        raise CommandError("--against: its environment is made by `make routers`, which needs Forebay's checkout")
    try:
        made = subprocess.run(["make", "routers"], cwd=ROOT, stdout=sys.stderr, check=False)
    except OSError as error:
        raise CommandError(f"--against: make cannot be run: {error.strerror}") from error
    if made.returncode != 0:
        raise CommandError(f"--against: `make routers` failed (exit code {made.returncode})")


def run(bench: RouterBench, out: Console, errors: Console) -> Report:
    """Measure and print the table.

    Raises:
        CommandError: an environment could not be made, or a router failed.
    """
    if bench.against:
        ensure_peers()
    try:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            figures = _measure(bench, Bench(bench, Path(folder), stack), errors)
    except WorkerError as error:
        raise CommandError(str(error)) from error
    header, rows = table(figures, bench.plan.streams, bench.against)
    idle = figures.values["machine.idle_share"]
    notes = [
        f"{bench.plan.rounds} alternating rounds; the machine was {100 * min(idle):.0f} to {100 * max(idle):.0f} % idle "
        f"while streams ran; {figures.windows_left_out} of {figures.windows} windows left out: under 99 % of tokens came singly",
        "µs: CPU time of the router's process, user and system",
    ]
    print_table(out, header, rows, notes=notes)
    return Report("bench router", _context(bench, figures), report_rows(figures, bench.plan.streams, bench.against))


def _measure(bench: RouterBench, parts: Bench, errors: Console) -> Figures:
    plan, figures, targets = bench.plan, Figures(), parts.targets
    per_round = len(plan.streams) * len(targets) + 1 + len(targets) + 1 + 1 + len(targets)
    with counting_bar(errors) as bar:
        task = bar.add_task("", total=1 + plan.rounds * per_round)

        def begins(what: str) -> None:
            bar.update(task, description=what)

        def ended() -> None:
            bar.advance(task)

        begins(f"{OURS}, {plan.open_streams} open streams")
        open_streams(figures, plan.open_streams, parts.open_streams(plan.open_streams))
        ended()
        for number in range(plan.rounds):
            # Who goes first changes, so that what slowly changes on the machine changes it for all alike.
            order = targets[number % len(targets) :] + targets[: number % len(targets)]
            for count in plan.streams:
                for target in order:
                    what = f"{target.name}, {count} streams"
                    begins(what)
                    for counted in singly(partial(parts.streams, target, count, plan), figures, what):
                        per_token(figures, target.name, str(count), counted)
                    ended()
            fewest = plan.streams[0]
            what = f"{OURS}, {fewest} streams, a frame each"
            begins(what)
            parts.pace(Pace(scattered=True))
            for counted in singly(partial(parts.streams, parts.ours, fewest, plan), figures, what):
                per_token(figures, OURS, f"own_frames_{fewest}", counted)
            parts.pace(Pace())
            ended()
            for target in order:
                begins(f"{target.name}, requests")
                per_request(figures, target.name, "cpu_us_per_request", parts.requests(target, False, plan))
                ended()
            begins(f"{OURS}, requests of token ids")
            counted = parts.requests(parts.ours, True, plan)
            per_request(figures, OURS, "cpu_us_per_request_pretokenised", counted)
            ended()
            begins("first tokens without a router")
            direct_ms = parts.probes(parts.mock_ports, plan)
            ended()
            for target in order:
                begins(f"{target.name}, first tokens")
                added_ttft(figures, target.name, direct_ms, parts.probes((target.port,), plan))
                ended()
    return figures


def _context(bench: RouterBench, figures: Figures) -> Context:
    return machine_context(("uvicorn", "uvloop")) | {
        "model": bench.model.name,
        "against": list(bench.against),
        "streams": list(bench.plan.streams),
        "rounds": bench.plan.rounds,
        "windows": figures.windows,
        "windows_left_out": figures.windows_left_out,
        "window_s": WINDOW_S,
        "half_load_streams": bench.plan.half_load,
        "open_streams": bench.plan.open_streams,
        "replicas": REPLICAS,
        "seed": bench.seed,
    }
