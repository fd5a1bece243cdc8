"""No circle can form among those who wait for pages, segments, staging and ring entries: every interleaving of a small model
comes to an end, every order that breaks a rule does not, and the engines take things in the order that the model says."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from msgspec.structs import replace

from disagg.engine.choices import Answer
from disagg.engine.handoff.receive import Receiver
from disagg.engine.handoff.receiving import Receiving
from disagg.engine.handoff.ring_table import RingState
from disagg.engine.handoff.send import Sender
from disagg.engine.prompts import Prompt
from disagg.transfer.states import ReceiveState, SendState
from tests.engine.sim import World
from tests.engine.sim_faults import Faults
from tests.engine.sim_server import Server
from tests.transfer.order_model import Explored, Model, Order, Sizes, Spec, explore


def told(explored: Explored) -> str:
    """How the model gets stuck, a line for each step."""
    stuck = explored.stuck()
    assert stuck is not None
    return "\n".join(f"{what} {which}" for what, which in explored.trace(stuck))


# Two prefill and two decode servers; each request takes up to a whole pool.
SPREAD = (Spec(0, 0), Spec(1, 0, growth=1), Spec(0, 1, decode_pages=2), Spec(1, 1))
ONE_PAIR = (Spec(0, 0, pieces=2), Spec(0, 0, decode_pages=2), Spec(0, 0, growth=1))
ONE_DECODE = (Spec(0, 0, growth=1), Spec(1, 0, growth=1), Spec(0, 0, decode_pages=2), Spec(1, 0))
ONE_PREFILL = (Spec(0, 0, pieces=2), Spec(0, 1, pieces=2), Spec(0, 0, decode_pages=2), Spec(0, 1, growth=1))
CROSSED = (*SPREAD, Spec(0, 0, decode_pages=2))


SPECS = {
    "spread": SPREAD,
    "one pair": ONE_PAIR,
    "one decode": ONE_DECODE,
    "one prefill": ONE_PREFILL,
    "crossed": CROSSED,
}


def small_models() -> list[Any]:
    """(specs, pages, entries). Models of five requests, and large ones of one prefill server, reach many more states."""
    models = []
    for (name, specs), pages, entries in itertools.product(SPECS.items(), (2, 3), (1, 2)):
        large = (name == "crossed" and (pages, entries) != (2, 1)) or (name, pages) == ("one prefill", 3)
        marks = pytest.mark.long if large else ()
        models.append(pytest.param(specs, pages, entries, marks=marks, id=f"{name}-{pages}-{entries}"))
    return models


@pytest.mark.parametrize(("specs", "pages", "entries"), small_models())
def test_from_every_state_that_can_be_reached_every_request_can_still_be_completed(
    specs: tuple[Spec, ...], pages: int, entries: int
) -> None:
    explored = explore(Model(specs, Sizes(pages, pages, entries=entries), Order()))
    assert len(explored.parents) > 100
    stuck = explored.stuck()
    assert stuck is None, f"stuck:\n{told(explored)}"


@pytest.mark.slow
@pytest.mark.parametrize("segments", [1, 2])
def test_from_every_state_of_a_larger_model_every_request_can_still_be_completed(segments: int) -> None:
    specs = (*SPREAD, Spec(0, 0, decode_pages=2), Spec(1, 0, pieces=2))
    explored = explore(Model(specs, Sizes(2, 2, entries=1, segments=segments), Order()), max_states=1_000_000)
    assert explored.stuck() is None, f"stuck:\n{told(explored)}"


BIG = Spec(0, 0, decode_pages=2)


@pytest.mark.parametrize(
    ("order", "specs", "sizes", "last"),
    [
        (Order(grant_before_entry=False), (BIG, BIG), Sizes(), "take entry 1"),
        (Order(grant_before_staging=False), (BIG, BIG), Sizes(), "gather 1"),
        (
            Order(segment_with_grant=False, segment_on_demand=False),
            (BIG, replace(BIG, prefill=1)),
            Sizes(),
            "open ring 1",
        ),
        (
            Order(all_or_nothing=False, oldest_first=False),
            (BIG, replace(BIG, prefill=1)),
            Sizes(segments=2),
            "take pages 1",
        ),
        (Order(gives_way=False), (Spec(0, 0, growth=1), Spec(1, 0, growth=1)), Sizes(segments=2), "grant 1"),
    ],
    ids=[
        "a ring entry is taken before the grant",
        "staging is held while waiting for a grant",
        "decode pages are held while waiting for a segment whose holder waits for pages",
        "pages are taken one by one, by anybody",
        "no running sequence gives way",
    ],
)
def test_each_broken_order_deadlocks(order: Order, specs: tuple[Spec, ...], sizes: Sizes, last: str) -> None:
    assert explore(Model(specs, sizes, Order())).stuck() is None, "as shipped, it ends"
    explored = explore(Model(specs, sizes, order))
    trace = told(explored)
    print(f"{order}\n{trace}")
    assert trace.endswith(last), trace


def test_without_the_oldest_first_a_large_request_may_be_overtaken_for_ever() -> None:
    """The others come again and again. It never deadlocks, and yet the one that needs two pages at once may never run."""
    specs, sizes = (BIG, Spec(0, 0), Spec(0, 0)), Sizes(prefill_pages=3, staging=2, entries=2)
    shipped, broken = (
        explore(Model(specs, sizes, Order(oldest_first=oldest_first), again=(1, 2))) for oldest_first in (True, False)
    )
    assert not shipped.overtaken_for_ever(0)
    assert broken.overtaken_for_ever(0)
    assert broken.stuck() is None


# ---- the engines do what the model says


def receiver_of(server: Server) -> Receiver:
    (receiver,) = (stage for stage in server.engine.stages if isinstance(stage, Receiver))
    return receiver


def check_order(world: World) -> None:
    """Who waits for something holds nothing that comes later in the order."""
    for server in world.decodes:
        receiver = receiver_of(server)
        live = {entry.key for ring in receiver.rings.table.links.values() for entry in ring.live.values()}
        for leg in receiver.transfers.values():
            if leg.session.state in (ReceiveState.WAITING, ReceiveState.QUEUED):
                assert leg.pages is None and not leg.slots, f"{leg.key} holds pages and was granted nothing"
                assert leg.key not in live, f"{leg.key} has a ring entry and was granted nothing"
            if leg.session.state in (ReceiveState.BINDING, ReceiveState.RECEIVING):
                assert leg.link is not None
                ring = receiver.rings.table.links[leg.link]
                assert leg.pages is not None, "pages for all of it, or no grant"
                assert ring.state is RingState.OPEN, "a grant waits for no segment"
        for sequence in server.engine.core.batch.parked:
            assert sequence.pages is None, "who gave way holds nothing"
        for turn in (*server.engine.core.turns.moving, *server.engine.core.turns.queue):
            each = turn.what
            if isinstance(each, Prompt):  # that this server computes itself
                assert each.sequence is None and each.leg.key not in live, "who has not begun holds nothing"
                continue
            assert isinstance(each, Receiving | Answer)
            for one in each.waiting if isinstance(each, Answer) else (each,):
                assert one.pages is None and one.key not in live, "who has not begun holds nothing"
    for server in world.prefills:
        _, sender = server.engine.stages
        assert isinstance(sender, Sender)
        waiting = {key for key, leg in sender.transfers.items() if leg.session.state is SendState.WAITING}
        for link in sender.links.values():
            named = {key for key, _ in link.writing.values()}
            named |= {of.key for ring in link.rings.values() for part in ring.ranks.values() for of, _ in part.pending}
            assert not named & waiting, "an entry before the grant"
        for worker in server.workers:
            gathered = {write.command.slice.key for write in worker.transfer.writing} | {
                send.slice.key for send in worker.transfer.to_send
            }
            assert not gathered & waiting, "staging before the grant"


@pytest.mark.parametrize(
    "faults",
    [Faults(abort_share=0.3), pytest.param(Faults(), marks=pytest.mark.long)],
    ids=["aborts", "nothing"],
)
def test_two_by_two_servers_with_pools_and_arenas_as_small_as_can_be_come_to_an_end_in_that_order(
    faults: Faults,
) -> None:
    waited = preempted = 0
    for seed in range(60):
        if seed >= 12 and waited and preempted:
            break
        world = World(seed, faults, tight=True, careless=seed % 2 == 1)
        for server in world.servers:
            assert server.facts.transfer.arena_bytes == server.facts.transfer.segment_bytes
        while not world.router.done:
            world.step()
            check_order(world)
            assert world.steps < world.max_steps, f"hangs (seed {seed}):\n{world.dump()}"
            waited += any(receiver_of(server).rings.table._wanted for server in world.decodes)
        world.check_answers()
        world.settle()
        preempted += sum(sum(server.engine.counters.preemptions.values()) for server in world.decodes)
        world.check_nothing_leaked()
    assert waited, "links waited for the one segment"
    assert preempted, "sequences gave way"
