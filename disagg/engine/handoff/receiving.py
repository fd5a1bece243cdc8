"""What a decode engine remembers of a leg's transfer, and of a link to a prefill server."""

from __future__ import annotations

from dataclasses import dataclass, field

from disagg.engine.legs import Leg
from disagg.engine.now import NEVER, Now
from disagg.engine.turns import Turn
from disagg.memory.sequence import SequencePages
from disagg.messages import link as m
from disagg.transfer.session import ReceiveSession
from disagg.types.ids import LegKey


@dataclass(slots=True, eq=False)
class Receiving:
    """One leg's transfer."""

    leg: Leg
    session: ReceiveSession
    link: int | None = None
    turn: Turn | None = None  # while it waits for a grant
    root: bytes = b""
    hashes: list[bytes] = field(default_factory=list)  # of the prompt's full pages
    too_little_at: int = -1  # KvMemory.releases when there were too few pages for it
    pages: SequencePages | None = None  # from the grant on, until no rank writes to them any more
    slots: tuple[int, ...] = ()  # of the choices that begin at once, until they do
    age: int = -1
    distrusted: bool = False  # prefill gave it up, maybe for what it had computed: what landed is not kept
    begins_unbound: bool = False  # its choices begin when no rank has its pages bound any more
    announced: Now = NEVER
    granted: Now = NEVER
    progress_s: float = 0.0

    @property
    def key(self) -> LegKey:
        return self.leg.key


@dataclass(slots=True)
class ReceiveLink:
    """A link to one prefill server's incarnation."""

    number: int
    hello: m.LinkHello
    slices: tuple[tuple[int, ...], ...]  # of a piece: by layer group and rank
    early: dict[LegKey, int] = field(default_factory=dict)  # announced before the router's leg came: num_tokens
    early_tokens: dict[LegKey, m.FirstTokens] = field(default_factory=dict)

    def forget(self, key: LegKey) -> None:
        self.early.pop(key, None)
        self.early_tokens.pop(key, None)
