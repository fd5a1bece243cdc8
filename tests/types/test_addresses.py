"""Hosts and ports as text."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.types.addresses import bare, is_loopback, join, split, unmapped

ports = st.integers(1, 65535)
names = st.from_regex(r"[a-z0-9]([-a-z0-9.]{0,40}[a-z0-9])?", fullmatch=True)
hosts = st.one_of(names, st.ip_addresses().map(str), st.sampled_from(["fe80::1%eth0", "localhost", "under_score"]))


@given(hosts, ports)
def test_what_is_joined_is_split_into_the_same(host: str, port: int) -> None:
    assert split(join(host, port)) == (host, port)
    assert join(f"[{host}]", port) == join(host, port) or ":" not in host
    assert bare(f"[{host}]") == bare(host) == host


@given(st.text(max_size=60))
def test_whatever_is_split_is_an_address_or_refused(text: str) -> None:
    try:
        host, port = split(text)
    except ValueError:
        return
    assert host.isprintable() and not set(host) & set(" /[]@?#")
    assert split(join(host, port)) == (host, port)


@pytest.mark.parametrize(
    "text",
    [
        "", ":", "host", "host:", ":1", "host:0", "host:65536", "host:-1", "host:+1", "host:1.5", "host:\u0661", "::1:50061",
        "[::1]", "[]:1", "[host]:1", "[127.0.0.1]:1", "[::1:1", "::1]:1", "a b:1", "http://host:1", "user@host:1", "[::1%]:",
        "[::1%a b]:1", "h" * 256 + ":1", "host:000001",
    ],
)  # fmt: skip
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="it must be host:port"):
        split(text)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.9.9.9",
        "::1",
        "[::1]",
        "::1%lo",
        "::ffff:127.0.0.1",
        "[::ffff:127.0.0.1]",
        "localhost",
        "LocalHost",
    ],
)
def test_hosts_of_this_machine_alone(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host",
    [
        "",
        "::",
        "[::]",
        "0.0.0.0",
        "10.0.0.1",
        "::ffff:10.0.0.1",
        "fe80::1%lo",
        "fd00::1",
        "localhost.example",
        "127.1",
        "[",
        "]",
    ],
)
def test_hosts_that_others_may_reach_or_be(host: str) -> None:
    assert not is_loopback(host)


@given(st.ip_addresses())
def test_a_mapped_address_is_the_address(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    if address.version == 4:
        assert unmapped(f"::ffff:{address}") == str(address)
        assert is_loopback(f"::ffff:{address}") == address.is_loopback
    elif address.ipv4_mapped is None:
        assert unmapped(str(address)) == str(address)


@given(st.text(max_size=40))
def test_no_text_breaks_it(text: str) -> None:
    is_loopback(text)
    if not text.startswith("::"):
        assert unmapped(text) == text
