"""Which network device UCX is told to use."""

from __future__ import annotations

import asyncio
import socket
import threading
from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.server import networks
from disagg.server.networks import choose_net_devices, devices_for, held_addresses, parse_if_inet6, parse_ifconf

HELD = {
    ip_address("127.0.0.1"): "lo",
    ip_address("::1"): "lo",
    ip_address("10.0.0.5"): "eth0",
    ip_address("fd00::5"): "eth0",
    ip_address("192.168.1.1"): "docker0",
}
addresses = st.ip_addresses()


@pytest.mark.parametrize(
    ("reached_at", "devices"),
    [
        (["127.0.0.1"], ("lo",)),
        (["127.0.1.1"], ("lo",)),  # what Debian has hostnames stand for
        (["::1", "127.0.0.1"], ("lo",)),
        (["10.0.0.5"], ("eth0", "lo")),
        (["fd00::5", "10.0.0.5"], ("eth0", "lo")),
        (["127.0.1.1", "10.0.0.5"], ("eth0", "lo")),
        (["10.96.0.1"], ()),  # of a Service
        (["10.0.0.5", "10.96.0.1"], ()),
    ],
)
def test_the_device_is_the_one_that_holds_the_address(reached_at: list[str], devices: tuple[str, ...]) -> None:
    assert devices_for(map(ip_address, reached_at), HELD) == devices


@given(st.lists(addresses, max_size=4), st.dictionaries(addresses, st.sampled_from(["lo", "eth0", "eth1"])))
def test_no_device_is_chosen_that_holds_neither_the_address_nor_loopback(reached_at: list, held: dict) -> None:
    asked = {held[address] for address in reached_at if address in held}
    loopback = {device for address, device in held.items() if address.is_loopback}
    assert set(devices_for(reached_at, held)) <= asked | loopback


def test_this_machine_holds_loopback_and_what_it_would_send_from() -> None:
    held = held_addresses()
    assert held[ip_address("127.0.0.1")] == "lo"
    assert set(held.values()) <= {name for _, name in socket.if_nameindex()}


def test_addresses_of_both_families_are_read() -> None:
    entry = b"eth0:1".ljust(16, b"\0") + b"\2\0\0\0" + bytes([10, 0, 0, 5]) + bytes(16)
    assert parse_ifconf(entry + entry[:39]) == {ip_address("10.0.0.5"): "eth0"}
    row = "fd000000000000000000000000000005 02 40 00 80     eth0\nnonsense\n"
    assert parse_if_inet6(row) == {ip_address("fd00::5"): "eth0"}


@pytest.mark.parametrize("address", ["127.0.0.1:7", "[::1]:7", "localhost:7"])
def test_peers_on_this_machine_meet_on_loopback_alone(address: str) -> None:
    assert choose_net_devices(address) == "lo"


def test_a_name_that_nobody_knows_leaves_all_devices(caplog: pytest.LogCaptureFixture) -> None:
    assert choose_net_devices("no-such-host.invalid:7") == ""
    assert "not known" in caplog.text


def test_an_address_of_this_machine_is_reached_by_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "held_addresses", lambda: HELD)
    assert choose_net_devices("10.0.0.5:7") == "eth0,lo"


async def test_a_look_up_that_takes_too_long_holds_neither_the_loop_nor_who_asked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answered = threading.Event()

    def slow(address: str) -> str:
        answered.wait(30)
        return "eth0"

    monkeypatch.setattr(networks, "choose_net_devices", slow)
    monkeypatch.setattr(networks, "LOOK_UP_S", 0.05)
    try:
        assert await asyncio.wait_for(networks.net_devices_in_time("decode-0:7"), 10) == ""
        assert "looking decode-0:7 up took longer than 0.05 s" in caplog.text
    finally:
        answered.set()
    monkeypatch.setattr(networks, "LOOK_UP_S", 30)
    assert await networks.net_devices_in_time("decode-0:7") == "eth0"
