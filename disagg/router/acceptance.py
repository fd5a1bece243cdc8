"""Tokens are accepted once: the acceptance table of one request.

Servers may say the same token twice (the prefill server's copy of the first token is a shortcut; a retired attempt may still
speak), out of order, or late. Per choice the table takes only the current attempt and only the next output index; it trims
overlap, drops duplicates and holds what comes too early. Knows token ids and indices; nothing of servers, text or time.

    output index     0   1   2   3   4   5   6
    accepted         a   b   c                       next index is 3
    message              b   c   d                   b, c are duplicates, d is accepted
    message                          e' .   .        index 4 was not said yet, so index 5.. would be held
"""

from __future__ import annotations

import enum
from array import array

from msgspec import Struct

from disagg.messages.legs import LegTokens
from disagg.messages.plan import TokenLogprobs
from disagg.types.ids import FinishReason

MAX_HELD_TOKENS = 4096  # per choice; what comes beyond is dropped, and the attempt ends incomplete


class Accepted(Struct, frozen=True):
    """Tokens of one choice, taken for good. logprobs: one per token, or empty. finish: the choice ended with them."""

    choice: int
    first_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish: FinishReason | None


class Dropped(enum.Enum):
    """Why a message brought nothing new."""

    STALE = "stale"  # of another attempt, or of a choice that this request does not have
    DUPLICATE = "duplicate"
    HELD = "held"  # a gap before it; it may be accepted later
    CONTRADICTION = "contradiction"  # same attempt, same index, another token (or another end); all of it is ignored


class Counts(Struct):
    """Tokens dropped as duplicates or stale; messages dropped as contradictions."""

    duplicates: int = 0
    stale: int = 0
    contradictions: int = 0


class _Choice:
    __slots__ = ("end_at", "end_reason", "finish", "held", "token_ids")

    def __init__(self) -> None:
        self.token_ids = array("q")  # 8 bytes each, where Python's integers take 36
        self.held: dict[int, tuple[int, TokenLogprobs | None]] = {}
        self.end_at: int | None = None  # the attempt said that the choice ends before this index
        self.end_reason: FinishReason | None = None
        self.finish: FinishReason | None = None


class AcceptanceTable:
    """What was accepted of each choice of one request, over all its attempts."""

    def __init__(self, num_choices: int, max_held_tokens: int = MAX_HELD_TOKENS) -> None:
        assert num_choices >= 1
        self._choices = [_Choice() for _ in range(num_choices)]
        self._max_held_tokens = max_held_tokens
        self._attempt = 0
        self.counts = Counts()

    def begin(self, attempt: int) -> None:
        """From now on only this attempt is listened to. What was held of an earlier one is forgotten."""
        assert attempt > self._attempt, (attempt, self._attempt)
        self._attempt = attempt
        for choice in self._choices:
            choice.held.clear()
            if choice.finish is None:
                choice.end_at = choice.end_reason = None

    def accept(self, attempt: int, message: LegTokens) -> Accepted | Dropped:
        """Takes what is new of a message of `attempt`; says why when nothing is."""
        if attempt != self._attempt or not 0 <= message.choice < len(self._choices):
            self.counts.stale += len(message.token_ids)
            return Dropped.STALE
        choice = self._choices[message.choice]
        if choice.finish is not None:
            self.counts.duplicates += len(message.token_ids)
            return Dropped.DUPLICATE
        in_order = message.first_index == len(choice.token_ids) and not choice.held
        if in_order and message.token_ids and message.finish is None and choice.end_at is None:
            return self._next(choice, message)  # nearly always
        if self._contradicts(choice, message):
            self.counts.contradictions += 1
            return Dropped.CONTRADICTION
        known_end = choice.end_at is not None
        if message.finish is not None and not known_end:
            choice.end_at = message.first_index + len(message.token_ids)
            choice.end_reason = message.finish
        held_some = self._hold(choice, message)
        first_index = len(choice.token_ids)
        taken: list[tuple[int, TokenLogprobs | None]] = []
        while (item := choice.held.pop(len(choice.token_ids), None)) is not None:
            taken.append(item)
            choice.token_ids.append(item[0])
        if choice.end_at == len(choice.token_ids):
            choice.finish = choice.end_reason
            choice.held.clear()
        if not taken and choice.finish is None:
            return Dropped.HELD if held_some or (message.finish is not None and not known_end) else Dropped.DUPLICATE
        logprobs = tuple(entry for _, entry in taken if entry is not None)
        return Accepted(
            choice=message.choice,
            first_index=first_index,
            token_ids=tuple(token_id for token_id, _ in taken),
            logprobs=logprobs if len(logprobs) == len(taken) else (),
            finish=choice.finish,
        )

    def finish(self, choice: int, reason: FinishReason) -> bool:
        """The choice ends here by the router's own decision (a stop string). False if it had ended before."""
        state = self._choices[choice]
        if state.finish is not None:
            return False
        state.finish = reason
        state.held.clear()
        return True

    @property
    def attempt(self) -> int:
        return self._attempt

    @property
    def begun(self) -> bool:
        """A token of some choice was accepted."""
        return any(choice.token_ids for choice in self._choices)

    def token_ids(self, choice: int) -> tuple[int, ...]:
        """Outputs accepted so far."""
        return tuple(self._choices[choice].token_ids)

    def finished(self, choice: int) -> FinishReason | None:
        return self._choices[choice].finish

    def unfinished(self) -> tuple[int, ...]:
        return tuple(index for index, choice in enumerate(self._choices) if choice.finish is None)

    def _next(self, choice: _Choice, message: LegTokens) -> Accepted:
        """All of a message that begins where the accepted ones end; nothing else of the choice is known."""
        first_index = len(choice.token_ids)
        choice.token_ids.extend(message.token_ids)
        logprobs = message.logprobs if len(message.logprobs) == len(message.token_ids) else ()
        return Accepted(message.choice, first_index, message.token_ids, logprobs, None)

    def _contradicts(self, choice: _Choice, message: LegTokens) -> bool:
        end = message.first_index + len(message.token_ids)
        if message.finish is not None:
            if choice.end_at is not None and choice.end_at != end:
                return True
            if len(choice.token_ids) > end or any(index >= end for index in choice.held):
                return True
        if choice.end_at is not None and end > choice.end_at:
            return True
        for index, token_id in enumerate(message.token_ids, message.first_index):
            if index < len(choice.token_ids):
                known: int | None = choice.token_ids[index]
            else:
                known = choice.held[index][0] if index in choice.held else None
            if known is not None and known != token_id:
                return True
        return False

    def _hold(self, choice: _Choice, message: LegTokens) -> bool:
        next_index = len(choice.token_ids)
        with_logprobs = len(message.logprobs) == len(message.token_ids)
        added = False
        for offset, token_id in enumerate(message.token_ids):
            index = message.first_index + offset
            if index < next_index or index in choice.held:
                self.counts.duplicates += 1
            elif message.first_index == next_index or len(choice.held) < self._max_held_tokens:
                choice.held[index] = (token_id, message.logprobs[offset] if with_logprobs else None)
                added = True
        return added
