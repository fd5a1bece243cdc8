"""Pipeline stages: how many plans are in flight, how many of those that decode each takes, and how long stages stand idle. Pure.

    stage 0   │ plan 0 │ plan 1 │ plan 2 │ plan 3 │░░░░░░░░│          ░ a bubble: the stage has nothing to compute,
    stage 1   │░░░░░░░░│ plan 0 │ plan 1 │ plan 2 │ plan 3 │            while another has

As many plans as there are stages keep all of them busy. The chunks of a prompt may be in several of them. A choice is in one:
its next token is computed from the one before it, which only the last stage knows, and which the server says with the next plan.
"""

from __future__ import annotations

from disagg.memory.spans import PLANS_IN_FLIGHT
from disagg.types.arithmetic import ceil_div


def plans_in_flight(stages: int) -> int:
    """Plans sent and not reported at a time: with one stage, one is computed while the next one is on its way. One sequence may
    be in all of them, and its pages are reserved for that.
    """
    return max(PLANS_IN_FLIGHT, stages)


def decode_share(decoding: int, stages: int) -> int:
    """Of so many sequences that decode in several stages, how many a plan takes at most: all of them over all plans, as evenly
    as they go."""
    return ceil_div(decoding, plans_in_flight(stages))


class Bubbles:
    """How long each stage has computed, and how long it has not while any plan was in flight. Seconds.

    Events come in the order in which things happen, with times that never go back. bubble_s: by stage; it never falls, and is
    exact whenever the stage has just computed something, or nothing is in flight.
    """

    def __init__(self, stages: int) -> None:
        self.busy_s = [0.0] * stages
        self.bubble_s = [0.0] * stages
        self._in_flight = 0
        self._now_s = 0.0
        self._spanned_s = 0.0  # in which any plan was in flight

    def sent(self, now_s: float) -> None:
        """A plan is on its way to all stages."""
        self._pass(now_s)
        self._in_flight += 1

    def computed(self, stage: int, compute_s: float, now_s: float) -> None:
        """A stage has computed one."""
        self._pass(now_s)
        self.busy_s[stage] += compute_s
        self._count(stage)

    def reported(self, now_s: float) -> None:
        """All stages have computed the oldest one."""
        self._pass(now_s)
        self._in_flight -= 1
        assert self._in_flight >= 0, "more plans were reported than sent"
        for stage in range(len(self.busy_s)) if not self._in_flight else ():
            self._count(stage)

    def _pass(self, now_s: float) -> None:
        if self._in_flight:
            self._spanned_s += max(0.0, now_s - self._now_s)
        self._now_s = max(self._now_s, now_s)

    def _count(self, stage: int) -> None:
        self.bubble_s[stage] = max(self.bubble_s[stage], self._spanned_s - self.busy_s[stage])
