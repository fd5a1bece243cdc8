"""An engine: events in, instructions out. No I/O, no clock, no torch.

    a router's leg, a step's result, a message of a link,     ──> the stage whose it is ──> instructions
    a report of a transfer thread, the passing of time
                                                schedule ──> what waits begins, plans are sent

What a server's role does is a composition of *stages* (see `legs.Stage`), which share a batch, memory and the table of legs
(`core.Core`). Here is what all roles have in common. Events take the moment at which they happen; the server calls
`schedule` after each of them.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from disagg.engine.core import Core
from disagg.engine.handoff.handoff import Handoff
from disagg.engine.instructions import Counters, Instruction, ToWorkers
from disagg.engine.legs import Leg, Stage
from disagg.engine.now import Now
from disagg.engine.refusal import refusal
from disagg.engine.sequences import Sequence
from disagg.engine.steps import PlanPipeline
from disagg.messages.legs import (
    AbortLeg,
    ArenaReport,
    KvEvents,
    LoadReport,
    Outcome,
    ReceivedFrom,
    ServerState,
    StartLeg,
    StepCosts,
    Tier,
)
from disagg.messages.link import LinkHello, LinkMessage
from disagg.messages.plan import StepResult, WorkerPlan
from disagg.messages.tiers import TierEvent
from disagg.messages.transfer import Beat, TransferEvent
from disagg.offload.instructions import StoreEvent
from disagg.types.errors import ProtocolError
from disagg.types.ids import LegKey

LATE_S = 5.0  # beyond a request's deadline, which the router minds first

Route = Callable[[StartLeg], tuple[Stage, ...]]


class Engine:
    """See the module. `core`: what its stages share."""

    def __init__(
        self,
        core: Core,
        stages: tuple[Stage, ...],
        *,
        route: Route | None = None,
        dialled: Handoff | None = None,
        accepted: Handoff | None = None,
    ) -> None:
        """stages: in the order in which they hear of things. route: which of them a leg passes
        through; by default all. dialled, accepted: whose the links are that the server dials, and those that it accepts.
        """
        self.core = core
        self.stages = stages
        self._route: Route = route or (lambda start: stages)
        self._handoffs = {True: dialled, False: accepted}
        self._all_handoffs = tuple(handoff for handoff in (dialled, accepted) if handoff is not None)
        self._links: dict[int, Handoff] = {}
        self._legs = core.legs
        self._batch = core.batch
        self.due_s: float | None = None  # when a plan that is held is to be sent: `schedule` is to be called then

    # ---- legs

    def start_leg(self, router: int, start: StartLeg, now: Now) -> list[Instruction]:
        """A router dispatches a leg. Answered at once by LegEnd if it can never run here, or if too many wait."""
        if start.key in self._legs:
            return []
        leg = Leg(router, start, self._route(start), now, now.s + start.deadline_s)
        if wrong := self._refusal(leg):
            self._legs.end(leg, Outcome.REFUSED, wrong)
        elif busy := next(filter(None, (stage.make_room(leg) for stage in leg.stages)), ""):
            self._legs.end(leg, Outcome.GIVEN_BACK, busy)
        else:
            self._legs.add(leg)
            for stage in leg.stages:
                stage.start(leg, now)
        return self._take()

    def _refusal(self, leg: Leg) -> str:
        model = self.core.facts.model
        wrong = refusal(leg.start, max_model_len=model.max_model_len, vocab_size=model.vocab_size)
        return wrong or next(filter(None, (stage.refusal(leg.start) for stage in leg.stages)), "")

    def abort_leg(self, abort: AbortLeg) -> list[Instruction]:
        """A router wants nothing more of this leg, or of one of its choices."""
        leg = self._legs.get(abort.key)
        if leg is None or leg.ended:
            return []
        if abort.choice is None:
            self.counters.aborts += 1
            self._legs.abort(leg, "aborted by the router")
        else:
            was_last = False
            for stage in leg.stages:
                was_last |= stage.drop_choice(leg, abort.choice)
            if was_last:
                self._legs.abort(leg, "aborted by the router")
        return self._take()

    def hand_over(self, key: LegKey) -> list[Instruction]:
        """A router wants this leg to go on elsewhere."""
        leg = self._legs.get(key)
        if leg is not None and not leg.ended:
            for stage in leg.stages:
                stage.hand_over(leg)
        return self._take()

    def end_router(self, router: int, reason: str) -> list[Instruction]:
        """A router's lease is over: its legs end."""
        for leg in self._legs:
            if leg.router == router:
                self._legs.close(leg, Outcome.ABORTED, reason)
        return self._take()

    def give_back(self, reason: str) -> list[Instruction]:
        """The server drains: prompts that have not begun are better computed elsewhere."""
        for leg in self._legs:
            if not leg.ended and any(stage.unbegun(leg) for stage in leg.stages):
                self._legs.close(leg, Outcome.GIVEN_BACK, reason)
        return self._take()

    def end_all(self, outcome: Outcome, reason: str) -> list[Instruction]:
        """Drain is over, or the workers are lost: every leg ends."""
        for leg in self._legs:
            self._legs.close(leg, outcome, reason)
        return self._take()

    # ---- steps

    def schedule(self, now: Now) -> list[Instruction]:
        """What waits begins as far as it can; plans are sent until as many are in flight as may be, or nothing is left to do."""
        self.begin_passes(now)
        while self._one_pass(now):
            pass
        return self.end_passes()

    def _one_pass(self, now: Now) -> bool:
        """What waits begins as far as it can, and a plan is sent if there is one. Whether another pass follows at once."""
        self.core.passes.begin(now)
        self.core.turns.begin(now)
        was_held = self.due_s is not None
        self.due_s = self._held_until(now)
        if self.due_s is not None:
            return False
        alone = not self.computing
        plan = self._batch.plan()
        if plan is not None and self.core.late is not None:
            self.core.late.sent(plan.plan_no, now.s, alone=alone, held=was_held)
        return self.end_pass(plan, now, computing=self.computing)

    def _held_until(self, now: Now) -> float | None:
        """When the next plan is to be sent, if somebody may join it until then and the step under way lasts so long. Once that
        step is reported no plan is held, whatever was expected."""
        late = self.core.late
        if late is None or not self.computing or not self.pipeline.has_room or now.s >= late.due_s:
            return None
        return late.due_s if any(stage.expects for stage in self.stages) else None

    # What `schedule` consists of: data-parallel ranks that step together do it in turns (engine/data_parallel).

    def begin_passes(self, now: Now) -> None:
        self._settle(now)
        for stage in self.stages:
            stage.schedule(now)

    def begin_pass(self, now: Now) -> bool:
        """What waits begins as far as it can, but for prompts. Whether one could."""
        self.core.passes.begin(now)
        return self.core.passes.wanted(lambda: self.core.turns.begin(now))

    def end_pass(self, plan: WorkerPlan | None, now: Now, *, computing: bool) -> bool:
        """plan: what is sent. computing: see Passes.end. Whether another pass follows at once."""
        if plan is not None:
            self.core.out.append(ToWorkers(plan))
            self.core.bubbles.sent(now.s)
            for stage in self.stages:
                stage.planned(plan, now)
        return self.core.passes.end(plan, computing=computing)

    def end_passes(self) -> list[Instruction]:
        self._legs.reap()
        return self._take()

    def step_done(self, result: StepResult, now: Now) -> list[Instruction]:
        """A rank has computed a plan."""
        complete = self._batch.report(result)
        self._count_stages(result, complete is not None, now)
        if complete is None:
            return []
        plan, report = complete
        self.counters.observe("step", report.compute_s)
        if self.core.late is not None:
            decodes = bool(plan.runs) and all(run.num_tokens == 1 for run in plan.runs)
            self.core.late.computed(plan.plan_no, report.compute_s, report.ahead_s, now.s, decodes_only=decodes)
        if plan.runs:
            self.counters.steps += 1
        for stage in self.stages:
            stage.computed(plan, report, now)
        self._settle(now)
        return self._take()

    def _count_stages(self, result: StepResult, complete: bool, now: Now) -> None:
        """The first rank of a stage speaks for it."""
        facts, bubbles = self.core.facts, self.core.bubbles
        if facts.pp == 1:
            return
        if result.rank % facts.tp == 0:
            bubbles.computed(result.rank // facts.tp, result.compute_s, now.s)
        if complete:
            bubbles.reported(now.s)
        for stage in range(facts.pp):
            self.counters.stage_seconds["busy", stage] = bubbles.busy_s[stage]
            self.counters.stage_seconds["bubble", stage] = bubbles.bubble_s[stage]

    def _settle(self, now: Now) -> None:
        """Memory that nobody uses any more comes back, and then legs of which nothing is left are forgotten."""
        self._batch.settle(now.s)
        self._legs.reap()

    # ---- links

    @property
    def linked(self) -> Engine | None:
        """What hears of links: itself."""
        return self

    def link_up(self, number: int, hello: LinkHello, now: Now, *, dialled: bool) -> list[Instruction]:
        """A link is there. Raises SliceError if the two TP sizes cannot exchange heads."""
        handoff = self._handoffs[dialled]
        assert handoff is not None
        handoff.link_up(number, hello, now)
        self._links[number] = handoff
        return self._take()

    def dial_failed(self, name: str, incarnation: str, reason: str) -> list[Instruction]:
        """No link to that server could be made."""
        for handoff in self._all_handoffs:
            handoff.dial_failed(name, incarnation, reason)
        return self._take()

    def link_down(self, number: int, gone: bool, reason: str) -> list[Instruction]:
        """The link is lost for good. gone: its workers are known to have exited, so nothing can write to its ring."""
        if (handoff := self._links.pop(number, None)) is not None:
            handoff.link_down(number, gone, reason)
        return self._take()

    def peer_gone(self, number: int) -> None:
        """The workers behind a lost link have exited at last."""
        for handoff in self._all_handoffs:
            handoff.peer_gone(number)

    def link_message(self, number: int, message: LinkMessage, now: Now) -> list[Instruction]:
        """Raises ProtocolError for what the other end may not say; the server then drops the link."""
        if (handoff := self._links.get(number)) is not None:
            handoff.link_message(number, message, now)
        return self._take()

    def transfer_event(self, rank: int, message: TransferEvent, now: Now) -> list[Instruction]:
        """A rank's transfer thread has something to say."""
        if not isinstance(message, Beat):
            heard = [handoff.transfer_event(rank, message, now) for handoff in self._all_handoffs]
            if not any(heard):
                raise ProtocolError(f"a {self.core.role} worker may not report {type(message).__name__}")
        return self._take()

    def tier_event(self, rank: int, message: TierEvent, now: Now) -> list[Instruction]:
        """A rank's offload thread has something to say."""
        tiers = self.core.tiers
        if tiers is None:
            raise ProtocolError(
                f"a {self.core.role} worker may not report {type(message).__name__}: nothing is offloaded"
            )
        tiers.tier_event(rank, message)
        return self._take()

    def store_event(self, message: StoreEvent, now: Now) -> list[Instruction]:
        """Storage has something to say."""
        tiers = self.core.tiers
        if tiers is None:
            raise ProtocolError(f"storage may not say {type(message).__name__}: nothing is offloaded")
        tiers.store_event(message)
        return self._take()

    # ---- time

    def tick(self, now: Now) -> list[Instruction]:
        """Backstop deadlines, and whatever stages look at as time passes."""
        for leg in self._legs:
            if now.s > leg.deadline_s + LATE_S:
                self._legs.abort(leg, "the request's deadline passed")
        for stage in self.stages:
            stage.tick(now)
        if self.core.tiers is not None:
            self.core.tiers.loads.tick(now.s)
        return self._take()

    # ---- what the outside wants to know

    @property
    def counters(self) -> Counters:
        return self.core.counters

    @property
    def ranks(self) -> tuple[Engine, ...]:
        """Its data-parallel ranks: itself."""
        return (self,)

    @property
    def pipeline(self) -> PlanPipeline:
        return self._batch.pipeline

    @property
    def computing(self) -> bool:
        """A step is under way."""
        return bool(self.pipeline.in_flight)

    @property
    def budget_tokens(self) -> int:
        """Most tokens of the step that was planned last."""
        return self._batch.budget_tokens

    def sequence(self, seq_id: int) -> Sequence | None:
        """That a plan in flight may name."""
        return self._batch.sequence(seq_id)

    @property
    def running_and_waiting(self) -> tuple[int, int]:
        waiting = sum(stage.waiting for stage in self.stages) + len(self._batch.parked)
        return len(self._batch.running), waiting

    @property
    def idle(self) -> bool:
        return not len(self._legs)

    @property
    def offloads(self) -> bool:
        """KV of what has ended is still on its way to the host or to storage."""
        return self.core.tiers is not None and not self.core.tiers.offload.manager.idle

    @property
    def page_tokens(self) -> int:
        return self.core.facts.memory.page_tokens

    @property
    def max_tokens_in_pool(self) -> int:
        """Tokens that a sequence may come to have when it is alone."""
        return self.core.pool.longest_alone

    def load(self, state: ServerState) -> LoadReport:
        running, waiting = self.running_and_waiting
        tiers = self.core.tiers
        host, loads = (None, None) if tiers is None else (tiers.host_memory(), tiers.load_costs())
        load = self.core.pool.load(state, running=running, waiting=waiting, host=host)
        received = tuple(
            ReceivedFrom(peer, each.payload_bytes, each.transfers, each.failures, each.seconds)
            for peer, each in self.core.counters.received.items()
        )
        return replace(
            load,
            arena=ArenaReport(*self.arena_bytes()),
            received=received,
            steps=self._step_costs(),
            loads=loads,
            spare_tokens=self.core.lookahead.spare_tokens,
        )

    def _step_costs(self) -> StepCosts | None:
        line, scheduling = self._batch.step_costs(), self.core.facts.scheduling
        if line is None:
            return None
        return StepCosts(*line, scheduling.chunk_tokens, self.max_tokens_in_pool, scheduling.max_running)

    def parked(self, now_s: float) -> tuple[int, float]:
        """How many sequences gave way and have not gone on, and for how long the longest of them."""
        return len(self._batch.parked), self._batch.longest_parked_s(now_s)

    def kv_snapshot(self, tier: Tier = Tier.GPU) -> KvEvents:
        """Everything that is in the prefix cache, or in another tier."""
        if tier is Tier.GPU:
            return self.core.pool.snapshot()
        return self.core.tiers.snapshot(tier) if self.core.tiers is not None else KvEvents()

    def arena_bytes(self) -> tuple[int, int, int]:
        """(free, leased, quarantined), of each rank."""
        free, leased, quarantined = 0, 0, 0
        for handoff in self._all_handoffs:
            more = handoff.arena_bytes()
            free, leased, quarantined = free + more[0], leased + more[1], quarantined + more[2]
        return free, leased, quarantined

    def dump(self) -> dict[str, object]:
        """For a person: every leg, link, lease and plan in flight."""
        return {
            "legs": {str(leg.key): self._describe(leg) for leg in self._legs},
            **{name: value for stage in self.stages for name, value in stage.dump().items()},
            "plans in flight": [plan.plan_no for plan in self.pipeline.in_flight],
            **self._describe_late(),
            "running": list(self._batch.running),
            "parked": [f"{s.key} choice {s.choice}" for s in self._batch.parked],
            "memory": self.core.pool.dump(),
            **self.core.passes.dump(),
            **(self.core.tiers.dump() if self.core.tiers is not None else {}),
            "arena bytes": dict(zip(("free", "leased", "quarantined"), self.arena_bytes(), strict=True)),
        }

    def _describe_late(self) -> dict[str, object]:
        late = self.core.late
        return {} if late is None else {"plans held so far": late.held, "lead of plans ms": round(1e3 * late.lead_s, 2)}

    def _describe(self, leg: Leg) -> dict[str, object]:
        own: dict[str, object] = {"tokens": leg.num_tokens, "cached tokens": leg.cached_tokens, "ended": leg.ended}
        return own | {name: value for stage in leg.stages for name, value in stage.describe(leg).items()}

    def check_integrity(self) -> None:
        """What must hold between any two calls."""
        self._legs.check_integrity()
        self._batch.check_integrity()
        for stage in self.stages:
            stage.check_integrity()
        pages = [pages for handoff in self._all_handoffs for pages in handoff.pages()]
        tiers = self.core.tiers
        if tiers is not None:
            tiers.check_integrity()
        self.core.pool.kv.check_integrity([*pages, *self._batch.pages()], tiers.held() if tiers is not None else {})
        slots = self._batch.slots
        held = self._batch.held_slots() + sum(handoff.held_slots() for handoff in self._all_handoffs)
        assert held == slots.total - slots.free, "slots that somebody holds, and used slots"

    def _take(self) -> list[Instruction]:
        out = [*self.core.out, *self.core.pool.take_events()]
        if self.core.tiers is not None:
            out += self.core.tiers.take_events()
        self.core.out.clear()
        return out
