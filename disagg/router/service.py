"""The router: takes requests, keeps them until their last token, and runs them again when a server is lost.

This is what faces call. Everything happens on one event loop:

    face ── GenerateRequest ──> intake: checks, ids ──> dispatch ── a machine per request ──> fleet: a stream per server
     <── mailbox ── choice_text ── acceptance <───── events, instructions <──── tokens, last words, losses ──┘

Decides nothing itself: how many may wait is up to `places`, attempts to `machine`, pairs to `placement`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from itertools import islice
from typing import Any, ParamSpec, TypeVar

from msgspec import to_builtins
from prometheus_client import CollectorRegistry

from disagg.auth.quotas import ReloadedQuotas, Use
from disagg.config.tree import Config
from disagg.messages.legs import Drain, PrefixRules, SetRole, TimelineEvent
from disagg.messages.needs import lacks
from disagg.router.alarms import Alarm, alarms
from disagg.router.attempt import Bounds
from disagg.router.budget import Budget, Held
from disagg.router.dispatch import Dispatch
from disagg.router.events import ClientGone, Phase
from disagg.router.intake import Intake, checked_deadline_s
from disagg.router.live import Live
from disagg.router.machine import RequestMachine
from disagg.router.mailbox import Mailbox, Taker
from disagg.router.metrics import RouterMetrics
from disagg.router.names import drawn_name
from disagg.router.outcomes import outcome_of
from disagg.router.policies import POLICIES, RequestFacts
from disagg.router.prefixes import PAGE_BYTES, PromptHashing, PromptPages, num_pages
from disagg.router.requests import Asked, GenerateRequest, Started, Update
from disagg.router.roles import (
    ANSWER_S,
    Leaving,
    asked_before,
    change_begun,
    check_drain,
    needs_change,
    role_named,
    server_named,
)
from disagg.router.status import server_status
from disagg.router.streams import NO_FILES, Caller
from disagg.router.tenants import salt_of
from disagg.router.timelines import in_order
from disagg.router.turnstile import Turnstile
from disagg.router.view import ClusterView, Work
from disagg.router.vllm_names import expose_vllm_names
from disagg.telemetry.traces import Traces
from disagg.text.limits import TextLimits
from disagg.text.tokenizer import Tokenizer
from disagg.types.errors import DisaggError, InvalidRequest, Shed, Unavailable
from disagg.types.version import own_version
from disagg.wire.inference import ModelInfo
from disagg.wire.tls import open_wire_tls

logger = logging.getLogger(__name__)

LINGER_S = 0.25  # how long a finished request waits for the servers' last words
MAX_LISTED = 200  # requests that run
NO_TRACES = Traces()
CLOSING = "the router is shutting down"
ASK_EVERY_S = 0.05
FLUSH_S = 0.5  # how long a closing router waits for its last aborts to arrive
PROMPT_TOKEN_BYTES, STOP_CHAR_BYTES = 40, 260  # as Python has them

P = ParamSpec("P")
T = TypeVar("T")


class Router:
    """One router. `start` it, call `generate` as often as wanted, `close` it."""

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        *,
        model_name: str,
        max_model_len: int,
        registry: CollectorRegistry,
        linger_s: float = LINGER_S,
        files: Mapping[str, str] = NO_FILES,
        traces: Traces = NO_TRACES,
    ) -> None:
        """files: digests of the files that the tokenizer and the chat template come from, by name."""
        self._config = config.router
        self._model_name = model_name
        self._max_model_len = max_model_len
        self._clock = time.monotonic
        self._metrics = RouterMetrics(registry)
        self._leaving = Leaving()
        self._name = self._config.name or drawn_name()
        self._version = own_version()
        caller = Caller(
            version=self._version,
            model=model_name,
            name=self._name,
            incarnation=secrets.token_hex(8),
            heartbeat_s=self._config.heartbeat_s,
            lease_s=self._config.lease_s,
            files=files,
        )
        self.tls = open_wire_tls(config.tls)  # Raises ConfigError
        self.tls.expose(registry)
        self.quotas = ReloadedQuotas(config.auth)  # Raises ConfigError
        policy = POLICIES[self._config.policy]()
        self._dispatch = Dispatch(self._config, caller, policy, self._metrics, tokenizer, self, self.tls)
        self._dispatch.outcomes.traces = traces
        self._bounds = Bounds(
            max_total_tokens=max_model_len,
            max_attempts=self._config.max_attempts,
            verdict_s=self._config.lease_s,
            linger_s=linger_s,
        )
        self._intake = Intake(tokenizer, model_name, max_model_len, self._longest)
        self._budget = Budget(self._config.memory_bytes)
        self._serial = 0
        self.turns = secrets.randbits(32)  # by which its turns among servers differ from other routers'
        self._accepting = Turnstile()
        self._closing = False
        self._readers = 0  # answers that a face is still reading; the engines may be done with them
        self._idle = asyncio.Event()  # nothing runs and nothing is left to be read
        self._idle.set()
        self._changed: list[Callable[[], None]] = []
        self._has_paired = False
        self.loop_gap_s: Callable[[], float] = lambda: 0.0  # of the process, by whoever watches its loop
        self._metrics.running.set_function(lambda: self._dispatch.places.inflight)
        self._metrics.waiting.set_function(lambda: len(self._dispatch.places.waiting))
        self._metrics.mismatched.set_function(lambda: sum(s.mismatched for s in self._dispatch.fleet.view().servers))
        self._metrics.silence_s.set_function(self._dispatch.silence_s)
        expose_vllm_names(registry, model_name, self._metrics, self._dispatch.fleet.view)

    # ---- life

    async def start(self) -> None:
        await self._dispatch.fleet.start()

    async def drain(self, drain_s: float) -> None:
        """Takes nothing new, lets what runs finish and be read for `drain_s`, and ends the rest with Unavailable."""
        self._closing = True
        self.fleet_changed()
        self._dispatch.end_all(Unavailable(CLOSING), waiting_only=True)
        try:
            async with asyncio.timeout(max(0.0, drain_s)):
                await self._idle.wait()
        except TimeoutError:
            self._dispatch.end_all(Unavailable(CLOSING))

    async def close(self, drain_s: float) -> None:
        """Drains, and lets go of the servers."""
        await self.drain(drain_s)
        await self._dispatch.close(FLUSH_S)
        self._intake.close()
        await asyncio.to_thread(self._dispatch.outcomes.traces.close)

    # ---- what faces call

    def ask_quota(self, use: Use, count: int = 1) -> None:
        """For all requests of one call, before there is work for it. Raises QuotaExceeded or InvalidRequest; see Quotas.ask."""
        self.quotas.ask(use, count, self._clock())

    async def generate(
        self, request: GenerateRequest, use: Use | None = None, taker: Taker | None = None
    ) -> AsyncGenerator[Update, None]:
        """Started, deltas, Finished; or raises a DisaggError. Closing the iterator aborts the request.

        use: of the call that it is part of, whose quota was asked for, and which is ended by whoever asked. None: it is a
        call by itself. taker: is given deltas that come while the iterator waits, and may take them in its place.
        """
        if use is None:
            with Use(request.owner) as own:
                try:
                    self.ask_quota(own)
                except DisaggError as error:
                    self.note_refused(error, request.client_request_id)
                    raise
                async with aclosing(self.generate(request, own, taker)) as updates:
                    async for update in updates:
                        yield update
            return
        try:
            live = await self._accept(request, taker)
        except BaseException as error:
            use.leave()
            if isinstance(error, DisaggError):
                self.note_refused(error, request.client_request_id)
            raise
        use.tokens(len(live.machine.prompt_token_ids))
        self._readers += 1
        self._idle.clear()
        try:
            async with aclosing(live.mailbox.updates()) as updates:
                async for update in updates:
                    yield update
        finally:
            self._readers -= 1
            if live.machine.phase is not Phase.ENDED:
                self._dispatch.drive(live, ClientGone("the client went away"))
            live.mailbox.close()
            use.tokens(live.num_tokens)
            use.leave()
            self.request_ended()

    def note_refused(self, error: DisaggError, client_request_id: str = "") -> None:
        """Counts a request that was not accepted; faces say so of those that they could not even read."""
        self._dispatch.outcomes.note(outcome_of(error), self._clock())
        logger.info("request refused: %s", error, extra={"request_id": "", "client_request_id": client_request_id})

    def abort(self, request_id: str, abort_token: str) -> bool:
        """Ends a request with Cancelled. False if it does not run here, or the token is not what its `Started` said."""
        live = self._dispatch.live.get(request_id)
        if live is None or not secrets.compare_digest(live.abort_token.encode(), abort_token.encode()):
            return False
        self._dispatch.drive(live, ClientGone("the request was aborted"))
        return True

    def models(self) -> tuple[ModelInfo, ...]:
        return (ModelInfo(name=self._model_name, max_model_len=self._longest()),)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._intake.tokenizer

    @property
    def limits(self) -> TextLimits:
        """What faces check before they turn a message into values."""
        return self._intake.limits

    def deadline_s(self, request: GenerateRequest) -> float:
        """What it names, or what the cluster has for those that name none."""
        return self._config.request_deadline_s if request.deadline_s is None else request.deadline_s

    def hold(self) -> Held:
        """An account of `router.memory_bytes`, for a face that keeps something of a request."""
        return self._budget.hold()

    async def beside(self, tenant: str, size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Does what takes long with `size` bytes of text in a thread (see `beside.py`)."""
        return await self._intake.beside.run(tenant, size, work, *args, **kwargs)

    async def tokenize(
        self, model: str, text: str, add_special_tokens: bool = True, *, tenant: str = ""
    ) -> tuple[int, ...]:
        return await self._intake.tokenize(model, text, add_special_tokens, tenant)

    async def detokenize(
        self, model: str, token_ids: Sequence[int], skip_special_tokens: bool = True, *, tenant: str = ""
    ) -> str:
        return await self._intake.detokenize(model, token_ids, skip_special_tokens, tenant)

    def healthy(self) -> bool:
        """A request that comes now can be served."""
        return not self._closing and self._dispatch.fleet.view().has_pair

    def open(self) -> bool:
        """A request that comes now is taken, be it that it waits for servers: a router that has had a pair waits for the next
        one. Whether one that never had any can ever have one, nobody knows."""
        return not self._closing and (self._has_paired or self._dispatch.fleet.view().has_pair)

    def on_change(self, callback: Callable[[], None]) -> None:
        """Calls back, on the event loop, whenever `healthy()` may have changed."""
        self._changed.append(callback)

    def status(self) -> dict[str, Any]:
        view = self._dispatch.fleet.view()
        state = "draining" if self._closing else "ready" if view.has_pair else "unavailable"
        ended = self._dispatch.outcomes.recent.counts(self._clock())
        return {
            "state": state,
            "alarms": to_builtins(self._alarms(view, ended)),
            "ended_last_minute": ended,
            "servers": [server_status(server, view) for server in view.servers],
            "routers": [
                {
                    "name": self._name,
                    "pid": os.getpid(),
                    "version": self._version.software,
                    "protocol": self._version.protocol,
                    "inflight": self._dispatch.places.inflight,
                    "queued": len(self._dispatch.places.waiting),
                    "error": self._dispatch.fleet.rival,
                }
            ],
        }

    def _alarms(self, view: ClusterView, ended: Mapping[str, int]) -> tuple[Alarm, ...]:
        rival, left_s = self._dispatch.fleet.rival, self.tls.ends_in_s(time.time())
        return alarms(view, ended, self.loop_gap_s(), rival, self._version, left_s, self._dispatch.fleet.no_servers)

    def drain_server(self, server: str, on: bool, force: bool = False) -> dict[str, Any]:
        """Has a server take nothing new, for all routers; or undoes it. What it decodes goes on elsewhere, as far as it can.

        force: also the last ready server of its role. The answer: the server as `status` has it, before it has heard.
        Raises UnknownServer for one that is not there, InvalidRequest for one that cannot be told, or is the last;
        Unavailable while it is not heard.
        """
        view, leaving = self._dispatch.fleet.view(), self._leaving.now(self._clock())
        found = check_drain(view, server, force=force, leaving=leaving) if on else server_named(view, server)
        assert found.hello is not None
        drain = Drain(on)
        if why := lacks(found.hello, drain):
            raise InvalidRequest(f"server {server} cannot be told to drain; send it SIGTERM: {why}", "name")
        self._leaving.told(server, on, self._clock())
        self._dispatch.fleet.send(server, drain)
        return server_status(found, view)

    async def set_role(self, server: str, role: str, force: bool) -> bool:
        """Has a server drain, and become one of another role; False where it is that already. Returns when it has begun.

        force: also the last server of its role. Raises UnknownServer, InvalidRequest, or Unavailable where it may be
        asked again later.
        """
        fleet, wanted = self._dispatch.fleet, role_named(role)
        before = fleet.view()
        if not needs_change(before, server, wanted, force=force, leaving=self._leaving.now(self._clock())):
            return False
        self._leaving.told(server, True, self._clock())
        asked = asked_before(server_named(before, server))
        fleet.send(server, SetRole(wanted))
        until_s = self._clock() + ANSWER_S
        try:
            while self._clock() < until_s:
                found = next((each for each in fleet.view().servers if each.name == server), None)
                if change_begun(found, wanted, asked):
                    return True
                await asyncio.sleep(ASK_EVERY_S)
        finally:
            self._leaving.told(server, False, self._clock())
        raise Unavailable(
            f"server {server} has not said within {ANSWER_S:g} s whether it becomes a {wanted.value} server"
        )

    def addresses(self) -> tuple[tuple[str, str], ...]:
        """Name and gRPC address of each server that is found now."""
        return self._dispatch.fleet.addresses

    def timeline(self, request_id: str) -> tuple[TimelineEvent, ...] | None:
        """Where a request's time went; of running requests and the last few that ended."""
        live = self._dispatch.live.get(request_id)
        if live is not None:
            return in_order(live.events)
        return self._dispatch.outcomes.timelines.of(request_id)

    def known_requests(self) -> dict[str, Any]:
        """What runs, oldest first, and what ended last: enough to ask for timelines by id. Bounded."""
        now_s, live = self._clock(), self._dispatch.live
        return {
            "running": [each.dump(now_s) for each in islice(live.values(), MAX_LISTED)],
            "running_total": len(live),
            "ended": self._dispatch.outcomes.timelines.summaries(),
        }

    async def dump(self) -> dict[str, Any]:
        """What the router is doing, for a person to read."""
        now_s = self._clock()
        amount = self._dispatch.outstanding.amount
        return {
            **self.status(),
            "requests": [live.dump(now_s) for live in self._dispatch.live.values()],
            "waiting": [live.machine.request_id for live in self._dispatch.places.waiting],
            "replaying": [live.machine.request_id for live in self._dispatch.replays],
            "prompt_tokens_outstanding": {name: amount(name, Work.PREFILL) for name in self._dispatch.fleet.names},
            "choices_outstanding": {name: amount(name, Work.DECODE) for name in self._dispatch.fleet.names},
        }

    # ---- accepting

    async def _accept(self, request: GenerateRequest, taker: Taker | None) -> Live:
        arrived_s, arrived_unix_s = self._clock(), time.time()
        await self._accepting.turn(request.tenant)
        prompt = await self._read(request)
        params = self._intake.params(request, prompt)
        salt, ways = salt_of(request.owner, request.cache_salt), self._dispatch.pairing.ways
        limit_s = self.deadline_s(request)
        checked_deadline_s(limit_s)
        held = self._budget.hold()
        stop_bytes = STOP_CHAR_BYTES * sum(map(len, params.stop))
        held.add(PROMPT_TOKEN_BYTES * len(prompt) + PAGE_BYTES * num_pages(ways, len(prompt)) + stop_bytes, new=True)
        try:
            with self._dispatch.places.reading(request.tenant):
                pages = await self._hashed(ways, salt, prompt)
            self._dispatch.check_room(request.tenant)
            slo_s = math.inf if request.slo_ttft_s is None else request.slo_ttft_s
            self._check_wait(request, len(prompt), pages, arrived_s + min(slo_s, limit_s) - self._clock())
            self._dispatch.make_room(request.tenant)
        except BaseException:
            held.release()
            raise
        asked = Asked(
            request_id=secrets.token_hex(12),
            prompt_token_ids=prompt,
            params=params,
            deadline_s=arrived_s + limit_s,
            limit_s=limit_s,
            prompt_name=request.prompt_name,
            cache_salt=salt,
            tenant=request.tenant,
            call=request.call,
            serial=self._serial,
            priority=request.priority,
            pages=pages,
            trace=self._dispatch.outcomes.traces.begin(request.traceparent),
            client_traceparent=request.traceparent,
            operation=request.operation,
            session=request.session,
            slo_ttft_s=request.slo_ttft_s,
            turns=self.turns,
        )
        self._serial += 1
        live = Live(
            RequestMachine(asked, self._bounds),
            self._intake.stop_table(params.stop),
            Mailbox(self._budget.hold(), self._config.answer_bytes, taker),
            held,
            self._dispatch.outstanding.account(request.tenant, request.call),
            arrived_s,
            arrived_unix_s,
        )
        self._begin(live, request.client_request_id)
        return live

    def _check_wait(self, request: GenerateRequest, prompt_tokens: int, pages: PromptPages, in_time_s: float) -> None:
        """Raises Shed where its first token would come too late to be of use, or too many prompts are before it."""
        facts = RequestFacts(prefill_tokens=prompt_tokens, total_tokens=prompt_tokens, pages=pages)
        found = self._dispatch.pairing.why_refused(facts, request.tenant, request.priority, in_time_s)
        if found is not None:
            retry_after_s, why = found
            raise Shed(f"{request.the_prompt} is not taken: {why}", retry_after_s)

    async def _read(self, request: GenerateRequest) -> tuple[int, ...]:
        """The prompt's ids. Whoever is read has a place in the queue meanwhile."""
        if self._closing:
            raise Unavailable(CLOSING)
        self._intake.check_model(request.model)
        self._dispatch.check_reading(request.tenant)
        self._intake.check_before_text(request)
        with self._dispatch.places.reading(request.tenant):
            prompt = await self._intake.prompt_ids(request)
        if self._closing:
            raise Unavailable(CLOSING)
        return prompt

    async def _hashed(self, ways: tuple[PrefixRules, ...], salt: str, prompt: tuple[int, ...]) -> PromptPages:
        """Names of its pages, in turns with the rest of the loop."""
        hashing = PromptHashing(ways, salt, prompt)
        while not hashing.done:
            hashing.step()
            if not hashing.done:
                await asyncio.sleep(0)
        if self._closing:
            raise Unavailable(CLOSING)
        return hashing.pages

    def _begin(self, live: Live, client_request_id: str) -> None:
        """It waits for a place, and its client for its answer."""
        asked = live.machine.asked
        logger.info(
            "request accepted: %d prompt tokens, up to %s more",
            len(asked.prompt_token_ids),
            asked.params.max_tokens or "what fits",
            extra={**live.log, "client_request_id": client_request_id},
        )
        self._metrics.prompt_tokens.inc(len(asked.prompt_token_ids))
        self._idle.clear()
        self._dispatch.begin(live)
        live.mailbox.put(Started(asked.request_id, asked.prompt_token_ids, live.arrived_unix_s, live.abort_token))

    def _longest(self) -> int:
        return self._dispatch.fleet.longest(self._max_model_len)

    # ---- the dispatch calls these

    def fleet_changed(self) -> None:
        self._has_paired = self._has_paired or self._dispatch.fleet.view().has_pair
        for callback in self._changed:
            callback()

    def request_ended(self) -> None:
        if not self._dispatch.live and not self._readers:
            self._idle.set()
