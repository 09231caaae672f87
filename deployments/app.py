"""The composition root: controller, replicas and router as one Serve application."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ray import serve
from ray.serve import Application, Deployment

from deployments.controller import Controller
from deployments.engines import gpu_options
from deployments.replica import Replica
from deployments.router import Router
from deployments.scaler import Scaled
from deployments.settings import Instance

APPLICATION = "forebay"
_UNSAFE = re.compile("[^A-Za-z0-9-]+")
"""In the name of a deployment, which is also part of the names of files and actors."""


def build(instance: Instance) -> Application:
    """The application for `serve.run(..., name=APPLICATION, route_prefix=None)`.

    Ray's CPU bookkeeping is left out (`num_cpus: 0`): on one machine the processes share its cores, and on a GPU node
    the GPU is what is scheduled.
    """
    profile = instance.profile
    fields = instance.model_dump(mode="json")
    grace_s = profile.health.drain_timeout_s

    def deployment(target: type, count: int, name: str, *, max_surge_percent: int = 0, **resources: Any) -> Deployment:
        return serve.deployment(
            name=name,
            num_replicas=count,
            max_surge_percent=max_surge_percent,
            ray_actor_options={"num_cpus": 0, **resources},
            # One that cannot be constructed (a model that does not load) will not be at the third try either.
            max_constructor_retry_count=1,
            health_check_period_s=1,
            health_check_timeout_s=10,
            graceful_shutdown_wait_loop_s=0.1,
            graceful_shutdown_timeout_s=grace_s + 10,
        )(target)

    models = instance.models()
    names = dict(zip(models, replica_deployments(list(models)), strict=True))
    scaled = [
        Scaled(model=m.name, deployment=names[m.name], scale=m.config.scale).model_dump(mode="json")
        for m in models.values()
        if m.config.scale is not None
    ]
    controller = deployment(Controller, 1, "Controller").bind(fields, APPLICATION, scaled)
    replicas = [
        deployment(Replica, m.config.replicas, names[m.name], **gpu_options(m.config)).bind(fields, m.name, controller)
        for m in models.values()
    ]
    # In an upgrade a new router comes before an old one goes, on the same port. A replica's place is free only once its
    # old one has gone, where every GPU is taken: it is replaced in place, one at a time.
    return deployment(Router, profile.routers, "Router", max_surge_percent=100).bind(fields, controller, replicas)


def replica_deployments(models: Sequence[str]) -> tuple[str, ...]:
    """Names for the deployments of the replicas of these models, no two alike."""
    return tuple(f"Replica-{number}-{_UNSAFE.sub('-', model)}" for number, model in enumerate(models))
