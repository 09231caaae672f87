"""What a profile says of several routers and of leaving, and what of it cannot be."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from deployments.settings import Profile


@pytest.mark.parametrize(
    ("fields", "notice_s"),
    [
        ({}, 0.0),
        ({"routers": 2}, 5.0),
        ({"router": {"host": "0.0.0.0", "auth": "none"}}, 5.0),
        ({"routers": 2, "router": {"drain_notice_s": 0}}, 0.0),
        ({"router": {"drain_notice_s": 12}}, 12.0),
    ],
)
def test_notice_is_given_where_a_balancer_can_stand_before_a_router_or_as_stated(
    fields: dict[str, object], notice_s: float
) -> None:
    assert Profile.model_validate(fields).drain_notice_s == notice_s


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"routers": 2, "health": {"drain_timeout_s": 5}}, "must be longer than router.drain_notice_s"),
        ({"routers": 3, "router": {"port": 65534}}, "need the ports 65534 to 65536: lower router.port"),
        ({"routers": 0}, "greater than 0"),
        ({"health": {"hand_back_after_s": -1}}, "greater than or equal to 0"),
    ],
)
def test_what_cannot_be_is_said(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Profile.model_validate(fields)


def test_routers_of_one_machine_have_ports_in_a_row() -> None:
    assert list(Profile.model_validate({"routers": 3, "router": {"port": 9000}}).ports) == [9000, 9001, 9002]
