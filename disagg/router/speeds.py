"""How fast servers compute prompts, by what they say of those of this router: a line through their times. Pure.

    seconds of a prompt = prompt_s + token_s * tokens that were not cached

A server computes several prompts at once, so what counts is its work and not a prompt's stay: from the end of the prompt before
it, or from its own first chunk if that came later, to the end of its last one. Older prompts count less and less. Of a server
that has computed little, what all others do counts as much as two prompts, and of the first one a guess. Servers are as fast as
all of them together until they clearly are not, and one that is new as the fastest.

A server that stood still once (it was stopped, it swapped, it compiled) must not stay the one that nothing is sent to, and so
never be measured again: once it has computed nothing for IDLE_S, how many times slower or faster it is than usual becomes the
square root of that with each HALF_S.
"""

from __future__ import annotations

import math

from msgspec import Struct

KEPT = 0.95  # of a prompt's weight, with each that follows
GUESS_PROMPT_S, GUESS_TOKEN_S, GUESS_TOKENS = 0.005, 1e-4, 1000
ALIKE = (
    1.5  # servers whose times differ by less are equally fast: that much is noise, which would send all prompts to one
)
IDLE_S, HALF_S = 10.0, 10.0
REDRAW_S = 1.0  # lines are drawn anew that often, where no prompt ended
LEAST_SHARE = 0.1  # of a prompt's seconds that its tokens take, at least, whatever the line says
LEAST_S = 1e-6  # of a prompt
MAX_S = 3600.0


class Speed(Struct, frozen=True):
    """prompt_tokens: of a usual prompt, without what was cached."""

    prompt_s: float
    token_s: float
    prompt_tokens: float

    def seconds(self, prompts: float, tokens: float) -> float:
        return prompts * self.prompt_s + tokens * self.token_s

    @property
    def usual_s(self) -> float:
        """What a usual prompt takes."""
        return self.seconds(1, self.prompt_tokens)


class _Sums(Struct, frozen=True):
    """Of prompts: how many, their tokens and seconds, squares and products."""

    n: float
    x: float
    y: float
    xx: float
    xy: float

    def plus(self, other: _Sums, kept: float = 1.0) -> _Sums:
        return _Sums(
            self.n * kept + other.n,
            self.x * kept + other.x,
            self.y * kept + other.y,
            self.xx * kept + other.xx,
            self.xy * kept + other.xy,
        )

    def times(self, factor: float) -> _Sums:
        return _Sums(self.n * factor, self.x * factor, self.y * factor, self.xx * factor, self.xy * factor)

    def slower(self, times: float) -> _Sums:
        return _Sums(self.n, self.x, self.y * times, self.xx, self.xy * times)

    def line(self) -> Speed:
        """Least squares. Both parts of it are positive."""
        spread = self.n * self.xx - self.x * self.x
        mean_token_s = max(self.y, LEAST_S * self.n) / self.x
        token_s = (self.n * self.xy - self.x * self.y) / spread if spread > 0 else mean_token_s
        token_s = min(max(token_s, LEAST_SHARE * mean_token_s), mean_token_s)
        return Speed(max(0.0, (self.y - token_s * self.x) / self.n), token_s, self.x / self.n)


class _Shown(Struct, frozen=True):
    """By one server's prompts. ended_s: when the last one did, by its clock; heard_s: when that was heard, by ours."""

    sums: _Sums
    ended_s: float
    heard_s: float


def _one(tokens: float, seconds: float) -> _Sums:
    return _Sums(1.0, tokens, seconds, tokens * tokens, tokens * seconds)


_GUESS = _one(1, GUESS_PROMPT_S + GUESS_TOKEN_S).plus(_one(GUESS_TOKENS, GUESS_PROMPT_S + GUESS_TOKENS * GUESS_TOKEN_S))
GUESS = _GUESS.line()


def _times_slower(line: Speed, usual: Speed) -> float:
    return line.seconds(1, usual.prompt_tokens) / usual.usual_s


class Speeds:
    """Of all servers of one router."""

    def __init__(self) -> None:
        self._shown: dict[str, _Shown] = {}
        self._all = _GUESS
        self._lines: dict[str, Speed] = {}  # asked for with every view
        self._drawn_s = -math.inf

    def ended(self, server: str, tokens: int, began_s: float, ended_s: float, now_s: float) -> None:
        """A prompt was computed there, of which so many tokens were not cached, as is heard now. Began and ended: of the server's
        clock, whichever.

        Of prompts that are told out of order, only the latest count.
        """
        shown = self._shown.get(server)
        last_s = -math.inf if shown is None else shown.ended_s
        seconds = min(MAX_S, ended_s - max(began_s, last_s))
        if not seconds >= 0:  # nor if it is not a number
            return
        one = _one(max(1, tokens), seconds)
        sums = one
        if shown is not None:
            _, fading = self._faded(shown.sums, self.usual, began_s - last_s)
            sums = shown.sums.slower(fading).plus(one, KEPT)
        self._shown[server] = _Shown(sums, ended_s, now_s)
        self._all = self._all.plus(one, KEPT)
        self._lines.clear()

    def forget(self, server: str) -> None:
        """It has left."""
        self._shown.pop(server, None)
        self._lines.pop(server, None)

    def of(self, server: str, now_s: float) -> Speed:
        """Of one that has computed nothing yet: as the fastest, or it might never be tried."""
        if not 0 <= now_s - self._drawn_s < REDRAW_S:
            self._lines.clear()
            self._drawn_s = now_s
        line = self._lines.get(server)
        if line is None:
            usual = self.usual
            if server in self._shown:
                line = self._known(self._shown[server], usual, now_s)
            else:
                found = (usual, *(self._known(each, usual, now_s) for each in self._shown.values()))
                line = min(found, key=lambda each: each.seconds(1, usual.prompt_tokens))
            self._lines[server] = line
        return line

    def _known(self, shown: _Shown, usual: Speed, now_s: float) -> Speed:
        line, fading = self._faded(shown.sums, usual, now_s - shown.heard_s)
        line = Speed(line.prompt_s * fading, line.token_s * fading, line.prompt_tokens)
        return usual if 1 / ALIKE <= _times_slower(line, usual) <= ALIKE else line

    def _faded(self, sums: _Sums, usual: Speed, idle_s: float) -> tuple[Speed, float]:
        """What a server's prompts said when it last computed one, and by what to multiply that after so long."""
        line = self._all.times(2 / self._all.n).plus(sums).line()
        return line, _times_slower(line, usual) ** (0.5 ** (max(0.0, idle_s - IDLE_S) / HALF_S) - 1.0)

    @property
    def usual(self) -> Speed:
        """The line of all servers together."""
        return self._all.line()
