"""What a head's pod does when it is told to end: Ray's GCS stays while other nodes are left by what runs on them.

    python -m deployments.last_node 700

Owns: that wait. Where a whole cluster is deleted, all its pods are told at once, and a node can be drained only as long as
there is a GCS; a head that goes alone waits for nobody. Imports ray and nothing of Forebay's.
Invariant: it ends, after the seconds that it is given at most; a GCS that does not answer is waited for no longer than Ray's client
does, which gives it up after 40 s at first.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable, Sized

GCS = "127.0.0.1:6379"
NOTICE_S = 15.0
"""Within so long of the first, the pods of a cluster that is deleted are told to end."""
_LOOK_S = 0.5
_CALL_TIMEOUT_S = 5.0


def wait(
    draining: Callable[[], Sized], most_s: float, *, now: Callable[[], float], sleep: Callable[[float], None]
) -> float:
    """Until no node drains any more, where one does within `NOTICE_S`. Returns the seconds that it took.

    `draining`: the nodes that do. Raises what that raises.
    """
    began_s = now()
    begun = False
    while (waited_s := now() - began_s) < most_s:
        if draining():
            begun = True
        elif begun or waited_s >= NOTICE_S:
            break
        sleep(_LOOK_S)
    return waited_s


def main(most_s: float) -> None:
    # Ends this process within a call of Ray's too, which may take longer than it is asked to.
    signal.alarm(math.ceil(most_s))
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled; Serve asks by it, and there is no public call

    try:
        gcs = GcsClient(address=GCS)
        waited_s = wait(lambda: gcs.get_draining_nodes(_CALL_TIMEOUT_S), most_s, now=time.monotonic, sleep=time.sleep)
    except Exception as error:  # whatever Ray raises, a head without a GCS has nothing to stay for
        print(f"GCS does not say which nodes drain: {type(error).__name__}", file=sys.stderr)
    else:
        print(f"no other node drains, after {waited_s:.0f} s")


if __name__ == "__main__":
    main(float(sys.argv[1]))
