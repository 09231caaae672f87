"""What becomes of a request whose attempt is over before the request is: it goes on elsewhere, at its old place.

Owns: that way back, what a replica's death means to those that ran there, the trials of suspects, what faults mean
to the replica that had them, and the retries of what an engine has ended with an error. Single writer, driven by `core`.
Invariants: no token that has come is lost or asked for again; a request goes on as long as it is not blamed for an engine's
death (`suspects`), has not lost `max_attempts` engines and has had no error that is not retried, so that nothing goes round
for ever.
"""

from __future__ import annotations

import logging

from cluster.types import FinishReason, Outcome, RefusalReason, ReplicaState
from router.live import Live
from router.outliers import Fault, Mark, after_fault, after_success
from router.parts import Parts
from router.retries import Retry, RetryBudget, decide
from router.returns import Return
from router.suspects import Trial
from router.view import Replica

_log = logging.getLogger("forebay.router")


class Losses:
    def __init__(self, parts: Parts) -> None:
        self._config, self._rng, self._metrics = parts.config, parts.rng, parts.metrics
        self._fleet, self._dispatcher, self._lives = parts.fleet, parts.dispatcher, parts.lives
        self._endings, self._trials = parts.endings, parts.endings.trials
        self.retries = RetryBudget(parts.config)

    def enqueue(self, live: Live, now_s: float) -> None:
        """It begins to wait, or waits again."""
        self._dispatcher.enqueue(live, now_s)
        times_s = live.deadlines_s(now_s, self._config.max_queue_s)
        self._endings.deadlines.waits(live.request.request_id, *times_s)

    def go_on(
        self,
        live: Live,
        replica: Replica,
        why: Return | RefusalReason,
        now_s: float,
        *,
        abort: bool,
        lost: bool = True,
        refused: bool = False,
    ) -> None:
        """The open attempt is over and the request is not: back to its place, unless it has lost too many engines.

        `abort`: the replica may still run the attempt. `lost`: it counts against `max_attempts`. `refused`: the attempt
        was never begun there.
        """
        attempt = live.journal.attempt
        assert attempt is not None
        self._endings.release(live, replica, now_s, taken_back=True)
        live.continued |= not refused or live.first_token_s is not None
        if abort:
            replica.abort(live.request.request_id, attempt)
        live.decided(now_s, "returned", replica=replica.replica_id, why=why.value, emitted=live.journal.next_index)
        if live.journal.complete:
            self._endings.finalize(live, Outcome.FINISHED, finish=FinishReason.LENGTH)
            return
        self._metrics.continued(why)
        if lost:
            live.losses += 1
            if live.losses >= self._config.max_attempts:
                self._endings.finalize(live, Outcome.REPLICA_LOST)
                return
        self.enqueue(live, now_s)

    def replica_gone(self, replica: Replica, why: Return, now_s: float) -> None:
        """An incarnation is over: all that was open there goes on elsewhere, but for who killed it."""
        blamed = self._died(replica, now_s)
        for live in [self._lives[name] for name in replica.reservations]:
            if live is blamed:
                self._endings.release(live, replica, now_s, taken_back=False)
                self._endings.finalize(live, Outcome.QUARANTINED)
            else:
                self.go_on(live, replica, why, now_s, abort=False)
        self._fleet.forget(replica)
        self._dispatcher.lost(replica)

    def ask_again(self, live: Live, now_s: float) -> None:
        """What it misses has not come: it is asked for again, or its attempt is given up."""
        request_id, attempt = live.request.request_id, live.journal.attempt
        assert live.replica_id is not None
        assert attempt is not None
        replica = self._fleet[live.replica_id]
        if not replica.link_up:  # it will be asked when the link is up
            return
        if self._endings.gaps.ask(request_id, now_s):
            replica.port.resend_from(request_id, attempt, live.journal.next_index)
        else:
            self.fault(replica, Fault.GAP, now_s, live)
            self.go_on(live, replica, Return.GAP, now_s, abort=True)

    # --- errors of engines ---

    def erred(self, live: Live, replica: Replica, error: str, now_s: float) -> None:
        """The open attempt has ended with an error: the request is tried once more at its old place, or has ended too.

        That is no continuation: nothing is before other work for it, and it is not counted as one.
        """
        self.fault(replica, Fault.ENGINE_ERROR, now_s, live)
        live.erred_on = (*live.erred_on, replica.replica_id)
        left, attempts = self.retries.left, len(live.erred_on)
        until_s = min(live.deadlines_s(now_s, self._config.max_queue_s))
        suspect = live.suspicion is not None
        verdict = decide(self._config, left=left, attempts=attempts, suspect=suspect, until_s=until_s, now_s=now_s)
        self._metrics.erred(verdict)
        retried = verdict is Retry.RETRIED
        live.decided(
            now_s,
            "retried" if retried else "not retried",
            replica=replica.replica_id,
            why=error if retried else verdict.value.replace("_", " "),
            emitted=live.journal.next_index,
            errors=attempts,
            errors_max=self._config.retry_attempts,
            budget_left=round(left, 2),
            budget_share=self._config.retry_share,
            budget_burst=self._config.retry_burst,
        )
        if not retried:
            self._endings.finalize(live, Outcome.ENGINE_ERROR, error=error, engine_ended=True)
            return
        self.retries.spend()
        self._endings.release(live, replica, now_s, taken_back=True)
        self.enqueue(live, now_s)

    # --- replicas that fail ---

    def fault(self, replica: Replica, fault: Fault, now_s: float, live: Live | None = None) -> None:
        """Something went wrong there, with an attempt of `live` if it concerns one; told before that attempt is over.

        An error of a request that has erred elsewhere may well be its own. It is held against this replica too, but puts it
        out only together with a later one: no request puts out two.
        """
        mark, probe, may = Mark(now_s, fault), False, self._fleet.may_put_out(now_s)
        if live is not None:
            request = live.request
            own = fault is Fault.ENGINE_ERROR and any(name != replica.replica_id for name in live.erred_on)
            mark = Mark(now_s, fault, request.request_id, request.tenant)
            probe, may = replica.probe == request.request_id and not own, may and not own
        before = replica.record
        after = after_fault(before, mark, self._config, self._rng, may_put_out=may, probe=probe)
        if after is before:
            return
        replica.record = after
        if after.out_until_s is not None:
            self._metrics.ejected(fault)
            _log.warning(
                "replica %s is put out for %.0f s: %s", replica.replica_id, after.out_until_s - now_s, fault.value
            )

    def worked(self, replica: Replica, now_s: float, *, probe: bool) -> None:
        """A request has ended well there, or the one that it gets half open (`probe`) has had a token."""
        replica.record = after_success(replica.record, now_s, probe=probe)

    # --- suspects ---

    def _died(self, replica: Replica, now_s: float) -> Live | None:
        """Who is blamed for it, if anybody. A replica that was leaving anyway has not died of anything."""
        if replica.report is not None and replica.report.state is ReplicaState.DRAINING:
            return None
        ran = {name: live for name in replica.reservations if not (live := self._lives[name]).journal.complete}
        for name in replica.paused():  # unless it ran again in a step whose frame was lost with the engine
            if name in ran and not ran[name].spared:
                ran.pop(name).spared = True
        if not ran:
            return None
        blamed = self._trials.died(ran, replica.replica_id, now_s, strangers=replica.has_strangers)
        self._metrics.engine_died()
        if blamed is None:
            return None
        request_id = blamed.request.request_id
        _log.error(
            "request %s is quarantined: replica %s died with it alone, as others had", request_id, replica.replica_id
        )
        for live in self._trials.explained_by(blamed):
            self._clear(live, f"{request_id} was it", now_s)
        return blamed

    def progressed(self, live: Live, now_s: float) -> None:
        """A suspect has had tokens: with enough of them it is cleared, and until then each is looked at."""
        assert live.suspicion is not None
        live.steady_below = 0
        if live.journal.next_index >= live.suspicion.cleared_at:
            self._clear(live, "it went on beyond where its engine died", now_s)

    def _clear(self, live: Live, why: str, now_s: float) -> None:
        if self._trials.cleared(live, why, now_s):
            self.enqueue(live, now_s)
        elif live.replica_id is not None:
            self._fleet[live.replica_id].cleared(live.request.request_id)

    def make_way(self, live: Live, now_s: float) -> None:
        """A suspect is next and has no place. Where that is only for want of a replica to be tried on, it takes that of a
        less urgent suspect, or it is set aside and stands in nobody's way."""
        need = live.need(self._config.expected_output_tokens)
        if (
            self._fleet.place(need.untried(), now_s, self._rng) is None
            or self._dispatcher.place(live, now_s) is not None
        ):
            return
        lower = self._trials.least_urgent()
        if need.trial is Trial.APART and lower is not None and lower.request.priority < need.priority:
            assert lower.replica_id is not None
            self.go_on(lower, self._fleet[lower.replica_id], Return.DISPLACED, now_s, abort=True, lost=False)
            placement = self._dispatcher.place(live, now_s)
            if placement is not None:
                self._dispatcher.send(live, placement, now_s, by_share=False)
                return
        self._dispatcher.withdraw(live, now_s)
        self._trials.set_aside(live, now_s)

    def bring_back(self, now_s: float) -> bool:
        """Whether a suspect that was set aside has a replica to be tried on now: then it is at its old place again.

        One that must be alone goes out at once, unless more urgent work waits: in the queue it would lose the empty
        replica to whatever is before it there.
        """
        for trial in Trial.ALONE, Trial.APART:
            live = self._trials.first(trial)
            if live is None:
                continue
            placement = self._dispatcher.place(live, now_s)
            head = self._dispatcher.queue.peek()
            if placement is None or (
                trial is Trial.ALONE and head is not None and head.priority > live.request.priority
            ):
                continue
            self._trials.bring_back(live)
            self.enqueue(live, now_s)
            if trial is Trial.ALONE:
                self._dispatcher.send(live, placement, now_s, by_share=False)
            return True
        return False
