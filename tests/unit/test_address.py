"""What may be the address of a router, and what is said of what is none."""

from __future__ import annotations

import pytest

from deployments.address import checked_address
from deployments.settings import UsageError


@pytest.mark.parametrize("at", ["@", "\uff20", "\ufe6b"])
@pytest.mark.parametrize("scheme", ["http://", "https://", "", "ftp://"])
def test_an_address_with_a_password_is_refused_and_not_repeated(scheme: str, at: str) -> None:
    with pytest.raises(UsageError, match=r"^--url: ") as refused:
        checked_address(f"{scheme}user:hunter2{at}router.example:8000", "--url")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    "url", ["http://h?", "http://h#", "http://a b", "http://", "h:8000", "http://xn--a", "http://h:port"]
)
def test_what_is_no_address_is_named_in_its_refusal(url: str) -> None:
    with pytest.raises(UsageError, match=r"^--url: ") as refused:
        checked_address(url, "--url")
    assert repr(url) in str(refused.value)


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("http://h:8000", "http://h:8000"),
        (" https://h/v1/ ", "https://h"),
        ("http://h/forebay/v1", "http://h/forebay"),
        ("http://[::1]:8000/", "http://[::1]:8000"),
    ],
)
def test_paths_can_be_put_behind_an_address(given: str, address: str) -> None:
    assert checked_address(given, "--url") == address
