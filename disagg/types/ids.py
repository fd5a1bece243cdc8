"""Names for the integers and strings that travel between parts. Knows nothing else.

Three ids protect the answer (docs/architecture.md): an *incarnation* is the life of one server's workers, a *link generation* one
Peer.Link's, an *attempt* one dispatch of a request.
"""

from __future__ import annotations

import enum

from msgspec import Struct


class Role(enum.StrEnum):
    """What a server is for."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"  # both, of whole requests


class LegKey(Struct, frozen=True, order=True):
    """One dispatch of one prefix of a request; prefill and decode server know the same key.

    A *prefix* is the prompt and the output accepted so far, which some of a request's choices continue. The first attempt
    has one, number 0, with all n choices; a replay has one per distinct output. On the wire, in records, in logs and in
    spans its number is called `trunk`.
    """

    request_id: str
    attempt: int
    prefix_no: int

    def __str__(self) -> str:
        return f"{self.request_id}/{self.attempt}.{self.prefix_no}"


class FinishReason(enum.StrEnum):
    """Why a choice ended."""

    STOP = "stop"  # EOS, a stop token id, or a stop string
    LENGTH = "length"  # max_tokens or the model's context length
    ABORT = "abort"
