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
    """ask_s: until an Ask is answered at the latest. Beyond `asks` unanswered ones, others are answered at once with nothing.

    walks, publishes: at once. known_asks, known_spans: what is remembered of answers; a span takes about 2 KB. extra: tasks at
    once that nobody waits for, such as deleting; what is not deleted is collected later (offload/survey).
    """

    ask_s: float = 3.0
    asks: int = 256
    walks: int = 16
    publishes: int = 16
    known_asks: int = 4096
    known_spans: int = 1 << 15
    extra: int = 256
