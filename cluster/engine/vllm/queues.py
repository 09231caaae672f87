"""vLLM's waiting queues, as its scheduler sees them.

Owns: who is offered to vLLM's step. Imports the ledger and vLLM's internals. Invariant: who joins, leaves and comes back is
the ledger's affair, so that what vLLM puts in or takes out changes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from cluster.engine.vllm.internals import RequestQueue
from cluster.engine.vllm.ledger import Ledger

if TYPE_CHECKING:
    from cluster.engine.vllm.internals import CoreRequest

RequestOf = Callable[[str], "CoreRequest"]
"""Core id -> the request."""


class LedgersQueue(RequestQueue):
    """Takes nothing, and has nothing to offer."""

    def __init__(self, ledger: Ledger, request_of: RequestOf) -> None:
        self._ledger = ledger
        self._request_of = request_of

    def add_request(self, request: CoreRequest) -> None:
        pass

    def prepend_request(self, request: CoreRequest) -> None:
        pass

    def prepend_requests(self, requests: Iterable[CoreRequest]) -> None:
        pass

    def remove_request(self, request: CoreRequest) -> None:
        pass

    def remove_requests(self, requests: Iterable[CoreRequest]) -> None:
        pass

    def peek_request(self) -> CoreRequest:
        raise IndexError("nothing is offered")

    def pop_request(self) -> CoreRequest:
        raise IndexError("nothing is offered")

    def __bool__(self) -> bool:
        return False


class Offered(LedgersQueue):
    """`waiting`: as long as all that wait in the ledger, it offers those that the plan admits."""

    def __init__(self, ledger: Ledger, request_of: RequestOf) -> None:
        super().__init__(ledger, request_of)
        self.offered: deque[CoreRequest] = deque()

    def peek_request(self) -> CoreRequest:
        return self.offered[0]

    def pop_request(self) -> CoreRequest:
        return self.offered.popleft()

    def __bool__(self) -> bool:
        return bool(self.offered)

    def __len__(self) -> int:
        return len(self._ledger.waiting)

    def __iter__(self) -> Iterator[CoreRequest]:
        return (self._request_of(t.core_id) for t in self._ledger.wait_order())


class Loading(LedgersQueue):
    """`kv_holding_waiting`: those whose blocks a KV connector fills. When it is done with one, the ledger has it wait."""

    def __len__(self) -> int:
        return len(self._ledger.loading)

    def __iter__(self) -> Iterator[CoreRequest]:
        return (self._request_of(core_id) for core_id in self._ledger.loading)
