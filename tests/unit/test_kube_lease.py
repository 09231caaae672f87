"""The Lease follows who leads, and never decides it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import KubernetesConfig
from cluster.control.lease import LeaseSeen, Step, next_step, read, written
from cluster.types import Generation
from deployments.kube.objects import holder_of, lease_body, seen_lease

OWN, OLDER, LATER = Generation(5, "b"), Generation(4, "z"), Generation(6, "a")
CONFIG = KubernetesConfig(namespace="ns", name="f", lease_s=15)


def held(by: Generation | None, holder: str = "other", changed_at_s: float = 100.0) -> LeaseSeen:
    return LeaseSeen(holder, by, 15.0, changed_at_s)


@pytest.mark.parametrize(
    ("seen", "now_s", "step"),
    [
        (None, 0.0, Step.MAKE),
        (held(OWN, "me"), 1000.0, Step.RENEW),
        (held(OLDER), 100.0, Step.TAKE),
        (held(LATER), 115.0, Step.LEAVE),
        (held(LATER), 115.1, Step.TAKE),
        (held(Generation(5, "c")), 100.0, Step.LEAVE),  # of one number the later uuid is the later
        (held(Generation(5, "a")), 100.0, Step.TAKE),
        (held(None), 100.0, Step.TAKE),  # a holder that says nothing is none of ours
        (held(LATER, ""), 100.0, Step.TAKE),  # given back
    ],
)
def test_the_later_has_it_at_once_and_the_older_once_it_has_run_out(
    seen: LeaseSeen | None, now_s: float, step: Step
) -> None:
    assert next_step(seen, "me", OWN, now_s) is step


@given(st.lists(st.tuples(st.sampled_from([0, 1]), st.integers(0, 20)), min_size=1, max_size=60))
def test_of_two_that_lead_only_the_later_writes_while_it_renews(turns: list[tuple[int, int]]) -> None:
    """Both lead, for the older has not heard of the other: whatever turns they take, once the later has the Lease the older
    has it only if the later has been silent for as long as it lasts."""
    leads = (OLDER, LATER)
    lease: dict[str, object] | None = None
    seen: list[LeaseSeen | None] = [None, None]
    versions, version, now_s, renewed_s = ["", ""], 0, 0.0, {0: -1e9, 1: -1e9}
    for who, pause_s in turns:
        now_s += pause_s
        if lease is not None:
            seen[who] = seen_lease(lease, seen[who], versions[who], now_s)
            versions[who] = str(version)
        step = next_step(seen[who], str(who), leads[who], now_s)
        if step is not Step.LEAVE:
            if who == 0 and lease is not None and seen[0] is not None and seen[0].holder == "1":
                assert now_s - renewed_s[1] > CONFIG.lease_s
            version += 1
            lease = lease_body(CONFIG, lease, str(who), leads[who], now_s)
            lease["metadata"] = {**lease["metadata"], "resourceVersion": str(version)}  # type: ignore[dict-item]
            renewed_s[who] = now_s
        else:
            assert who == 0


def test_what_is_written_is_read_again_and_anything_else_is_nobodys() -> None:
    assert read(written(OWN)) == OWN
    for other in ("", "5", "five/b", "-5/b", "5 /b", "\u0665/b", "9" * 30 + "/b"):
        assert read(other) is None


def test_transitions_and_times_are_as_kubernetes_counts_them_and_what_others_wrote_stays() -> None:
    made = lease_body(CONFIG, None, "one", OWN, 0.5)
    assert made["metadata"] == {"name": "f", "namespace": "ns", "annotations": {"forebay/generation": "5/b"}}
    assert made["spec"] == {
        "holderIdentity": "one",
        "leaseDurationSeconds": 15,
        "acquireTime": "1970-01-01T00:00:00.500000Z",
        "renewTime": "1970-01-01T00:00:00.500000Z",
        "leaseTransitions": 0,
    }
    made["metadata"] |= {"resourceVersion": "7", "labels": {"theirs": "x"}}
    renewed = lease_body(CONFIG, made, "one", OWN, 5.0)
    assert renewed["spec"] == made["spec"] | {"renewTime": "1970-01-01T00:00:05.000000Z"}
    taken = lease_body(CONFIG, renewed, "two", LATER, 6.0)
    assert taken["spec"]["leaseTransitions"] == 1
    assert taken["spec"]["acquireTime"] == taken["spec"]["renewTime"] == "1970-01-01T00:00:06.000000Z"
    assert taken["metadata"]["labels"] == {"theirs": "x"}
    assert taken["metadata"]["resourceVersion"] == "7", "or two would overwrite each other"


def test_a_change_counts_from_when_it_was_seen_whatever_the_holders_clock_says() -> None:
    lease = lease_body(CONFIG, None, "one", OWN, 9e9)
    lease["metadata"]["resourceVersion"] = "7"
    first = seen_lease(lease, None, "", 100.0)
    again = seen_lease(lease, first, "7", 108.0)
    assert (first.changed_at_s, again.changed_at_s) == (100.0, 100.0)
    lease["metadata"]["resourceVersion"] = "8"
    assert seen_lease(lease, again, "7", 109.0).changed_at_s == 109.0


def test_a_holders_name_fits_and_tells_generations_apart() -> None:
    names = {holder_of("p" * 300, Generation(n, uuid * 32)) for n in (1, 2**62) for uuid in "ab"}
    assert len(names) == 4
    assert all(len(name) <= 128 for name in names)
