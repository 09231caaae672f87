"""The file of rules.

Owns: its text, which is the same for the same settings to the last byte. No file is read or written here.
"""

from __future__ import annotations

from typing import Any

import yaml

from ops.alerts.catalog import all_groups
from ops.alerts.settings import AlertSettings


class _Dumper(yaml.SafeDumper):
    """Expressions of several lines stand as such."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def document(settings: AlertSettings) -> dict[str, Any]:
    """What Prometheus reads, as values."""
    return {"groups": [group.rendered(settings.runbooks) for group in all_groups(settings)]}


def rules_file(settings: AlertSettings) -> str:
    """What Prometheus reads, as YAML."""
    return yaml.dump(document(settings), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**16)
