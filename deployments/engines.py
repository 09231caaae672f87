"""Which engine a replica runs: the one that its profile names.

Owns: the choice, what must be installed for it, and the GPU that it asks Ray for. Imports a backend when it is asked for,
so that a replica with one never loads the other.
"""

from __future__ import annotations

from typing import Any

from cluster.config import EngineConfig, EngineKind
from cluster.model import ModelFolder
from cluster.ports import Clock, EnginePort
from deployments.settings import ModelConfig, UsageError


def build_engine(model: ModelFolder, config: EngineConfig, clock: Clock) -> EnginePort:
    """An engine that waits for `start`. Once in a process, which it prepares for this engine.

    Raises:
        ModelFolderError: the model cannot be loaded or served.
        RuntimeError: vLLM is absent or another version, or its core did not start.
    """
    if config.kind is EngineKind.VLLM:
        from cluster.engine.vllm.build import build_vllm_engine

        return build_vllm_engine(model, config, clock)
    from cluster.engine.torch.build import build_embedded_engine, prepare_process

    prepare_process()
    return build_embedded_engine(model, config, clock)


def check_installed(config: EngineConfig) -> None:
    """Raises UsageError, with what to install, where this environment cannot run the engine."""
    if config.kind is not EngineKind.VLLM:
        return
    from cluster.engine.vllm.version import VllmVersionError, check_version

    try:
        check_version()
    except VllmVersionError as error:
        raise UsageError(str(error)) from error


def one_of(resource: str | None) -> dict[str, Any]:
    """What an actor asks of Ray that is to run where a resource is, as Ray names it."""
    return {} if resource is None else {"resources": {resource: 1}}


def replica_options(config: ModelConfig) -> dict[str, Any]:
    """What a replica asks of Ray, as Ray names it."""
    place = one_of(config.resource)
    if not config.gpus_per_replica:
        return place
    kind = {} if config.accelerator_type is None else {"accelerator_type": config.accelerator_type}
    return {"num_gpus": config.gpus_per_replica, **kind, **place}
