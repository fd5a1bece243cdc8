"""What a prompt's stage asks of the one after it: a transfer's, or that of the choices which go on here."""

from __future__ import annotations

from abc import ABC, abstractmethod

from disagg.engine.legs import Leg, Stage
from disagg.engine.now import Now
from disagg.engine.sequences import Sequence
from disagg.memory.sequence import SequencePages
from disagg.messages.legs import StartLeg
from disagg.messages.link import FirstToken


class Onward(Stage, ABC):
    """Where a prompt's KV goes: a stage that its leg passes through after this one."""

    begins_partly = False  # what has been computed of a prompt can be given back: none of it is on its way to anyone

    @property
    @abstractmethod
    def may_admit(self) -> bool:
        """It can take the KV of one more prompt."""

    @abstractmethod
    def cost(self, start: StartLeg) -> int:
        """What comes after the prompt costs its tenant here, in tokens."""

    @abstractmethod
    def total_tokens(self, start: StartLeg) -> int:
        """Tokens whose KV one of its choices may come to have here."""

    @abstractmethod
    def take_on(self, leg: Leg, pages: SequencePages, shared_tokens: int, *, alone: bool) -> bool:
        """The prompt has got these. What must not leave them while it is computed is said now. shared_tokens: of its first
        tokens, those that were cached, whose pages others may hold too. alone: nobody else holds any.
        False: what follows the prompt has no room here now, and the pages go back.
        """

    @abstractmethod
    def scheduled(self, leg: Leg, sequence: Sequence, start: int, plan_no: int) -> None:
        """Tokens [start, sequence.position) are computed by this plan."""

    @abstractmethod
    def prompt_done(self, leg: Leg, sequence: Sequence, tokens: tuple[FirstToken, ...], now: Now) -> None:
        """Every token is computed, and every choice has its first one. Takes the sequence out of the batch."""
