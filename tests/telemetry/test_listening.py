"""Sockets to listen at, and why one cannot be had."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from typing import Any

import pytest

from disagg.telemetry.listening import bound_socket, cannot_listen, why_not_listen
from disagg.types.errors import ConfigError, DisaggError

HAS_IPV6 = socket.has_ipv6 and why_not_listen("::1", 0, "server.port", "") is None
needs_ipv6 = pytest.mark.skipif(not HAS_IPV6, reason="this machine has no ::1")


def reaches(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


def listening(host: str) -> tuple[socket.socket, int]:
    listener = bound_socket(host, 0)
    listener.listen(8)
    return listener, int(listener.getsockname()[1])


@needs_ipv6
@pytest.mark.parametrize(
    ("host", "over_4", "over_6"),
    [
        ("127.0.0.1", True, False),
        ("0.0.0.0", True, False),
        ("::1", False, True),
        ("[::1]", False, True),
        ("::", True, True),
    ],
)
def test_it_listens_at_what_the_host_says(host: str, over_4: bool, over_6: bool) -> None:
    listener, port = listening(host)
    with listener:
        assert (reaches("127.0.0.1", port), reaches("::1", port)) == (over_4, over_6)


@pytest.mark.parametrize("number", [errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL])
def test_every_address_is_that_of_ipv4_where_there_is_no_other(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    made: Callable[..., socket.socket] = socket.socket

    def without(family: int = -1, *rest: Any, **more: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(number, "no IPv6 here")
        return made(family, *rest, **more)

    monkeypatch.setattr(socket, "socket", without)
    listener, _ = listening("::")
    with listener:
        assert listener.getsockname()[0] == "0.0.0.0"


@pytest.mark.parametrize("host", ["127.0.0.1", "::"])
def test_a_port_that_is_taken_may_be_free_later(host: str) -> None:
    listener, port = listening("127.0.0.1")
    with listener:
        why = why_not_listen(host, port, "server.port", "try another")
    assert type(why) is DisaggError
    assert f"server.port = {port}" in str(why) and "try another" in str(why)


@pytest.mark.parametrize(
    "host", ["192.0.2.1", "2001:db8::1", "[2001:db8::1]", "no.such.host.invalid", "a..b", "x" * 300]
)
def test_a_host_of_others_never_will_be_had(host: str) -> None:
    why = why_not_listen(host, 0, "server.port", "")
    assert isinstance(why, ConfigError)
    assert "server.host" in str(why) and "of this machine" in str(why)


def test_an_address_of_ipv6_is_said_in_brackets() -> None:
    said = cannot_listen("::1", 80, "router.http_port", OSError(errno.EACCES, "no"), "take another")
    assert isinstance(said, ConfigError) and "[::1]:80" in str(said)


def test_a_port_is_shared_only_by_those_who_all_say_so() -> None:
    first = bound_socket("127.0.0.1", 0, shared=True)
    port = int(first.getsockname()[1])
    with first:
        first.listen(1)
        with bound_socket("127.0.0.1", port, shared=True) as second:
            second.listen(1)
        assert why_not_listen("127.0.0.1", port, "router.http_port", "", shared=True) is None
        refused = why_not_listen("127.0.0.1", port, "router.http_port", "others have it")
        assert refused is not None and "others have it" in str(refused)
    alone, port = listening("127.0.0.1")
    with alone:
        assert why_not_listen("127.0.0.1", port, "router.http_port", "", shared=True) is not None
