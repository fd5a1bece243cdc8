"""When a plan is sent that others may still join: as late as lets its step follow the one under way at once. Pure.

    at once   report n ─ plan n+2 is sent                  report n+1            report n+2           report n+3
              │ step n+1            ▲ KV lands: it joins plan n+3   │ step n+2            │ step n+3 ── its token
    late      report n                      due ─ lead ─   report n+1            report n+2
              │ step n+1            ▲ KV lands: plan n+2, sent when it is due, has it      │ step n+2 ── its token

What joins one step earlier has its next token one step earlier. The lead is what a plan needs from its decision to the device:
scheduling, messages, tensors, and a timer that is not exact. It is learned from how long before the end of the step under way
the next one had been launched: a step that comes too late leaves the device idle, so the lead grows fast and shrinks slowly.

Knows durations and moments; nothing of plans, sequences or transfers.
"""

from __future__ import annotations

from collections import deque

RECENT = 4  # steps, of which the shortest says how long the one under way lasts at least
FIRST_LEAD_S = 0.003
LEAST_LEAD_S = 0.001
LEAST_SHARE = 0.25  # of a step is the lead at least: steps differ by more where they take longer
MOST_SHARE = 0.7  # where it needs to be more, nothing is held
AHEAD_S = 0.0003  # that a step is launched before the one before it ends
MORE_S, LESS_S = (
    0.0003,
    0.00003,
)  # by which the lead changes after a step that was launched too late, and one that was not
RELAX_S = 0.000003  # by which it shrinks after each step while it is too long to hold anything


class LatePlans:
    """`sent` and `computed` for every plan; until `due_s` the next one may be held."""

    def __init__(self) -> None:
        self.lead_s = FIRST_LEAD_S
        self.held = 0  # plans, so far
        self._steps_s: deque[float] = deque(maxlen=RECENT)
        self._began_s = 0.0  # the step under way: when the report of the one before it was heard
        self._timed: set[int] = set()  # plans in flight that were sent as late as they were meant to be, or later

    @property
    def due_s(self) -> float:
        """When the plan after the step under way is to be sent; when that step began, if nothing is to be held."""
        if not self._steps_s:
            return self._began_s
        step_s = min(self._steps_s)
        lead_s = max(self.lead_s, LEAST_SHARE * step_s)
        return self._began_s + (step_s - lead_s if lead_s <= MOST_SHARE * step_s else 0.0)

    def sent(self, plan_no: int, now_s: float, *, alone: bool, held: bool) -> None:
        """alone: no step is under way. held: it could have been sent before."""
        if held:
            self.held += 1
            if alone or now_s >= self.due_s:
                self._timed.add(plan_no)
        if alone:
            self._began_s = now_s

    def computed(
        self, plan_no: int, seconds: float, ahead_s: float | None, now_s: float, *, decodes_only: bool
    ) -> None:
        """A step is reported. ahead_s: from the end of its launch to that of the step before it, as far as it is known."""
        self._began_s = now_s
        if decodes_only and seconds > 0:
            self._steps_s.append(seconds)
        timed = plan_no in self._timed
        self._timed.discard(plan_no)
        if timed and ahead_s is not None:
            self.lead_s = max(LEAST_LEAD_S, self.lead_s + (MORE_S if ahead_s < AHEAD_S else -LESS_S))
        elif self._steps_s and self.lead_s > MOST_SHARE * min(self._steps_s):
            self.lead_s = max(LEAST_LEAD_S, self.lead_s - RELAX_S)
