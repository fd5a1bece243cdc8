"""One choice's tokens as text: detokenized incrementally, cut at a stop string, with log-probabilities attached.

A token is given out once no stop string can take it back: with stop strings, when some of its text has been given out.

    tokens      | Hel | lo | ST | OP |            stop string "STOP"
    given out     Hel   lo |              held while "ST" may become "STOP", dropped when it does

Knows tokens and text; nothing of servers or attempts (accepted tokens are final, also across a replay).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from msgspec import Struct

from disagg.messages.plan import TokenLogprobs
from disagg.router.acceptance import Accepted
from disagg.router.requests import ChoiceDelta, LogprobEntry, TokenLogprobInfo
from disagg.text.detokenizer import Detokenizer
from disagg.text.stops import StopFinder, StopTable
from disagg.text.tokenizer import Tokenizer
from disagg.types.ids import FinishReason
from disagg.types.sampling import SamplingParams


class _Token(Struct, frozen=True):
    token_id: int
    start_chars: int  # where its text begins in the output
    logprobs: TokenLogprobs | None


class ChoiceText:
    """The text of one choice so far."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        choice: int,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        stops: StopTable | None = None,
    ) -> None:
        """stops: of params.stop, where there is one that is shared."""
        self.stopped_by: str | None = None  # the stop string that was found
        self.num_tokens = 0  # given out
        self._tokenizer = tokenizer
        self._choice = choice
        self._min_tokens = params.min_tokens
        ends = frozenset() if params.ignore_eos else {tokenizer.end_token_id}  # which is no reason to name
        self._stop_token_ids = frozenset(params.stop_token_ids) - ends
        self._detokenizer = Detokenizer(tokenizer, start_ids=prompt_token_ids)
        self._finder = StopFinder(stops or StopTable(params.stop)) if params.stop else None
        self._chars = 0  # detokenized
        self._given_chars = 0
        self._held: deque[_Token] = deque()

    def push(self, accepted: Accepted) -> ChoiceDelta | None:
        """What can be given out now; None if nothing. Its `finish` is STOP if a stop string was found."""
        assert self.stopped_by is None
        if self._finder is None and accepted.finish is None and not accepted.logprobs:
            return self._plain(accepted.token_ids)
        text: list[str] = []
        # A token that ends the choice by its id is counted, but its text is not part of the answer.
        silent_last = accepted.finish is FinishReason.STOP
        for offset, token_id in enumerate(accepted.token_ids):
            last = offset == len(accepted.token_ids) - 1
            logprobs = accepted.logprobs[offset] if accepted.logprobs else None
            self._held.append(_Token(token_id, self._chars, logprobs))
            piece = "" if silent_last and last else self._detokenizer.push((token_id,))
            if self._take(piece, text, searched=accepted.first_index + offset >= self._min_tokens):
                return self._stop(text)
        if accepted.finish is None:
            return self._delta(text, self._settled())
        if self._take(self._detokenizer.finish(), text, searched=True):
            return self._stop(text)
        if self._finder is not None:
            text.append(self._finder.finish())
        tokens, self._held = tuple(self._held), deque()
        by_id = accepted.token_ids[-1] if silent_last and accepted.token_ids else None
        return self._delta(text, tokens, accepted.finish, by_id if by_id in self._stop_token_ids else None)

    def _plain(self, token_ids: tuple[int, ...]) -> ChoiceDelta | None:
        """Of an answer that goes on, in which nothing is sought: no token is held."""
        text = self._detokenizer.push(token_ids)
        self._chars += len(text)
        self._given_chars += len(text)
        self.num_tokens += len(token_ids)
        return ChoiceDelta(choice=self._choice, text=text, token_ids=token_ids) if text or token_ids else None

    def _take(self, piece: str, text: list[str], searched: bool) -> bool:
        """Adds what of the piece can be given out; whether a stop string was found. Before min_tokens none is complete."""
        self._chars += len(piece)
        hit = False
        if self._finder is not None:
            piece, hit = self._finder.push(piece, searched)
        text.append(piece)
        self._given_chars += len(piece)
        return hit

    def _stop(self, text: list[str]) -> ChoiceDelta | None:
        assert self._finder is not None
        self.stopped_by = self._finder.hit
        tokens = self._settled()
        self._held.clear()
        return self._delta(text, tokens, FinishReason.STOP, self.stopped_by)

    def _settled(self) -> tuple[_Token, ...]:
        tokens: list[_Token] = []
        while self._held and (self._finder is None or self._held[0].start_chars < self._given_chars):
            tokens.append(self._held.popleft())
        return tuple(tokens)

    def _delta(
        self,
        text: list[str],
        tokens: tuple[_Token, ...],
        finish: FinishReason | None = None,
        stop_reason: str | int | None = None,
    ) -> ChoiceDelta | None:
        joined = "".join(text)
        if not joined and not tokens and finish is None:
            return None
        self.num_tokens += len(tokens)
        return ChoiceDelta(
            choice=self._choice,
            text=joined,
            token_ids=tuple(token.token_id for token in tokens),
            logprobs=tuple(self._info(token, token.logprobs) for token in tokens if token.logprobs is not None),
            finish=finish,
            stop_reason=stop_reason,
        )

    def _info(self, token: _Token, logprobs: TokenLogprobs) -> TokenLogprobInfo:
        return TokenLogprobInfo(
            chosen=self._entry(token.token_id, logprobs.logprob),
            top=tuple(self._entry(token_id, logprob) for token_id, logprob in logprobs.top),
            text_offset=token.start_chars,
        )

    def _entry(self, token_id: int, logprob: float) -> LogprobEntry:
        raw = self._tokenizer.token_bytes(token_id)
        return LogprobEntry(token_id=token_id, text=raw.decode("utf-8", errors="replace"), raw=raw, logprob=logprob)


def merged(deltas: Sequence[ChoiceDelta]) -> ChoiceDelta:
    """Deltas of one choice, in order, as one: for a client that reads more slowly than tokens come."""
    last = deltas[-1]
    if len(deltas) == 1:
        return last
    assert all(delta.choice == last.choice for delta in deltas)
    return ChoiceDelta(
        choice=last.choice,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        logprobs=tuple(info for delta in deltas for info in delta.logprobs),
        finish=last.finish,
        stop_reason=last.stop_reason,
    )
