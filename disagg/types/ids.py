"""Names for the integers and strings that travel between parts. Knows nothing else.

Three ids protect the answer (docs/architecture.md): an *incarnation* is one worker group's life, a *link generation* one
Peer.Link's, an *attempt* one dispatch of a request.
"""

from __future__ import annotations

import enum
from typing import NewType

from msgspec import Struct

ServerName = NewType("ServerName", str)


class Role(enum.StrEnum):
    """What a server is for."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"  # both, of whole requests


class LegKey(Struct, frozen=True, order=True):
    """One dispatch of one trunk of a request; prefill and decode server know the same key.

    A *trunk* is a token prefix (prompt plus outputs accepted so far) with the choices that continue it. The first
    attempt of a request has one trunk with all n choices; a replay has one trunk per distinct prefix.
    """

    request_id: str
    attempt: int
    trunk: int

    def __str__(self) -> str:
        return f"{self.request_id}/{self.attempt}.{self.trunk}"


class FinishReason(enum.StrEnum):
    """Why a choice ended."""

    STOP = "stop"  # EOS, a stop token id, or a stop string
    LENGTH = "length"  # max_tokens or the model's context length
    ABORT = "abort"
