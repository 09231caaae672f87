"""The end of an attempt and the end of a request.

Owns: what is given back and what is told when either is over, and the memory of the requests that have ended. Imports
what keeps a live request: queue, deadlines, gaps, trials, moves. Single writer, driven by `core`. Invariants: each request
ends exactly once; nothing is kept for one that has ended but its explanation.
"""

from __future__ import annotations

import asyncio

from cluster.config import RouterConfig
from cluster.ports import Clock
from cluster.types import FinishReason, Outcome, RequestId
from router.deadlines import Deadlines
from router.dispatch import Dispatcher
from router.explain import Ended, encode
from router.fleet import Fleet
from router.gaps import Gaps
from router.live import Live, log_end
from router.metrics_sink import RouterMetrics
from router.moves import MoveBook
from router.outcomes import Ending
from router.trials import Trials
from router.view import Replica


class Endings:
    """Ends requests; `idle` is set while none is live."""

    def __init__(
        self,
        config: RouterConfig,
        clock: Clock,
        metrics: RouterMetrics,
        fleet: Fleet,
        dispatcher: Dispatcher,
        lives: dict[RequestId, Live],
    ) -> None:
        self._clock = clock
        self._metrics = metrics
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._lives = lives
        self.deadlines = Deadlines()
        self.gaps = Gaps()
        self.trials = Trials()
        self.moves = MoveBook(metrics)
        self.ended = Ended(config.explained_requests, config.explained_bytes)
        self.idle = asyncio.Event()
        self.idle.set()

    def release(self, live: Live, replica: Replica, now_s: float, *, taken_back: bool) -> None:
        """Its attempt is over; `taken_back` as for `Dispatcher.release`."""
        self._dispatcher.release(live, replica, now_s, taken_back=taken_back)
        self.gaps.close(live.request.request_id)
        self.moves.over(live.request.request_id)

    def finalize(
        self,
        live: Live,
        outcome: Outcome,
        *,
        finish: FinishReason | None = None,
        error: str = "",
        retry_after: int | None = None,
        engine_ended: bool = False,
    ) -> None:
        """End a request, once: `del` fails for one that is not live. `engine_ended`: there is nothing to abort."""
        request_id, now_s = live.request.request_id, self._clock.monotonic()
        del self._lives[request_id]
        self.deadlines.forget(request_id)
        if live.replica_id is None:
            if request_id in self._dispatcher.queue:
                self._dispatcher.withdraw(live, now_s)
        else:
            replica, attempt = self._fleet[live.replica_id], live.journal.attempt
            assert attempt is not None
            self.release(live, replica, now_s, taken_back=False)
            if not engine_ended:
                replica.abort(request_id, attempt)
        if live.suspicion is not None:
            self.trials.forget(live)
        if outcome is Outcome.FINISHED:
            self._dispatcher.finished(live, now_s)
        ending = Ending(
            outcome,
            len(live.request.prompt_ids),
            live.journal.next_index,
            finish,
            error,
            retry_after,
            live.cached_tokens,
            failed_on_several=outcome is Outcome.ENGINE_ERROR and len(set(live.erred_on)) > 1,
        )
        live.stream.end(ending)
        live.count_end(self._metrics, ending, now_s)
        self._metrics.served(live.request.tenant, live.served)
        explanation = encode(live.explain(now_s, ending))
        self.ended.add(request_id, explanation)
        log_end(explanation, ending.meaning.log_level)
        if not self._lives:
            self.idle.set()
