"""A router on fake servers. Every test must leave it empty: no request, no task, nothing outstanding."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from disagg.config.tree import Config, RouterConfig, ServerRef
from disagg.router.requests import ChoiceDelta, Finished, GenerateRequest, Started, Update
from disagg.router.service import Router
from disagg.types.ids import Role
from disagg.types.sampling import SamplingParams
from tests.router.fake_server import MODEL, TOKENIZER, FakeServer, Script, decode, prefill

# Router and servers share one event loop: a lease must outlast whatever the machine does with it meanwhile.
CONFIG = RouterConfig(lease_s=30.0, heartbeat_s=0.05, request_deadline_s=60.0)
SHORT_LEASE_S = 1.0  # for tests that wait for its end
DEADLINE_S = 30.0


class Answer:
    """A whole answer, put together from its updates."""

    def __init__(self, updates: list[Update]) -> None:
        assert isinstance(updates[0], Started)
        assert isinstance(updates[-1], Finished)
        self.started = updates[0]
        self.finished = updates[-1]
        self.deltas = [update for update in updates if isinstance(update, ChoiceDelta)]
        self.text: dict[int, str] = {}
        self.token_ids: dict[int, tuple[int, ...]] = {}
        self.last: dict[int, ChoiceDelta] = {}
        for delta in self.deltas:
            assert delta.choice not in self.last, "a delta after the choice's last one"
            self.text[delta.choice] = self.text.get(delta.choice, "") + delta.text
            self.token_ids[delta.choice] = self.token_ids.get(delta.choice, ()) + delta.token_ids
            if delta.finish is not None:
                self.last[delta.choice] = delta


class Cluster:
    """Fake servers, and one router over them."""

    def __init__(self) -> None:
        self.servers: dict[str, FakeServer] = {}
        self.router: Router
        self.registry = CollectorRegistry()

    async def up(
        self,
        scripts: dict[str, Script],
        hello: dict[str, dict[str, Any]] | None = None,
        ready: bool = True,
        files: dict[str, str] | None = None,
        **config: Any,
    ) -> Router:
        """Names begin with p or d, which says the role. files: digests of the router's own."""
        refs = []
        for name, script in scripts.items():
            role = Role.PREFILL if name.startswith("p") else Role.DECODE
            server = FakeServer(name, role, script, **(hello or {}).get(name, {}))
            await server.start()
            self.servers[name] = server
            refs.append(ServerRef(name=name, role=role.value, address=f"127.0.0.1:{server.port}"))
        tree = Config(router=replace(CONFIG, servers=tuple(refs), **config))
        facts: dict[str, Any] = {"model_name": MODEL, "max_model_len": 512, "files": files or {}}
        self.router = Router(tree, TOKENIZER, registry=self.registry, linger_s=0.1, **facts)
        self.router.turns = 0  # the first request begins with the first server
        await self.router.start()
        if ready:  # all of them: a router that is healthy may still be greeting the second server of a role
            await self.until(lambda: all(server["connected"] for server in self.router.status()["servers"]))
            await self.until(self.router.healthy)
        return self.router

    async def until(self, condition: Callable[[], bool], timeout_s: float = DEADLINE_S) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.01)

    async def ask(
        self, prompt: str | tuple[int, ...] = "hi", timeout_s: float = 2 * DEADLINE_S, **params: Any
    ) -> Answer:
        async with asyncio.timeout(timeout_s):
            return Answer([update async for update in self.router.generate(request(prompt, **params))])

    def state(self, name: str) -> str:
        return next(s["state"] for s in self.router.status()["servers"] if s["name"] == name)

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0


def request(prompt: str | tuple[int, ...] = "hi", **params: Any) -> GenerateRequest:
    names = (
        "model",
        "max_tokens_unasked",
        "deadline_s",
        "seed",
        "cache_salt",
        "tenant",
        "owner",
        "prompt_name",
        "call",
        "too_large",
        "priority",
        "traceparent",
        "operation",
        "session",
        "slo_ttft_s",
    )
    outer = {name: params.pop(name) for name in names if name in params}
    return GenerateRequest(
        prompt=prompt, params=SamplingParams(**{"max_tokens": 8, **params}), **{"model": MODEL, **outer}
    )


def _grpcs_own(task: asyncio.Task[Any]) -> bool:
    """gRPC's wait for the status of a call. Where a write failed because the server had just ended the stream, gRPC takes the
    call for done, cancels it no more, and may wait for as long as the event loop runs."""
    return task.get_coro().__qualname__ == "_AioCall._handle_status_once_received"


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    before = asyncio.all_tasks()
    made = Cluster()
    yield made
    async with asyncio.timeout(DEADLINE_S):
        while (dump := await made.router.dump())["requests"]:
            await asyncio.sleep(0.01)
    assert dump["waiting"] == dump["replaying"] == []
    assert set(dump["prompt_tokens_outstanding"].values()) <= {0}
    assert set(dump["choices_outstanding"].values()) <= {0}
    await made.router.close(0.0)
    for server in made.servers.values():
        await server.kill()
    loop = asyncio.get_running_loop()
    until_s = loop.time() + DEADLINE_S
    while leaked := {task for task in asyncio.all_tasks() - before - {asyncio.current_task()} if not _grpcs_own(task)}:
        assert loop.time() < until_s, leaked
        await asyncio.wait(leaked, timeout=0.05)


NORMAL: dict[str, Script] = {"p0": prefill, "d0": decode}
