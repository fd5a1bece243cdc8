"""What every hello says of its sender's version, to protobuf and back."""

from __future__ import annotations

from typing import Any

from disagg.types.protocol import Version
from disagg.wire import pb
from disagg.wire.fields import refuse, refuse_long


def fill_version(out: pb.server.Version, version: Version) -> None:
    out.protocol = version.protocol
    out.oldest_protocol = version.oldest
    out.software = version.software


def read_version(hello: Any) -> Version:
    """Of a hello; one that does not say it is of protocol 0. Raises ProtocolError."""
    message = hello.version
    if message.oldest_protocol > message.protocol:
        refuse(message, "oldest_protocol", f"is {message.oldest_protocol}, above protocol, which is {message.protocol}")
    refuse_long(message, "software")
    return Version(message.protocol, message.oldest_protocol, message.software)
