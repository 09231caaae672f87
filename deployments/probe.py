"""Whether each URL answers 2xx: what Kubernetes runs in a pod to see whether it is alive, or ready.

    python -m deployments.probe http://127.0.0.1:52365/api/local_raylet_healthz http://127.0.0.1:8000/ready

Owns: that exit status, 0 where all do. Little of the standard library and nothing else: it starts every few seconds on
every node.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlsplit

_TIMEOUT_S = 4.0


def failing(urls: Sequence[str]) -> str | None:
    """What the first that does not answer says; None where all do."""
    for url in urls:
        parts = urlsplit(url)
        connection = HTTPConnection(parts.netloc, timeout=_TIMEOUT_S)
        try:
            connection.request("GET", parts.path)
            status = connection.getresponse().status
        except (OSError, HTTPException) as error:
            return f"{url}: {error}"
        finally:
            connection.close()
        if not 200 <= status < 300:
            return f"{url} answers {status}"
    return None


if __name__ == "__main__":
    sys.exit(failing(sys.argv[1:]))
