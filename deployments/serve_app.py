"""The application as Ray Serve's config file names it: `import_path: deployments.serve_app:build_app`.

For `serve deploy`, its REST call, and a RayService on Kubernetes:

    proxy_location: Disabled
    applications:
      - name: forebay
        route_prefix: null
        import_path: deployments.serve_app:build_app
        external_scaler_enabled: true  # where a model has `scale`
        args:
          secret_path: /run/forebay/secret
          profile: {...}  # as in a file of deployments/profiles

Owns: the form of `args`. Serve reads it in a process of its own, on any node, so whatever it names lies on every node.
Invariant: nothing is deployed of arguments that do not fit; the message names the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator
from ray.serve import Application

from cluster.config import Config
from deployments.settings import Instance, Profile, ServeAccess, UsageError, first_error


class ServeArgs(Config):
    """What the config file says under `args`."""

    profile: Profile
    secret_path: Path = Field(description="The file with the cluster's secret, 32 bytes at least, on every node.")
    dashboard_url: str | None = Field(
        None, description="Ray's dashboard; needed where a model has `scale`, for Serve is told through it."
    )
    token_path: Path | None = Field(
        None, description="The file with Ray's token, wherever a controller may run; none where Ray asks for none."
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"

    @model_validator(mode="after")
    def _holds_on_every_node(self) -> ServeArgs:
        for number, model in enumerate(self.profile.models):
            if model.model is None:
                raise ValueError(
                    f"profile.models[{number}].model must name a folder: the default model is fetched by one machine only"
                )
            if model.scale is not None and self.dashboard_url is None:
                raise ValueError(f"dashboard_url must be given: profile.models[{number}] has scale")
        for key, path in (("secret_path", self.secret_path), ("token_path", self.token_path)):
            if path is not None and not path.is_absolute():
                raise ValueError(f"{key}: {path} must be a whole path, for processes start in other folders")
        return self

    @property
    def instance(self) -> Instance:
        access = None if self.dashboard_url is None else ServeAccess(url=self.dashboard_url, token_path=self.token_path)
        return Instance(
            profile=self.profile,
            model_folders=tuple(m.model.expanduser().resolve() for m in self.profile.models if m.model is not None),
            secret_path=self.secret_path,
            serve=access,
            log_level=self.log_level,
        )


def build_app(args: Mapping[str, Any]) -> Application:
    """Serve calls this with the file's `args`. Of a model with `scale` as many replicas are kept as run.

    Raises:
        UsageError: they do not fit, or a model cannot be served; Serve tells it as the application's message.
    """
    from deployments.app import build, kept_by_serve

    try:
        told = ServeArgs.model_validate(args)
    except ValidationError as error:
        raise UsageError(f"args: {first_error(error)}") from error
    return build(told.instance, kept_by_serve())
