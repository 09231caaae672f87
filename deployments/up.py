"""Forebay deployed on a Ray cluster that runs, or changed there.

    ray job submit --working-dir . -- python -m deployments.up --profile X --secret /run/forebay/secret --wait

Owns: the command, what it asks of Serve (the same config file that `serve deploy` and KubeRay give, by the same REST call),
and what is said of the difference. Serve is never asked by a call of Ray's: a job that did would be its driver.
What is started on this machine alone is in deployments/local.py.

Invariants: what is deployed already as it is asked for is left alone, to the last process; other applications of the cluster
stay as they are; what runs is the code that the nodes have installed, never the copy that came with the job.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

import typer
import yaml
from pydantic import ValidationError

from deployments.app import APPLICATION
from deployments.jobs import command
from deployments.jobs.endpoint import ask_ray
from deployments.local import takes_work
from deployments.settings import UsageError, first_error, load_profile

T = TypeVar("T")

IMPORT_PATH = "deployments.serve_app:build_app"
_CALL_TIMEOUT_S = 30.0
_LOOK_S = 0.5
_SAY_EVERY_S = 15.0
_MESSAGE_CHARS = 500
_KEPT = ("secret_path", "token_path", "dashboard_url", "log_level")
"""Arguments that stay as they are deployed where nothing else is said."""


class ServeClient(Protocol):
    """Serve's REST API, as Ray's own client has it."""

    def get_serve_details(self) -> dict[str, Any]: ...

    def deploy_applications(self, config: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be put to Serve, and what of it is new."""

    config: dict[str, Any]
    """Of Serve, with all its applications; empty where nothing is to be done."""
    changes: tuple[str, ...]
    """A line for each; none for what was not deployed before."""


def up(
    profile: Annotated[str, typer.Option(help="A name under deployments/profiles, or the path of a .yaml file.")],
    secret: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="The file with the cluster's secret, 32 bytes at least, the same on every node.",
            show_default="as deployed",
        ),
    ] = None,
    token: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="The file with Ray's token, on nodes where a controller may run; needed where a model has `scale`.",
            show_default="as deployed",
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the profile: --set replicas=3. Repeatable."),
    ] = None,
    dashboard: Annotated[
        str | None, typer.Option(metavar="URL", help="Ray's dashboard.", show_default="that of this job's cluster")
    ] = None,
    log_level: Annotated[str | None, typer.Option(metavar="LEVEL", show_default="as deployed, or INFO")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Return when every model is served.")] = False,
    timeout_s: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="With --wait, at most.")] = 1800.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print what came of it as JSON, all else as errors.")] = False,
) -> int:
    """Deploy Forebay on the Ray cluster of this job, or change what is deployed there.

    Models must name folders that lie on every node that serves them. A change replaces processes one after another, and
    streams go on; what is deployed already is left alone.

    Exit code: 0; 1 if it was not served in time, or cannot be; 2 if it could not be asked for (one line says why).
    """
    out = sys.stderr if as_json else sys.stdout

    def say(line: str) -> None:
        print(line, file=out, flush=True)

    url, client = _connect(dashboard)
    told = _call(client.get_serve_details)
    given = {"secret_path": secret, "token_path": token, "log_level": log_level, "dashboard_url": dashboard}
    arguments = arguments_of(
        load_profile(profile, dict(map(_change, changes or ()))).model_dump(mode="json", exclude_unset=True),
        {name: str(value) for name, value in given.items() if value is not None},
        deployed_arguments(told),
        url,
    )
    plan = plan_of(told, arguments)
    if not plan.config:
        say("nothing to change: it is deployed like that")
    else:
        for line in plan.changes:
            say(f"  {line}")
        say("changing what is deployed …" if deployed_arguments(told) else "deploying …")
        _call(lambda: client.deploy_applications(plan.config))
    served: tuple[str, ...] = ()
    if wait:
        before_s = _application(told).get("last_deployed_time_s", 0.0) if plan.config else -1.0
        began_s = time.monotonic()
        served = Wait(client, before_s, say).until_served(began_s + timeout_s)
        if not served:
            return command.FAILED_SOME
        say(f"served at {', '.join(served)} after {time.monotonic() - began_s:.1f} s")
    if as_json:
        print(json.dumps({"changed": bool(plan.config), "changes": plan.changes, "urls": served}), flush=True)
    return 0


def arguments_of(
    profile: Mapping[str, Any], given: Mapping[str, str], deployed: Mapping[str, Any], dashboard_url: str
) -> dict[str, Any]:
    """Those of the application (`serve_app.ServeArgs`), checked.

    Args:
        profile: Its keys.
        given: Arguments beside it that were asked for.
        deployed: All that are deployed now; empty where nothing is.
        dashboard_url: Of Ray, for models with `scale` where none is deployed.

    Raises:
        UsageError: they do not fit; the message names the key.
    """
    from deployments.serve_app import ServeArgs

    scaled = any(model.get("scale") for model in profile.get("models", (profile,)))
    kept = {name: deployed[name] for name in _KEPT if deployed.get(name) is not None}
    arguments = {"dashboard_url": dashboard_url, **kept, **given, "profile": dict(profile)}
    if not scaled:  # nobody asks there then, and what is not asked need not be changed
        del arguments["dashboard_url"]
    if "secret_path" not in arguments:
        raise UsageError(
            "--secret must name the file of the cluster's secret, on every node: openssl rand -hex 32 makes one"
        )
    try:
        ServeArgs.model_validate(arguments)
    except ValidationError as error:
        raise UsageError(first_error(error)) from error
    return arguments


def plan_of(told: Mapping[str, Any], arguments: Mapping[str, Any]) -> Plan:
    """What to put to Serve so that it has these arguments and all else stays.

    Args:
        told: What Serve says of itself.
        arguments: Of the application.
    """
    application = {
        "name": APPLICATION,
        "route_prefix": None,
        "import_path": IMPORT_PATH,
        "external_scaler_enabled": any(model.get("scale") for model in _normal(arguments)["profile"]["models"]),
        "args": dict(arguments),
    }
    now, deployed = _application(told), deployed_arguments(told)
    differences = tuple(_differences(_normal(deployed), _normal(arguments))) if deployed else ()
    config = now.get("deployed_app_config") or {}
    same = (config.get("import_path"), config.get("external_scaler_enabled", False)) == (
        IMPORT_PATH,
        application["external_scaler_enabled"],
    )
    if deployed and same and not differences and now.get("status") in ("RUNNING", "DEPLOYING"):
        return Plan({}, ())
    others = [
        other["deployed_app_config"]
        for name, other in told.get("applications", {}).items()
        if name != APPLICATION and other.get("deployed_app_config")
    ]
    whole: dict[str, Any] = {"applications": [*others, application]}
    # Options of Serve itself hold from its start: it has no proxy where it is started for this alone.
    whole["proxy_location"] = told.get("proxy_location") or "Disabled"
    if told.get("target_capacity") is not None:
        whole["target_capacity"] = told["target_capacity"]
    return Plan(whole, differences)


def deployed_arguments(told: Mapping[str, Any]) -> dict[str, Any]:
    """Empty where it is not deployed, or not by a config."""
    return dict((_application(told).get("deployed_app_config") or {}).get("args") or {})


def _application(told: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = told.get("applications", {}).get(APPLICATION, {})
    return found


def _normal(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """With every default; as they are where another version had written them."""
    from deployments.serve_app import ServeArgs

    try:
        normal = ServeArgs.model_validate(arguments).model_dump(mode="json")
    except ValidationError:
        normal = dict(arguments)
    return normal


def _differences(old: Any, new: Any, key: str = "") -> Iterator[str]:
    """A line for each key whose value differs."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in dict.fromkeys((*old, *new)):
            yield from _differences(old.get(name), new.get(name), f"{key}.{name}" if key else str(name))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for place, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from _differences(before, after, f"{key}[{place}]")
    elif old != new:
        yield f"{key}: {json.dumps(old)} → {json.dumps(new)}"


def _change(given: str) -> tuple[str, Any]:
    key, equals, value = given.partition("=")
    if not equals or not key:
        raise UsageError(f"--set: {given!r} must be KEY=VALUE, as replicas=3")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise UsageError(f"--set {key}: {value!r} is not YAML") from error


def _connect(dashboard: str | None) -> tuple[str, ServeClient]:
    """Ray's dashboard, and Serve's client for it. Raises UsageError where there is none."""
    from ray.dashboard.modules.serve.sdk import ServeSubmissionClient
    from ray.dashboard.utils import get_address_for_submission_client

    class Client(ServeSubmissionClient):
        def _do_request(self, *args: Any, **options: Any) -> Any:
            return super()._do_request(*args, timeout=_CALL_TIMEOUT_S, **options)

    def connect() -> tuple[str, ServeClient]:
        url = dashboard or get_address_for_submission_client(None)
        return url, Client(url)

    return _call(connect)


def _call(function: Callable[[], T]) -> T:
    """Raises UsageError where Ray's dashboard does not do it."""
    import requests
    from ray.exceptions import AuthenticationError

    try:
        return function()
    except AuthenticationError as error:
        raise UsageError("Ray's dashboard refuses this job: it needs Ray's token (RAY_AUTH_TOKEN_PATH)") from error
    except (requests.RequestException, ConnectionError, RuntimeError, ValueError) as error:
        raise UsageError(f"Ray's dashboard: {str(error)[:_MESSAGE_CHARS]}") from error


class Wait:
    """For what was deployed after `after_s` of Serve's time."""

    def __init__(self, client: ServeClient, after_s: float, say: Callable[[str], None]) -> None:
        self._client = client
        self._after_s = after_s
        self._say = say
        self._said, self._said_s = "", 0.0

    def until_served(self, end_s: float) -> tuple[str, ...]:
        """The routers' addresses, once each serves every model; none where that cannot be or has not come in time."""
        urls: tuple[str, ...] = ()
        while time.monotonic() < end_s:
            try:
                application = _application(_call(self._client.get_serve_details))
                if application.get("last_deployed_time_s", 0.0) > self._after_s:
                    self._show(standing(application))
                    if application["status"] == "DEPLOY_FAILED":
                        self._say(f"cannot be deployed: {failure(application)}")
                        return ()
                    if application["status"] == "RUNNING":
                        urls = urls or ask_ray()
                        if all(map(takes_work, urls)):
                            return urls
            except UsageError as error:  # Serve, or Ray's head, may be starting
                self._show(str(error))
                urls = ()
            time.sleep(_LOOK_S)
        self._say(f"not served in time: {self._said}")
        return ()

    def _show(self, line: str) -> None:
        """What is new, and now and then that it is not."""
        now_s = time.monotonic()
        if line != self._said or now_s - self._said_s >= _SAY_EVERY_S:
            self._said, self._said_s = line, now_s
            self._say(f"  {line}")


def standing(application: Mapping[str, Any]) -> str:
    """Of what Serve says of an application: its state, and of each deployment how many run of how many."""
    parts = []
    for name, deployment in application["deployments"].items():
        running = sum(replica["state"] == "RUNNING" for replica in deployment["replicas"])
        parts.append(f"{name} {running} of {deployment['target_num_replicas']}")
    return ", ".join([application["status"].lower().replace("_", " "), *parts])


def failure(application: Mapping[str, Any]) -> str:
    """Why: what the first failed deployment was stopped by."""
    told = [d["message"] for d in application["deployments"].values() if d["status"] == "DEPLOY_FAILED"]
    messages: list[str] = [*told, application["message"]]
    for message in messages:
        if lines := [line.strip() for line in message.splitlines() if line.strip()]:
            return lines[-1][:_MESSAGE_CHARS]
    return "Serve does not say why"


def main() -> None:
    sys.exit(command.run("deployments.up", up))


if __name__ == "__main__":
    main()
