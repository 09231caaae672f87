"""The keys that a router serves, as its profile says where they lie.

Apart from deployments/settings.py, which every process imports: who asks for no key is not to load what a router is made of.
"""

from __future__ import annotations

from cluster.config import Auth, RouterConfig
from deployments.settings import UsageError
from router.keys import KeyFile, KeyRing, KeysError


def open_keys(router: RouterConfig) -> KeyRing | None:
    """None where it asks for none. Raises UsageError where they cannot be read."""
    if router.auth is not Auth.KEYS:
        return None
    try:
        return KeyRing(key_file(router), router.classes)
    except KeysError as error:
        raise UsageError(f"router.auth is keys: {error}") from error


def key_file(router: RouterConfig) -> KeyFile:
    return KeyFile(router.keys_file, router.keys_pepper_file)
