"""One prefill or decode server: its engine, its workers, its router streams, its links, its health, and its end.

Everything here runs on one asyncio loop. The engine decides; this class carries out what it returns and feeds it what
happens. Knows sockets, processes and time; decides nothing about legs, pages or pieces.

    loading ──> ready ──> draining ──> gone
       ^          │ the workers are lost: every leg ends WORKER_LOST, links drop, a new incarnation starts
       └──────────┘
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import msgspec
import zmq

from disagg.config.check import check_staging, connections_allowed
from disagg.config.staging import Device, size_staging
from disagg.config.tree import Config
from disagg.convert.inspect import ModelFacts, inspect_model
from disagg.convert.model_dir import resolve
from disagg.engine.decode import DecodeEngine
from disagg.engine.facts import EngineFacts
from disagg.engine.instructions import (
    DialLink,
    DropLink,
    ForgetLink,
    Instruction,
    PublishKv,
    ToLane,
    ToLink,
    ToRouter,
    ToWorkers,
)
from disagg.engine.prefill import PrefillEngine
from disagg.memory.groups import spec_of
from disagg.memory.layout import PageSizing, PoolLayout, plan_layout
from disagg.memory.sizing import size_pool
from disagg.messages.control import (
    Computation,
    Dump,
    Dumped,
    Load,
    Loaded,
    MakePool,
    OpenTransfer,
    Profile,
    Profiled,
    TransferOpen,
)
from disagg.messages.heads import SliceError, check_heads
from disagg.messages.lane import Beat, LaneReport, LaneRequest
from disagg.messages.layout import PROTOCOL_VERSION, Fingerprint, LayerGroup
from disagg.messages.legs import (
    AbortLeg,
    KvEvents,
    LegEnd,
    LoadReport,
    Outcome,
    PeerRef,
    RouterMessage,
    ServerHello,
    ServerState,
    StartLeg,
)
from disagg.messages.link import LinkHello, LinkMessage, RankInfo
from disagg.messages.plan import StepResult
from disagg.server.device import (
    UCX_NET_DEVICES_ON_CPU,
    UCX_TLS_ON_CPU,
    choose_device,
    ucx_choice,
)
from disagg.server.door import HELLO_S, MAX_STREAMS
from disagg.server.exporter import Exporter
from disagg.server.identity import SHOWN_DIGITS, ModelIdentity, changed, disagreement, identity_of
from disagg.server.links import Links
from disagg.server.pids import host_id, started
from disagg.server.routers import RouterStreams
from disagg.server.workers import GroupLost, WorkerGroup
from disagg.staging.pieces import framed_bytes
from disagg.telemetry.http import TelemetryServer
from disagg.telemetry.loop import LoopWatch
from disagg.telemetry.metrics import EngineMetrics, new_registry
from disagg.telemetry.process import raise_descriptor_limit
from disagg.telemetry.stacks import format_stacks
from disagg.types.errors import ConfigError, ProtocolError
from disagg.types.ids import LegKey, Role
from disagg.types.sampling import MAX_CHOICES
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

logger = logging.getLogger(__name__)

TICK_S = 0.1
RESTART_FIRST_S = 0.2
RESTART_MOST_S = 10.0
STEADY_S = 30.0  # up for this long: the next restart is quick again
BARRIER_S = 30.0
DUMP_S = 5.0
NOTE_CHARS = 1000  # of what routers are told for the operator
IDLE_S = 300.0  # a connection on which nothing is called for so long is closed
GEMV_COPY_BYTES = 2 << 30  # a decode server on CPU keeps two copies of weights up to this size


class Server:
    """`run` returns the exit status. One object per process."""

    def __init__(self, config: Config, role: Role, heartbeat: Callable[[], None]) -> None:
        self._config = config
        self._role = role
        self._beat = heartbeat
        self._name = config.server.name or f"{role.value}-0"
        self._state = ServerState.LOADING
        self._facts: ModelFacts | None = None
        self._identity: ModelIdentity | None = None  # of the last group that came up
        self._note = ""  # what the operator should know of this server
        self._model_dir = Path()
        self._device: Device = "cpu"
        self._max_model_len = 0
        self._group: WorkerGroup | None = None
        self._engine: PrefillEngine | DecodeEngine | None = None
        self._ranks: tuple[RankInfo, ...] = ()
        self._fingerprint = ""
        self._dumping = asyncio.Lock()
        self._server_id = secrets.token_hex(8)
        self._stop = asyncio.Event()
        self._last_load: LoadReport | None = None
        self._metrics_address = ""
        self._link_address = ""
        self._routers = RouterStreams(
            lease_s=config.router.lease_s,
            heartbeat_s=config.router.heartbeat_s,
            hello=self._hello,
            load=self._load,
            snapshot=self._kv_snapshot,
            on_message=self._router_message,
            on_lease_end=self._lease_end,
            dump=self._dump,
        )
        self._links = Links(
            lease_s=config.transfer.link_lease_s,
            greeting=self._greeting,
            on_up=self._link_up,
            on_message=self._link_message,
            on_down=self._link_down,
            on_gone=self._link_gone,
            on_dial_failed=self._dial_failed,
        )
        self._registry = new_registry()
        self._exporter = Exporter(EngineMetrics(self._registry), self._registry)

    # ---- the life of the process

    async def run(self) -> int:
        """0 after a drain, 3 for a configuration that cannot work."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        allowed = connections_allowed(self._config, self._role.value, raise_descriptor_limit())
        bounds = client_options(allowed, MAX_STREAMS, HELLO_S, IDLE_S)
        server = make_server(server_handler(self._routers), peer_handler(self._links), options=bounds)
        health = Health(server, (SERVER, PEER))
        enable_reflection(server, (SERVER, PEER))
        host = self._config.server.host
        telemetry = TelemetryServer(self._registry, self._health, self._dump, self._config.debug.remote)
        port, metrics_port = await self._listen(server, telemetry)
        self._link_address = f"{self._config.server.advertise_host or _dialable(host)}:{port}"
        self._metrics_address = f"{host}:{metrics_port}"
        await server.start()
        logger.info("%s listens on %s:%d, metrics on port %d", self._name, host, port, metrics_port)
        watch = LoopWatch(self._registry)
        watch.start()
        ticker = asyncio.create_task(self._tick(), name="tick")
        supervisor = asyncio.create_task(self._supervise(health), name="supervise")
        stopped = asyncio.create_task(self._stop.wait(), name="stop")
        try:
            await asyncio.wait({supervisor, stopped, ticker}, return_when=asyncio.FIRST_COMPLETED)
            if ticker.done():
                ticker.result()
            if supervisor.done():
                supervisor.result()
            await self._drain(health)
            return 0
        except ConfigError as error:
            logger.error("%s", error)
            return 3
        finally:
            for task in (supervisor, stopped):
                task.cancel()
            await asyncio.gather(supervisor, stopped, return_exceptions=True)
            await self._links.close()
            self._routers.close()
            if self._group is not None:
                await self._group.stop()
            watch.stop()
            await telemetry.close()
            await server.stop(grace=1.0)
            ticker.cancel()

    async def _listen(self, server: grpc.aio.Server, telemetry: TelemetryServer) -> tuple[int, int]:
        """The ports of gRPC and of metrics. Raises ConfigError naming the setting of one that is taken."""
        at = self._config.server
        free = "0 takes a free one"
        try:
            port = server.add_insecure_port(f"{at.host}:{at.port}")
        except RuntimeError as error:  # gRPC's words name a variable for more of them
            raise ConfigError(f"server.port = {at.port}: cannot listen on {at.host}:{at.port}; {free}") from error
        try:
            return port, await telemetry.start(at.host, at.metrics_port)
        except OSError as error:
            where = f"{at.host}:{at.metrics_port}"
            raise ConfigError(f"server.metrics_port = {at.metrics_port}: cannot listen on {where}; {free}") from error

    async def _drain(self, health: Health) -> None:
        """In this order: not serving; wait for legs; give back what is left; let routers have it all; then close."""
        self._state = ServerState.DRAINING
        self._links.stopping = True
        await health.set_serving(False)
        self._routers.announce()
        deadline = time.monotonic() + self._config.server.drain_s
        while self._engine is not None and not self._engine.idle and time.monotonic() < deadline:
            await asyncio.sleep(TICK_S / 2)
        if self._engine is not None:
            self._do(self._engine.end_all(Outcome.DRAINED, f"{self._name} is shutting down"))
        self._routers.flush()
        flushed = time.monotonic() + 2.0
        while not self._routers.drained and time.monotonic() < flushed:
            await asyncio.sleep(TICK_S / 2)

    async def _supervise(self, health: Health) -> None:
        """Keep one worker group alive. Raises ConfigError when no group can come up with this configuration."""
        self._find_device()
        self._prepare_model = asyncio.get_running_loop().run_in_executor(None, self._find_model)
        await self._prepare_model
        pause_s = RESTART_FIRST_S
        while True:
            up_s = time.monotonic()
            try:
                await self._bring_up()
                await health.set_serving(True)
                assert self._group is not None
                reason = await self._group.wait_lost()
            except GroupLost as error:
                reason = str(error)
                self._note = f"its workers could not start: {reason}"[:NOTE_CHARS]
            except ConfigError as error:
                if self._identity is None:
                    raise
                # It worked before, so it is what the model's files have become, perhaps for a moment while they are replaced.
                reason = str(error)
                note = f"the model in {self._model_dir} could be served before, and cannot now: {reason}"
                self._note = note[:NOTE_CHARS]
            logger.error("the workers of %s are lost: %s", self._name, reason)
            await health.set_serving(False)
            await self._take_down(reason)
            if time.monotonic() - up_s > STEADY_S:
                pause_s = RESTART_FIRST_S
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, RESTART_MOST_S)

    def _find_model(self) -> None:
        model = self._config.model
        self._model_dir = resolve(model.name, Path(model.cache_dir).expanduser())

    def _inspect_model(self) -> None:
        """What the files say now: of every group, since they may have been replaced. Raises ConfigError."""
        self._facts = inspect_model(self._model_dir)
        tp = self._config.server.tp
        try:
            check_heads(tp, self._facts.num_heads, self._facts.num_kv_heads)
        except SliceError as error:
            raise ConfigError(f"server.tp = {tp}: {error}") from error
        self._max_model_len = _model_len(self._config.model.max_model_len, self._facts.max_model_len)

    def _find_device(self) -> None:
        """What the configuration leaves to the device is decided here. Raises ConfigError for what does not go with it."""
        self._device = choose_device(self._config.model.device)
        transfer = size_staging(self._config.transfer, self._device)
        check_staging(transfer, self._device)
        self._config = msgspec.structs.replace(self._config, transfer=transfer)

    async def _bring_up(self) -> None:
        """Start a new incarnation: processes, model, pool, transfer agents, engine; then READY."""
        config = self._config
        await asyncio.get_running_loop().run_in_executor(None, self._inspect_model)
        assert self._facts is not None
        try:
            group = WorkerGroup(
                self._name, config.worker, config.log, config.server.tp, self._step_done, self._lane_report
            )
            self._group = group
            group.start()
        except (OSError, zmq.ZMQError) as error:  # no descriptors, processes or space: others may let go of some
            raise GroupLost(f"they cannot be started: {error}") from error
        self._routers.announce()
        device = self._device
        dtype = _dtype(config.model.dtype, device, self._facts.torch_dtype)
        timeout_s = config.worker.load_timeout_s
        small = 4 * self._facts.num_parameters <= GEMV_COPY_BYTES
        gemv_copies = self._role is Role.DECODE and (device, dtype) == ("cpu", "float32") and small
        load = Load(
            model_dir=str(self._model_dir),
            dtype=dtype,
            device=device,
            first_gpu=config.server.first_gpu,
            threads=config.worker.threads,
            gemv_copies=gemv_copies,
            tp=config.server.tp,
            meet_s=timeout_s,
            collective_s=config.worker.step_deadline_s,
            computation=Computation(config.model.prefill_attention, config.model.decode_attention, config.model.graphs),
        )
        loaded = [rank for rank in await group.call(load, timeout_s) if isinstance(rank, Loaded)]
        if why := disagreement(loaded):
            raise GroupLost(why)
        first = loaded[0]
        groups = tuple(layers.keeping_all() for layers in first.groups) if config.engine.keep_windows else first.groups
        on_rank = tuple(layers.on_rank(config.server.tp) for layers in groups)
        self._check_pieces(on_rank)
        layout, num_large = await self._make_pool(group, on_rank)
        opened = await group.call(self._open_transfer(group.incarnation), timeout_s)
        await group.barrier(BARRIER_S)
        self._ranks = tuple(
            RankInfo(
                rank.rank,
                rank.pid,
                started(rank.pid),
                rank.metadata,
                rank.arena_address,
                rank.arena_device,
                rank.arena_bytes,
            )
            for rank in opened
            if isinstance(rank, TransferOpen)
        )
        transfer = config.transfer
        self._max_model_len = _model_len(
            config.model.max_model_len, min(self._facts.max_model_len, first.max_model_len)
        )
        facts = EngineFacts(
            incarnation=group.incarnation,
            tp=config.server.tp,
            groups=groups,
            layout=layout,
            num_large=num_large,
            prefix_cache=config.engine.prefix_cache,
            cache_root=f"{first.weights_hash} {dtype}",
            max_slots=self._max_slots,
            chunk_tokens=config.engine.chunk_tokens,
            max_model_len=self._max_model_len,
            vocab_size=first.vocab_size,
            eos_token_ids=first.eos_token_ids,
            max_waiting=config.engine.max_waiting,
            ungranted_share=config.engine.ungranted_share,
            spare_tokens=config.engine.grant_headroom_tokens,
            lookahead_tokens=config.engine.lookahead_tokens,
            preempt_after_s=config.engine.preempt_after_s,
            preemption=config.engine.preemption,
            gather_bytes=transfer.gather_bytes,
            arena_bytes=transfer.arena_bytes,
            segment_bytes=transfer.segment_bytes,
            link_segments=transfer.link_segments,
            link_idle_s=transfer.link_idle_s,
            progress_s=transfer.progress_s,
        )
        fingerprint = Fingerprint(
            PROTOCOL_VERSION,
            first.weights_hash,
            config.engine.page_tokens,
            config.engine.checkpoint_tokens,
            groups,
        )
        self._fingerprint = fingerprint.digest()
        self._take_identity(identity_of(first))
        self._engine = DecodeEngine(facts) if self._role is Role.DECODE else PrefillEngine(facts)
        self._state = ServerState.DRAINING if self._stop.is_set() else ServerState.READY
        self._routers.announce()
        logger.info(
            "%s is ready: incarnation %s, %s in %s, weights %s, model loaded in %.1f s",
            self._name,
            group.incarnation,
            self._facts.model_type,
            dtype,
            first.weights_hash[:SHOWN_DIGITS],
            first.load_s,
        )

    def _take_identity(self, identity: ModelIdentity) -> None:
        if change := changed(str(self._model_dir), self._identity, identity):
            logger.error("%s: %s", self._name, change)
            self._exporter.metrics.model_changes.inc()
        self._note = change[:NOTE_CHARS]
        self._identity = identity

    def _open_transfer(self, incarnation: str) -> OpenTransfer:
        """An arena for what lands, or gather buffers for what leaves."""
        transfer, device, decode = self._config.transfer, self._device, self._role is Role.DECODE
        return OpenTransfer(
            backend=transfer.backend,
            incarnation=incarnation,
            arena_bytes=transfer.arena_bytes if decode else 0,
            gather_bytes=transfer.gather_bytes,
            gather_buffers=0 if decode else transfer.gather_buffers,
            ucx_tls=ucx_choice(transfer.ucx_tls, device, UCX_TLS_ON_CPU),
            ucx_net_devices=ucx_choice(transfer.ucx_net_devices, device, UCX_NET_DEVICES_ON_CPU),
            kernels=transfer.kernels,
        )

    def _check_pieces(self, groups: tuple[LayerGroup, ...]) -> None:
        """Raises ConfigError if the smallest piece, one row of one layer on one rank, is too large to be sent."""
        transfer = self._config.transfer
        for layers in groups:
            needed = framed_bytes(layers.bytes_per_token_layer)
            for name, given in (("gather_bytes", transfer.gather_bytes), ("segment_bytes", transfer.segment_bytes)):
                if needed > given:
                    raise ConfigError(
                        f"transfer.{name} = {given}: one layer of {layers.name} sends at least {needed} bytes at once; "
                        "it must be as large"
                    )

    @property
    def _max_slots(self) -> int:
        """Sequences sampled at once. Prefill samples the first tokens of all choices of a request in one step."""
        most = self._config.engine.max_running
        return max(most, MAX_CHOICES) if self._role is Role.PREFILL else most

    async def _make_pool(self, group: WorkerGroup, groups: tuple[LayerGroup, ...]) -> tuple[PoolLayout, int]:
        """Decide on the pool's pages and size, and have every rank make it. Raises ConfigError if nothing fits.

        groups: as a rank keeps them.
        """
        engine, timeout_s = self._config.engine, self._config.worker.load_timeout_s
        specs = [spec_of(layers, engine.page_tokens) for layers in groups]
        profiled = await group.call(Profile(engine.chunk_tokens, self._max_slots), timeout_s)
        measured = [rank for rank in profiled if isinstance(rank, Profiled)]
        try:
            layout = plan_layout(specs, engine.page_tokens, engine.checkpoint_tokens, PageSizing(engine.page_sizing))
            size = size_pool(
                layout,
                set_bytes=engine.kv_memory_bytes,
                total_bytes=min(rank.total_bytes for rank in measured),
                peak_bytes=max(rank.peak_bytes for rank in measured),
                staging_bytes=self._open_transfer(group.incarnation).staging_bytes,
                utilization=engine.gpu_memory_utilization,
            )
        except ValueError as error:
            raise ConfigError(f"engine: {error}") from error
        if layout.reason:
            logger.warning("%s", layout.reason)
        logger.info(
            "KV memory: %s; per large page %s",
            size.why,
            ", ".join(
                f"{count} of {layers.name} ({len(layers.layers)} layers, {layers.page_bytes(engine.page_tokens)} bytes)"
                for count, layers in zip(layout.per_large, groups, strict=True)
            ),
        )
        made = MakePool(size.num_large, layout.large_bytes, layout.strides, engine.page_tokens, self._max_slots)
        await group.call(made, timeout_s)
        return layout, size.num_large

    async def _take_down(self, reason: str) -> None:
        """The workers are lost: tell the routers, end the workers, and then let peers know that nothing can come."""
        group, engine = self._group, self._engine
        if self._state is ServerState.READY:
            self._state = ServerState.LOADING
        self._engine = None
        if engine is not None:
            self._exporter.retire(engine.tally)
            for instruction in engine.end_all(Outcome.WORKER_LOST, f"{self._name} lost its workers: {reason}"):
                if isinstance(instruction, ToRouter):
                    self._tell(instruction)
        self._routers.announce()
        self._routers.flush()
        if group is not None:
            await group.kill()
        self._group = None
        self._links.drop_all(f"{self._name} lost its workers")

    async def _tick(self) -> None:
        """Everything that happens because time passes."""
        next_beat_s = 0.0
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            if now >= next_beat_s:
                next_beat_s = now + 1.0
                self._beat()
            self._routers.tick()
            self._links.tick()
            if self._engine is not None:
                if isinstance(self._engine, PrefillEngine):
                    self._do(self._engine.tick(now))
                else:
                    self._do(self._engine.tick(now, time.time()))
            self._export()

    def _export(self) -> None:
        self._exporter.export(
            self._engine,
            self._load(),
            self._routers.token_frames,
            self._routers.lease_expiries,
            self._links.lease_expiries,
            time.monotonic(),
        )

    # ---- what happens, into the engine

    def _router_message(self, router: int, message: RouterMessage) -> None:
        engine = self._engine
        now = time.monotonic()
        match message:
            case StartLeg():
                if engine is None or self._state is not ServerState.READY or not self._is_meant(message):
                    self._refuse(router, message)
                    return
                logger.info("leg begins: %d tokens", len(message.token_ids), extra=_log_of(message.key))
                self._do(engine.start_leg(router, message, now, time.time()))
            case AbortLeg():
                if isinstance(engine, PrefillEngine):
                    self._do(engine.abort_leg(message))
                elif engine is not None:
                    self._do(engine.abort_leg(message, now))

    def _is_meant(self, start: StartLeg) -> bool:
        """Not by a router that has not heard of our new workers yet, whose model may be another."""
        return self._group is not None and start.incarnation in ("", self._group.incarnation)

    def _refuse(self, router: int, start: StartLeg) -> None:
        """Not begun, so given back: it costs the request no attempt."""
        why = "has other workers now" if self._state is ServerState.READY else f"is {self._state.value}"
        self._routers.tell(router, LegEnd(start.key, Outcome.GIVEN_BACK, f"{self._name} {why}"))
        self._routers.flush()

    def _lease_end(self, router: int, reason: str) -> None:
        if self._engine is not None:
            self._do(self._engine.end_router(router, reason))

    def _step_done(self, result: StepResult) -> None:
        if self._engine is not None:
            self._do(self._engine.step_done(result, time.monotonic(), time.time()), step=True)

    def _lane_report(self, rank: int, message: LaneReport) -> None:
        if isinstance(message, Beat):
            self._exporter.metrics.transfer_turn_s.labels(rank=str(rank)).set(message.longest_turn_s)
        engine = self._engine
        if isinstance(engine, PrefillEngine):
            self._do(engine.lane_report(rank, message, time.monotonic()))
        elif engine is not None:
            self._do(engine.lane_report(rank, message, time.monotonic(), time.time()))

    def _link_up(self, number: int, peer: LinkHello) -> None:
        engine = self._engine
        if engine is None:
            return
        try:
            if isinstance(engine, PrefillEngine):
                self._do(engine.link_up(number, peer))
            else:
                self._do(engine.link_up(number, peer, time.monotonic(), time.time()))
        except SliceError as error:
            logger.error("%s and %s cannot exchange KV: %s", self._name, peer.name, error)
            self._links.drop(number, str(error))
            if isinstance(engine, DecodeEngine):
                self._do(engine.dial_failed(peer.name, peer.incarnation, str(error)))

    def _link_message(self, number: int, message: LinkMessage) -> None:
        engine = self._engine
        try:
            if isinstance(engine, PrefillEngine):
                self._do(engine.link_message(number, message, time.monotonic()))
            elif engine is not None:
                self._do(engine.link_message(number, message, time.monotonic(), time.time()))
        except ProtocolError as error:
            logger.error("link %d: %s", number, error)
            self._links.drop(number, str(error))

    def _link_down(self, number: int, gone: bool, reason: str) -> None:
        engine = self._engine
        if isinstance(engine, PrefillEngine):
            self._links.forget(number)  # nothing here waits for a decode worker's exit
            self._do(engine.link_down(number, reason))
        elif engine is not None:
            self._do(engine.link_down(number, gone, reason))

    def _link_gone(self, number: int) -> None:
        if isinstance(self._engine, DecodeEngine):
            self._engine.peer_gone(number)

    def _dial_failed(self, peer: PeerRef, reason: str) -> None:
        logger.warning("no link to %s: %s", peer.name, reason)
        if isinstance(self._engine, DecodeEngine):
            self._do(self._engine.dial_failed(peer.name, peer.incarnation, reason))

    # ---- what the engine wants done

    def _do(self, instructions: list[Instruction], step: bool = False) -> None:
        """Carry out what the engine returned, then let it schedule; tokens go out once a step."""
        engine, group = self._engine, self._group
        if engine is None or group is None:
            return
        now = time.monotonic()
        lanes: dict[int, list[LaneRequest]] = {}
        drops: list[DropLink] = []
        for instruction in [*instructions, *engine.schedule(now, time.time())]:
            match instruction:
                case ToWorkers():
                    group.publish(instruction.plan)
                case ToRouter():
                    self._tell(instruction)
                case ToLane():
                    ranks = range(self._config.server.tp) if instruction.rank is None else (instruction.rank,)
                    for rank in ranks:
                        lanes.setdefault(rank, []).append(instruction.message)
                case ToLink():
                    self._links.send(instruction.link, instruction.message)
                case PublishKv():
                    self._routers.publish(instruction.events)
                case DialLink():
                    self._links.dial(instruction.peer)
                case DropLink():
                    drops.append(instruction)
                case ForgetLink():
                    self._links.forget(instruction.link)
        for rank, messages in lanes.items():
            group.send(rank, messages)
        self._links.flush()
        if step or not engine.pipeline.in_flight:
            self._routers.flush()
        for drop in drops:
            self._links.drop(drop.link, drop.reason)

    def _kv_snapshot(self) -> KvEvents:
        return self._engine.kv_snapshot() if self._engine is not None else KvEvents()

    def _tell(self, instruction: ToRouter) -> None:
        message = instruction.message
        if isinstance(message, LegEnd):
            done = message.outcome in (Outcome.DONE, Outcome.ABORTED)
            why = f"{message.outcome.value}: {message.reason}" if message.reason else message.outcome.value
            logger.log(logging.INFO if done else logging.WARNING, "leg ended: %s", why, extra=_log_of(message.key))
        self._routers.tell(instruction.router, message)

    # ---- who we are

    def _hello(self) -> ServerHello:
        group, engine = self._group, self._engine
        return ServerHello(
            name=self._name,
            role=self._role,
            tp=self._config.server.tp,
            pid=os.getpid(),
            worker_pids=group.pids if group is not None else (),
            incarnation=group.incarnation if group is not None and engine is not None else "",
            fingerprint=self._fingerprint,
            model=self._config.model.public_name,
            max_model_len=self._max_model_len,
            max_tokens_in_pool=engine.max_tokens_in_pool if engine is not None else 0,
            link_address=self._link_address,
            load=self._load(),
            weights_hash=self._identity.weights_hash if engine is not None and self._identity is not None else "",
            files=dict(self._identity.files) if engine is not None and self._identity is not None else {},
            note=self._note,
        )

    def _load(self) -> LoadReport:
        if self._engine is not None:
            return self._engine.load(self._state)
        return LoadReport(self._state, 0, 0, 0, 0, 0, 0)

    def _greeting(self, generation: str) -> LinkHello | None:
        if self._engine is None or self._group is None:
            return None
        return LinkHello(
            name=self._name,
            generation=generation,
            incarnation=self._group.incarnation,
            fingerprint=self._fingerprint,
            tp=self._config.server.tp,
            host_id=host_id(),
            ranks=self._ranks,
            server_id=self._server_id,
        )

    def _health(self) -> tuple[int, str]:
        return (200 if self._state is ServerState.READY else 503), self._state.value

    async def _dump(self) -> str:
        """Everything worth knowing of a hung server, as text. One at a time, whoever asks."""
        async with self._dumping:
            return await self._make_dump()

    async def _make_dump(self) -> str:
        parts = [
            f"== {self._name} ({self._role.value}), pid {os.getpid()}, {socket.gethostname()}, {self._state.value}"
        ]
        if self._engine is not None:
            parts.append(json.dumps(self._engine.dump(), indent=1, default=str))
        parts.append("-- routers\n" + json.dumps(self._routers.describe(), indent=1))
        parts.append("-- links\n" + json.dumps(self._links.describe(), indent=1))
        parts.append("-- stacks\n" + format_stacks())
        if self._group is not None:
            try:
                for reply in await self._group.call(Dump(), DUMP_S):
                    if isinstance(reply, Dumped):
                        parts.append(f"-- worker\n{reply.text}")
            except (GroupLost, ConfigError) as error:
                parts.append(f"-- workers do not answer: {error}")
        return "\n".join(parts)


def _log_of(key: LegKey) -> dict[str, object]:
    """What ties a log line to its request, in every process under the same names."""
    return {"request_id": key.request_id, "attempt": key.attempt, "trunk": key.trunk}


def _model_len(wanted: int, possible: int) -> int:
    if wanted > possible:
        raise ConfigError(f"model.max_model_len is {wanted}; the model allows at most {possible}")
    return wanted or possible


def _dtype(wanted: str, device: str, checkpoint: str) -> str:
    if wanted != "auto":
        return wanted
    return "float32" if device == "cpu" else checkpoint


def _dialable(host: str) -> str:
    """What peers on this host dial when we listen on every address."""
    return socket.gethostname() if host in ("0.0.0.0", "::", "") else host
