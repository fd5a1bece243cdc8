"""What an engine returns is done in its order, also where doing it makes something else happen."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from disagg.bench.engine.offline import NoLinks
from disagg.engine.now import Now
from disagg.messages.legs import KvEvents, LegTokens, ServerMessage, Tier
from disagg.messages.plan import SampledToken, WorkerPlan
from disagg.messages.sequence_diff import KnownSequences
from disagg.messages.tiers import TierCommand
from disagg.messages.transfer import TransferCommand
from disagg.mixed_server.role import mixed_engine
from disagg.server.dispatch import Dispatch
from tests.engine.lone_engine import PARAMS, facts, result, start

ROUTER = 1


class SimWorkers:
    """They know what plans have told them, and take none out of turn."""

    def __init__(self) -> None:
        self.known = KnownSequences()

    def publish(self, plan: WorkerPlan) -> None:
        self.known.apply(plan)

    def send(self, rank: int, messages: Sequence[TransferCommand | TierCommand]) -> None: ...


class NarrowRouters:
    """A router for which one message with tokens is too much: its lease ends at once."""

    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch
        self.told: list[ServerMessage] = []
        self._leased = True

    def tell(self, router: int, message: ServerMessage) -> None:
        if self._leased:
            self.told.append(message)
        if self._leased and isinstance(message, LegTokens):
            self._leased = False
            self._dispatch.lease_end(router, "too much was waiting for it")

    def publish(self, tier: Tier, events: KvEvents) -> None: ...
    def flush(self) -> None: ...


def test_plans_go_out_in_order_where_a_router_loses_its_lease_by_what_it_is_told() -> None:
    """The plan that ends its sequences is decided after the one that goes out with its tokens. (It went before, workers missed
    a plan, and everybody's answers were lost with them.)"""
    dispatch = Dispatch("S", 1, lambda: Now(0.0), lambda leg: "")
    dispatch.routers, dispatch.links = routers, _ = NarrowRouters(dispatch), NoLinks()
    engine, workers = mixed_engine(facts()), SimWorkers()
    dispatch.attach(engine, workers)
    dispatch.router_message(ROUTER, start(params=replace(PARAMS, max_tokens=2)))
    dispatch.step_done(result(0, SampledToken(0, 0, 9)))
    assert [type(message) for message in routers.told] == [LegTokens]
    while plans := engine.pipeline.in_flight:
        dispatch.step_done(result(plans[0].plan_no, *(SampledToken(run.seq_id, 0, 9) for run in plans[0].runs)))
    assert engine.idle and not workers.known.sequences
