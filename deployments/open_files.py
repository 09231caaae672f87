"""How many files a process may have open. Imports nothing of ours.

Each connection is one, and the usual soft limit of 1,024 is an accident, not a choice: the hard one is what somebody chose.
"""

from __future__ import annotations

import resource

_MOST = 65_536
"""Where there is no hard limit."""


def allow_many_connections() -> None:
    """Raise this process's own limit as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
