"""Roles of servers, and how they change: to protobuf and back. Pure."""

from __future__ import annotations

from disagg.messages.legs import RoleChange, SetRole
from disagg.types.ids import Role
from disagg.wire import pb
from disagg.wire.fields import read_enum, refuse

ROLE_TO_PROTO = {
    Role.PREFILL: pb.server.ROLE_PREFILL,
    Role.DECODE: pb.server.ROLE_DECODE,
    Role.MIXED: pb.server.ROLE_MIXED,
}
ROLE_FROM_PROTO = {int(v): k for k, v in ROLE_TO_PROTO.items()}

MAX_FAILED_CHARS = 4096


def fill_set_role(out: pb.server.SetRole, asked: SetRole) -> None:
    out.role = ROLE_TO_PROTO[asked.role]


def read_set_role(message: pb.server.SetRole) -> SetRole:
    """Raises ProtocolError."""
    return SetRole(read_enum(message, "role", ROLE_FROM_PROTO))


def fill_role_change(out: pb.server.RoleChange, change: RoleChange) -> None:
    out.started = ROLE_TO_PROTO[change.started]
    if change.becomes is not None:
        out.becomes = ROLE_TO_PROTO[change.becomes]
    out.failed = change.failed
    out.asked = change.asked


def read_role_change(message: pb.server.RoleChange) -> RoleChange:
    """Raises ProtocolError."""
    if len(message.failed) > MAX_FAILED_CHARS:
        refuse(message, "failed", f"has {len(message.failed)} characters; at most {MAX_FAILED_CHARS} are read")
    return RoleChange(
        started=read_enum(message, "started", ROLE_FROM_PROTO),
        becomes=read_enum(message, "becomes", ROLE_FROM_PROTO) if message.becomes else None,
        failed=message.failed,
        asked=message.asked,
    )
