"""Which network device UCX is told to use: the one that holds the address at which peers reach this server.

Without being told UCX takes every device that there is, with bridges and tunnels that reach no peer.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import ipaddress
import logging
import socket
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

logger = logging.getLogger(__name__)

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

LOOK_UP_S = 5.0  # for the name by which peers dial
_SIOCGIFCONF = 0x8912
_ENTRY_BYTES = 40  # of struct ifreq: a name of 16 bytes, and a sockaddr_in whose address begins at byte 20
_MOST_ENTRIES = 1024


def devices_for(reached_at: Iterable[Address], held: Mapping[Address, str]) -> tuple[str, ...]:
    """reached_at: what the name by which peers dial stands for. held: device of each address of this machine.

    Loopback is always among them, so that servers of one machine meet whatever each of them listens on; and alone where peers
    dial an address of loopback. Empty if no device holds the address, as behind a Service or a NAT: UCX then looks at all.
    """
    loopback = [device for address, device in held.items() if address.is_loopback]
    others = []
    for address in reached_at:
        if not address.is_loopback and address not in held:
            return ()
        others += [] if address.is_loopback else [held[address]]
    return tuple(dict.fromkeys([*others, *loopback]))


def choose_net_devices(link_address: str) -> str:
    """UCX_NET_DEVICES for a server that peers dial at this host:port. Blocks while the name is looked up."""
    host = link_address.rpartition(":")[0].strip("[]")
    try:
        held = held_addresses()
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        reached_at = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
    except (OSError, UnicodeError, ValueError) as error:
        logger.warning("UCX uses every network device, since it is not known which one has %s: %s", host, error)
        return ""
    devices = devices_for(reached_at, held)
    if not devices:
        logger.info("UCX uses every network device, since none has the address of %s", host)
    return ",".join(devices)


async def net_devices_in_time(link_address: str) -> str:
    """As choose_net_devices, beside the loop; every device where the look-up takes longer than LOOK_UP_S. It goes on in
    its thread then, until the resolver gives up."""
    looking = asyncio.get_running_loop().run_in_executor(None, choose_net_devices, link_address)
    done, _ = await asyncio.wait((looking,), timeout=LOOK_UP_S)
    if done:
        return looking.result()
    logger.warning("UCX uses every network device, since looking %s up took longer than %g s", link_address, LOOK_UP_S)
    return ""


def held_addresses() -> dict[Address, str]:
    """Device of each address of this machine. Raises OSError."""
    buffer = array.array("B", bytes(_ENTRY_BYTES * _MOST_ENTRIES))
    address, _ = buffer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, _SIOCGIFCONF, struct.pack("iL", len(buffer), address))
    used = struct.unpack("iL", answer)[0]
    held = parse_ifconf(buffer.tobytes()[:used])
    try:
        return held | parse_if_inet6(Path("/proc/net/if_inet6").read_text())
    except OSError:  # a kernel without IPv6
        return held


def parse_ifconf(entries: bytes) -> dict[Address, str]:
    """IPv4, as SIOCGIFCONF answers."""
    held: dict[Address, str] = {}
    for start in range(0, len(entries) - _ENTRY_BYTES + 1, _ENTRY_BYTES):
        name = entries[start : start + 16].partition(b"\0")[0].decode(errors="replace")
        held[ipaddress.IPv4Address(entries[start + 20 : start + 24])] = name.partition(":")[0]  # eth0:1 is eth0
    return held


def parse_if_inet6(text: str) -> dict[Address, str]:
    """IPv6, as /proc/net/if_inet6 has it: address, number of the device, prefix, scope, flags, name."""
    held: dict[Address, str] = {}
    for fields in map(str.split, text.splitlines()):
        if len(fields) == 6:
            held[ipaddress.IPv6Address(int(fields[0], 16))] = fields[5]
    return held
