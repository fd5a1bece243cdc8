"""Starts a router with its gRPC face: Inference, health (serving while a request could be served) and reflection.

The HTTP face, signals and logging are the caller's.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import grpc
from prometheus_client import CollectorRegistry

from disagg.config.tree import Config, ModelConfig
from disagg.convert.inspect import ModelFacts, inspect_model
from disagg.router.grpc_service import InferenceService
from disagg.router.service import Router
from disagg.text.tokenizer import Tokenizer
from disagg.types.errors import ConfigError
from disagg.wire.services import INFERENCE, Health, enable_reflection, inference_handler, make_server

logger = logging.getLogger(__name__)

NAMED_TOKENS, TOKEN_CHARS = 8, 64  # of those beyond the vocabulary, in the log
_GOODBYE_S = 1.0  # for calls that have their answer to be told so


class RunningRouter:
    """A router that serves. `router` is what further faces are built on; `grpc_port` is where it listens."""

    def __init__(self, router: Router, server: grpc.aio.Server, grpc_port: int, health: Health) -> None:
        self.router = router
        self.grpc_port = grpc_port
        self._server = server
        self._health = health
        self._changed = asyncio.Event()
        self._changed.set()
        router.on_change(self._changed.set)
        self._health_task = asyncio.create_task(self._tell_health(), name="router health")

    async def _tell_health(self) -> None:
        told: bool | None = None
        while True:
            await self._changed.wait()
            self._changed.clear()
            healthy = self.router.healthy()
            if healthy is not told:
                await self._health.set_serving(healthy)
                told = healthy

    async def close(self, drain_s: float) -> None:
        """Lets running requests finish for `drain_s`, then ends everything."""
        await self.router.close(drain_s)
        self._health_task.cancel()
        await asyncio.gather(self._health_task, return_exceptions=True)
        await self._server.stop(_GOODBYE_S)


async def run_router(config: Config, model_dir: Path, *, registry: CollectorRegistry) -> RunningRouter:
    """Loads the tokenizer, dials the servers and listens. Raises ConfigError."""
    facts = inspect_model(model_dir)
    tokenizer = await asyncio.to_thread(Tokenizer.load, model_dir, facts.vocab_size)
    if tokenizer.beyond_vocab:
        logger.warning("%s", beyond_vocab(tokenizer))
    router = Router(
        config,
        tokenizer,
        model_name=config.model.public_name,
        max_model_len=max_model_len(config.model, facts),
        registry=registry,
    )
    server = make_server(inference_handler(InferenceService(router)), max_request_bytes=router.limits.message_bytes)
    health = Health(server, (INFERENCE,))
    enable_reflection(server, (INFERENCE,))
    host = f"[{config.router.host}]" if ":" in config.router.host else config.router.host
    address = f"{host}:{config.router.grpc_port}"
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(f"router.grpc_port: cannot listen on {address}: {error}") from error
    await router.start()
    await server.start()
    return RunningRouter(router, server, port, health)


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
