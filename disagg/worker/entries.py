"""What both ends of a ring entry must agree on: the seed of its checksum, and the notification that names it."""

from __future__ import annotations

from disagg.messages.lane import ExpectPiece, SendPiece
from disagg.staging.identity import identity_seed

_ENTRY_BYTES = 8


def seed_of(request: SendPiece | ExpectPiece) -> int:
    """The identity of a piece as this side believes it to be."""
    piece = request.piece
    return identity_seed(
        request_id=request.key.request_id,
        attempt=request.key.attempt,
        trunk=request.key.trunk,
        src_incarnation=request.src_incarnation,
        dst_incarnation=request.dst_incarnation,
        group=piece.group,
        layer_start=piece.layer_start,
        layer_stop=piece.layer_stop,
        token_start=piece.token_start,
        token_stop=piece.token_stop,
        src_rank=request.src_rank,
        dst_rank=request.dst_rank,
    )


def agent_name(incarnation: str, rank: int) -> str:
    """What a rank's transfer agent is called, so also who a notification is from."""
    return f"{incarnation}/{rank}"


def notification_of(entry_id: int) -> bytes:
    """What follows the bytes of an entry."""
    return entry_id.to_bytes(_ENTRY_BYTES, "little")


def entry_of(notification: bytes) -> int | None:
    """The entry that a notification names; None if it is none of ours."""
    return int.from_bytes(notification, "little") if len(notification) == _ENTRY_BYTES else None
