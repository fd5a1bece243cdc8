"""The legs of an engine: who asked for what, what the router was told of it, and when the last of it is gone.

    StartLeg ──> add ──> its stages work ──> end (LegEnd) ──> no stage holds anything ──> forgotten
                                       └ close: stages give up what they do for it

A leg passes through *stages* (see `Stage`), which the engine's role chooses: prompts and sending, or receiving and choices.
What a leg does in a stage is kept there. Knows routers, keys and outcomes; nothing of pages, plans' contents or links.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from disagg.engine.instructions import Counters, Instruction, ToRouter
from disagg.engine.now import Now
from disagg.engine.steps import PlanPipeline
from disagg.messages.legs import LegEnd, LegTokens, Outcome, StartLeg, TimelineEvent
from disagg.messages.link import FirstToken
from disagg.messages.plan import StepResult, WorkerPlan
from disagg.types.ids import LegKey

MAX_TIMELINE = 256
NO_NUMBERS = (
    "the logits of output token {} are no numbers (NaN or infinity): values overflow in this dtype, or a device is ill"
)


class Stage:
    """A part of what an engine does for a leg. What a stage has nothing to do with, it leaves as it is here."""

    def refusal(self, start: StartLeg) -> str:
        """Why the leg can never go through this stage; empty if it can."""
        return ""

    def make_room(self, leg: Leg) -> str:
        """Why the leg cannot wait here now; empty if it can."""
        return ""

    def start(self, leg: Leg, now: Now) -> None:
        """The leg is this stage's from now on."""

    def hand_over(self, leg: Leg) -> None:
        """The router wants what goes on of it to stop here, and to be kept."""

    def unbegun(self, leg: Leg) -> bool:
        """Nothing of it was done here, nor does anybody else know that it is here: another server can do it at no cost."""
        return False

    def drop_choice(self, leg: Leg, choice: int) -> bool:
        """The router wants nothing more of this choice. True if that was the last that the leg was for."""
        return False

    def close(self, leg: Leg, outcome: Outcome, reason: str) -> None:
        """The leg ends early. What it holds here follows as soon as it can."""

    def holds(self, leg: Leg) -> bool:
        """Something of an ended leg is left here."""
        return False

    def forget(self, leg: Leg) -> None:
        """It has ended, and no stage holds anything of it."""

    def schedule(self, now: Now) -> None:
        """What waits may begin."""

    def planned(self, plan: WorkerPlan, now: Now) -> None:
        """A plan is on its way to the workers."""

    def computed(self, plan: WorkerPlan, report: StepResult, now: Now) -> None:
        """Every rank has computed a plan. The batch knows already."""

    def tick(self, now: Now) -> None:
        """Time has passed."""

    @property
    def waiting(self) -> int:
        """Legs or choices that have not begun here."""
        return 0

    @property
    def expects(self) -> bool:
        """Something may join the batch within a step or two, though it waits for nothing here."""
        return False

    def describe(self, leg: Leg) -> dict[str, object]:
        """What a person should know of a leg."""
        return {}

    def dump(self) -> dict[str, object]:
        """What a person should know of the rest."""
        return {}

    def check_integrity(self) -> None:
        """What must hold between any two calls."""


@dataclass(slots=True, eq=False)
class Leg:
    """One leg from StartLeg until no stage holds anything of it."""

    router: int
    start: StartLeg
    stages: tuple[Stage, ...]
    received: Now
    deadline_s: float
    cached_tokens: int = 0  # of its tokens, those that did not have to be computed or sent
    brought_tokens: Mapping[str, int] = field(default_factory=dict)  # of these, by tier: host, storage
    told: set[int] = field(default_factory=set)  # choices whose first token the router has from here
    ended: bool = False  # the router has its LegEnd
    aborted: bool = False  # the request is not wanted any more
    abort_plan: int | None = None  # the last plan that had been reported when it was closed
    timeline: list[TimelineEvent] = field(default_factory=list)

    @property
    def key(self) -> LegKey:
        return self.start.key

    @property
    def num_tokens(self) -> int:
        return len(self.start.token_ids)

    @property
    def first_index(self) -> int:
        """Output index of the first token that this attempt produces."""
        return self.num_tokens - self.start.num_prompt

    @property
    def tenant(self) -> str:
        """A router that does not say whose its legs are is a tenant."""
        return self.start.tenant or f"router {self.router}"

    def note_part(self, event: TimelineEvent) -> None:
        """An event of which there may be very many."""
        if len(self.timeline) < MAX_TIMELINE:
            self.timeline.append(event)


class Legs:
    """See the module. Instructions are appended to `out`."""

    def __init__(self, counters: Counters, pipeline: PlanPipeline, out: list[Instruction]) -> None:
        self._counters = counters
        self._pipeline = pipeline
        self._out = out
        self._legs: dict[LegKey, Leg] = {}  # in order of arrival
        self._ending: dict[LegKey, Leg] = {}  # ended, and something is left

    def __len__(self) -> int:
        return len(self._legs)

    def __iter__(self) -> Iterator[Leg]:
        """All of them, also while some end."""
        return iter(list(self._legs.values()))

    def __contains__(self, key: LegKey) -> bool:
        return key in self._legs

    def get(self, key: LegKey) -> Leg | None:
        return self._legs.get(key)

    def add(self, leg: Leg) -> None:
        self._legs[leg.key] = leg

    # ---- what the router is told

    def tell(self, leg: Leg, message: LegTokens) -> None:
        """Nothing after the end."""
        if not leg.ended:
            self._out.append(ToRouter(leg.router, message))

    def tell_first(self, leg: Leg, token: FirstToken) -> None:
        """The first token of a choice, once."""
        if leg.ended or token.choice in leg.told:
            return
        leg.told.add(token.choice)
        logprobs = (token.logprobs,) if token.logprobs is not None else ()
        self.tell(leg, LegTokens(leg.key, token.choice, leg.first_index, (token.token_id,), logprobs, token.finish))

    # ---- the end

    def abort(self, leg: Leg, reason: str) -> None:
        """Its request is not wanted any more, whoever of the two servers hears of it first."""
        if not leg.ended:
            leg.aborted = True
            self.close(leg, Outcome.ABORTED, reason)

    def close(self, leg: Leg, outcome: Outcome, reason: str) -> None:
        """End a leg early. What it holds follows as soon as no plan, no rank and no writer names it."""
        if leg.ended:
            return
        leg.abort_plan = self._pipeline.reported
        for stage in leg.stages:
            stage.close(leg, outcome, reason)
        self.end(leg, outcome, reason)

    def no_token(self, leg: Leg, index: int) -> None:
        """What would have been its output of this index has logits that are no numbers. As if its workers had died of it: another
        server may do better, and no text is made up."""
        self._counters.bad_logits += 1
        self.close(leg, Outcome.WORKER_LOST, NO_NUMBERS.format(index))

    def end(self, leg: Leg, outcome: Outcome, reason: str = "") -> None:
        """Tell the router that nothing more will come."""
        if leg.ended:
            return
        leg.ended = True
        self._counters.legs[outcome.value] += 1
        if leg.key in self._legs:
            self._ending[leg.key] = leg
        message = LegEnd(
            leg.key,
            outcome,
            reason,
            tuple(leg.timeline),
            leg.cached_tokens,
            host_tokens=leg.brought_tokens.get("host", 0),
            storage_tokens=leg.brought_tokens.get("storage", 0),
        )
        self._out.append(ToRouter(leg.router, message))

    def late_step(self, leg: Leg, plan_no: int) -> None:
        """A plan named a leg that had ended by then."""
        if leg.abort_plan is not None:
            self._counters.max_steps_after_abort = max(self._counters.max_steps_after_abort, plan_no - leg.abort_plan)

    def reap(self) -> None:
        """Forget those that have ended and of which nothing is left."""
        for leg in list(self._ending.values()):
            if any(stage.holds(leg) for stage in leg.stages):
                continue
            for stage in leg.stages:
                stage.forget(leg)
            del self._legs[leg.key], self._ending[leg.key]

    def check_integrity(self) -> None:
        """What must hold between any two calls."""
        assert all(leg.ended and key in self._legs for key, leg in self._ending.items())
        assert all(leg.ended == (key in self._ending) for key, leg in self._legs.items())
