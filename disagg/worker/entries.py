"""What both ends of a ring entry call each other, and the notification that names the entry."""

from __future__ import annotations

_ENTRY_BYTES = 8


def agent_name(incarnation: str, rank: int) -> str:
    """What a rank's transfer agent is called, so also who a notification is from."""
    return f"{incarnation}/{rank}"


def notification_of(entry_id: int) -> bytes:
    """What follows the bytes of an entry."""
    return entry_id.to_bytes(_ENTRY_BYTES, "little")


def entry_of(notification: bytes) -> int | None:
    """The entry that a notification names; None if it is none of ours."""
    return int.from_bytes(notification, "little") if len(notification) == _ENTRY_BYTES else None
