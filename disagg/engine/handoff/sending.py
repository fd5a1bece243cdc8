"""What an engine that sends KV remembers of a leg's transfer, and what of a window it still has."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from disagg.engine.legs import Leg
from disagg.engine.sequences import Sequence
from disagg.memory.spans import window_first, window_start
from disagg.messages import link as m
from disagg.messages.layout import GroupKind, LayerGroup
from disagg.messages.legs import StartLeg
from disagg.transfer.session import SendSession
from disagg.types.ids import LegKey


@dataclass(slots=True, eq=False)
class Sending:
    """One leg's transfer."""

    leg: Leg
    session: SendSession
    link: int | None = None
    sequence: Sequence | None = None  # whose KV it is, from the first chunk on
    large_pages: int = 0  # what the prompt came to hold, once all of it is scheduled
    last_plan: int = -1  # that computes a chunk of it
    checkpoint_offered: bool = False
    announced: bool = False
    first_tokens: m.FirstTokens | None = None
    granted_choices: int = 0  # how many of its choices, the first ones, have slots on decode
    dropping: set[int] = field(default_factory=set)  # ranks that have yet to say SendsDropped
    tell_drained: bool = False
    withdraw: m.Withdraw | None = None  # once it has ended, if decode has to know

    @property
    def key(self) -> LegKey:
        return self.leg.key


def first_held(groups: Iterable[LayerGroup], page_tokens: int, start: StartLeg) -> tuple[int, ...]:
    """Per layer group, the first token that pages still hold when all of the leg's have been computed.

    A prompt keeps the window of its last full page, a sequence that ran no more than its next token needs.
    """
    num_tokens = len(start.token_ids)

    def of_window(window_tokens: int) -> int:
        if start.moves_attempt:
            return window_first(num_tokens, window_tokens, page_tokens) * page_tokens
        return window_start(num_tokens, window_tokens, page_tokens)

    return tuple(of_window(g.window - 1) if g.kind is GroupKind.WINDOW else 0 for g in groups)
