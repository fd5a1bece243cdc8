"""What is asked of a simulated world at its end: the right answers, and nothing held."""

from __future__ import annotations

from typing import TYPE_CHECKING

from disagg.engine.handoff.receive import Receiver
from disagg.engine.handoff.send import Sender
from disagg.messages.legs import ServerState
from tests.engine.sim_model import reference

if TYPE_CHECKING:
    from tests.engine.sim import World


def check_answers(world: World) -> None:
    for request in world.requests:
        for choice in range(request.params.n):
            expected = reference(request.prompt, choice, request.params, world.limits.max_model_len)
            got = tuple(request.accepted.get(choice, ()))
            if request.aborted or choice in request.dropped:
                assert got == expected[: len(got)]
            else:
                assert got == expected, f"{request.request_id} choice {choice}"
        if not world.faults.any:
            assert request.attempt <= 1 + request.moves + request.given_back, (
                f"{request.request_id} was replayed though nothing went wrong"
            )


def check_nothing_leaked(world: World) -> None:
    """At rest: what must be empty is."""
    world.store.check()
    for server in world.servers:
        engine = server.engine
        engine.check_integrity()
        where = f"{server.name} (seed {world.seed})"
        if (tiers := engine.core.tiers) is not None:
            assert tiers.offload.manager.idle and not tiers.held() and not tiers.loads.dump().keys() - {"tokens"}, where
            assert not tiers.offload.host.holders(), f"{where}: pages of the host are held"
        assert engine.idle, f"{where}: legs {engine.dump()['legs']}"
        assert engine.core.pool.kv.allocator.used_large == 0, where
        assert engine.core.batch.slots.free == engine.core.batch.slots.total, where
        assert not engine.pipeline.in_flight, where
        assert engine.counters.max_steps_after_abort <= 2, where
        if not world.faults.any:
            assert not engine.counters.legs.get("peer_lost"), f"{where}: no peer was lost, legs were aborted"
        for worker in server.workers:
            assert not worker.known.sequences and not worker.slots, f"{where}: the worker remembers sequences"
            transfer = worker.transfer
            assert not transfer.bound and not transfer.expected, f"{where}: {transfer.expected}"
            assert not transfer.to_send and not transfer.writing and not transfer.dropping, where
        batch = engine.core.batch
        assert not batch.pages() and not batch.running and not batch.parked, where
        assert not engine.core.turns.queue and not engine.core.turns.moving, where
        for stage in engine.stages:
            if isinstance(stage, Sender):
                check_sender_quiet(stage, where)
            elif isinstance(stage, Receiver):
                check_receiver_quiet(stage, where)
        assert engine.load(ServerState.READY).waiting == 0
    others = world.decodes[:1] if world.faults.drains else []
    for server in world.prefills + others:
        world.lose_workers(server)
    for server in world.decodes:
        assert server.engine.arena_bytes()[2] == 0, f"{server.name}: quarantined though every prefill is gone"


def check_sender_quiet(sender: Sender, where: str) -> None:
    """At rest, nothing is being written."""
    assert not sender.lost_links, where
    for link in sender.links.values():
        assert not link.writing and not link.rings, f"{where}: {link}"


def check_receiver_quiet(receiver: Receiver, where: str) -> None:
    """At rest, nothing is expected, and no link holds segments or wants them."""
    for link in receiver.links.values():
        assert not link.early and not link.early_tokens, f"{where}: {link.early}"
    assert not any(ring.live for ring in receiver.rings.table.links.values()), where
    assert receiver.arena_bytes()[1] == 0, f"{where}: idle links hold segments: {receiver.dump()}"
    assert not receiver.rings.table._wanted, where
