"""The router's process: router, gRPC face and HTTP face in one loop, from start to drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import ParamSpec, TypeVar

import grpc
import uvloop
from prometheus_client import CollectorRegistry

from disagg.api.app import HttpServer, create_app, serve
from disagg.api.crowd import Bounds, HttpMetrics
from disagg.api.entry import require_credentials
from disagg.auth.quotas import Use
from disagg.config.tree import Config, RouterConfig
from disagg.convert.model_dir import resolve
from disagg.messages.legs import TimelineEvent
from disagg.router.budget import Held
from disagg.router.mailbox import Taker
from disagg.router.main import RunningRouter, run_router
from disagg.router.requests import GenerateRequest, Update
from disagg.router.service import Router
from disagg.telemetry.listening import Sharing
from disagg.telemetry.loop import LoopWatch
from disagg.telemetry.memory import keep_loaded
from disagg.telemetry.metrics import new_registry
from disagg.telemetry.process import ending_signals
from disagg.telemetry.stacks import format_stacks
from disagg.telemetry.threads import start_loop_threads
from disagg.text.chat import TemplateSource
from disagg.text.limits import TextLimits
from disagg.text.model_files import ModelFiles
from disagg.text.renderer import RenderBounds, Renderer
from disagg.types.errors import DisaggError
from disagg.types.small_files import home_expanded
from disagg.types.status import BY_SIGNAL, DONE
from disagg.types.version import version
from disagg.wire import pb
from disagg.wire.inference import ModelInfo
from disagg.wire.services import ServerStub
from disagg.wire.tls import CLEAR, WireTls

HEARTBEAT_S = 1.0
SERVER_DUMP_S = 15.0  # a server that hangs must not hide what the others say

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


def run(config: Config, heartbeat: Callable[[], None]) -> int:
    """Serves until SIGTERM or SIGINT, drains, and returns the exit code. Raises ConfigError."""
    return uvloop.run(_serve(config, heartbeat))


class RouterFace:
    """The router as the HTTP face wants it (`api.ports.RouterPort`)."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def ask_quota(self, use: Use, count: int = 1) -> None:
        self._router.ask_quota(use, count)

    def generate(self, request: GenerateRequest, use: Use, taker: Taker | None = None) -> AsyncGenerator[Update, None]:
        return self._router.generate(request, use, taker)

    def note_refused(self, error: DisaggError, client_request_id: str = "") -> None:
        self._router.note_refused(error, client_request_id)

    @property
    def limits(self) -> TextLimits:
        return self._router.limits

    async def beside(self, tenant: str, size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._router.beside(tenant, size, work, *args, **kwargs)

    def hold(self) -> Held:
        return self._router.hold()

    def models(self) -> Sequence[ModelInfo]:
        return self._router.models()

    def healthy(self) -> bool:
        return self._router.healthy()

    def open(self) -> bool:
        return self._router.open()

    def status(self) -> Mapping[str, object]:
        return self._router.status()

    def drain_server(self, server: str, on: bool, force: bool) -> Mapping[str, object]:
        return self._router.drain_server(server, on, force)

    async def set_role(self, server: str, role: str, force: bool) -> bool:
        return await self._router.set_role(server, role, force)

    def timeline(self, request_id: str) -> tuple[TimelineEvent, ...] | None:
        return self._router.timeline(request_id)

    def known_requests(self) -> Mapping[str, object]:
        return self._router.known_requests()

    async def dump(self) -> object:
        """The router's own state and stacks, and what each server answers to Dump."""
        servers = self._router.addresses()
        answers = await asyncio.gather(*(dump_server(address, self._router.tls) for _, address in servers))
        return {
            "router": await self._router.dump(),
            "router_stacks": format_stacks(),
            "servers": {name: answer for (name, _), answer in zip(servers, answers, strict=True)},
        }


async def dump_server(address: str, tls: WireTls = CLEAR, timeout_s: float = SERVER_DUMP_S) -> str:
    """What a server says of itself; if it does not, why."""
    channel = tls.dial(address)
    try:
        reply = await ServerStub(channel).dump(pb.server.DumpRequest(), timeout=timeout_s)
        return str(reply.text)
    except grpc.aio.AioRpcError as error:
        return f"no dump: {error.code().name}: {error.details()}"
    finally:
        await channel.close()


async def _serve(config: Config, heartbeat: Callable[[], None]) -> int:
    start_loop_threads()
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    told: list[int] = []

    def stop(number: int) -> None:
        told.append(number)
        stopping.set()

    for number in ending_signals():
        loop.add_signal_handler(number, stop, number)
    beating = asyncio.create_task(_beat(heartbeat), name="heartbeat")
    try:
        await _until(config, stopping)
    except DisaggError as error:
        if not told:
            raise
        # A signal to a process group also ends what the start waits for.
        log.info("ended before it has served: %s", error)
        return BY_SIGNAL + told[0]
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
    return DONE


async def _until(config: Config, stopping: asyncio.Event) -> None:
    registry = new_registry()
    model_dir = await asyncio.to_thread(_model_dir, config)
    files = await asyncio.to_thread(ModelFiles.read, model_dir)
    async with _chat_template(files, config.router) as renderer:
        await _serve_faces(config, stopping, registry, model_dir, files, renderer)


async def _serve_faces(
    config: Config,
    stopping: asyncio.Event,
    registry: CollectorRegistry,
    model_dir: Path,
    files: ModelFiles,
    renderer: Renderer | None,
) -> None:
    watch = LoopWatch(registry)
    running = await run_router(config, model_dir, registry=registry, files=files)
    running.router.loop_gap_s = lambda: watch.longest_gap_s
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(running.close, config.router.drain_s)
        app = create_app(
            RouterFace(running.router),
            renderer,
            registry,
            version=version(),
            max_prompts=config.router.max_prompts_per_request,
            max_answer_bytes=config.router.answer_bytes,
            debug_remote=config.debug.remote,
        )
        if running.gate is not None:
            require_credentials(app, running.gate)
        router, certificates = config.router, running.router.tls.certificates
        bounds, refused = _bounds(router), running.router.note_refused
        http = await serve(
            *(app, router.host, router.http_port, bounds, HttpMetrics(registry), refused, certificates),
            Sharing.SHARED if router.share_ports else Sharing.NONE,
        )
        own: list[HttpServer] = []
        if router.own_http_port:
            at = (app, router.host, router.own_http_port, bounds, None, refused, certificates)
            own.append(await serve(*at, Sharing.BESIDE))
        keep_loaded()
        watch.start()
        stack.callback(watch.stop)
        where = {"http": http.base_url, "grpc_port": running.grpc_port}
        log.info("router is listening", extra={**where, **({"own_http": own[0].base_url} if own else {})})
        stop = asyncio.create_task(stopping.wait())
        ends = [asyncio.create_task(each.wait()) for each in (http, *own)]
        await asyncio.wait((stop, *ends), return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        for end in ends:
            if end.done():
                end.result()  # raises what ended it
        log.info("draining", extra={"drain_s": config.router.drain_s})
        stack.pop_all()
        if router.share_ports:  # who connects from now on comes to another router
            http.stop_listening()
            running.stop_listening(router.drain_s)
        await end_faces(running, http, router.drain_s, *own)
        await end


@contextlib.asynccontextmanager
async def _chat_template(files: ModelFiles, router: RouterConfig) -> AsyncGenerator[Renderer | None, None]:
    """What renders chats, until the faces have ended; None where the model has no template. Raises ConfigError."""
    source = TemplateSource.of(files)
    if source is None:
        yield None
        return
    renderer = await Renderer.start(
        source, RenderBounds(wait_s=router.request_deadline_s, max_waiting=max(1, router.max_queued))
    )
    try:
        yield renderer
    finally:
        await renderer.close()


async def end_faces(running: RunningRouter, http: HttpServer, drain_s: float, *more: HttpServer) -> None:
    """Drains all faces: what runs may finish, and clients may read it to its end, for drain_s. Then they close."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + drain_s
    await running.drain(drain_s)  # meanwhile HTTP still answers: new requests get 503
    left_s = max(0.0, until_s - loop.time())
    await asyncio.gather(running.close(left_s), *(each.shutdown(left_s) for each in (http, *more)))


def _bounds(router: RouterConfig) -> Bounds:
    return Bounds(
        max_connections=router.max_connections,
        head_s=router.head_s,
        body_s=router.body_s,
        idle_s=router.idle_s,
        stall_s=router.stall_s,
    )


def _model_dir(config: Config) -> Path:
    return resolve(config.model.name, home_expanded(config.model.cache_dir, "model.cache_dir"))


async def _beat(heartbeat: Callable[[], None]) -> None:
    while True:
        heartbeat()
        await asyncio.sleep(HEARTBEAT_S)
