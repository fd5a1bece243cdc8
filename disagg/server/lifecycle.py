"""The life of one server: it listens, brings its workers up, keeps them alive, and drains.

Everything here runs on one asyncio loop. Who it is: `identity`. How workers come up: `bringup`. When: `supervision`. What
happens, and what its engine wants done: `dispatch`. Knows sockets, processes and time.

    loading ──> ready ──> draining ──> gone
       ^          │ │ the workers are lost: every leg ends WORKER_LOST, links drop, a new incarnation starts
       ├──────────┘ │
       └────────────┘ another role is asked for (`roles`): it drains, its workers end, and new ones are of that role
"""

from __future__ import annotations

import asyncio
import logging
import time
from asyncio import create_task
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import zmq

from disagg.config.check import connections_allowed
from disagg.config.staging import Device
from disagg.config.tree import Config, WorkerConfig
from disagg.convert.model_dir import resolve
from disagg.engine.now import Now
from disagg.messages.legs import KvEvents, LoadReport, Outcome, ServerState, StorageState, Tier
from disagg.messages.tiers import TierEvent
from disagg.messages.transfer import Beat, PeerWired, TransferEvent
from disagg.server.bringup import Bringup, on_this_machine, why_not_role
from disagg.server.carriers import Carriers
from disagg.server.dispatch import Dispatch
from disagg.server.door import HELLO_S, MAX_STREAMS
from disagg.server.dump import Dumper
from disagg.server.exporter import Exporter
from disagg.server.identity import Identity, Ranks
from disagg.server.leg_spans import LegSpans
from disagg.server.links import Links
from disagg.server.listening import dialable, listen
from disagg.server.model_identity import SHOWN_DIGITS, ModelIdentity, changed
from disagg.server.offloading import Offloading, storage_name
from disagg.server.recorder import recorder_of
from disagg.server.role import RoleOf, ServerRole
from disagg.server.roles import RoleChanges
from disagg.server.routers import RouterStreams
from disagg.server.same_code import check_code
from disagg.server.supervision import Supervisor
from disagg.server.vllm_names import expose_vllm_names
from disagg.server.workers import Workers, WorkersLost
from disagg.telemetry.http import TelemetryServer
from disagg.telemetry.loop import LoopWatch
from disagg.telemetry.memory import keep_loaded
from disagg.telemetry.metrics import EngineMetrics, new_registry
from disagg.telemetry.process import ending_signals, raise_descriptor_limit
from disagg.telemetry.traces import open_traces
from disagg.types.addresses import join
from disagg.types.errors import ConfigError
from disagg.types.ids import Role
from disagg.types.small_files import home_expanded
from disagg.types.status import DONE, REFUSED
from disagg.wire.services import (
    PEER,
    SERVER,
    Health,
    client_options,
    enable_reflection,
    make_server,
    peer_handler,
    server_handler,
)
from disagg.wire.tls import open_wire_tls

logger = logging.getLogger(__name__)

TICK_S = 0.1
STORE_DRAIN_S = 5.0  # what ended requests leave in storage may take so long
IDLE_S = 300.0  # a connection on which nothing is called for so long is closed


class Server:
    """`run` returns the exit status. One object per process."""

    def __init__(self, config: Config, role_of: RoleOf, role: Role, heartbeat: Callable[[], None]) -> None:
        """role_of: what each role is. role: the one to begin with."""
        self._config = self._given = config
        self._role_of = role_of
        self._roles = RoleChanges(role)
        self._beat = heartbeat
        self._model_dir = Path()
        self._device: Device = "cpu"
        self._found_for: Role | None = None  # the role for which it was looked at
        self._workers: Workers | None = None
        self._stop = asyncio.Event()
        self._alarm: asyncio.TimerHandle | None = None
        self._drains = False  # an operator wants it empty
        self._tls = open_wire_tls(config.tls)
        name, tp = config.server.name or f"{role.value}-0", config.server.tp
        self._identity = identity = Identity(
            name,
            role,
            Ranks(tp, config.server.dp, config.server.pp),
            config.model.public_name,
            self._load,
            config.server.pod,
            hands_over=self._role.hands_over,
        )
        identity.storage = storage_name(config)
        identity.role_change = lambda: self._roles.report
        self._supervisor = Supervisor(identity, self._roles, self._stop, self, config.worker.command)
        asked = (self._asked_to_drain, self._asked_for_role, self._wake_at)
        self._dispatch = dispatch = Dispatch(name, tp * config.server.pp, _now, identity.why_not, *asked)
        self._dumper = dumper = Dumper(identity, dispatch)
        self._offloading = dumper.offloading = Offloading(config)
        self._routers = dispatch.routers = dumper.routers = RouterStreams(
            lease_s=config.router.lease_s,
            heartbeat_s=config.router.heartbeat_s,
            hello=identity.hello,
            load=self._load,
            snapshots={tier: partial(self._kv_snapshot, tier) for tier in self._offloading.tiers},
            on_message=dispatch.router_message,
            on_lease_end=dispatch.lease_end,
            dump=dumper.dump,
        )
        self._links = dispatch.links = dumper.links = Links(
            lease_s=config.transfer.link_lease_s,
            greeting=identity.greeting,
            on_up=dispatch.link_up,
            on_message=dispatch.link_message,
            on_down=dispatch.link_down,
            on_gone=dispatch.link_gone,
            on_dial_failed=dispatch.dial_failed,
            channel_to=self._tls.dial,
        )
        self._carriers = Carriers(self._links.peer_of)
        self._registry = new_registry()
        self._tls.expose(self._registry)
        self._traces = open_traces(config.tracing.otlp_endpoint, config.tracing.sample_ratio, self._registry, name)
        self._note_role()
        metrics = EngineMetrics(self._registry)
        self._exporter = Exporter(metrics, self._registry)
        expose_vllm_names(self._registry, config.model.public_name, metrics, lambda: self._dispatch.engine)
        self._watch = LoopWatch(self._registry)

    # ---- the life of the process

    async def run(self) -> int:
        """The exit status: DONE after a drain, REFUSED for a configuration that cannot work. Raises ConfigError, DisaggError."""
        loop = asyncio.get_running_loop()
        for number in ending_signals():
            loop.add_signal_handler(number, self._stop.set)
        allowed = connections_allowed(self._config, self._roles.now.value, raise_descriptor_limit())
        bounds = client_options(allowed, MAX_STREAMS, HELLO_S, IDLE_S)
        server = make_server(server_handler(self._routers), peer_handler(self._links), options=bounds)
        health = Health(server, (SERVER, PEER))
        enable_reflection(server, (SERVER, PEER))
        host = self._config.server.host
        telemetry = TelemetryServer(self._registry, self._health, self._dumper.dump, self._config.debug.remote)
        port, metrics_port = await listen(self._config.server, self._tls, server, telemetry)
        self._identity.link_address = join(self._config.server.advertise_host or dialable(host), port)
        await server.start()
        logger.info("%s listens on %s, metrics on port %d", self._identity.name, join(host, port), metrics_port)
        keep_loaded()
        self._watch.start()
        ticker = create_task(self._tick(health), name="tick")
        supervisor = create_task(self._supervisor.run(health), name="supervise")
        stopped = create_task(self._stop.wait(), name="stop")
        certificates = create_task(self._tls.look_always(), name="certificates")
        try:
            await asyncio.wait({supervisor, stopped, ticker}, return_when=asyncio.FIRST_COMPLETED)
            if ticker.done():
                ticker.result()
            if supervisor.done():
                supervisor.result()
            await self._drain(health)
            return DONE
        except ConfigError as error:
            logger.error("%s", error)
            return REFUSED
        finally:
            for task in (supervisor, stopped, certificates):
                task.cancel()
            await asyncio.gather(supervisor, stopped, certificates, return_exceptions=True)
            await self._links.close()
            self._routers.close()
            await self._offloading.close()
            if self._workers is not None:
                await self._workers.stop()
            self._watch.stop()
            await asyncio.to_thread(self._dispatch.recorder.close)
            await asyncio.to_thread(self._traces.close)
            await telemetry.close()
            await server.stop(grace=1.0)
            ticker.cancel()

    async def _drain(self, health: Health) -> None:
        """In this order: not serving; wait for legs; give back what is left; let routers have it all; then close."""
        self._identity.state = ServerState.DRAINING
        self._links.stopping = True
        await health.set_serving(False)
        self._routers.announce()
        await self.empty(f"{self._identity.name} is shutting down")

    async def empty(self, reason: str) -> None:
        """Gives back what has not begun, waits for the rest, ends what is left, and lets routers have it all: also what they sent
        before they knew that nothing more is taken is answered before links go down."""
        self._routers.settle()
        self._dispatch.give_back(reason)
        deadline = time.monotonic() + self._config.server.drain_s
        while (engine := self._dispatch.engine) is not None and not engine.idle and time.monotonic() < deadline:
            await asyncio.sleep(TICK_S / 2)
        deadline = min(deadline, time.monotonic() + STORE_DRAIN_S)
        while self._stores_on() and time.monotonic() < deadline:
            await asyncio.sleep(TICK_S / 2)
        self._dispatch.drain(reason)
        flushed = time.monotonic() + 2.0
        while not self._routers.drained and time.monotonic() < flushed:
            await asyncio.sleep(TICK_S / 2)

    def _asked_to_drain(self, on: bool) -> None:
        """By a router, for an operator: nothing new begins, until it is undone or the process begins anew."""
        if self._stop.is_set() or on == self._drains:
            return
        self._drains = on
        identity = self._identity
        logger.info("%s %s, as a router asked", identity.name, "drains" if on else "takes requests again")
        if identity.incarnation is not None:
            identity.state = self._up_state
            self._routers.announce()
            if on:
                self._dispatch.give_back(f"{identity.name} drains")

    @property
    def _up_state(self) -> ServerState:
        """While workers are up."""
        drains = self._drains or self._stop.is_set() or self._roles.becomes is not None
        return ServerState.DRAINING if drains else ServerState.READY

    def _asked_for_role(self, role: Role) -> None:
        """By a router, for an operator. Every router is told what comes of it."""
        if self._roles.ask(role, lambda: self._why_not_role(role)):
            logger.info("%s is to be a %s server, as a router asked", self._identity.name, role.value)
            self._identity.state = self._up_state
            self._supervisor.ask_for_role()
        self._routers.announce()

    def _why_not_role(self, role: Role) -> str:
        """What can be said before anything ends."""
        if self._stop.is_set() or self._drains:
            return "it drains"
        if self._identity.incarnation is None:
            return "its workers are not up"
        return why_not_role(self._given, self._role_of(role))

    @property
    def _role(self) -> ServerRole:
        return self._role_of(self._roles.now)

    async def _take_role(self) -> None:
        """No workers are up: the next ones are of the role that is now."""
        identity, role = self._identity, self._role
        identity.role, identity.hands_over = role.role, role.hands_over
        recorder = self._dispatch.recorder
        self._note_role()
        await asyncio.to_thread(recorder.close)

    def _note_role(self) -> None:
        """Records and spans say it."""
        name, role = self._identity.name, self._roles.now.value
        self._dispatch.recorder = recorder_of(self._given.record.dir, name, role)
        if self._given.tracing.otlp_endpoint:
            self._dispatch.leg_spans = LegSpans(self._traces, name, role)

    def _stores_on(self) -> bool:
        """KV is on its way to storage, and with the host it would be lost."""
        engine = self._dispatch.engine
        works = self._offloading.state is StorageState.OK
        return works and engine is not None and (engine.offloads or not self._offloading.idle)

    @property
    def workers(self) -> Workers | None:
        return self._workers

    @property
    def model_dir(self) -> Path:
        return self._model_dir

    async def prepare(self) -> None:
        """What every incarnation needs, found once. Raises ConfigError."""
        loop = asyncio.get_running_loop()
        await self._find_device()
        await loop.run_in_executor(None, self._offloading.open)
        await loop.run_in_executor(None, self._find_model)

    async def _find_device(self) -> None:
        role = self._role
        self._config, self._device = await on_this_machine(self._given, role, self._identity.link_address)
        self._found_for = role.role

    def _find_model(self) -> None:
        model = self._config.model
        self._model_dir = resolve(model.name, home_expanded(model.cache_dir, "model.cache_dir"))

    async def bring_up(self) -> None:
        """Start a new incarnation; then READY."""
        if self._found_for is not self._roles.now:
            await self._find_device()
        await asyncio.get_running_loop().run_in_executor(None, check_code, self._identity.name)
        bringup = Bringup(self._config, self._role, self._device, self._model_dir)
        inspected = await asyncio.get_running_loop().run_in_executor(None, bringup.inspect)
        identity = self._identity
        identity.max_model_len = bringup.model_len(inspected.max_model_len)
        config = self._config
        try:
            workers = Workers(
                identity.name,
                self._worker_config(),
                config.log,
                config.server.tp * config.server.pp,
                self._dispatch.step_done,
                self._transfer_event,
                config.server.dp,
            )
            self._take_workers(workers)
            workers.start()
        except (OSError, zmq.ZMQError) as error:  # no descriptors, processes or space: others may let go of some
            raise WorkersLost(f"they cannot be started: {error}") from error
        identity.worker_pids = workers.pids
        self._routers.announce()
        incarnation = await bringup.run(workers, inspected)
        identity.up(incarnation)
        self._roles.up()
        self._take_model(incarnation.model)
        keeper = self._offloading.up(incarnation.facts, workers.send, self._dispatch.store_event)
        self._dispatch.attach(incarnation.engine, workers, keeper)
        identity.state = self._up_state
        self._routers.announce()
        weights = incarnation.model.weights_hash[:SHOWN_DIGITS]
        logger.info(
            "%s is ready: incarnation %s, weights %s, %s", identity.name, workers.incarnation, weights, incarnation.what
        )

    def _worker_config(self) -> WorkerConfig:
        """A stage waits for those before it: a step of all of them takes as many steps."""
        config = self._config
        return msgspec.structs.replace(config.worker, step_deadline_s=config.worker.step_deadline_s * config.server.pp)

    def _take_workers(self, workers: Workers | None) -> None:
        self._workers = self._dumper.workers = workers

    def _take_model(self, model: ModelIdentity) -> None:
        """What the workers loaded, which may not be what those before had."""
        identity = self._identity
        if change := changed(str(self._model_dir), identity.model, model):
            logger.error("%s: %s", identity.name, change)
            self._exporter.metrics.model_changes.inc()
        else:
            identity.known_model = model
        identity.note = changed(str(self._model_dir), identity.known_model, model)  # none where that one is there again
        identity.model = model

    async def take_down(self, reason: str, *, another_role: bool, intended: bool) -> None:
        """The workers are lost, or end as intended, for those of another role: tell the routers, end the workers, and then let
        peers know that nothing can come.
        """
        identity, workers = self._identity, self._workers
        if not (self._drains or self._stop.is_set()):
            identity.state = ServerState.LOADING
        identity.incarnation = None
        what = f"{identity.name} {'ended' if intended else 'lost'} its workers: {reason}"
        engine = self._dispatch.detach(what, Outcome.DRAINED if intended else Outcome.WORKER_LOST)
        if engine is not None:
            self._exporter.retire(*(rank.counters for rank in engine.ranks))
        if another_role:
            await self._take_role()
        self._routers.announce()
        self._routers.flush()
        await self._offloading.down()
        if workers is not None:
            await workers.kill()
        self._take_workers(None)
        identity.worker_pids = ()
        self._links.drop_all(what, intended=intended)

    async def _tick(self, health: Health) -> None:
        """Everything that happens because time passes. gRPC's health says what HTTP's does, whatever has changed the state."""
        next_beat_s = 0.0
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            if now >= next_beat_s:
                next_beat_s = now + 1.0
                self._beat()
            self._routers.tick()
            self._links.tick()
            self._dispatch.tick()
            self._offloading.tick()
            self._export()
            await health.set_serving(self._identity.state is ServerState.READY)

    def _wake_at(self, at_s: float) -> None:
        """Of the dispatch."""
        if self._alarm is not None:
            self._alarm.cancel()
        delay_s = max(0.0, at_s - time.monotonic())
        self._alarm = asyncio.get_running_loop().call_later(delay_s, self._dispatch.wake)

    def _export(self) -> None:
        self._exporter.export(
            self._dispatch.engine,
            self._load(),
            self._routers.token_frames,
            self._routers.lease_expiries,
            self._links.lease_expiries,
            time.monotonic(),
        )
        self._exporter.export_tiers(self._offloading)

    # ---- what others ask

    def _transfer_event(self, rank: int, message: TransferEvent | TierEvent) -> None:
        if isinstance(message, Beat):
            self._exporter.metrics.transfer_turn_s.labels(rank=str(rank)).set(message.longest_turn_s)
        if isinstance(message, PeerWired):
            self._carriers.learned(message, self._device)
            return
        if isinstance(message, TierEvent):
            self._offloading.sums.count(message)
        self._dispatch.transfer_event(rank, message)

    def _load(self) -> LoadReport:
        state, engine = self._identity.state, self._dispatch.engine
        load = engine.load(state) if engine is not None else LoadReport(state, 0, 0, 0, 0, 0, 0)
        return msgspec.structs.replace(
            load,
            store=self._offloading.state,
            lost_pods=self._links.lost_pods(),
            loop_gap_s=self._watch.longest_gap_s,
            carried=self._carriers.report(self._device),
        )

    def _kv_snapshot(self, tier: Tier) -> KvEvents:
        engine = self._dispatch.engine
        return engine.kv_snapshot(tier) if engine is not None else KvEvents()

    def _health(self) -> tuple[int, str]:
        state = self._identity.state
        return (200 if state is ServerState.READY else 503), state.value


def _now() -> Now:
    return Now(time.monotonic(), time.time())
