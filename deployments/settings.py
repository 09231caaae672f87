"""What a deployment is told: the profile, the environment, and the facts of one instance.

Owns: the only reading of the environment and of profile files. Imports `cluster.config`; no Ray.
Invariant: everything is parsed and checked before anything is started.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    Field,
    NonNegativeInt,
    PositiveInt,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, SettingsConfigDict

from cluster.config import (
    Config,
    ControlConfig,
    EngineConfig,
    EngineKind,
    HealthConfig,
    KubernetesConfig,
    MetricsConfig,
    RouterConfig,
    ScaleConfig,
    TransportConfig,
    is_loopback,
)
from cluster.model import ModelFolder, ModelFolderError
from cluster.smollm2 import default_cache
from cluster.types import PodRef

PROFILES = Path(__file__).parent / "profiles"
_DRAIN_NOTICE_S = 5.0
"""Two checks of a balancer, of two seconds each."""
_LAST_PORT = 65535
_VLLM_CPU_BLOCK_TOKENS = 32
"""vLLM's attention on CPUs has blocks of a multiple of this."""


class UsageError(Exception):
    """What the user asked for cannot be; the message is one line that says what to change."""


class Environment(BaseSettings):
    """Every environment variable that Forebay reads, with the prefix FOREBAY_."""

    model_config = SettingsConfigDict(
        env_prefix="FOREBAY_", frozen=True, extra="ignore", hide_input_in_errors=True
    )  # what a variable holds may be a secret

    cache_dir: Path = Field(
        default_factory=lambda: default_cache(os.environ),
        description="Converted models and the state of running instances.",
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    url: str | None = Field(
        None, description="The endpoint that `forebay status` asks; else the instance on this machine."
    )
    zone: str = Field(
        "",
        max_length=256,
        description="What fails together with this node, beyond the node: a zone, a rack. A replica tells its node's.",
    )
    node: str = Field("", max_length=253, description="The Kubernetes node that this process runs on.")
    pod: str = Field("", max_length=253, description="And its pod,")
    pod_uid: str = Field("", max_length=64, description="of which this is the identity.")
    api_key: SecretStr | None = Field(None, description="The key that `forebay` presents where an endpoint wants one.")
    grafana_token: SecretStr | None = Field(
        None, description="A service account's token, which `forebay dashboards push` presents to Grafana."
    )

    @field_validator("api_key", "grafana_token")
    @classmethod
    def _fits_a_header(cls, key: SecretStr | None) -> SecretStr | None:
        """White space around it comes with files that end with a line; a variable that is blank names no key."""
        told = "" if key is None else key.get_secret_value().strip()
        if not all("!" <= character <= "~" for character in told):
            raise ValueError("must be one word of printable ASCII characters, as a header has it")
        return SecretStr(told) if told else None

    @property
    def pod_ref(self) -> PodRef | None:
        return PodRef(self.pod, self.pod_uid) if self.pod else None

    @property
    def models_dir(self) -> Path:
        return self.cache_dir / "models"

    @property
    def credentials(self) -> dict[str, str]:
        """The headers that say who asks."""
        return {} if self.api_key is None else {"authorization": f"Bearer {self.api_key.get_secret_value()}"}

    @property
    def run_dir(self) -> Path:
        """One file per running instance of this user on this machine."""
        return self.cache_dir / "run"


def checked_environment() -> Environment:
    """Raises UsageError naming the variable that does not fit."""
    try:
        return Environment()
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = "_".join(str(part) for part in first["loc"]).upper()
        raise UsageError(f"FOREBAY_{name}: {first['msg'].removeprefix('Value error, ')}") from error


class ModelConfig(Config):
    """One model of a deployment, with the replicas that serve it and nothing else."""

    model: Path | None = Field(
        None,
        description="A model folder in Hugging Face form, as a whole path, the same on every node; none takes "
        "SmolLM2-135M-Instruct.",
    )
    served_name: str | None = Field(
        None, min_length=1, description="The model's name in the API; none takes the folder's."
    )
    aliases: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (), description="Further names that requests may give it; answers say the first one."
    )
    replicas: PositiveInt = Field(
        2, description="Engines, each in a process of its own; with `scale` as many as there are at the start."
    )
    scale: ScaleConfig | None = Field(
        None, description="Replicas come and go with what is asked of them; none keeps as many as `replicas` says."
    )
    gpus_per_replica: NonNegativeInt = Field(
        0, le=1, description="GPUs that Ray gives each replica for itself; 0 runs it on the CPU."
    )
    accelerator_type: str | None = Field(
        None, description="The kind of GPU that a replica may run on, as Ray names it (A100); none takes any."
    )
    resource: str | None = Field(
        None,
        min_length=1,
        description="A resource of Ray's nodes that each replica takes one of, beside its GPU: it runs where that is, and "
        "nowhere else.",
    )
    engine: EngineConfig = EngineConfig()

    @model_validator(mode="after")
    def _model_is_whole(self) -> ModelConfig:
        if self.model is not None and not self.model.expanduser().is_absolute():
            raise ValueError(f"model: {self.model} must be a whole path, for replicas start in other folders")
        return self

    @model_validator(mode="after")
    def _starts_within_its_scale(self) -> ModelConfig:
        if self.scale is not None and not max(self.scale.min, 1) <= self.replicas <= self.scale.max:
            raise ValueError(
                f"replicas ({self.replicas}) must be between scale.min ({self.scale.min}) and scale.max "
                f"({self.scale.max}): as many are started first, one at least"
            )
        return self

    @property
    def replicas_max(self) -> int:
        """What there must be room for."""
        return self.replicas if self.scale is None else self.scale.max

    @model_validator(mode="after")
    def _engine_has_its_device(self) -> ModelConfig:
        if self.gpus_per_replica:
            return self
        if self.accelerator_type is not None:
            raise ValueError(
                f"accelerator_type {self.accelerator_type!r} says nothing with gpus_per_replica 0: set it to 1"
            )
        engine = self.engine
        if engine.kind is EngineKind.VLLM and engine.block_size_tokens % _VLLM_CPU_BLOCK_TOKENS:
            raise ValueError(
                f"engine.block_size_tokens ({engine.block_size_tokens}) must be a multiple of {_VLLM_CPU_BLOCK_TOKENS}: "
                "on CPUs (gpus_per_replica 0) vLLM has no other"
            )
        if engine.vllm is not None and engine.vllm.gpu_memory_utilization is not None:
            raise ValueError(
                "engine.vllm.gpu_memory_utilization needs a GPU: set gpus_per_replica to 1, or state blocks"
            )
        return self


class Profile(Config):
    """One deployment of Forebay. Files under deployments/profiles hold complete ones.

    A profile of one model may have the keys of `ModelConfig` at its top level instead of `models`; read, it has the one
    entry that they make.
    """

    models: tuple[ModelConfig, ...] = Field(
        (ModelConfig(),), description="What is served, each by replicas of its own; one at least."
    )
    listen: Literal["loopback", "node"] = Field(
        "loopback", description="Where replicas and controller listen: this machine only, or the node's address."
    )
    routers: PositiveInt = Field(
        1,
        description="Routers, each in a process of its own. Those of one machine listen on router.port and the ports "
        "after it.",
    )
    router_resource: str | None = Field(
        None,
        min_length=1,
        description="A resource of Ray's nodes that each router takes one of. Each has a node, or a pod, of its own then, all "
        "listen on router.port, and in an upgrade each is replaced in its place.",
    )
    controller_resource: str | None = Field(
        None, min_length=1, description="A resource of Ray's nodes that each controller takes one of."
    )
    router: RouterConfig = RouterConfig()
    transport: TransportConfig = TransportConfig()
    control: ControlConfig = ControlConfig()
    health: HealthConfig = HealthConfig()
    metrics: MetricsConfig = MetricsConfig()
    kubernetes: KubernetesConfig | None = Field(
        None,
        description="The controller watches nodes and writes Events and a Lease; none: it has nothing to do with it.",
    )

    @model_validator(mode="before")
    @classmethod
    def _one_model(cls, raw: Any) -> Any:
        """Make the short form the long one."""
        if not isinstance(raw, Mapping):
            return raw
        short = {key: value for key, value in raw.items() if key in ModelConfig.model_fields}
        if "models" not in raw:
            return {key: value for key, value in raw.items() if key not in short} | {"models": (short,)}
        if short:
            raise ValueError(f"models and {', '.join(short)} are both given: move {', '.join(short)} into its entries")
        return raw

    @model_validator(mode="after")
    def _names_differ(self) -> Profile:
        """As far as they are stated; those of folders are known once these are opened."""
        if not self.models:
            raise ValueError("models must name at least one")
        check_names([name for m in self.models for name in (m.served_name, *m.aliases) if name is not None])
        return self

    @property
    def routers_of_a_machine(self) -> int:
        return self.routers if self.router_resource is None else 1

    @property
    def ports(self) -> range:
        """What routers of one machine listen on, where router.port is not 0."""
        return range(self.router.port, self.router.port + self.routers_of_a_machine)

    @property
    def drain_notice_s(self) -> float:
        """How long a router that stops serves on after it has said so."""
        if self.router.drain_notice_s is not None:
            return self.router.drain_notice_s
        return 0.0 if self.routers == 1 and is_loopback(self.router.host) else _DRAIN_NOTICE_S

    @model_validator(mode="after")
    def _ends_in_order(self) -> Profile:
        if self.drain_notice_s >= self.health.drain_timeout_s:
            raise ValueError(
                f"health.drain_timeout_s ({self.health.drain_timeout_s}) must be longer than router.drain_notice_s "
                f"({self.drain_notice_s}), which is a part of it"
            )
        if self.ports[-1] > _LAST_PORT:
            raise ValueError(
                f"routers ({self.routers}) need the ports {self.ports[0]} to {self.ports[-1]}: lower router.port"
            )
        return self

    @model_validator(mode="after")
    def _patience_in_order(self) -> Profile:
        if self.router.fenced_after_s <= self.transport.reconnect_for_s:
            raise ValueError(
                "router.fenced_after_s must be longer than transport.reconnect_for_s: a link that is being made again "
                "is not yet a silent replica"
            )
        return self


def url_of(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def check_names(names: Sequence[str]) -> None:
    """Raises ValueError where two models would be reached by one name."""
    if twice := sorted(name for name, count in Counter(names).items() if count > 1):
        raise ValueError(f"models: {twice[0]!r} names two: give them a served_name or aliases that differ")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model of a deployment, its folder read."""

    config: ModelConfig
    folder: ModelFolder

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def names(self) -> tuple[str, ...]:
        """By which requests may ask for it, its own first."""
        return (self.name, *self.config.aliases)


def open_model(config: ModelConfig, path: Path) -> ServedModel:
    """Read a model's folder. Raises UsageError where it cannot be served, or not as `config` says."""
    try:
        folder = ModelFolder.open(path, config.served_name)
        folder.check_context(config.engine.max_model_len)
    except ModelFolderError as error:
        raise UsageError(str(error)) from error
    return ServedModel(config, folder)


def open_models(profile: Profile, folders: Sequence[Path]) -> tuple[ServedModel, ...]:
    """Read the folder of each of the profile's models, in their order.

    Raises:
        UsageError: one cannot be served, or not as the profile says, or two have one name.
    """
    served = tuple(open_model(config, path) for config, path in zip(profile.models, folders, strict=True))
    try:
        check_names([name for model in served for name in model.names])
    except ValueError as error:
        raise UsageError(str(error)) from error
    return served


class ServeAccess(Config):
    """Ray's dashboard, through which Serve is asked and told how many replicas there are."""

    url: str
    token_path: Path | None = Field(None, description="Ray's token; none where it asks for none.")


class Instance(Config):
    """The facts of one running instance that its processes need beside the profile. Paths, never secrets."""

    profile: Profile
    model_folders: tuple[Path, ...] = Field(
        description="Of each of the profile's models, in their order; whole paths, without links."
    )
    secret_path: Path
    serve: ServeAccess | None = Field(
        None, description="Where Serve is told how many replicas there are to be; needed where a model has `scale`."
    )
    log_level: str = "INFO"

    def models(self) -> dict[str, ServedModel]:
        """By name. Raises UsageError where one cannot be served."""
        return {model.name: model for model in open_models(self.profile, self.model_folders)}

    def model(self, name: str) -> ServedModel:
        """One of them: the folders of others need not lie where its replicas run. Raises UsageError as `models` does."""
        for config, path in zip(self.profile.models, self.model_folders, strict=True):
            if (config.served_name or path.name) == name:
                return open_model(config, path)
        raise UsageError(f"there is no model {name!r} in this instance")

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
    listed = raw.get("models")
    for fields in (raw, *(listed if isinstance(listed, list) else ())):
        if isinstance(fields, dict) and isinstance(engine := fields.get("engine"), str):
            fields["engine"] = {"kind": engine}  # `engine: vllm`
    for dotted, value in overrides.items():
        *parents, leaf = dotted.split(".")
        if listed is not None and (parents or [leaf])[0] in ModelConfig.model_fields:
            raise UsageError(f"profile {path.stem} lists its models: change {dotted} in their entries")
        target = raw
        for parent in parents:
            target = target.setdefault(parent, {})
            if not isinstance(target, dict):
                raise UsageError(f"profile {path.stem}: {parent} must hold a mapping")
        target[leaf] = value
    try:
        return Profile.model_validate(raw)
    except ValidationError as error:
        unnamed = ("models", 0) if listed is None else ()  # which the file does not have: the short form
        raise UsageError(f"profile {path.stem}: {first_error(error, unnamed)}") from error


def first_error(error: ValidationError, unnamed: tuple[str | int, ...] = ()) -> str:
    """The key and what is wrong with it, and how many more there are. A place that begins with `unnamed` is told without."""
    # A default that follows from a field that is wrong is no error of its own.
    errors = [e for e in error.errors(include_url=False) if e["type"] != "default_factory_not_called"]
    place = errors[0]["loc"]
    if place[: len(unnamed)] == unnamed:
        place = place[len(unnamed) :]
    where = ".".join(str(part) for part in place)
    what = errors[0]["msg"].removeprefix("Value error, ")
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return f"{where + ': ' if where else ''}{what}{more}"
