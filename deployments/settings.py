"""What a deployment is told: the profile, the environment, and the facts of one instance.

Owns: the only reading of the environment and of profile files. Imports `cluster.config`; no Ray.
Invariant: everything is parsed and checked before anything is started.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, PositiveInt, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from cluster.config import Config, EngineConfig, HealthConfig, RouterConfig, TransportConfig
from cluster.smollm2 import default_cache

PROFILES = Path(__file__).parent / "profiles"


class UsageError(Exception):
    """What the user asked for cannot be; the message is one line that says what to change."""


class Environment(BaseSettings):
    """Every environment variable that Forebay reads, with the prefix FOREBAY_."""

    model_config = SettingsConfigDict(env_prefix="FOREBAY_", frozen=True, extra="ignore")

    cache_dir: Path = Field(
        default_factory=lambda: default_cache(os.environ),
        description="Converted models and the state of running instances.",
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    url: str | None = Field(
        None, description="The endpoint that `forebay status` asks; else the instance on this machine."
    )

    @property
    def models_dir(self) -> Path:
        return self.cache_dir / "models"

    @property
    def run_dir(self) -> Path:
        """One file per running instance of this user on this machine."""
        return self.cache_dir / "run"


class Profile(Config):
    """One deployment of Forebay. Files under deployments/profiles hold complete ones."""

    model: Path | None = Field(
        None, description="A model folder in Hugging Face form; none takes SmolLM2-135M-Instruct."
    )
    served_name: str | None = Field(None, description="The model's name in the API; none takes the folder's.")
    replicas: PositiveInt = Field(2, description="Engines, each in a process of its own.")
    listen: Literal["loopback", "node"] = Field(
        "loopback", description="Where replicas and controller listen: this machine only, or the node's address."
    )
    engine: EngineConfig = EngineConfig()
    router: RouterConfig = RouterConfig()
    transport: TransportConfig = TransportConfig()
    health: HealthConfig = HealthConfig()

    @model_validator(mode="after")
    def _patience_in_order(self) -> Profile:
        if self.router.fenced_after_s <= self.transport.reconnect_for_s:
            raise ValueError(
                "router.fenced_after_s must be longer than transport.reconnect_for_s: a link that is being made again "
                "is not yet a silent replica"
            )
        return self


class Instance(Config):
    """The facts of one running instance that its processes need beside the profile. Paths, never secrets."""

    profile: Profile
    model_folder: Path
    secret_path: Path
    log_level: str = "INFO"

    def secret(self) -> bytes:
        """Raises UsageError where the file cannot be read or is too short to be a secret."""
        try:
            secret = self.secret_path.read_bytes().strip()
        except OSError as error:
            raise UsageError(f"the cluster's secret cannot be read: {error}") from error
        if len(secret) < 32:
            raise UsageError(f"{self.secret_path} holds {len(secret)} bytes; the cluster's secret needs at least 32")
        return secret


def load_profile(name_or_path: str, overrides: dict[str, Any]) -> Profile:
    """Read a profile by name (deployments/profiles/NAME.yaml) or path and change the given keys.

    `overrides` maps dotted keys (`engine.dtype`) to values.

    Raises:
        UsageError: no such profile, not YAML, or a key or value that does not fit; the message names it.
    """
    path = Path(name_or_path)
    if path.suffix not in {".yaml", ".yml"}:
        path = PROFILES / f"{name_or_path}.yaml"
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        known = ", ".join(sorted(p.stem for p in PROFILES.glob("*.yaml")))
        raise UsageError(f"no profile {name_or_path!r} (known: {known}; or give the path of a .yaml file)") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if raw is None:
        raw = {}
    if not isinstance(raw, dict):
        raise UsageError(f"{path} must hold a mapping")
    for dotted, value in overrides.items():
        *parents, leaf = dotted.split(".")
        target = raw
        for parent in parents:
            target = target.setdefault(parent, {})
        target[leaf] = value
    try:
        return Profile.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise UsageError(f"profile {path.stem}: {where + ': ' if where else ''}{first['msg']}{more}") from error
