"""The router of `bench step`, in a process of its own: sends each round's requests and reads all tokens.

    python -m ops.bench.step_router HOST PORT SECRET_FILE

Reads `round streams tokens` lines on standard input and prints `done` when every stream of the round has ended.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from pathlib import Path

from cluster.config import TransportConfig
from cluster.messages import RosterEntry, StepFrame
from cluster.ports import ReplicaPort
from cluster.types import Generation, ReplicaId, ReplicaReport
from deployments.replica_link import ReplicaLink
from deployments.transport import Identity
from ops.bench.step import GENERATION, REPLICA, requests


class Counter:
    """A ReplicaListener that counts ends."""

    def __init__(self) -> None:
        self.up = asyncio.Event()
        self.ended = asyncio.Event()
        self.open = 0

    def link_up(self, port: ReplicaPort, report: ReplicaReport | None) -> bool:
        del port, report
        self.up.set()
        return True

    def link_down(self, replica_id: ReplicaId, generation: Generation) -> None:
        sys.exit(f"link to {replica_id} of generation {generation.number} broke")

    def replica_lost(self, replica_id: ReplicaId, generation: Generation, why: str) -> None:
        sys.exit(f"{replica_id} of generation {generation.number} is lost: {why}")

    def frame(self, replica_id: ReplicaId, generation: Generation, frame: StepFrame) -> None:
        del replica_id, generation
        self.open -= sum(delta.finish is not None for delta in frame.deltas)
        if frame.deltas and not self.open:
            self.ended.set()


async def run(host: str, port: int, secret: bytes) -> None:
    counter = Counter()
    entry = RosterEntry(REPLICA, GENERATION, host, port, "bench")
    link = ReplicaLink(
        entry, Identity("router", "bench-router", secret), counter, TransportConfig(), itertools.count(1)
    )
    living = asyncio.create_task(link.run())
    await counter.up.wait()
    while line := await asyncio.to_thread(sys.stdin.readline):
        name, streams, tokens = line.split()
        counter.open = int(streams)
        counter.ended.clear()
        for request in requests(f"streamed-{name}", int(streams), int(tokens)):
            link.add(request, 0)
        await counter.ended.wait()
        print("done", flush=True)
    link.close()
    await living


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]).read_bytes()))
