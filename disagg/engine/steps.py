"""The plan pipeline of an engine: numbers plans, holds so many in flight, and knows when a plan has been computed.

The engine schedules plan n+1 while the workers compute n, or as many plans as there are pipeline stages; pages and slots
named by a plan may be reused only once it, on every rank, has reported. Knows plan numbers and ranks; nothing of what is in
a plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from disagg.messages.plan import StepResult, WorkerPlan
from disagg.scheduler.pipeline import plans_in_flight
from disagg.types.errors import ProtocolError


@dataclass(slots=True)
class _InFlight:
    plan: WorkerPlan
    reports: dict[int, StepResult] = field(default_factory=dict)


class PlanPipeline:
    """Plans sent and not yet reported by every rank, oldest first."""

    def __init__(self, ranks: int, stages: int, sampling_rank: int) -> None:
        """sampling_rank: the one that says what was sampled, and speaks for all."""
        self.stages = stages
        self._ranks = ranks
        self._most = plans_in_flight(stages)
        self._sampling_rank = sampling_rank
        self._in_flight: dict[int, _InFlight] = {}
        self.reported = -1  # number of the last plan that every rank has reported

    @property
    def clock(self) -> int:
        """Plans that every rank has reported: the logical time at which pages were last used."""
        return self.reported + 1

    @property
    def has_room(self) -> bool:
        return len(self._in_flight) < self._most

    @property
    def in_flight(self) -> tuple[WorkerPlan, ...]:
        return tuple(item.plan for item in self._in_flight.values())

    def sent(self, plan: WorkerPlan) -> None:
        assert self.has_room
        self._in_flight[plan.plan_no] = _InFlight(plan)

    def report(self, result: StepResult) -> tuple[WorkerPlan, StepResult] | None:
        """Take one rank's report. The plan and the sampling rank's result, once every rank has reported it."""
        item = self._in_flight.get(result.plan_no)
        if item is None or result.rank in item.reports:
            raise ProtocolError(f"rank {result.rank} reports plan {result.plan_no}, which is not in flight there")
        item.reports[result.rank] = result
        if len(item.reports) < self._ranks:
            return None
        if result.plan_no != self.reported + 1:
            raise ProtocolError(f"plan {result.plan_no} is complete where plan {self.reported + 1} was due")
        del self._in_flight[result.plan_no]
        self.reported = result.plan_no
        return item.plan, item.reports[self._sampling_rank]


class Slots:
    """Sampling slots 0 .. count-1, lowest first."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))
        self.total = count

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> tuple[int, ...] | None:
        """All or nothing."""
        if count > len(self._free):
            return None
        return tuple(self._free.pop() for _ in range(count))

    def give(self, slots: tuple[int, ...]) -> None:
        self._free.extend(slots)
        assert len(self._free) <= self.total
