"""Whether prompts may run in this pass of an engine, or wait for a better one: SGLang's PrefillDelayer.

A step that computes prompts takes long, and data-parallel ranks that share the experts of a model wait in each step for the
slowest of them. So prompts should run on all ranks in the same steps, and many at once. In each pass every rank says four
integers, each rank hears them all, and all decide alike:

    prefillable on   prompts wait                                          they run after so many passes at the latest
    no rank          -
    every rank       while free slots < the largest batch of prompts       passes - 1; the first time at once
    some ranks       unless the pool of one that could is hardly used      passes - 1

Limits count passes, which are the same on all ranks; a rank's clock only measures. Pure; knows states, nothing of sequences,
pages or of how states get around.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from typing import Protocol

from msgspec import Struct


class RankState(Struct, frozen=True):
    """What one rank says in a pass."""

    prefillable: bool  # a prompt waits whose turn could come; those that have begun go on
    force: bool  # it is, and the rank's pool is used less than the low watermark
    running: int  # sequences that go on after their prompts
    largest_batch: int  # most prompts that began in one pass, of those that count (see LargestBatch)


class Limits(Struct, frozen=True):
    """passes: the first one that a delay cannot reach. max_running: of one rank. low_usage: a share of a rank's pool; 0: off."""

    passes: int
    max_running: int
    low_usage: float = 0.0

    def state(self, *, prefillable: bool, usage: float, running: int, largest_batch: int) -> RankState:
        """usage: used pages of this rank's pool over all; those that could be evicted are not used."""
        return RankState(prefillable, prefillable and usage < self.low_usage, running, largest_batch)


class Delay(Struct, frozen=True):
    """Prompts wait. passes: how many they have waited for; since_s: when the first of them was, by this rank's clock."""

    passes: int
    since_s: float


class Estimate(enum.Enum):
    """On which ranks prompts could begin."""

    ALL = "all"
    MIXED = "mixed"
    NONE = "none"


class Reason(enum.Enum):
    DELAY = "delay"
    TOKEN_WATERMARK = "token_watermark"  # a pool is hardly used: better anything than that
    WAIT_TIMEOUT = "wait_timeout"
    NO_WAIT = "no_wait"
    WAIT_SUCCESS = "wait_success"  # what was waited for is here
    NONE = "none"  # there are no prompts


class Verdict(Struct, frozen=True):
    """skipped: a delay was due, and let off as the first one."""

    estimate: Estimate
    allow: bool
    reason: Reason
    skipped: bool = False


def estimate(states: tuple[RankState, ...]) -> Estimate:
    if all(state.prefillable for state in states):
        return Estimate.ALL
    return Estimate.MIXED if any(state.prefillable for state in states) else Estimate.NONE


def decide(states: tuple[RankState, ...], delay: Delay | None, limits: Limits, *, skips: bool) -> Verdict:
    """delay: that these prompts have had so far. skips: the first delay that is due to a want of slots is let off."""
    found = estimate(states)
    if found is Estimate.NONE:
        return Verdict(found, True, Reason.NONE)
    if found is Estimate.MIXED and any(state.force for state in states):
        return Verdict(found, True, Reason.TOKEN_WATERMARK)
    if found is Estimate.ALL:
        free = limits.max_running - max(state.running for state in states)
        few = free < max(state.largest_batch for state in states)
        if skips or not few:
            return Verdict(found, True, Reason.NO_WAIT if delay is None else Reason.WAIT_SUCCESS, skipped=few)
    if (0 if delay is None else delay.passes) < limits.passes - 1:
        return Verdict(found, False, Reason.DELAY)
    return Verdict(found, True, Reason.WAIT_TIMEOUT)


class LargestBatch:
    """The most prompts that began in one of the last `window` passes: one burst does not raise the bar for good."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._largest: deque[tuple[int, int]] = (
            deque()
        )  # (pass, prompts), fewer and fewer: an older one with less is over

    def add(self, pass_no: int, prompts: int) -> None:
        while self._largest and self._largest[-1][1] <= prompts:
            self._largest.pop()
        if prompts:
            self._largest.append((pass_no, prompts))

    def at(self, pass_no: int) -> int:
        """As it counts in this pass."""
        while self._largest and self._largest[0][0] < pass_no - self._window:
            self._largest.popleft()
        return self._largest[0][1] if self._largest else 0


class Gather(Protocol):
    """The states of all ranks, once in each pass."""

    def gather(self, state: RankState) -> tuple[RankState, ...]:
        """state: this rank's. Everyone's, by rank, the same on all."""


class Together:
    """Of ranks that one process schedules: all say their states (`states`) before any of them hears them."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.states: tuple[RankState, ...] = ()

    def gather(self, state: RankState) -> tuple[RankState, ...]:
        assert len(self.states) == self.ranks, f"{len(self.states)} of {self.ranks} ranks have said their states"
        return self.states


class Outcome(Struct, frozen=True):
    """Of one pass. delay: what there was before the verdict; executed: prompts ran here, also such as had begun before and go on
    whatever the verdict is.
    """

    verdict: Verdict
    states: tuple[RankState, ...]
    delay: Delay | None
    executed: bool


class PrefillDelayer:
    """What lasts from pass to pass: how long prompts have waited, and whether a delay was let off."""

    def __init__(self, limits: Limits, gather: Gather) -> None:
        self.limits = limits
        self.gather = gather
        self.delay: Delay | None = None
        self._skips = True

    def negotiate(self, state: RankState, now_s: float) -> tuple[Verdict, tuple[RankState, ...]]:
        """Once in each pass, on every rank."""
        states = self.gather.gather(state)
        verdict = decide(states, self.delay, self.limits, skips=self._skips)
        self._skips = self._skips and not verdict.skipped
        if verdict.allow:
            self.delay = None
        elif self.delay is None:
            self.delay = Delay(1, now_s)
        else:
            self.delay = Delay(self.delay.passes + 1, self.delay.since_s)
        return verdict, states


class SinglePass:
    """One pass: ranks negotiate once in it, when prompts could run here or else at its end, however often that is asked."""

    def __init__(self, delayer: PrefillDelayer, state: Callable[[bool], RankState], now_s: float) -> None:
        """state: what this rank says, by whether it is prefillable."""
        self._delayer = delayer
        self._state = state
        self._now_s = now_s
        self.asked = False  # a prompt could run here
        self._before = delayer.delay
        self._said: tuple[Verdict, tuple[RankState, ...]] | None = None

    def may_prefill(self) -> bool:
        """Somebody could run a prompt now."""
        self.asked = True
        return self._negotiated(prefillable=True)[0].allow

    def finalize(self, *, executed: bool) -> Outcome:
        """The pass is over. A rank on which nobody asked takes part now: the others wait for it."""
        verdict, states = self._negotiated(prefillable=False)
        return Outcome(verdict, states, self._before, executed)

    def _negotiated(self, *, prefillable: bool) -> tuple[Verdict, tuple[RankState, ...]]:
        if self._said is None:
            self._said = self._delayer.negotiate(self._state(prefillable), self._now_s)
        return self._said
