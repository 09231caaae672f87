"""The routers that `bench router` compares with: how each is started by its own command line.

Owns: their command lines. Imports nothing of ours. They run from an environment of their own (`make routers`), with the
settings that cost them least: round robin, no log but errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

PEERS = ("vllm-router", "sglang-router", "smg")
"""Names of their packages and of their commands."""
HEALTH_PATH = "/health"
"""Answers 200 once a router can be used."""


def command(name: str, bin_folder: Path, port: int, metrics_port: int, workers: Sequence[int]) -> tuple[str, ...]:
    """The command line of a router on `port`, in front of servers on the ports `workers`, all on 127.0.0.1."""
    launch = () if name == "vllm-router" else ("launch",)
    urls = (f"http://127.0.0.1:{worker}" for worker in workers)
    return (
        str(bin_folder / name), *launch,
        "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port),
        "--policy", "round_robin", "--log-level", "error", "--worker-urls", *urls,
    )  # fmt: skip
