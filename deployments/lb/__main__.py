"""Prints the configuration of a load balancer before the routers.

    python -m deployments.lb haproxy --router 10.0.0.1:8000 --router 10.0.0.2:8000 --port 80 > haproxy.cfg

Owns: the command line. Invariant: what cannot be is one line on standard error, and nothing is printed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from pydantic import ValidationError

from deployments.lb.balancer import Balancer, Kind, render

_OPTIONS = {
    "routers": "--router",
    "host": "--host",
    "port": "--port",
    "drain_notice_s": "--drain-notice-s",
    "state_folder": "--state-folder",
}
"""By the field of a `Balancer`."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _parser() -> _Parser:
    fields = Balancer.model_fields
    parser = _Parser(prog="python -m deployments.lb", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=[kind.value for kind in Kind], help="whose configuration")
    for name, option in _OPTIONS.items():
        field = fields[name]
        parser.add_argument(
            option,
            dest=name,
            required=field.is_required(),
            action="append" if name == "routers" else "store",
            default=argparse.SUPPRESS,
            metavar=option.removeprefix("--").upper().replace("-", "_"),
            help=(field.description or "")
            + (f" Default: {field.default}." if not field.is_required() and field.default else ""),
        )
    return parser


def main(words: Sequence[str] | None = None) -> None:
    parser = _parser()
    told = vars(parser.parse_args(words))
    kind = Kind(told.pop("kind"))
    try:
        balancer = Balancer.model_validate(told)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        parser.error(f"{_OPTIONS[str(first['loc'][0])]}: {first['msg'].removeprefix('Value error, ')}")
    sys.stdout.write(render(kind, balancer))


if __name__ == "__main__":
    main()
