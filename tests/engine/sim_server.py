"""A server of the simulated world: a real engine and its dispatch, simulated workers, and its ends of the world's queues.

A rank computes plans in order over `sim_pages`, and checks every cell that it attends over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from disagg.engine.engine import Engine
from disagg.engine.facts import EngineFacts
from disagg.messages.legs import KvEvents, PeerRef, ServerMessage, Tier
from disagg.messages.link import LinkHello, LinkMessage, RankInfo
from disagg.messages.plan import SampledToken, StepResult, WorkerPlan
from disagg.messages.sequence_diff import KnownSequences, RunView
from disagg.messages.tiers import TierCommand
from disagg.messages.transfer import TransferCommand
from disagg.server.dispatch import Dispatch
from disagg.server.role import ServerRole
from tests.engine.sim_model import next_token
from tests.engine.sim_pages import SimPages
from tests.engine.sim_tiers import SimKeeper, SimRankTiers
from tests.engine.sim_transfer import SimTransfer, Write

if TYPE_CHECKING:
    from tests.engine.sim import World

FAILURES = ("its peer was removed", "its peer is not known here", "its peer has exited", "the wire broke")  # of writes


class SimWire:
    """Between the transfer threads of the world's workers."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._world = server.world
        self.gather_buffers = server.world.gather_buffers

    def target(self, link: int, rank: int) -> SimTransfer | None:
        worker = self._world.network.worker_behind(self._server, link, rank)
        return worker.transfer if worker is not None and worker.transfer.alive else None

    def breaks(self) -> bool:
        return self._world.spend("failed_writes", 0.02)

    def corrupts(self) -> bool:
        return self._world.spend("corrupt_pieces", 0.1)

    def notify(self, target: SimTransfer, entry_id: int) -> None:
        world = self._world
        if not world.spend("lost_notifications", 0.1):
            target.notifications.append(entry_id)
        elif world.rng.random() < 0.5:  # not lost: it comes when nobody waits for it any more
            world.late.append((world.steps + world.rng.randrange(3000), target, entry_id))

    def stray(self, writer: SimTransfer, write: Write) -> None:
        world = self._world
        if world.rng.random() < 0.5:
            world.stray.append((world.steps + world.rng.randrange(1000), writer, write))

    def bad_checksum(self) -> None:
        world = self._world
        world.bad_checksums += 1
        assert world.bad_checksums <= world.spent["corrupt_pieces"], "a checksum failed that nobody corrupted"


class Worker:
    """One rank: a compute thread that runs plans in order, and a transfer thread."""

    def __init__(self, server: Server, rank: int) -> None:
        self.server, self.rank = server, rank
        self.plans: deque[WorkerPlan] = deque()
        self.results: deque[StepResult] = deque()
        self.known = KnownSequences()
        self.computed_plan = -1
        self.slots: dict[int, int] = {}  # slot -> sequence
        self.pages = SimPages(server.facts, f"{server.name} rank {rank}")
        self.transfer = SimTransfer(
            server.facts, self.pages, SimWire(server), lambda: self.computed_plan, overwrites=server.world.overwrites
        )
        self.tiers = SimRankTiers(server.facts, rank, self.pages, server.world.store, server.world.store_fails)

    def compute(self) -> None:
        plan = self.plans.popleft()
        ended, begun, runs = self.known.apply(plan)
        for sequence in ended:
            for sampler in sequence.samplers:
                assert self.slots.pop(sampler.slot) == sequence.seq_id
        for copy in plan.copies:
            self.pages.copy(copy.group, copy.source, copy.destination)
        for sequence in begun:
            for sampler in sequence.samplers:
                assert sampler.slot not in self.slots, "a sampling slot was opened twice"
                self.slots[sampler.slot] = sequence.seq_id
        sampled = [token for run in runs for token in self._run(run)]
        self.computed_plan = plan.plan_no
        tokens = tuple(sampled) if self.rank == self.server.facts.sampling_rank else ()
        self.results.append(StepResult(self.rank, plan.plan_no, tokens, self.server.world.compute_s, 0.0, 0.0))

    def _run(self, run: RunView) -> list[SampledToken]:
        sequence, stop = run.sequence, run.start + run.num_tokens
        assert stop <= len(sequence.tokens), "a run names tokens that this worker does not know"
        for g, group in enumerate(self.server.facts.model.groups):
            if group.is_state:
                self._update_state(g, run)
            else:
                self._attend(g, run)
        if not run.sample:
            return []
        context, seed = tuple(sequence.tokens[:stop]), sequence.params.seed
        sampled = [
            SampledToken(sequence.seq_id, sampler.choice, next_token(context, sampler.choice, seed))
            for sampler in sequence.samplers
        ]
        if len(sampled) == 1 and self.server.facts.pp == 1:  # stages learn it from the plan that computes it
            sequence.tokens.append(sampled[0].token_id)
        return sampled

    def _update_state(self, g: int, run: RunView) -> None:
        tokens, stop = tuple(run.sequence.tokens), run.start + run.num_tokens
        if run.start:
            assert self.pages.row(g, run.last_pages[g], 0) == tokens[: run.start]
        self.pages.write_row(g, run.sequence.tables[g][-1], 0, tokens[:stop])
        checkpoint = self.server.facts.memory.checkpoint_tokens
        assert (stop - 1) // checkpoint == run.start // checkpoint, "a run crosses a checkpoint"

    def _attend(self, g: int, run: RunView) -> None:
        page_tokens, table, tokens = self.server.facts.memory.page_tokens, run.sequence.tables[g], run.sequence.tokens
        stop = run.start + run.num_tokens
        for position in range(run.start, stop):
            cell = (tokens[position], position)
            self.pages.write_row(g, table[position // page_tokens], position % page_tokens, cell)
        seen = self.server.facts.model.groups[g].window or stop
        for position in range(max(0, run.start - seen + 1), stop):
            held = self.pages.row(g, table[position // page_tokens], position % page_tokens)
            assert held == (tokens[position], position), f"{self.server.name} group {g}: {position} holds {held}"


class SimWorkers:
    """What a server's dispatch publishes, and sends to transfer threads."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def publish(self, plan: WorkerPlan) -> None:
        for worker in self._server.workers:
            worker.plans.append(plan)

    def send(self, rank: int, messages: Sequence[TransferCommand | TierCommand]) -> None:
        worker = self._server.workers[rank]
        for message in messages:
            if isinstance(message, TierCommand):
                worker.tiers.take(message)
            else:
                worker.transfer.commands.append(message)


class SimRouters:
    """What it tells the one router. known: what the cache events came to."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.known: dict[Tier, set[tuple[int, bytes]]] = {tier: set() for tier in Tier}

    def tell(self, router: int, message: ServerMessage) -> None:
        self._server.to_router.append(message)

    def publish(self, tier: Tier, events: KvEvents) -> None:
        known = self.known[tier]
        assert set(events.stored).isdisjoint(events.removed), "a page came and left"
        if tier is not Tier.STORAGE:  # of which others, too, may have told what is found to be gone
            assert known.isdisjoint(events.stored) and known.issuperset(events.removed), f"no news of {tier}"
        known.update(events.stored)
        known.difference_update(events.removed)

    def flush(self) -> None:
        pass


class SimLinks:
    """What it sends over links, and what becomes of them."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def send(self, number: int, message: LinkMessage) -> None:
        self._server.world.network.send(self._server, number, message)

    def flush(self) -> None:
        pass

    def dial(self, peer: PeerRef) -> None:
        self._server.world.network.dial(self._server, peer)

    def drop(self, number: int, reason: str) -> None:
        assert reason in FAILURES, f"no fault explains why a link is dropped: {reason}"
        self._server.world.network.lose(self._server, number, reason)

    def pod_gone(self, pod: str) -> None:
        raise AssertionError("nothing here runs in a pod")

    def forget(self, number: int) -> None:
        pass


class Server:
    """One server: an engine and what carries out its instructions, as in a real one; its workers, its end of links."""

    def __init__(self, world: World, name: str, role: ServerRole, facts: EngineFacts) -> None:
        self.world, self.name, self.role = world, name, role
        self.facts = facts
        self.workers: list[Worker] = []
        self.incarnations = 0
        self.to_router: deque[Any] = deque()
        self.from_router: deque[Any] = deque()
        self.alarms: deque[float] = deque(maxlen=1)
        self.dispatch = Dispatch(name, facts.tp, lambda: world.now, lambda leg: "", wake_at=self.alarms.append)
        self.start()

    def start(self) -> None:
        self.incarnations += 1
        incarnation = f"{self.name}.{self.incarnations}"
        self.facts = replace(self.facts, incarnation=incarnation)
        self.routers = self.dispatch.routers = SimRouters(self)
        self.dispatch.links = SimLinks(self)
        workers = SimWorkers(self)
        send = lambda rank, command: workers.send(rank, [command])  # noqa: E731
        self.keeper = SimKeeper(self.facts, self.world.store, send, self.world.store_fails)
        self.dispatch.attach(self.role.engine(self.facts), workers, self.keeper)
        self.workers = [Worker(self, rank) for rank in range(self.facts.tp)]

    @property
    def engine(self) -> Engine:
        assert self.dispatch.engine is not None
        return self.dispatch.engine

    @property
    def ref(self) -> PeerRef:
        return PeerRef(self.name, "somewhere:1", self.facts.incarnation)

    def hello(self, generation: str) -> LinkHello:
        ranks = tuple(RankInfo(rank, 1, 1, b"", 0, 0, 0) for rank in range(self.facts.tp))
        return LinkHello(self.name, generation, self.facts.incarnation, "same", self.facts.tp, "host", ranks)

    def hear(self, event: Callable[[Dispatch], None]) -> None:
        """Something happens, and all is well afterwards."""
        event(self.dispatch)
        assert len(self.engine.pipeline.in_flight) <= 2
        self.engine.check_integrity()
        for tier, known in self.routers.known.items():
            has = set(self.engine.kv_snapshot(tier).stored)
            # What a server forgets of storage is there still.
            assert known >= has if tier is Tier.STORAGE else known == has, f"events do not add up to what {tier} has"
