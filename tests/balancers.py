"""Load balancers before routers, for tests: real processes with the configurations that deployments/lb ships.

Owns: finding the programs, starting and ending them. Invariant: none outlives its context. A program that is not installed
skips its tests, with the package that has it.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from deployments.checks import free_ports
from deployments.lb.balancer import Balancer, Kind, render
from tests.programs import serving

_DEPLOY_BIN = Path(__file__).parents[1] / ".venv-deploy" / "bin"


@dataclass(frozen=True)
class Program:
    """How one is found, checked and run. In its words FILE stands for the configuration, FOLDER for one of its own."""

    kind: Kind
    name: str
    package: str
    check: tuple[str, ...]
    run: tuple[str, ...]

    @property
    def path(self) -> str | None:
        return shutil.which(self.name) or shutil.which(self.name, path=f"/usr/sbin:/usr/local/sbin:{_DEPLOY_BIN}")

    @property
    def mark(self) -> pytest.MarkDecorator:
        """Skips where it is not installed."""
        return pytest.mark.skipif(self.path is None, reason=f"{self.name} is not installed ({self.package})")

    def command(self, words: Sequence[str], file: Path) -> list[str]:
        assert self.path is not None
        return [self.path, *(word.replace("FILE", str(file)).replace("FOLDER", str(file.parent)) for word in words)]


HAPROXY = Program(
    Kind.HAPROXY, "haproxy", "Debian: apt-get install haproxy", ("-c", "-f", "FILE"), ("-db", "-f", "FILE")
)
NGINX = Program(
    Kind.NGINX,
    "nginx",
    "Debian: apt-get install nginx",
    ("-t", "-p", "FOLDER", "-c", "FILE"),
    ("-p", "FOLDER", "-c", "FILE", "-g", "daemon off;"),
)
ENVOY = Program(
    Kind.ENVOY,
    "envoy",
    "`make deploy-tools`",
    ("--mode", "validate", "-c", "FILE"),
    ("-c", "FILE", "--disable-hot-restart", "--concurrency", "2", "--log-level", "warn"),
)
PROGRAMS = (HAPROXY, NGINX, ENVOY)


def address_of(url: str) -> str:
    return url.removeprefix("http://")


def write_config(program: Program, balancer: Balancer, folder: Path) -> Path:
    file = folder / program.kind.file
    file.write_text(render(program.kind, balancer.model_copy(update={"state_folder": folder})))
    return file


@contextlib.asynccontextmanager
async def balanced(
    program: Program,
    urls: Sequence[str],
    folder: Path,
    notice_s: float,
    *,
    soft_files: int | None = None,
    change: Callable[[str], str] = str,
) -> AsyncIterator[str]:
    """The URL of a balancer before these routers, whose `drain_notice_s` is `notice_s`, once it answers.

    Args:
        soft_files: The soft limit of open files that it is started with; None: that of the test.
        change: Makes another configuration of the one that is shipped.
    """
    port = free_ports("127.0.0.1", 1)
    balancer = Balancer.model_validate(
        {"routers": map(address_of, urls), "host": "127.0.0.1", "port": port, "drain_notice_s": notice_s}
    )
    folder = folder / program.name
    folder.mkdir()
    config = write_config(program, balancer, folder)
    config.write_text(change(config.read_text()))
    command = program.command(program.run, config)
    if soft_files is not None:
        command = ["sh", "-c", f'ulimit -Sn {soft_files} && exec "$@"', "sh", *command]
    url = f"http://127.0.0.1:{port}"
    async with serving(command, folder / "log", f"{url}/health", lambda status: True):  # with whatever it says
        yield url
