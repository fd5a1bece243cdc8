"""What can happen to a request, and what its machine may say is to be done about it. Frozen values.

Whatever tells the machine something (streams, timers, clients) makes an event; whoever drives it does each instruction.
"""

from __future__ import annotations

import enum

from msgspec import Struct

from disagg.messages.legs import LegEnd, LegTokens, PeerRef, RouterMessage
from disagg.router.acceptance import Accepted
from disagg.router.view import NoPair, Pair
from disagg.types.errors import DisaggError


class Phase(enum.Enum):
    """Of a request; see machine."""

    WAITING = "waiting"
    RUNNING = "running"
    CLOSING = "closing"  # every choice has its tokens; servers still owe their last word (timings)
    ENDED = "ended"


# ---- events


class PairPicked(Struct, frozen=True):
    """Servers were found for the next attempt."""

    pair: Pair
    now_s: float


class NoPairFound(Struct, frozen=True):
    """There are none for it, and there may be later or never."""

    no_pair: NoPair


class TokensCame(Struct, frozen=True):
    """A server sampled tokens of one choice."""

    server: str
    message: LegTokens


class LegEnded(Struct, frozen=True):
    """A server has said the last of a leg."""

    server: str
    end: LegEnd


class ServerLost(Struct, frozen=True):
    """Nothing that this incarnation held is there any more. crashed: its workers died under a living server."""

    server: str
    incarnation: str
    crashed: bool
    reason: str


class StopFound(Struct, frozen=True):
    """The text of a choice has reached one of the request's stop strings."""

    choice: int


class TargetSeen(Struct, frozen=True):
    """The decode server drains, and there is another one on which the request can go on."""


class VerdictTimeout(Struct, frozen=True):
    """prefix_no: of the leg whose timer it was."""

    attempt: int
    prefix_no: int = 0


class LingerTimeout(Struct, frozen=True):
    """Servers of a finished attempt have owed their last word for `linger_s`."""

    attempt: int


class DeadlinePassed(Struct, frozen=True):
    """The request's time is over."""


class ClientGone(Struct, frozen=True):
    """Nobody reads the answer any more, or its client aborted it."""

    reason: str


class ShutDown(Struct, frozen=True):
    """The router ends before the request could."""

    error: DisaggError


Event = (
    PairPicked
    | NoPairFound
    | TokensCame
    | LegEnded
    | ServerLost
    | StopFound
    | TargetSeen
    | VerdictTimeout
    | LingerTimeout
    | DeadlinePassed
    | ClientGone
    | ShutDown
)


# ---- instructions


class NeedPair(Struct, frozen=True):
    """Pick a pair, not before `delay_s`; `prefer_decode` and `avoid` are wishes. source: who keeps the request's KV, having
    handed it over: where there is a server that it can go on at, it is not computed again.
    """

    prefer_decode: PeerRef | None
    avoid: frozenset[str]
    delay_s: float
    cause: str
    reason: str
    source: PeerRef | None = None


class Attempted(Struct, frozen=True):
    """An attempt begins; its legs follow as `Send`. prefill_tokens: how many tokens whoever computes the prompt was given; again:
    a prefill or mixed server had been given it before."""

    attempt: int
    pair: Pair
    cause: str
    prefill_tokens: int
    choices: int
    again: bool = False


class Send(Struct, frozen=True):
    """Tell a server."""

    server: str
    message: RouterMessage


class Emit(Struct, frozen=True):
    """Tokens for the client: nobody has had them before."""

    accepted: Accepted


class ArmVerdictTimer(Struct, frozen=True):
    """Each leg that prefill has failed has one: decode's verdict on it is owed for so long from its own failure on."""

    attempt: int
    delay_s: float
    prefix_no: int = 0


class ArmLingerTimer(Struct, frozen=True):
    """LingerTimeout in so long, unless all has been said by then."""

    attempt: int
    delay_s: float


class Finish(Struct, frozen=True):
    """The request has been answered whole, and nothing of it is left on servers."""


class Fail(Struct, frozen=True):
    """The request ends with this error."""

    error: DisaggError


Instruction = NeedPair | Attempted | Send | Emit | ArmVerdictTimer | ArmLingerTimer | Finish | Fail
