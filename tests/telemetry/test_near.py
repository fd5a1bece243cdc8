"""Who may ask what is for operators alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.telemetry.near import Asker, fault_of_asker, is_loopback

HERE = "127.0.0.1"


@pytest.mark.parametrize(
    "host",
    ["", "localhost", "LOCALHOST:8000", "localhost.:8000", "a.localhost", "127.0.0.1:8000", "[::1]:8000", "0.0.0.0:1"],
)
def test_names_that_nobody_can_point_elsewhere(host: str) -> None:
    assert fault_of_asker(Asker(HERE, host), remote=False) is None


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "notlocalhost",
        "127.0.0.1.evil.example",
    ],
)
def test_names_of_others(host: str) -> None:
    fault = fault_of_asker(Asker(HERE, host), remote=False)
    assert fault is not None and "debug.remote" in fault
    assert fault_of_asker(Asker(HERE, host), remote=True) is None


def test_a_page_of_this_very_origin_may_ask() -> None:
    own = Asker(HERE, "localhost:8000", "http://localhost:8000", "same-origin")
    assert fault_of_asker(own, remote=False) is None
    assert fault_of_asker(Asker(HERE, "Localhost:8000", "https://localhost:8000"), remote=False) is None


@given(st.text(max_size=40), st.text(max_size=40), st.text(max_size=40), st.text(max_size=40), st.booleans())
def test_nobody_from_elsewhere_whatever_the_headers_say(
    address: str, host: str, origin: str, site: str, remote: bool
) -> None:
    fault = fault_of_asker(Asker(address, host, origin, site), remote)
    if fault is None:
        assert remote or is_loopback(address)
        assert site in ("", "same-origin", "none")
        assert not origin or host.lower() in origin.lower()
