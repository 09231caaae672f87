"""The composition root: controllers, replicas and router as one Serve application."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ray import serve
from ray.serve import Application, Deployment

from deployments.controller import Controller
from deployments.engines import one_of, replica_options
from deployments.replica import Replica
from deployments.router import Router
from deployments.scaler import Scaled
from deployments.settings import Instance, ModelConfig

APPLICATION = "forebay"
NOTHING_KEPT: Mapping[str, int] = MappingProxyType({})
_LEAVING = ("STOPPING", "STOPPED", "PENDING_MIGRATION")
"""States of replicas that do not count for how many there are to be; in place of the last another is started."""
_LOOK_AT_CONTROLLERS_S = 0.25
"""Serve learns that a process has died when it next asks it for its health, and starts another."""
_UNSAFE = re.compile("[^A-Za-z0-9-]+")
"""In the name of a deployment, which is also part of the names of files and actors."""


def kept_by_serve() -> dict[str, int]:
    """How many replicas of each deployment Serve keeps now, by its name; none where the application does not run. Ray and
    Serve must be connected."""
    application = serve.status().applications.get(APPLICATION)
    if application is None:
        return {}
    return {
        name: sum(count for state, count in deployed.replica_states.items() if state not in _LEAVING)
        for name, deployed in application.deployments.items()
    }


def build(instance: Instance, kept: Mapping[str, int] = NOTHING_KEPT) -> Application:
    """The application for `serve.run(..., name=APPLICATION, route_prefix=None)`.

    A model with `scale` begins with as many replicas as it has by now (`kept`), within its bounds, but for none, which Serve
    does not deploy: what the load has made of it is not undone by an upgrade.

    Ray's CPU bookkeeping is left out (`num_cpus: 0`): on one machine the processes share its cores, and on a GPU node
    the GPU is what is scheduled.
    """
    profile = instance.profile
    fields = instance.model_dump(mode="json")
    grace_s = profile.health.drain_timeout_s

    def deployment(
        target: type,
        count: int,
        name: str,
        *,
        max_surge_percent: int = 0,
        health_check_period_s: float = 1,
        **resources: Any,
    ) -> Deployment:
        return serve.deployment(
            name=name,
            num_replicas=count,
            max_surge_percent=max_surge_percent,
            ray_actor_options={"num_cpus": 0, **resources},
            # One that cannot be constructed (a model that does not load) will not be at the third try either.
            max_constructor_retry_count=1,
            health_check_period_s=health_check_period_s,
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
    # Two deployments, so that each router and replica can be linked to both: of two replicas of one, Serve names one.
    controllers = [
        deployment(
            Controller,
            1,
            name,
            health_check_period_s=_LOOK_AT_CONTROLLERS_S,
            **one_of(profile.controller_resource),
        ).bind(fields, APPLICATION, scaled, place)
        for place, name in enumerate(("Controller", "Standby") if profile.control.standby else ("Controller",))
    ]
    replicas = [
        deployment(
            Replica, _begin_with(m.config, kept.get(names[m.name])), names[m.name], **replica_options(m.config)
        ).bind(fields, m.name, controllers)
        for m in models.values()
    ]
    # In an upgrade a new router comes before an old one goes, on the same port. A replica's place is free only once its
    # old one has gone, where every GPU is taken: it is replaced in place, one at a time; so is a router that has a pod.
    routers = deployment(
        Router,
        profile.routers,
        "Router",
        max_surge_percent=100 if profile.router_resource is None else 0,
        **one_of(profile.router_resource),
    )
    return routers.bind(fields, controllers, replicas)


def _begin_with(model: ModelConfig, kept: int | None) -> int:
    """Replicas."""
    if model.scale is None or kept is None:
        return model.replicas
    return max(1, model.scale.min, min(kept, model.scale.max))


def replica_deployments(models: Sequence[str]) -> tuple[str, ...]:
    """Names for the deployments of the replicas of these models, no two alike."""
    return tuple(f"Replica-{number}-{_UNSAFE.sub('-', model)}" for number, model in enumerate(models))
