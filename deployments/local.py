"""Forebay on this machine alone: a Ray cluster of its own, the application on it, and its end.

Owns: what `forebay serve` does once its checks are passed (checks.py), to the last process gone. Two instances on one
machine share nothing: each has its own Ray cluster, token, secret and temporary folder.

Invariant: whatever ends it (first Ctrl-C: streams finish; second: at once; an error while starting), every process and
file that it made is gone afterwards, and no other process is touched: children are ended by pid, after their start time
has been compared.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import logging
import os
import secrets
import shutil
import signal
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import msgspec
import psutil

from cluster.model import ModelFolderError
from deployments.checks import check_gpus, with_port
from deployments.instances import FOLDER_PREFIX, InstanceState
from deployments.settings import Environment, Instance, Profile, ServeAccess, ServedModel, UsageError, url_of

_POLL_S = 0.1
_WATCH_S = 2.0
_RAY_PROCESSES = frozenset({"raylet", "gcs_server"})
"""Without these nothing works; Serve starts everything else again by itself."""
_CHILDREN_GRACE_S = 5.0
_READY_MAX_BYTES = 1 << 20


class InterruptedBySignalError(Exception):
    """A signal came while something was awaited."""


class Progress(Protocol):
    """How phases are shown; see ops/serve_cli.py."""

    def phase(self, name: str) -> contextlib.AbstractContextManager[Callable[[str], None]]:
        """A phase that lasts: yields a function that shows a detail."""
        ...


class Interrupts:
    """Counts SIGINT, SIGTERM and SIGHUP (the terminal was closed). Ray replaces handlers when it starts, so `install` is called after it again."""

    def __init__(self) -> None:
        self.count = 0
        self._event = threading.Event()

    def install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.count += 1
        self._event.set()

    def check(self, seen: int = 0) -> None:
        """Raises InterruptedBySignalError if more than `seen` signals have come."""
        if self.count > seen:
            raise InterruptedBySignalError

    def wait(self, timeout_s: float | None = None) -> None:
        """Sleep until the next signal, or for `timeout_s`."""
        self._event.wait(timeout_s)
        self._event.clear()


class LocalInstance:
    """One running Forebay with its own Ray cluster. Use as a context manager: leaving it ends everything."""

    def __init__(self, profile: Profile, models: Sequence[ServedModel], environment: Environment) -> None:
        self._profile = with_port(profile)
        self._models = models
        self._environment = environment
        self._children: dict[int, float] = {}
        self._ray_processes: dict[str, tuple[int, float]] = {}
        self._handle: Any = None
        self._ray_started = False
        self._scales = any(model.config.scale is not None for model in models)
        self._serve: ServeAccess | None = None
        self._stack = contextlib.ExitStack()
        self.interrupts = Interrupts()
        self.urls = tuple(url_of(self._profile.router.host, port) for port in self._profile.ports)
        """Of its routers."""
        self.url = ""
        """Of the first, once all are ready."""
        self._awaited = ""
        # Short, for Ray puts sockets deep below it and their paths may have 107 characters.
        self._folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
        self._state_file = environment.run_dir / f"{os.getpid()}.json"

    def __enter__(self) -> LocalInstance:
        self._write_state()
        # Ray prints to the driver's streams from threads of its own; what it says belongs with its logs.
        log = self._stack.enter_context((self._folder / "driver.log").open("w", encoding="utf-8"))
        self._stack.enter_context(contextlib.redirect_stdout(log))
        self._stack.enter_context(contextlib.redirect_stderr(log))
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self._end_hard()
        finally:
            self._stack.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._state_file.unlink(missing_ok=True)

    # --- start ---

    def start(self, progress: Progress) -> None:
        """Start everything and return when each router says that each model has a replica that answers.

        Raises:
            InterruptedBySignalError: a signal came meanwhile.
            UsageError: this machine lacks the GPUs, or a replica found that the model cannot be loaded or served.
            RuntimeError: Ray or the application did not start; the message names the logs.
        """
        self.interrupts.install()
        with progress.phase("Starting Ray"):
            self._start_ray()
        self.interrupts.check()
        with progress.phase("Starting controller, routers and replicas") as detail:
            self._start_application(detail)
        self._note_children(set())
        self._write_state()

    def _start_ray(self) -> None:
        token = self._folder / "ray-token"
        for path, content in ((token, secrets.token_hex(32)), (self._folder / "secret", secrets.token_hex(32))):
            path.touch(mode=0o600)
            path.write_text(content)
        os.environ.update(
            RAY_AUTH_MODE="token",
            RAY_AUTH_TOKEN_PATH=str(token),
            RAY_USAGE_STATS_ENABLED="0",
            RAY_DISABLE_IMPORT_WARNING="1",
            OMP_NUM_THREADS="1",
            # Ray would run workers at niceness 15: whatever else the machine does would come before urgent requests.
            RAY_worker_niceness="0",
            # Workers run our processes, not tasks: none in advance.
            RAY_prestart_worker_first_driver="0",
        )
        import ray

        before = _children()
        try:
            self._ray_started = True
            context = ray.init(
                address="local",
                num_cpus=max(os.cpu_count() or 1, 2),
                # Serve is told how many replicas there are to be through it; it takes eleven processes and 208 MB.
                include_dashboard=self._scales,
                log_to_driver=False,
                logging_level=logging.ERROR,
                namespace="forebay",
                object_store_memory=80 * 2**20,
                _temp_dir=str(self._folder / "ray"),
            )
        except SystemExit as error:  # of Ray's own handler of SIGTERM
            raise InterruptedBySignalError from error
        except Exception as error:  # it raises whatever comes to it, bare exceptions too
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise RuntimeError(f"Ray did not start: {why}; {self._keep_logs()}") from error
        finally:
            self._note_children(before)
            self.interrupts.install()
        if self._scales:
            self._serve = ServeAccess(url=f"http://{context.dashboard_url}", token_path=token)
        check_gpus(self._profile, ray.cluster_resources())  # type: ignore[no-untyped-call]
        for pid, started in self._children.items():
            for process in _same(pid, started):
                if process.name() in _RAY_PROCESSES:
                    self._ray_processes[process.name()] = (pid, started)

    def _start_application(self, detail: Callable[[str], None]) -> None:
        from ray import serve
        from ray.serve._private.constants import SERVE_LOGGER_NAME

        from deployments.app import APPLICATION, build, kept_by_serve

        logging.getLogger(SERVE_LOGGER_NAME).setLevel(logging.ERROR)
        instance = Instance(
            profile=self._profile,
            model_folders=tuple(model.folder.path for model in self._models),
            secret_path=self._folder / "secret",
            serve=self._serve,
            log_level=self._environment.log_level,
        )
        serve.start(proxy_location="Disabled")
        target = serve.RunTarget(
            target=build(instance, kept_by_serve()),
            name=APPLICATION,
            route_prefix=None,
            external_scaler_enabled=self._scales,
        )
        (self._handle,) = serve.run_many([target], wait_for_applications_running=False)
        limit_s = self._profile.health.start_timeout_s
        self._awaited = self._loaded({})
        deadline = time.monotonic() + limit_s
        while not self._ready(detail):
            self.interrupts.check()
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"not ready after {limit_s:g} s (health.start_timeout_s): {self._awaited}; {self._keep_logs()}"
                )
            self.interrupts.wait(_POLL_S)

    def _ready(self, detail: Callable[[str], None]) -> bool:
        from ray import serve

        from deployments.app import APPLICATION

        application = serve.status().applications.get(APPLICATION)
        if application is None:
            return False
        if application.status == "DEPLOY_FAILED":
            reason = _reason(application)
            for told in (ModelFolderError, UsageError):
                _, is_told, why = reason.partition(f"{told.__name__}: ")
                if is_told:
                    raise UsageError(why)
            raise RuntimeError(f"it did not start: {reason}; {self._keep_logs()}")
        self._awaited = self._loaded(application.deployments)
        detail(self._awaited)
        if application.status != "RUNNING":
            return False
        if not all(map(takes_work, self.urls)):
            return False
        self.url = self.urls[0]
        return True

    def _loaded(self, deployments: Mapping[str, Any]) -> str:
        """How many replicas of each model are loaded."""
        from deployments.app import replica_deployments

        parts = []
        for model, name in zip(self._models, replica_deployments([m.name for m in self._models]), strict=True):
            states = deployments[name].replica_states if name in deployments else {}
            loaded = sum(count for state, count in states.items() if state == "RUNNING")
            parts.append(f"{loaded} of {model.config.replicas} replicas of {model.name}")
        return f"{', '.join(parts)} loaded"

    def _keep_logs(self) -> str:
        """Copy Ray's logs to where they outlive this instance, in place of the last failure's; says where."""
        kept = self._environment.cache_dir / "last-failure"
        shutil.rmtree(kept, ignore_errors=True)
        with contextlib.suppress(OSError, shutil.Error):
            shutil.copytree(self._folder / "ray" / "session_latest" / "logs", kept, ignore=_only_files)
        return f"its logs were kept in {kept}"

    def _write_state(self) -> None:
        names = tuple(model.name for model in self._models)
        InstanceState(self.url, os.getpid(), names, str(self._folder)).write(self._state_file)

    def run(self) -> None:
        """Return at the next signal.

        Raises:
            RuntimeError: Ray's own processes ended meanwhile.
        """
        while not self.interrupts.count:
            gone = [name for name, (pid, started) in self._ray_processes.items() if not any(_same(pid, started))]
            if gone:
                raise RuntimeError(f"Ray has ended ({', '.join(gone)}); what it served is gone with it")
            self._note_children(set())
            self.interrupts.wait(_WATCH_S)

    # --- end ---

    def finish(self, progress: Progress) -> None:
        """Let every accepted request finish, then end everything. Raises InterruptedBySignalError at the next signal."""
        seen = self.interrupts.count
        with progress.phase("Finishing streams (Ctrl-C again ends at once)"):
            done = self._handle.broadcast("drain")
            # The synchronous `results` waits in a pool, whose threads Python joins at its exit: a router that was
            # replaced just then never answers, and the process would never end.
            self._await(lambda: asyncio.run(done.results_async(return_exceptions=True)), seen)
        with progress.phase("Stopping"):
            from ray import serve

            self._await(serve.shutdown, seen)

    def _await(self, function: Callable[[], object], seen: int) -> None:
        """Run in a thread and watch for a signal."""
        failure: list[BaseException] = []

        def run() -> None:
            try:
                function()
            except BaseException as error:
                failure.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        while thread.is_alive():
            self.interrupts.check(seen)
            thread.join(_POLL_S)
        if failure:
            logging.getLogger("forebay").warning("while stopping: %s", failure[0])

    def _end_hard(self) -> None:
        if self._ray_started:
            import ray

            self._note_children(set())
            ray.shutdown()
            self._end_children()

    def _note_children(self, before: set[tuple[int, float]]) -> None:
        """Remember whom we started: Ray's processes, and what those started since."""
        for pid, started in _children() - before:
            self._children[pid] = started
        for pid, started in list(self._children.items()):
            for process in _same(pid, started):
                with contextlib.suppress(psutil.Error):
                    for child in process.children(recursive=True):
                        self._children[child.pid] = child.create_time()

    def _end_children(self) -> None:
        """Wait for them to end by themselves, then end the rest by pid."""
        alive = [p for pid, started in self._children.items() for p in _same(pid, started)]
        _, alive = psutil.wait_procs(alive, timeout=_CHILDREN_GRACE_S)
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(alive, timeout=_CHILDREN_GRACE_S)


def _reason(application: Any) -> str:
    """The last line of what the first failed deployment says: the exception that its constructor raised."""
    for deployment in application.deployments.values():
        lines = [line.strip() for line in str(deployment.message).splitlines() if line.strip()]
        if deployment.status == "DEPLOY_FAILED" and lines:
            return lines[-1]
    return str(application.message)


def _only_files(folder: str, names: list[str]) -> set[str]:
    """For copytree: leave sockets and links out."""
    paths = [Path(folder) / name for name in names]
    return {path.name for path in paths if path.is_symlink() or not (path.is_file() or path.is_dir())}


def _children() -> set[tuple[int, float]]:
    found = set()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found.add((child.pid, child.create_time()))
    return found


def _same(pid: int, started: float) -> Iterator[psutil.Process]:
    """The process of that pid, if it is still the one that was started then."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        if process.create_time() == started and process.status() != psutil.STATUS_ZOMBIE:
            yield process


class _Ready(msgspec.Struct):
    models: dict[str, bool]


def takes_work(url: str) -> bool:
    """Whether the router takes work of every model. What answers otherwise than a router does not."""
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=2) as response:  # noqa: S310 - our own http URL
            models = msgspec.json.decode(response.read(_READY_MAX_BYTES), type=_Ready).models
    except (OSError, http.client.HTTPException, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return bool(models) and all(models.values())
