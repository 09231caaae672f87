"""The composition root: controller, replicas and router as one Serve application."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve import Application, Deployment

from deployments.controller import Controller
from deployments.engines import gpu_options
from deployments.replica import Replica
from deployments.router import Router
from deployments.settings import Instance

APPLICATION = "forebay"


def build(instance: Instance) -> Application:
    """The application for `serve.run(..., name=APPLICATION, route_prefix=None)`.

    Ray's CPU bookkeeping is left out (`num_cpus: 0`): on one machine the processes share its cores, and on a GPU node
    the GPU is what is scheduled.
    """
    profile = instance.profile
    fields = instance.model_dump(mode="json")
    grace_s = profile.health.drain_timeout_s

    def deployment(target: type, count: int, **resources: Any) -> Deployment:
        return serve.deployment(
            name=target.__name__,
            num_replicas=count,
            ray_actor_options={"num_cpus": 0, **resources},
            # One that cannot be constructed (a model that does not load) will not be at the third try either.
            max_constructor_retry_count=1,
            health_check_period_s=1,
            health_check_timeout_s=10,
            graceful_shutdown_wait_loop_s=0.1,
            graceful_shutdown_timeout_s=grace_s + 10,
        )(target)

    controller = deployment(Controller, 1).bind(fields)
    replicas = deployment(Replica, profile.replicas, **gpu_options(profile)).bind(fields, controller)
    return deployment(Router, 1).bind(fields, controller, replicas)
