"""Starts a router with its gRPC face: Inference, health (serving while a request could be served) and reflection.

The HTTP face, signals and logging are the caller's.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import grpc
from prometheus_client import CollectorRegistry

from disagg.auth.audit import Audit
from disagg.auth.gate import Gate, open_gate
from disagg.config.tree import Config, ModelConfig
from disagg.convert.inspect import ModelFacts, inspect_model
from disagg.router.grpc_service import InferenceService
from disagg.router.metrics import GrpcMetrics
from disagg.router.service import Router
from disagg.telemetry.listening import Sharing, why_not_listen
from disagg.telemetry.traces import open_traces
from disagg.text.model_files import TOKENIZER, ModelFiles
from disagg.text.tokenizer import Tokenizer
from disagg.text.tokenizer_trial import try_out
from disagg.types.addresses import join
from disagg.types.errors import DisaggError, InvalidRequest
from disagg.types.plain import one_line
from disagg.wire.entry import Entry
from disagg.wire.guard import Guard
from disagg.wire.services import INFERENCE, Health, client_options, enable_reflection, inference_handler, make_server

logger = logging.getLogger(__name__)

NAMED_TOKENS, TOKEN_CHARS = 8, 64  # of those beyond the vocabulary, in the log
_GOODBYE_S = 2.0  # after the drain: for calls to be told how they ended
_COUNTED_METHOD = f"/{INFERENCE}/Generate"  # whose refusals count as requests that were refused


class RunningRouter:
    """A router that serves. `router` is what further faces are built on; `grpc_port` is where it listens. gate: where
    credentials are asked for; further faces must ask for them, too."""

    def __init__(
        self, router: Router, server: grpc.aio.Server, grpc_port: int, health: Health, gate: Gate | None
    ) -> None:
        self.router = router
        self.grpc_port = grpc_port
        self.gate = gate
        self._server = server
        self._health = health
        self._stopping: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._changed.set()
        router.on_change(self._changed.set)
        self._tasks = [asyncio.create_task(self._tell_health(), name="router health")]
        if router.tls.certificates is not None:
            self._tasks.append(asyncio.create_task(router.tls.look_always(), name="router certificates"))
        if gate is not None:
            self._tasks.append(asyncio.create_task(gate.look_always(), name="router keys"))
            self._tasks.append(asyncio.create_task(router.quotas.look_always(), name="router limits"))

    async def _tell_health(self) -> None:
        told: bool | None = None
        while True:
            await self._changed.wait()
            self._changed.clear()
            healthy = self.router.healthy()
            if healthy is not told:
                await self._health.set_serving(healthy)
                told = healthy

    def stop_listening(self, drain_s: float) -> None:
        """No calls come any more; those that run have drain_s, and a little more. `close` follows."""
        self._stopping = asyncio.create_task(self._server.stop(drain_s + _GOODBYE_S), name="router gRPC ends")

    async def drain(self, drain_s: float) -> None:
        """Takes nothing new; lets running requests finish, and be read, for `drain_s`, and ends the rest with an error."""
        await self.router.drain(drain_s)

    async def close(self, drain_s: float) -> None:
        """Drains, then ends everything. Calls that a client still reads have `drain_s` and a little more."""
        until_s = asyncio.get_running_loop().time() + drain_s
        await self.router.close(drain_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.stop(max(0.0, until_s - asyncio.get_running_loop().time()) + _GOODBYE_S)
        if self._stopping is not None:
            await self._stopping


async def run_router(
    config: Config, model_dir: Path, *, registry: CollectorRegistry, files: ModelFiles | None = None
) -> RunningRouter:
    """Loads the tokenizer, dials the servers and listens. files: of model_dir, if they were read.

    Raises ConfigError, or DisaggError for what may pass.
    """
    if files is None:
        files = await asyncio.to_thread(ModelFiles.read, model_dir)
    gate = open_gate(config.auth, Audit(registry))
    facts = inspect_model(model_dir)
    await try_out(files, facts.vocab_size)
    tokenizer = await asyncio.to_thread(Tokenizer.of, files, facts.vocab_size)
    if tokenizer.beyond_vocab:
        logger.warning("%s", beyond_vocab(tokenizer))
    if tokenizer.without_chance:
        logger.warning(
            "%s: %s is turned off: it makes other tokens of the same text each time, which is of use in training only",
            files.model_dir / TOKENIZER,
            tokenizer.without_chance,
        )
    tracing = config.tracing
    traces = open_traces(tracing.otlp_endpoint, tracing.sample_ratio, registry, config.router.name or "router")
    router = Router(
        config,
        tokenizer,
        model_name=config.model.public_name,
        max_model_len=max_model_len(config.model, facts),
        registry=registry,
        files=files.digests(),
        traces=traces,
    )
    server = _grpc_server(config, router, registry, gate)
    health = Health(server, (INFERENCE,))
    enable_reflection(server, (INFERENCE,))
    address = join(config.router.host, config.router.grpc_port)
    try:
        port = router.tls.listen_to_clients(server, address)
    except RuntimeError as error:  # gRPC does not say why
        at = config.router
        free = (Sharing.SHARED if at.share_ports else Sharing.NONE).hint
        why = why_not_listen(at.host, at.grpc_port, "router.grpc_port", free, shared=at.share_ports)
        raise why or DisaggError(f"router.grpc_port = {at.grpc_port}: cannot listen on {address}; {free}") from error
    await router.start()
    await server.start()
    return RunningRouter(router, server, port, health, gate)


def _grpc_server(config: Config, router: Router, registry: CollectorRegistry, gate: Gate | None) -> grpc.aio.Server:
    metrics = GrpcMetrics(registry)
    bounds = config.router

    def refused(method: str, reason: str, error: InvalidRequest | None) -> None:
        metrics.ended.labels(reason=reason).inc()
        if error is not None and method == _COUNTED_METHOD:
            router.note_refused(error)

    guard = Guard(bounds.body_s, bounds.stall_s, refused)
    metrics.calls.set_function(lambda: guard.open_calls)
    return make_server(
        inference_handler(InferenceService(router)),
        interceptors=(guard,) if gate is None else (_entry(gate), guard),
        max_request_bytes=router.limits.message_bytes,
        options=(
            *client_options(bounds.max_connections, bounds.max_calls_per_connection, bounds.head_s, bounds.idle_s),
            ("grpc.so_reuseport", int(bounds.share_ports)),
        ),
    )


def _entry(gate: Gate) -> Entry:
    def admitted(tenant: str, method: str) -> None:
        gate.audit.admitted(tenant, "grpc", one_line(method, 200), "")

    def refused(reason: str, method: str, client: str) -> None:
        gate.audit.refused(reason, "grpc", one_line(method, 200), client)

    return Entry(gate.tenant_of, admitted, refused)


def beyond_vocab(tokenizer: Tokenizer) -> str:
    """What an operator should know of a tokenizer with tokens that the model has no row for."""
    beyond = tokenizer.beyond_vocab
    named = ", ".join(f"{text[:TOKEN_CHARS]!r} ({token_id})" for token_id, text in beyond[:NAMED_TOKENS])
    more = f" and {len(beyond) - NAMED_TOKENS} more" if len(beyond) > NAMED_TOKENS else ""
    return (
        f"the tokenizer has {len(beyond)} tokens beyond the model's vocabulary of {tokenizer.vocab_size}: {named}{more}; "
        "prompts with one of them are refused"
    )


def max_model_len(model: ModelConfig, facts: ModelFacts) -> int:
    """Prompt and output together: the model's own, or less if so configured."""
    own = facts.max_model_len
    return min(own, model.max_model_len) if model.max_model_len else own
