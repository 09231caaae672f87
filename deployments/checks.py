"""What is checked before anything is started, so that it does not fail late and obscurely.

Owns: whether a profile can run on this machine: its models' folders, its engines, ports, memory and GPUs. Starts nothing;
Ray is asked for nothing: its resources are an argument.
"""

from __future__ import annotations

import contextlib
import errno
import random
import socket
from collections.abc import Mapping, Sequence

import psutil

from cluster.engine.memory import memory_bytes
from cluster.model import ModelFolderError
from cluster.smollm2 import ensure_smollm2
from deployments.engines import check_installed
from deployments.instances import running_instances
from deployments.keys import open_keys
from deployments.settings import Environment, ModelConfig, Profile, ServedModel, UsageError, open_models

_PORT_TRIES = 100
_FREE_PORTS = range(20_000, 32_768)
"""Linux gives out those from 32,768 on, others from 49,152 on."""
_RAY_BYTES = 1 << 30
"""What Ray's own processes, router and controller take on one machine, rounded up."""


def find_models(profile: Profile, environment: Environment) -> tuple[ServedModel, ...]:
    """The profile's models, their folders read; SmolLM2-135M-Instruct, converted once, where one names no folder.

    Raises:
        UsageError: a folder is not there or cannot be served, or not as the profile says.
    """
    folders = []
    for config in profile.models:
        if config.model is not None and not config.model.expanduser().is_dir():
            raise UsageError(
                f"{config.model} is not a folder; name the model's: MODEL=… (--model), or model in the profile"
            )
        try:
            folders.append(config.model or ensure_smollm2(environment.models_dir))
        except ModelFolderError as error:
            raise UsageError(str(error)) from error
    return open_models(profile, folders)


def preflight(profile: Profile, models: Sequence[ServedModel], environment: Environment) -> None:
    """Check what would otherwise fail late and obscurely.

    Raises:
        UsageError: an engine is not installed, the keys cannot be read, the port is in use, memory is short, or a
            model's files do not say how much it takes.
    """
    for config in profile.models:
        check_installed(config.engine)
    open_keys(profile.router)
    for port in profile.ports if profile.router.port else ():
        _check_port(profile.router.host, port, environment)
    _check_memory([model for model in models if not model.config.gpus_per_replica])


def _check_memory(models: Sequence[ServedModel]) -> None:
    """Of models on the CPU: on a GPU weights and KV blocks lie in its memory, which the engine looks at."""
    try:
        need = sum(m.config.replicas_max * memory_bytes(m.folder, m.config.engine) for m in models)
    except ModelFolderError as error:
        raise UsageError(str(error)) from error
    have = psutil.virtual_memory().available
    if models and need + _RAY_BYTES > have:
        who = ", ".join(f"{m.config.replicas_max} of {m.name}" for m in models)
        raise UsageError(
            f"too little memory: the replicas ({who}) need about {(need + _RAY_BYTES) / 2**30:.1f} GiB, "
            f"{have / 2**30:.1f} GiB are available; lower {_count_key([m.config for m in models])}, or DTYPE=bfloat16 (--dtype)"
        )


def _count_key(configs: Sequence[ModelConfig]) -> str:
    """What says how many replicas there are at most."""
    return "scale.max" if any(config.scale is not None for config in configs) else "REPLICAS (--replicas)"


def check_gpus(profile: Profile, resources: Mapping[str, float]) -> None:
    """Ray would wait for GPUs that its machines do not have. `resources` are the cluster's, as Ray names them.

    Raises:
        UsageError: there are too few GPUs, or none of a kind.
    """
    on_gpus = [config for config in profile.models if config.gpus_per_replica]
    need = sum(config.replicas_max * config.gpus_per_replica for config in on_gpus)
    have = int(resources.get("GPU", 0))
    if need > have:
        replicas = sum(config.replicas_max for config in on_gpus)
        raise UsageError(
            f"too few GPUs: {replicas} replicas need {need}, Ray finds {have} here; lower {_count_key(on_gpus)}"
        )
    prefix = "accelerator_type:"
    kinds = sorted(name.removeprefix(prefix) for name in resources if name.startswith(prefix))
    for config in on_gpus:
        if config.accelerator_type is not None and config.accelerator_type not in kinds:
            raise UsageError(
                f"no {config.accelerator_type} here, Ray finds {', '.join(kinds) or 'no kind of GPU'}; "
                "change accelerator_type in the profile, or leave it out"
            )


def with_port(profile: Profile) -> Profile:
    """Port 0 replaced by a free one, with another after it for each further router: a router that is started again must
    come back where it was."""
    if profile.router.port:
        return profile
    port = free_ports(profile.router.host, profile.routers)
    return profile.model_copy(update={"router": profile.router.model_copy(update={"port": port})})


def free_ports(host: str, count: int) -> int:
    """The first of `count` free ports in a row, of those that no system gives out by itself: until they are taken a minute
    may pass, in which others connect and listen. Raises UsageError where there are none."""
    for _ in range(_PORT_TRIES):
        first = random.randrange(_FREE_PORTS.start, _FREE_PORTS.stop - count)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                probe = stack.enter_context(socket.socket(_family(host), socket.SOCK_STREAM))
                probe.bind((host, port))
            return first
    raise UsageError(f"no {count} free ports in a row on {host}; choose the first of them with PORT=… (--port)")


def _check_port(host: str, port: int, environment: Environment) -> None:
    """Ray would report a port in use only after ten seconds, as a failed deployment."""
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise UsageError(f"cannot listen on {host}:{port}: {error.strerror}") from error
            raise UsageError(
                f"port {port} is in use on {host}{_by_whom(port, environment)}; choose another with PORT=… (--port)"
            ) from error


def _by_whom(port: int, environment: Environment) -> str:
    """How to reach and to stop the instance that has it, where it is one of this user's."""
    for instance in running_instances(environment):
        if instance.url.endswith(f":{port}"):
            models = ", ".join(instance.models)
            return f" by your instance that serves {models} at {instance.url} (`kill -INT {instance.pid}` ends it)"
    return ""


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
