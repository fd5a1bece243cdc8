"""The OpenAI-compatible HTTP face: routes, and the server that runs them in the router's event loop.

    POST /v1/completions, /v1/chat/completions      GET /v1/models, /v1/models/{name}
    POST /servers/{name}/drain[?force=true], /servers/{name}/undrain, /servers/{name}/role?role=ROLE[&force=true]
    GET /health, /live, /metrics, /status, /version, /debug/requests, /debug/timeline?request_id=, /debug/dump
    GET /                                           a page for operators that asks these

Knows HTTP and the router's port; how bodies are read and replies written is in `bodies`, `answer` and `replies`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import uvicorn
from fastapi import FastAPI, Request, Response
from msgspec import Struct
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from disagg.api.answer import Answer, until_gone
from disagg.api.bodies import parse_chat, parse_completion
from disagg.api.connections import UNSENT_BYTES, Connection
from disagg.api.crowd import Bounds, Crowd, HttpMetrics
from disagg.api.dashboard import read_page
from disagg.api.entry import owner_of
from disagg.api.errors import INTERNAL, BadField, BodyTooLarge, Fault, UnreadableBody, fault_of, fault_of_http
from disagg.api.headers import client_request_id, said
from disagg.api.headers import tenant as tenant_of_request
from disagg.api.ports import ChatTemplatePort, RouterPort, ServedModel
from disagg.auth.quotas import Use
from disagg.auth.reloaded import Reloaded
from disagg.auth.tls import Certificates, serving_context
from disagg.router.budget import Held
from disagg.telemetry.listening import Sharing, bound_socket, cannot_listen
from disagg.telemetry.near import Asker, fault_of_asker
from disagg.types.addresses import join
from disagg.types.errors import DisaggError, UnknownModel
from disagg.types.plain import quoted

MAX_BODY_BYTES = 16 << 20
MAX_PROMPTS = 128
MAX_ANSWER_BYTES = 128 << 20
INLINE_BYTES = 16 << 10  # of a completion's body that is read on the event loop: 1 ms
GOODBYE_S = 2.0  # after the drain: for the last words of what did not end in time
BACKLOG = 1024  # connections that the kernel keeps; all are taken at once, which holds the loop for some 60 ms
NO_BOUNDS = Bounds()
PROBED_BY = ["GET", "HEAD"]  # some load balancers ask for the head alone


def create_app(
    router: RouterPort,
    chat_template: ChatTemplatePort | None,
    registry: CollectorRegistry,
    *,
    version: str,
    max_prompts: int = MAX_PROMPTS,
    max_body_bytes: int = MAX_BODY_BYTES,
    debug_remote: bool = False,
    max_answer_bytes: int = MAX_ANSWER_BYTES,
) -> FastAPI:
    """The face of one router. chat_template None: the model cannot chat, and clients are told so.

    version: of this software; also what replies carry as `system_fingerprint`. debug_remote: /debug and /servers answer
    everybody, not only clients on this machine.
    """
    app = FastAPI(
        title="disagg", version=version, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )
    _add_error_handlers(app)
    limits = FaceLimits(max_prompts=max_prompts, max_body_bytes=max_body_bytes, max_answer_bytes=max_answer_bytes)
    _add_generation(app, router, chat_template, limits, fingerprint=f"disagg-{version}")
    _add_models(app, router, created=int(time.time()))
    _add_reports(app, router, registry, version)
    _add_debug(app, router, debug_remote)
    _add_operation(app, router, debug_remote)
    return app


class FaceLimits(Struct, frozen=True, kw_only=True):
    """What one call may bring and take."""

    max_prompts: int
    max_body_bytes: int
    max_answer_bytes: int


def _add_generation(
    app: FastAPI, router: RouterPort, chat_template: ChatTemplatePort | None, limits: FaceLimits, fingerprint: str
) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        with _refusals_noted(router, request), _holding(router) as held, _counted(request) as use:
            who = said(request)
            client_id, tenant = client_request_id(request), tenant_of_request(request)
            body = await _body(request, limits.max_body_bytes, held)
            router.ask_quota(use)  # before anything is read of it
            if len(body) <= INLINE_BYTES:
                call = parse_completion(body, router.limits, limits.max_prompts, client_id, tenant)
            else:
                call = await router.beside(
                    tenant, len(body), parse_completion, body, router.limits, limits.max_prompts, client_id, tenant
                )
            call = call.asked_by("text_completion", who)
            if len(call.requests) > 1:
                router.ask_quota(use, len(call.requests))
            return Answer(router, call, fingerprint, held, use, limits.max_answer_bytes)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        with _refusals_noted(router, request), _holding(router) as held, _counted(request) as use:
            who = said(request)
            client_id, tenant = client_request_id(request), tenant_of_request(request)
            body = await _body(request, limits.max_body_bytes, held)
            router.ask_quota(use)  # before anything is read of it
            has_template = chat_template is not None
            # Beside the loop whatever its length: many small messages take longer to read than one long text.
            chat = await router.beside(
                tenant, len(body), parse_chat, body, router.limits, has_template, client_id, tenant
            )
            del body  # a chat may wait for its turn to be rendered
            assert chat_template is not None, "a chat without a template has been refused"
            rendering = chat_template.render(chat.messages, router.limits.max_chars, tenant)
            prompt = await until_gone(request.receive, rendering)
            if prompt is None:
                raise ClientDisconnect
            call = chat.rendered(prompt).asked_by("chat", who)
            return Answer(router, call, fingerprint, held, use, limits.max_answer_bytes)


def _add_models(app: FastAPI, router: RouterPort, created: int) -> None:
    @app.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [_model_card(model, created) for model in router.models()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        for served in router.models():
            if served.name == name:
                return _json(_model_card(served, created))
        raise UnknownModel(f"the model {quoted(name)} does not exist", "model")


def _add_reports(app: FastAPI, router: RouterPort, registry: CollectorRegistry, version: str) -> None:
    page = read_page()

    @app.get("/")
    async def dashboard() -> Response:
        return Response(page.body, headers=page.headers)

    @app.api_route("/health", methods=PROBED_BY)
    async def health(request: Request) -> Response:
        healthy = router.healthy()
        state = router.status().get("state", "ready" if healthy else "unavailable")
        fine = router.open() if "waiting" in request.query_params else healthy
        return _json({"healthy": healthy, "state": state}, 200 if fine else 503)

    @app.api_route("/live", methods=PROBED_BY)
    async def live() -> Response:
        return _json({"alive": True})

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": content_type})

    @app.get("/status")
    async def status() -> Response:
        return _json(router.status())

    @app.get("/version")
    async def version_of_this() -> Response:
        return _json({"version": version})


def _add_debug(app: FastAPI, router: RouterPort, debug_remote: bool) -> None:
    @app.get("/debug/requests")
    async def requests(request: Request) -> Response:
        _check_debug(request, debug_remote)
        return _json(router.known_requests())

    @app.get("/debug/timeline")
    async def timeline(request: Request) -> Response:
        _check_debug(request, debug_remote)
        asked = request.query_params.get("request_id")
        if not asked:
            raise BadField("request_id is required", "request_id", "missing_required_parameter")
        request_id = asked.removeprefix("chatcmpl-").removeprefix("cmpl-")
        events = router.timeline(request_id)
        if events is None:
            raise HTTPException(404, f"no timeline of request {quoted(request_id)} is kept")
        return _json({"request_id": request_id, "events": events})

    @app.get("/debug/dump")
    async def dump(request: Request) -> Response:
        _check_debug(request, debug_remote)
        content = await router.dump()
        return Response(content, media_type="text/plain") if isinstance(content, str) else _json(content)


def _add_operation(app: FastAPI, router: RouterPort, debug_remote: bool) -> None:
    @app.post("/servers/{name}/drain")
    async def drain(request: Request, name: str) -> Response:
        _check_debug(request, debug_remote)
        return _json(_drain(router, name, True, _flag(request, "force")))

    @app.post("/servers/{name}/undrain")
    async def undrain(request: Request, name: str) -> Response:
        _check_debug(request, debug_remote)
        return _json(_drain(router, name, False, False))

    @app.post("/servers/{name}/role")
    async def role(request: Request, name: str) -> Response:
        _check_debug(request, debug_remote)
        wanted, force = _param(request, "role", ""), _flag(request, "force")
        begun = await router.set_role(name, wanted, force)
        return _json({"server": name, "role": wanted, "begun": begun})


def _drain(router: RouterPort, name: str, on: bool, force: bool) -> dict[str, object]:
    server = router.drain_server(name, on, force)
    return {"server": name, "drain": on, **{word: server.get(word) for word in ("state", "becomes", "silent_s")}}


def _param(request: Request, name: str, default: str) -> str:
    """Of the query. Raises BadField where it is there more than once: which one is meant, nobody knows."""
    given = request.query_params.getlist(name)
    if len(given) > 1:
        raise BadField(f"{name} is there {len(given)} times: give it once", name, "invalid_value")
    return given[0] if given else default


def _flag(request: Request, name: str) -> bool:
    said = _param(request, name, "false")
    if said not in ("true", "false"):
        raise BadField(f"{name} = {quoted(said)}: it must be true or false", name, "invalid_value")
    return said == "true"


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, {"content-type": "application/json"})


def _model_card(model: ServedModel, created: int) -> dict[str, object]:
    return {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "disagg",
        "max_model_len": model.max_model_len,
    }


def _check_debug(request: Request, remote: bool) -> None:
    """Raises HTTPException."""
    headers = request.headers
    asker = Asker(
        address=request.client.host if request.client else "",
        host=headers.get("host", ""),
        origin=headers.get("origin", ""),
        site=headers.get("sec-fetch-site", ""),
    )
    fault = fault_of_asker(asker, remote)
    if fault is not None:
        raise HTTPException(403, fault)


@contextlib.contextmanager
def _refusals_noted(router: RouterPort, request: Request) -> Iterator[None]:
    """What is refused before the router sees it is counted by the router all the same."""
    try:
        yield
    except DisaggError as error:
        router.note_refused(error, client_request_id(request))
        raise


@contextlib.contextmanager
def _holding(router: RouterPort) -> Iterator[Held]:
    """An account of the router's memory, which the answer releases; or this, where there is none."""
    held = router.hold()
    try:
        yield held
    except BaseException:
        held.release()
        raise


@contextlib.contextmanager
def _counted(request: Request) -> Iterator[Use]:
    """What the call has of its tenant's limits, which the answer ends; or this, where there is none."""
    use = Use(owner_of(request))
    try:
        yield use
    except BaseException as error:
        use.end(error)
        raise


async def _body(request: Request, limit: int, held: Held) -> bytes:
    """The request's body. Raises BodyTooLarge, before reading it where its length is announced; or UnreadableBody."""
    codings = ",".join(request.headers.getlist("content-encoding")).lower().split(",")  # several headers are one list
    if any(coding.strip() not in ("", "identity") for coding in codings):
        raise UnreadableBody("compressed bodies are not served; send the body without a content-encoding")
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit:
        raise BodyTooLarge(f"the body has {announced} bytes; at most {limit} are allowed")
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise BodyTooLarge(f"the body has more than {limit} bytes")
        held.add(len(part), new=True)
        parts.append(part)
    return b"".join(parts)


# ---- errors


def _add_error_handlers(app: FastAPI) -> None:
    def reply(fault: Fault, headers: dict[str, str] | None = None) -> Response:
        every = {"content-type": "application/json", **fault.headers(), **(headers or {})}
        return Response(fault.body(), fault.status, every)

    @app.exception_handler(DisaggError)
    async def ours(request: Request, error: DisaggError) -> Response:
        # What follows on the connection is the rest of a body that nobody reads, so it ends, and says so.
        return reply(fault_of(error), {"connection": "close"} if isinstance(error, BodyTooLarge) else None)

    @app.exception_handler(HTTPException)
    async def of_http(request: Request, error: HTTPException) -> Response:
        # Not request.url, which is made of the Host header too, and raises if a client puts nonsense there.
        fault = fault_of_http(error.status_code, request.method, request.scope["path"], error.detail)
        return reply(fault, dict(error.headers or {}))

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # nobody reads it

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        return reply(INTERNAL)  # Starlette raises the error again, so that the log has it


# ---- the server


class HttpServer:
    """A running HTTP server. Made by `serve`."""

    def __init__(
        self,
        server: uvicorn.Server,
        listener: socket.socket,
        running: asyncio.Task[None],
        crowd: Crowd,
        scheme: str = "http",
    ) -> None:
        self._server = server
        self._running = running
        self._crowd = crowd
        self._scheme = scheme
        self._sweeping = asyncio.create_task(crowd.sweep_always(), name="http-sweep")
        self.host: str = listener.getsockname()[0]
        self.port: int = listener.getsockname()[1]

    @property
    def base_url(self) -> str:
        return f"{self._scheme}://{join(self.host, self.port)}"

    async def wait(self) -> None:
        """Until the server ends. Raises what ended it, if that was a failure."""
        await asyncio.shield(self._running)

    def stop_listening(self) -> None:
        """Connections that are open go on; nobody can connect any more. `shutdown` follows."""
        for server in self._server.servers:
            server.close()

    async def shutdown(self, grace_s: float, goodbye_s: float = GOODBYE_S) -> None:
        """Takes no new connections, and waits grace_s for running calls to end and for clients to read what they were sent.

        Then what is left has goodbye_s: nobody waits for a slow reader any more, so that ends, and errors that the router
        has raised meanwhile, go to the kernel, which delivers them. What still runs then is told that it is over. Idempotent.
        """
        calls = self._server.server_state.tasks
        # uvicorn annotates whole seconds but hands the number to asyncio.wait_for, which takes any.
        self._server.config.timeout_graceful_shutdown = grace_s + goodbye_s  # type: ignore[assignment]
        self._server.should_exit = True
        hurry = asyncio.get_running_loop().call_later(grace_s, self._crowd.hurry)
        try:
            await self.wait()
            await asyncio.gather(*calls, return_exceptions=True)
        finally:
            hurry.cancel()
            self._sweeping.cancel()
        await asyncio.sleep(0)  # for transports to pass on what calls wrote as they were cancelled
        self._crowd.cut()


class _Server(uvicorn.Server):
    """uvicorn in a loop that is not its own: it leaves signals to the process, and says when it is up."""

    def __init__(self, config: uvicorn.Config, handshake_s: float) -> None:
        super().__init__(config)
        self._handshake_s = handshake_s  # of TLS
        self.up = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's own gives a TLS handshake a minute, which nothing of ours could bound: connections begin after it."""
        loop = asyncio.get_running_loop()
        config = self.config

        def connection() -> asyncio.Protocol:
            kind: Any = config.http_protocol_class
            made: asyncio.Protocol = kind(config, self.server_state, self.lifespan.state, _loop=loop)
            return made

        handshake_s = self._handshake_s if config.ssl is not None else None
        self.servers = [
            await loop.create_server(
                connection, sock=sock, ssl=config.ssl, backlog=config.backlog, ssl_handshake_timeout=handshake_s
            )
            for sock in sockets or ()
        ]
        self.started = True
        self.up.set()


async def serve(
    app: FastAPI,
    host: str,
    port: int,
    bounds: Bounds = NO_BOUNDS,
    metrics: HttpMetrics | None = None,
    note_refused: Callable[[DisaggError], None] = lambda error: None,
    certificates: Reloaded[Certificates] | None = None,
    sharing: Sharing = Sharing.NONE,
) -> HttpServer:
    """Starts to serve in this event loop; returns once connections are taken. port 0: any free one.

    note_refused: told of requests to the API that are refused before any route sees them. certificates: it speaks TLS with these.

    Raises ConfigError if the address cannot be had, DisaggError if it may be had later.
    """
    listener = _listen(host, port, sharing)
    crowd = Crowd(bounds, metrics or HttpMetrics(CollectorRegistry()), note_refused)
    config = uvicorn.Config(
        app,
        http=functools.partial(Connection, crowd),  # type: ignore[arg-type]  # which makes one for each connection
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        ssl_context_factory=None if certificates is None else lambda config, default: serving_context(certificates),
        proxy_headers=False,  # a client's word for its address, which decides who may debug, is not taken
    )
    server = _Server(config, bounds.head_s)
    running = asyncio.create_task(server.serve([listener]), name="http-server")
    up = asyncio.create_task(server.up.wait())
    handle = HttpServer(server, listener, running, crowd, "http" if certificates is None else "https")
    await asyncio.wait((running, up), return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        up.cancel()
        running.result()
    return handle


def _listen(host: str, port: int, sharing: Sharing) -> socket.socket:
    setting = "router.own_http_port" if sharing is Sharing.BESIDE else "router.http_port"
    try:
        listener = bound_socket(host, port, shared=sharing is Sharing.SHARED)
    except (OSError, UnicodeError) as error:
        raise cannot_listen(host, port, setting, error, sharing.hint) from error
    # Connections inherit it: what a slow client has no room for yet stays with the router, which merges it.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    listener.setblocking(False)
    return listener
