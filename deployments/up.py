"""Forebay on this machine alone: a Ray cluster of its own, the application on it, and its end.

Owns: what `forebay serve` does, from the checks before anything starts to the last process gone. Two instances on one
machine share nothing: each has its own Ray cluster, token, secret and temporary folder.

Invariant: whatever ends it (first Ctrl-C: streams finish; second: at once; an error while starting), every process and
file that it made is gone afterwards, and no other process is touched: children are ended by pid, after their start time
has been compared.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import msgspec
import psutil

from cluster.engine.memory import memory_bytes
from cluster.model import ModelFolder, ModelFolderError
from cluster.smollm2 import ensure_smollm2
from deployments.engines import check_installed
from deployments.settings import Environment, Instance, Profile, UsageError, open_keys

_READY_TIMEOUT_S = 300.0
_POLL_S = 0.1
_WATCH_S = 2.0
_FOLDER_PREFIX = "forebay-"
_RAY_PROCESSES = frozenset({"raylet", "gcs_server"})
"""Without these nothing works; Serve starts everything else again by itself."""
_CHILDREN_GRACE_S = 5.0
_RAY_BYTES = 1 << 30
"""What Ray's own processes, router and controller take on one machine, rounded up."""


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


def preflight(profile: Profile, model: ModelFolder) -> None:
    """Check what would otherwise fail late and obscurely.

    Raises:
        UsageError: the engine is not installed, the keys cannot be read, the port is in use, memory is short, or the
            model's files do not say how much it takes.
    """
    check_installed(profile.engine)
    open_keys(profile.router)
    _check_port(profile.router.host, profile.router.port)
    if not profile.gpus_per_replica:  # on a GPU weights and KV blocks lie in its memory, which the engine looks at
        _check_memory(profile, model)


def _check_memory(profile: Profile, model: ModelFolder) -> None:
    try:
        need = profile.replicas * memory_bytes(model, profile.engine) + _RAY_BYTES
    except ModelFolderError as error:
        raise UsageError(str(error)) from error
    have = psutil.virtual_memory().available
    if need > have:
        raise UsageError(
            f"too little memory: {profile.replicas} replicas of {model.name} need about {need / 2**30:.1f} GiB, "
            f"{have / 2**30:.1f} GiB are available; lower REPLICAS (--replicas), or DTYPE=bfloat16 (--dtype)"
        )


def check_gpus(profile: Profile, resources: Mapping[str, float]) -> None:
    """Ray would wait for GPUs that its machines do not have. `resources` are the cluster's, as Ray names them.

    Raises:
        UsageError: there are too few GPUs, or none of the kind.
    """
    need, have = profile.replicas * profile.gpus_per_replica, int(resources.get("GPU", 0))
    if need > have:
        raise UsageError(
            f"too few GPUs: {profile.replicas} replicas need {need}, Ray finds {have} here; lower REPLICAS (--replicas)"
        )
    prefix = "accelerator_type:"
    kinds = sorted(name.removeprefix(prefix) for name in resources if name.startswith(prefix))
    if profile.accelerator_type is not None and profile.accelerator_type not in kinds:
        raise UsageError(
            f"no {profile.accelerator_type} here, Ray finds {', '.join(kinds) or 'no kind of GPU'}; "
            "change accelerator_type in the profile, or leave it out"
        )


def with_port(profile: Profile) -> Profile:
    """Port 0 replaced by a free one: a router that is started again must come back where it was."""
    if profile.router.port:
        return profile
    family = socket.AF_INET6 if ":" in profile.router.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((profile.router.host, 0))
        port = probe.getsockname()[1]
    return profile.model_copy(update={"router": profile.router.model_copy(update={"port": port})})


def _check_port(host: str, port: int) -> None:
    """Ray would report a port in use only after ten seconds, as a failed deployment."""
    if port == 0:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UsageError(f"port {port} is in use on {host}; choose another with PORT=… (--port)") from error
            raise UsageError(f"cannot listen on {host}:{port}: {error.strerror}") from error


def open_model(profile: Profile, environment: Environment) -> ModelFolder:
    """The profile's model, or SmolLM2-135M-Instruct, converted once. Raises UsageError."""
    if profile.model is not None and not profile.model.expanduser().is_dir():
        raise UsageError(
            f"{profile.model} is not a folder; name the model's: MODEL=… (--model), or model in the profile"
        )
    try:
        folder = profile.model if profile.model is not None else ensure_smollm2(environment.models_dir)
        return ModelFolder.open(folder, profile.served_name)
    except ModelFolderError as error:
        raise UsageError(str(error)) from error


class InstanceState(msgspec.Struct, frozen=True):
    """What an instance writes of itself for other commands of the same user."""

    url: str
    """Empty while it starts."""
    pid: int
    model: str
    folder: str


class LocalInstance:
    """One running Forebay with its own Ray cluster. Use as a context manager: leaving it ends everything."""

    def __init__(self, profile: Profile, model: ModelFolder, environment: Environment) -> None:
        self._profile = with_port(profile)
        self._model = model
        self._environment = environment
        self._children: dict[int, float] = {}
        self._ray_processes: dict[str, tuple[int, float]] = {}
        self._handle: Any = None
        self._ray_started = False
        self._stack = contextlib.ExitStack()
        self.interrupts = Interrupts()
        self.url = ""
        # Short, for Ray puts sockets deep below it and their paths may have 107 characters.
        self._folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX))
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
        """Start everything and return when the router says that a replica answers.

        Raises:
            InterruptedBySignalError: a signal came meanwhile.
            UsageError: this machine lacks the GPUs, or a replica found that the model cannot be loaded or served.
            RuntimeError: Ray or the application did not start; the message names the logs.
        """
        self.interrupts.install()
        with progress.phase("Starting Ray"):
            self._start_ray()
        self.interrupts.check()
        with progress.phase("Starting controller, router and replicas") as detail:
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
            ray.init(
                address="local",
                num_cpus=max(os.cpu_count() or 1, 2),
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                namespace="forebay",
                object_store_memory=80 * 2**20,
                _temp_dir=str(self._folder / "ray"),
            )
        finally:
            self._note_children(before)
            self.interrupts.install()
        check_gpus(self._profile, ray.cluster_resources())  # type: ignore[no-untyped-call]
        for pid, started in self._children.items():
            for process in _same(pid, started):
                if process.name() in _RAY_PROCESSES:
                    self._ray_processes[process.name()] = (pid, started)

    def _start_application(self, detail: Callable[[str], None]) -> None:
        from ray import serve
        from ray.serve._private.constants import SERVE_LOGGER_NAME

        from deployments.app import APPLICATION, build

        logging.getLogger(SERVE_LOGGER_NAME).setLevel(logging.ERROR)
        instance = Instance(
            profile=self._profile,
            model_folder=self._model.path,
            secret_path=self._folder / "secret",
            log_level=self._environment.log_level,
        )
        serve.start(proxy_location="Disabled")
        target = serve.RunTarget(target=build(instance), name=APPLICATION, route_prefix=None)
        (self._handle,) = serve.run_many([target], wait_for_applications_running=False)
        deadline = time.monotonic() + _READY_TIMEOUT_S
        while not self._ready(detail):
            self.interrupts.check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"not ready after {_READY_TIMEOUT_S:.0f} s; {self._keep_logs()}")
            self.interrupts.wait(_POLL_S)

    def _ready(self, detail: Callable[[str], None]) -> bool:
        from ray import serve

        from deployments.app import APPLICATION

        application = serve.status().applications.get(APPLICATION)
        if application is None:
            return False
        if application.status == "DEPLOY_FAILED":
            reason = _reason(application)
            _, is_model, why = reason.partition(f"{ModelFolderError.__name__}: ")
            if is_model:
                raise UsageError(why)
            raise RuntimeError(f"it did not start: {reason}; {self._keep_logs()}")
        states = application.deployments["Replica"].replica_states if application.deployments else {}
        loaded = sum(count for state, count in states.items() if state == "RUNNING")
        detail(f"{loaded} of {self._profile.replicas} replicas loaded")
        if application.status != "RUNNING":
            return False
        if not self.url:
            self.url = self._handle.url.remote().result(timeout_s=10)
        return _answers(f"{self.url}/ready")

    def _keep_logs(self) -> str:
        """Copy Ray's logs to where they outlive this instance, in place of the last failure's; says where."""
        kept = self._environment.cache_dir / "last-failure"
        shutil.rmtree(kept, ignore_errors=True)
        with contextlib.suppress(OSError, shutil.Error):
            shutil.copytree(self._folder / "ray" / "session_latest" / "logs", kept, ignore=_only_files)
        return f"its logs were kept in {kept}"

    def _write_state(self) -> None:
        self._state_file.parent.mkdir(parents=True, exist_ok=True)
        state = InstanceState(self.url, os.getpid(), self._model.name, str(self._folder))
        temporary = self._state_file.with_suffix(".new")
        temporary.write_bytes(msgspec.json.encode(state))
        temporary.replace(self._state_file)

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
            done = self._handle.drain.remote()
            self._await(lambda: done.result(timeout_s=None), seen)
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


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:  # noqa: S310 - our own http URL
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def running_instances(environment: Environment) -> list[InstanceState]:
    """This user's instances on this machine, newest first. What killed ones left behind is removed."""
    found: list[tuple[float, InstanceState]] = []
    for path in environment.run_dir.glob("*.json"):
        try:
            state = msgspec.json.decode(path.read_bytes(), type=InstanceState)
            modified_s = path.stat().st_mtime
        except (OSError, msgspec.DecodeError):
            path.unlink(missing_ok=True)
            continue
        if psutil.pid_exists(state.pid):
            found.append((modified_s, state))
        else:
            folder = Path(state.folder)
            if folder.parent == Path(tempfile.gettempdir()) and folder.name.startswith(_FOLDER_PREFIX):
                shutil.rmtree(folder, ignore_errors=True)
            path.unlink(missing_ok=True)
    return [state for _, state in sorted(found, key=lambda item: -item[0])]
