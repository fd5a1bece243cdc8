"""A deterministic world for both roles: real engines, simulated links, workers, memory, router and time.

    sim         the world: what can happen next, and the step at which it does
    sim_setup   what it begins with: servers' facts, sizes, requests
    sim_server  servers from their engines up to `server/dispatch`, which are real, and their ranks
    sim_links, sim_router, sim_transfer, sim_tiers, sim_pages: what lies between servers, and under them
    sim_model   what is computed; sim_faults: what goes wrong; sim_rest: what must hold when all is over

Every queue delivers in order, after any delay; what happens next is drawn from a seed. Pools hold (token id, position)
cells per layer and head, or states that name every token they have seen; arenas hold the writes that lie in them; and a
"model" checks every cell that it attends over: a wrong page, a page that another layer group has taken, a stale byte of a
ring, a page reused too early or a missing copy-on-write is an assertion here, at the step where it would have become
text.
"""

from __future__ import annotations

from collections.abc import Callable

from disagg.engine.facts import EngineFacts
from disagg.engine.now import Now
from disagg.server.dispatch import Dispatch
from disagg.server.role import ServerRole
from tests.engine import sim_rest
from tests.engine.sim_faults import Faults
from tests.engine.sim_links import Ends, Network
from tests.engine.sim_router import STALL_S, Router
from tests.engine.sim_server import Server, Worker
from tests.engine.sim_setup import Dice, Kind, converse, limits_of, requests_of, servers_of, setup_of, with_offload
from tests.engine.sim_tiers import SimStore
from tests.engine.sim_transfer import SimTransfer, Write


class World:
    """Everything, and what happens next. `run` until every request is done, then `settle` and `check_nothing_leaked`."""

    def __init__(self, seed: int, faults: Faults, max_steps: int = 60_000, **kind: bool) -> None:
        """kind: the fields of `Kind`."""
        self.seed, self.faults, self.max_steps = seed, faults, max_steps
        dice = Dice(seed)
        self.rng, self.tiers_rng, self.local_rng = dice.all, dice.tiers, dice.local
        self.store = SimStore()
        self.now_s = 0.0
        self.steps = 0
        self.spent: dict[str, int] = dict.fromkeys(Faults.__struct_fields__, 0)
        self.bad_checksums = 0
        self.settling = False
        self.gather_buffers = self.rng.choice((1, 2))
        self.overwrites = seed % 2 == 1  # as on a GPU
        self.compute_s = (0.001, 0.02, 0.3)[seed // 2 % 3]  # of a step: whether plans are held, and for whom
        self.late: list[tuple[int, SimTransfer, int]] = []  # notifications: (step at which they come, to whom, entry)
        self.stray: list[tuple[int, SimTransfer, Write]] = []  # failed writes: (step at which they land, writer, write)
        self._weights: dict[object, float] = {}
        what = Kind(**kind)
        self.mixed = what.mixed
        self.limits = limits_of(dice, what)
        setup = setup_of(dice, what, self.limits)
        self.many_tenants = self.rng.random() < 0.5
        if what.offload:
            setup = with_offload(setup, self.tiers_rng)
        self.network = Network(lambda: self.servers)
        self.prefills, self.decodes = servers_of(setup, self.rng, 2 if faults.drains else 1, self._server)
        self.servers = self.prefills + self.decodes
        self.requests = requests_of(setup, self.rng, faults.abort_share)
        self._haste = 0.3  # of requests, to arrive
        if what.offload:
            converse(self.requests, self.tiers_rng, self.limits)
            self._haste = self.tiers_rng.choice((0.01, 0.03, 0.3))
        self.router = Router(self, self.requests)

    def _server(self, name: str, role: ServerRole, facts: EngineFacts) -> Server:
        return Server(self, name, role, facts)

    @property
    def now(self) -> Now:
        return Now(self.now_s, self.now_s)

    # ---- chance

    def spend(self, fault: str, chance: float) -> bool:
        """True if this fault happens now."""
        if self.settling or self.spent[fault] >= getattr(self.faults, fault) or self.rng.random() >= chance:
            return False
        self.spent[fault] += 1
        return True

    def _weight(self, what: object) -> float:
        """Some queues are slow for a while."""
        if self.steps % 300 == 0:
            self._weights.clear()
        return self._weights.setdefault(what, self.rng.choice((0.02, 0.3, 1.0, 1.0, 3.0)))

    def lose_workers(self, server: Server) -> None:
        """Ranks share fate: the group dies, and comes back as another incarnation."""
        for worker in server.workers:
            worker.transfer.alive = False
        server.dispatch.detach("killed")
        self.network.workers_ended(server)
        old = server.facts.incarnation
        server.start()
        self.network.workers_are_gone(old)

    # ---- what can happen

    def _actions(self) -> list[tuple[float, Callable[[], None]]]:
        out: list[tuple[float, Callable[[], None]]] = []

        def maybe(what: object, queue: object, act: Callable[[], None]) -> None:
            if queue:
                out.append((self._weight(what), act))

        if self.router.next_may_come:
            out.append((self._haste, self.router.arrive))
        for dialled in self.network.dials:
            maybe("dial", True, lambda d=dialled: self.network.answer(d))  # type: ignore[misc]
        for server in self.servers:
            maybe((server.name, "hear"), server.to_router, lambda s=server: self.router.hear(s))  # type: ignore[misc]
            maybe((server.name, "tell"), server.from_router, lambda s=server: self._dispatched(s))  # type: ignore[misc]
            maybe((server.name, "alarm"), server.alarms, lambda s=server: self._wake(s))  # type: ignore[misc]
            for worker in server.workers:
                at, transfer = (server.name, worker.rank), worker.transfer
                maybe((*at, "compute"), worker.plans, worker.compute)
                maybe((*at, "serve"), transfer.commands, transfer.serve)
                maybe((*at, "result"), worker.results, lambda w=worker: self._result(w))  # type: ignore[misc]
                maybe((*at, "report"), transfer.events, lambda w=worker: self._report(w))  # type: ignore[misc]
                maybe((*at, "copy"), worker.tiers.copies, worker.tiers.copy)
                maybe((*at, "store"), worker.tiers.transfers, worker.tiers.transfer)
                maybe((*at, "tiers"), worker.tiers.events, lambda w=worker: self._tier_report(w))  # type: ignore[misc]
                maybe((*at, "gather"), transfer.sendable, transfer.start_write)
                maybe((*at, "wire"), transfer.writing, lambda t=transfer: self._wire(t))  # type: ignore[misc]
                maybe((*at, "notify"), transfer.notifications, lambda t=transfer: self._notify(t))  # type: ignore[misc]
            maybe((server.name, "ask"), server.keeper.commands, server.keeper.serve)
            maybe((server.name, "told"), server.keeper.events, lambda s=server: self._store_says(s))  # type: ignore[misc]
        for link in self.network.links:
            if not link.decode.established and link.decode.up:
                maybe("greeting", True, lambda x=link: self.network.greeted(x))  # type: ignore[misc]
                continue
            for end in (link.prefill, link.decode):
                maybe((end.number, "link"), end.queue, lambda e=end: self._deliver(e))  # type: ignore[misc]
                if end.up and not link.other(end).up:
                    weight = self._weight((end.number, "loss")) / 3
                    out.append((weight, lambda x=link, e=end: self.network.lose_end(x, e, "lost at the other end")))  # type: ignore[misc]
        return out

    def _dispatched(self, server: Server) -> None:
        incarnation, message = server.from_router.popleft()
        if incarnation != server.facts.incarnation:
            return  # its channel went with the old workers' engine
        server.hear(lambda dispatch: dispatch.router_message(0, message))

    def _wake(self, server: Server) -> None:
        self.now_s = max(self.now_s, server.alarms.popleft())
        server.hear(Dispatch.wake)

    def _result(self, worker: Worker) -> None:
        server = worker.server
        result = worker.results.popleft()
        server.hear(lambda dispatch: dispatch.step_done(result))

    def _report(self, worker: Worker) -> None:
        server, report = worker.server, worker.transfer.events.popleft()
        server.hear(lambda dispatch: dispatch.transfer_event(worker.rank, report))

    def _tier_report(self, worker: Worker) -> None:
        server, report = worker.server, worker.tiers.events.popleft()
        server.hear(lambda dispatch: dispatch.transfer_event(worker.rank, report))

    def _store_says(self, server: Server) -> None:
        event = server.keeper.events.popleft()
        server.hear(lambda dispatch: dispatch.store_event(event))

    def store_fails(self) -> bool:
        """A call of the store comes to nothing."""
        return self.spend("store_failures", 0.1)

    def _wire(self, transfer: SimTransfer) -> None:
        transfer.advance(self.rng.choice(transfer.writing))

    def _notify(self, transfer: SimTransfer) -> None:
        transfer.notified(self.rng.choice(transfer.notifications))

    def _deliver(self, end: Ends) -> None:
        server, message = end.server, end.queue.popleft()
        server.hear(lambda dispatch: dispatch.link_message(end.number, message))

    def _tick(self) -> None:
        self.now_s += 0.1
        for server in self.servers:
            server.hear(Dispatch.tick)
        self.router.look_around()

    def _fault(self) -> None:
        if self.spend("lost_workers", 0.001):
            self.lose_workers(self.rng.choice(self.servers))
            self.router.look_around()
        offloading = [
            server for server in self.servers if server.facts.offload is not None and server.facts.offload.storage
        ]
        broken = [server for server in offloading if not server.keeper.works]
        if broken and (self.settling or self.tiers_rng.random() < 0.02):
            broken[0].keeper.turn()
        elif offloading and self.spend("store_outages", 0.002):
            self.tiers_rng.choice(offloading).keeper.turn()
        ups = [
            (link, end)
            for link in self.network.links
            for end in (link.prefill, link.decode)
            if end.up and end.established
        ]
        if ups and self.spend("lost_links", 0.003):
            self.network.lose_end(*self.rng.choice(ups), "a fault")
        for request in self.requests:
            due = request.abort_at is not None and request.attempt > 0 and request.abort_at <= self.steps
            if due and not request.done:
                self.router.abort(request)

    def step(self) -> bool:
        """One thing happens. False if only time could pass."""
        self.steps += 1
        self._fault()
        self.router.drain()
        for stray in [stray for stray in self.stray if stray[0] <= self.steps or self.settling]:
            self.stray.remove(stray)
            stray[1].land_stray(stray[2])
        for late in [late for late in self.late if late[0] <= self.steps or self.settling]:
            self.late.remove(late)
            late[1].notifications.append(late[2])
        actions = self._actions()
        if not actions or self.rng.random() < 0.01:
            self._tick()
            return bool(actions)
        weights = [weight for weight, _ in actions]
        self.rng.choices([act for _, act in actions], weights)[0]()
        self.network.forget_dead()
        return True

    def run(self) -> None:
        """Until every request has its answer, or as many steps as no healthy run needs."""
        while not self.router.done:
            self.step()
            assert self.steps < self.max_steps, f"hangs (seed {self.seed}):\n{self.dump()}"

    def settle(self) -> None:
        """Everything still under way comes to its end, and idle rings go back."""
        self.settling = True
        quiet = 0
        while quiet < 10 * (STALL_S + 4):
            quiet = 0 if self.step() else quiet + 1
            assert self.steps < 2 * self.max_steps, f"never quiet (seed {self.seed}):\n{self.dump()}"

    def check_answers(self) -> None:
        sim_rest.check_answers(self)

    def check_nothing_leaked(self) -> None:
        """At rest: what must be empty is."""
        sim_rest.check_nothing_leaked(self)

    def dump(self) -> str:
        lines = [f"time {self.now_s:.1f}, step {self.steps}"]
        lines += [str(r) for r in self.requests if not r.done]
        lines += [f"{server.name}: {server.engine.dump()}" for server in self.servers]
        return "\n".join(lines)
