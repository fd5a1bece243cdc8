"""What a store keeper knows of its model, and how much it does at once."""

from __future__ import annotations

from msgspec import Struct

from disagg.offload.keys import Scope
from disagg.offload.objects import Compression


class KeeperFacts(Struct, frozen=True):
    """scope: of the model, without a tenant. checkpoint_tokens: how far apart states are kept."""

    scope: Scope
    tp: int
    checkpoint_tokens: int
    compression: Compression


class KeeperLimits(Struct, frozen=True):
    """What is done at once, and what is remembered."""

    ask_s: float = 3.0  # until an Ask is answered at the latest
    asks: int = 256  # without an answer; beyond them, others are answered at once with nothing
    walks: int = 16  # at once
    publishes: int = 16  # at once
    known_asks: int = 4096  # of which the answers are remembered
    known_spans: int = 1 << 15  # that are remembered; one takes about 2 KB
    # Tasks at once that nobody waits for, such as deleting; what is not deleted is collected later (offload/survey).
    extra: int = 256
