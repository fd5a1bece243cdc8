"""The router: takes requests, keeps them until their last token, and runs them again when a server is lost.

Everything happens on one event loop. Streams and timers bring events, a `RequestMachine` per request says what to do, and
`_do` does it; no step waits for anything, so none can be interrupted half way. Decides nothing itself about attempts
(request.py), pairs (policies.py), servers' lives (streams.py) or text (choice_text.py).
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import secrets
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, ParamSpec, TypeVar

from msgspec import to_builtins
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from disagg.config.tree import Config
from disagg.messages.legs import LegTokens, ServerMessage, TimelineEvent
from disagg.router.acceptance import Accepted
from disagg.router.beside import Beside
from disagg.router.budget import Budget, Held
from disagg.router.choice_text import ChoiceText
from disagg.router.dial import dial_server
from disagg.router.mailbox import Mailbox
from disagg.router.metrics import RouterMetrics
from disagg.router.names import drawn_name
from disagg.router.policies import POLICIES, pick_pair, queue_cost
from disagg.router.request import (
    ArmLingerTimer,
    ArmVerdictTimer,
    Attempted,
    ClientGone,
    DeadlinePassed,
    Emit,
    Event,
    Fail,
    Finish,
    Instruction,
    LegEnded,
    LingerTimeout,
    NeedPair,
    NoPairFound,
    PairPicked,
    Phase,
    RequestMachine,
    Send,
    ServerLost,
    ShutDown,
    StopFound,
    TokensCame,
    VerdictTimeout,
)
from disagg.router.requests import Finished, GenerateRequest, Started, Update, Usage
from disagg.router.streams import NO_FILES, Dialer, ServerStream
from disagg.router.view import ClusterView, NoPair, NoPairReason, Pair, ServerView
from disagg.scheduler.fairness import FairQueue
from disagg.text.limits import INLINE_CHARS, TextLimits
from disagg.text.stops import StopTable
from disagg.text.tokenizer import Tokenizer
from disagg.types.errors import (
    Cancelled,
    DeadlineExceeded,
    DisaggError,
    InvalidRequest,
    NoCompatiblePeer,
    Overloaded,
    RequestError,
    Unavailable,
    UnknownModel,
)
from disagg.types.plain import quoted
from disagg.types.sampling import MAX_CACHE_SALT_CHARS, MAX_INT, SamplingParams, check_ids
from disagg.wire.inference import ModelInfo

logger = logging.getLogger(__name__)

LINGER_S = 0.25  # how long a finished request waits for the servers' last words
FLUSH_S = 0.5  # how long a closing router waits for its last aborts to arrive
KEPT_TIMELINES = 256
RATE_WINDOW_S = 30.0
PROMPT_TOKEN_BYTES, STOP_CHAR_BYTES = 40, 260  # as Python has them
_OUTCOMES: tuple[tuple[type[DisaggError], str], ...] = (
    (RequestError, "invalid"),
    (Overloaded, "overloaded"),
    (NoCompatiblePeer, "no_compatible_peer"),
    (Unavailable, "unavailable"),
    (DeadlineExceeded, "deadline"),
    (Cancelled, "cancelled"),
)


P = ParamSpec("P")
T = TypeVar("T")


class _Live:
    """A request from its acceptance to its end."""

    def __init__(
        self,
        machine: RequestMachine,
        stops: StopTable | None,
        mailbox: Mailbox,
        held: Held,
        arrived_s: float,
        arrived_unix_s: float,
    ) -> None:
        self.machine = machine
        self.abort_token = secrets.token_hex(16)  # proves to `abort` that the caller began this request
        self.held = held  # its prompt's bytes
        self.stops = stops
        self.texts: dict[int, ChoiceText] = {}  # of the choices that have tokens: 8,192 at once would hold the loop
        self.mailbox = mailbox
        self.arrived_s = arrived_s
        self.arrived_unix_s = arrived_unix_s
        self.dispatched = False  # it has a place among max_inflight
        self.wish: NeedPair | None = None
        self.timers: list[asyncio.TimerHandle] = []
        self.heard_s: dict[int, float] = {}  # per choice that has begun and not finished, when tokens last came
        self.began = False
        self.longest_silence_s = 0.0  # of any choice, from one message with tokens of it to the next
        self.timeline: list[TimelineEvent] = []
        self.attempt_unix_s = 0.0
        self.prefill_charge: tuple[str, int] | None = None  # (server, prompt tokens)
        self.decode_charge: tuple[str, int] | None = None  # (server, choices)

    @property
    def log(self) -> dict[str, str]:
        return {"request_id": self.machine.request_id}


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
        policy: str = "least_loaded",
        dial: Dialer = dial_server,
        clock: Callable[[], float] = time.monotonic,
        linger_s: float = LINGER_S,
        files: Mapping[str, str] = NO_FILES,
    ) -> None:
        """files: digests of the files that the tokenizer and the chat template come from, by name."""
        self._config = config.router
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._max_model_len = max_model_len
        self._policy = POLICIES[policy]()
        self._clock = clock
        self._linger_s = linger_s
        self._metrics = RouterMetrics(registry)
        self._name = self._config.name or drawn_name()
        incarnation = secrets.token_hex(8)
        self._streams = {
            ref.name: ServerStream(
                ref,
                model=model_name,
                router_name=self._name,
                router_incarnation=incarnation,
                heartbeat_s=self._config.heartbeat_s,
                lease_s=self._config.lease_s,
                dial=dial,
                owner=self,
                clock=clock,
                files=files,
            )
            for ref in self._config.servers
        }
        self._limits = TextLimits(max_model_len, tokenizer.most_chars(max_model_len))
        self._beside = Beside()
        self._budget = Budget(self._config.memory_bytes)
        self._stop_tables: weakref.WeakValueDictionary[tuple[str, ...], StopTable] = weakref.WeakValueDictionary()
        self._arriving = 0  # requests whose text is being read
        self._live: dict[str, _Live] = {}
        self._waiting: FairQueue[_Live] = FairQueue()  # for a place or a server, tenants in turns
        self._replays: deque[_Live] = deque()  # for a server; they have a place
        self._inflight = 0
        self._serial = 0
        self._prompt_tokens_out = dict.fromkeys(self._streams, 0)
        self._choices_out = dict.fromkeys(self._streams, 0)
        self._timelines: OrderedDict[str, list[TimelineEvent]] = OrderedDict()
        self._ended_s: deque[float] = deque(maxlen=256)
        self._pump_handle: asyncio.Handle | None = None
        self._closing = False
        self._readers = 0  # answers that a face is still reading; the engines may be done with them
        self._idle = asyncio.Event()  # nothing runs and nothing is left to be read
        self._idle.set()
        self._changed: list[Callable[[], None]] = []
        self._metrics.running.set_function(lambda: self._inflight)
        self._metrics.waiting.set_function(lambda: len(self._waiting))
        self._metrics.mismatched.set_function(lambda: sum(server.mismatched for server in self._view().servers))
        self._weights: frozenset[str] = frozenset()  # of all servers, when last heard
        self._metrics.silence_s.set_function(self._silence_s)

    # ---- life

    async def start(self) -> None:
        for stream in self._streams.values():
            stream.start()

    async def drain(self, drain_s: float) -> None:
        """Takes nothing new, lets what runs finish and be read for `drain_s`, and ends the rest with Unavailable."""
        self._closing = True
        self._notify()
        for live in [live for live in self._live.values() if not live.dispatched]:
            self._drive(live, ShutDown(Unavailable("the router is shutting down")))
        try:
            async with asyncio.timeout(max(0.0, drain_s)):
                await self._idle.wait()
        except TimeoutError:
            for live in list(self._live.values()):
                self._drive(live, ShutDown(Unavailable("the router is shutting down")))

    async def close(self, drain_s: float) -> None:
        """Drains, and lets go of the servers."""
        await self.drain(drain_s)
        await asyncio.gather(*(stream.flush(FLUSH_S) for stream in self._streams.values()))
        await asyncio.gather(*(stream.close() for stream in self._streams.values()))
        if self._pump_handle is not None:
            self._pump_handle.cancel()
        self._beside.close()

    # ---- what faces call

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Update, None]:
        """Started, deltas, Finished; or raises a DisaggError. Closing the iterator aborts the request."""
        try:
            live = await self._accept(request)
        except DisaggError as error:
            self.note_refused(error, request.client_request_id)
            raise
        self._readers += 1
        self._idle.clear()
        try:
            async with aclosing(live.mailbox.updates()) as updates:
                async for update in updates:
                    yield update
        finally:
            self._readers -= 1
            if live.machine.phase is not Phase.ENDED:
                self._drive(live, ClientGone("the client went away"))
            live.mailbox.close()
            self._note_idle()

    def note_refused(self, error: DisaggError, client_request_id: str = "") -> None:
        """Counts a request that was not accepted; faces say so of those that they could not even read."""
        self._metrics.requests.labels(outcome=_outcome(error)).inc()
        logger.info("request refused: %s", error, extra={"request_id": "", "client_request_id": client_request_id})

    def abort(self, request_id: str, abort_token: str) -> bool:
        """Ends a request with Cancelled. False if it does not run here, or the token is not what its `Started` said."""
        live = self._live.get(request_id)
        if live is None or not secrets.compare_digest(live.abort_token.encode(), abort_token.encode()):
            return False
        self._drive(live, ClientGone("the request was aborted"))
        return True

    def models(self) -> tuple[ModelInfo, ...]:
        return (ModelInfo(name=self._model_name, max_model_len=self._longest()),)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def limits(self) -> TextLimits:
        """What faces check before they turn a message into values."""
        return self._limits

    def hold(self) -> Held:
        """An account of `router.memory_bytes`, for a face that keeps something of a request."""
        return self._budget.hold()

    async def beside(self, size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Does what takes long with `size` bytes of text in a thread (see `beside.py`)."""
        return await self._beside.run(size, work, *args, **kwargs)

    async def tokenize(self, model: str, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        self._check_model(model)
        return await self._encoded(text, add_special_tokens, "the text has", "text")

    async def detokenize(self, model: str, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self._check_model(model)
        self._limits.check_count(len(token_ids), "token_ids has", "token_ids")
        check_ids("token_ids", token_ids, self._tokenizer.vocab_size)
        decode = self._tokenizer.decode
        if len(token_ids) <= INLINE_CHARS:
            return decode(token_ids, skip_special_tokens=skip_special_tokens)
        return await self._beside.run(len(token_ids), decode, token_ids, skip_special_tokens=skip_special_tokens)

    def healthy(self) -> bool:
        """A request that comes now can be served."""
        return not self._closing and self._view().has_pair

    def on_change(self, callback: Callable[[], None]) -> None:
        """Calls back, on the event loop, whenever `healthy()` may have changed."""
        self._changed.append(callback)

    def status(self) -> dict[str, Any]:
        view = self._view()
        state = "draining" if self._closing else "ready" if view.has_pair else "unavailable"
        return {
            "state": state,
            "servers": [_server_status(server, view) for server in view.servers],
            "routers": [
                {
                    "name": self._name,
                    "pid": os.getpid(),
                    "inflight": self._inflight,
                    "queued": len(self._waiting),
                    "error": next((stream.error for stream in self._streams.values() if stream.name_taken), ""),
                }
            ],
        }

    def timeline(self, request_id: str) -> tuple[TimelineEvent, ...] | None:
        """Where a request's time went; of running requests and the last few that ended."""
        live = self._live.get(request_id)
        if live is not None:
            return _sorted_timeline(live.timeline + live.machine.timeline)
        kept = self._timelines.get(request_id)
        return None if kept is None else _sorted_timeline(kept)

    async def dump(self) -> dict[str, Any]:
        """What the router is doing, for a person to read."""
        now_s = self._clock()
        requests = []
        for request_id, live in self._live.items():
            machine = live.machine
            pair = machine.pair
            requests.append(
                {
                    "request_id": request_id,
                    "phase": machine.phase.value,
                    "age_s": round(now_s - live.arrived_s, 3),
                    "attempt": machine.attempt,
                    "prefill": pair.prefill.name if pair is not None else None,
                    "decode": pair.decode.name if pair is not None else None,
                    "prompt_tokens": len(machine.prompt_token_ids),
                    "accepted_tokens": [len(machine.table.token_ids(c)) for c in range(machine.params.n)],
                    "unfinished_choices": list(machine.table.unfinished()),
                }
            )
        return {
            **self.status(),
            "requests": requests,
            "waiting": [live.machine.request_id for live in self._waiting],
            "replaying": [live.machine.request_id for live in self._replays],
            "prompt_tokens_outstanding": dict(self._prompt_tokens_out),
            "choices_outstanding": dict(self._choices_out),
        }

    # ---- accepting

    async def _accept(self, request: GenerateRequest) -> _Live:
        if self._closing:
            raise Unavailable("the router is shutting down")
        arrived_s, arrived_unix_s = self._clock(), time.time()
        self._check_model(request.model)
        self._check_room(request.tenant)
        self._check_before_text(request)
        self._arriving += 1
        try:
            prompt = await self._prompt_ids(request)
        finally:
            self._arriving -= 1
        if self._closing:
            raise Unavailable("the router is shutting down")
        params = self._check_params(request, prompt)
        deadline_s = self._config.request_deadline_s if request.deadline_s is None else request.deadline_s
        if not (math.isfinite(deadline_s) and deadline_s > 0):
            raise InvalidRequest(f"deadline_s is {deadline_s}; it must be a positive number of seconds", "deadline_s")
        self._check_room(request.tenant)
        held = self._budget.hold()
        held.add(PROMPT_TOKEN_BYTES * len(prompt) + STOP_CHAR_BYTES * sum(map(len, params.stop)), new=True)
        self._make_room(request.tenant)
        request_id = secrets.token_hex(12)
        machine = RequestMachine(
            request_id,
            prompt,
            params,
            cache_salt=request.cache_salt,
            deadline_s=arrived_s + deadline_s,
            max_total_tokens=self._max_model_len,
            max_attempts=self._config.max_attempts,
            verdict_s=self._config.lease_s,
            linger_s=self._linger_s,
            serial=self._serial,
            tenant=request.tenant,
        )
        self._serial += 1
        mailbox = Mailbox(self._budget.hold(), self._config.answer_bytes)
        live = _Live(machine, self._stop_table(params.stop), mailbox, held, arrived_s, arrived_unix_s)
        logger.info(
            "request accepted: %d prompt tokens, up to %s more",
            len(prompt),
            params.max_tokens or "what fits",
            extra={**live.log, "client_request_id": request.client_request_id},
        )
        self._metrics.prompt_tokens.inc(len(prompt))
        self._live[request_id] = live
        self._idle.clear()
        self._waiting.append(request.tenant, live, queue_cost(len(prompt), params))
        left_s = deadline_s - (self._clock() - arrived_s)
        self._after(live, max(0.0, left_s), DeadlinePassed())
        live.mailbox.put(Started(request_id, prompt, arrived_unix_s, live.abort_token))
        self._pump_soon()
        return live

    def _check_model(self, model: str) -> None:
        if model != self._model_name:
            raise UnknownModel(f"model {quoted(model)} is not served here; {self._model_name!r} is", "model")

    def _check_before_text(self, request: GenerateRequest) -> None:
        """What needs no tokens to be refused: nobody's text is read for a request that cannot be served."""
        if len(request.cache_salt) > MAX_CACHE_SALT_CHARS:
            raise InvalidRequest(
                f"cache_salt has {len(request.cache_salt)} characters; at most {MAX_CACHE_SALT_CHARS} are allowed",
                "cache_salt",
            )
        params = replace(request.params, seed=request.seed or 0)
        replace(params, max_tokens=params.max_tokens or MAX_INT).validate(self._tokenizer.vocab_size)

    async def _prompt_ids(self, request: GenerateRequest) -> tuple[int, ...]:
        """Ids that the model has rows for, whoever made them: a tokenizer may know tokens that the model does not."""
        prompt = request.prompt
        if not prompt:
            raise InvalidRequest("the prompt is empty", "prompt")
        if isinstance(prompt, str):
            prompt = await self._encoded(prompt, request.add_special_tokens, "the prompt has", "prompt")
            if not prompt:
                raise InvalidRequest("the prompt has no tokens", "prompt")
        self._check_prompt_length(len(prompt))
        check_ids("prompt", prompt, self._tokenizer.vocab_size)
        return prompt

    async def _encoded(self, text: str, add_special_tokens: bool, what: str, param: str) -> tuple[int, ...]:
        """As many ids as fit the context, or InvalidRequest. Long texts are read beside the loop."""
        self._limits.check_chars(len(text), what, param)
        encoding = self._tokenizer.encoding
        text = _well_formed(text)
        if len(text) <= INLINE_CHARS:
            found = encoding(text, add_special_tokens=add_special_tokens)
        else:
            found = await self._beside.run(len(text), encoding, text, add_special_tokens=add_special_tokens)
        if param == "prompt":
            self._check_prompt_length(len(found))
        self._limits.check_count(len(found), what, param)
        return tuple(found.ids)

    def _check_prompt_length(self, tokens: int) -> None:
        longest = self._longest()
        if tokens >= longest:
            raise InvalidRequest(
                f"the prompt has {tokens} tokens; the model's context holds {longest}, "
                "and at least one must be left for the answer",
                "prompt",
            )

    def _stop_table(self, stops: tuple[str, ...]) -> StopTable | None:
        """One for all requests that have the same stop strings now, as the prompts of one call have."""
        if not stops:
            return None
        table = self._stop_tables.get(stops)
        if table is None:
            table = self._stop_tables[stops] = StopTable(stops)
        return table

    def _check_params(self, request: GenerateRequest, prompt: tuple[int, ...]) -> SamplingParams:
        """The parameters with their seed; max_tokens 0 stays, for the first pair to fill in."""
        longest = self._longest()
        room = longest - len(prompt)
        seed = secrets.randbits(64) if request.seed is None else request.seed
        params = replace(request.params, seed=seed)
        checked = replace(params, max_tokens=room) if params.max_tokens == 0 else params
        checked.validate(self._tokenizer.vocab_size)
        if checked.max_tokens > room:
            raise InvalidRequest(
                f"the prompt has {len(prompt)} tokens and max_tokens is {checked.max_tokens}, "
                f"{len(prompt) + checked.max_tokens} in all; the model's context holds {longest}",
                "max_tokens",
            )
        return params

    def _longest(self) -> int:
        """Prompt and output together, as far as is known now; what a pool can hold is checked with the pair."""
        hellos = [s.hello for s in self._streams.values() if s.hello is not None and s.hello.max_model_len > 0]
        served = [hello.max_model_len for hello in hellos if hello.model == self._model_name]
        return min(self._max_model_len, max(served, default=self._max_model_len))

    def _check_room(self, tenant: str) -> None:
        """Raises Overloaded if the queue is full, and this tenant has as much of it as any other."""
        full = self._full()
        if full is not None and self._waiting.displaced_by(tenant) is None:
            raise full

    def _make_room(self, tenant: str) -> None:
        """For one more in a queue that may be full: the youngest of whoever has most there goes. Raises as `_check_room`."""
        full = self._full()
        if full is None:
            return
        displaced = self._waiting.displaced_by(tenant)
        if displaced is None:
            raise full
        self._drive(displaced, ShutDown(full))

    def _full(self) -> Overloaded | None:
        free = self._config.max_inflight - self._inflight
        taken = len(self._waiting) + self._arriving
        if taken < self._config.max_queued + max(0, free if self._view().has_pair else 0):
            return None
        return Overloaded(
            f"{self._inflight} requests are running and {taken} are waiting; "
            f"at most {self._config.max_inflight} and {self._config.max_queued} may",
            self._retry_after_s(),
        )

    def _silence_s(self) -> float:
        """The longest time that a choice which has begun and not finished has now been silent."""
        now_s = self._clock()
        return max((now_s - s for live in self._live.values() for s in live.heard_s.values()), default=0.0)

    def _retry_after_s(self) -> float:
        """About when a place in the queue will be free, by how fast requests ended lately."""
        now_s = self._clock()
        lately = [ended_s for ended_s in self._ended_s if now_s - ended_s < RATE_WINDOW_S]
        if not lately:
            return 1.0
        return min(60.0, max(0.1, (now_s - lately[0]) / len(lately)))

    # ---- pairs

    def _view(self) -> ClusterView:
        return ClusterView(
            tuple(
                stream.view(self._prompt_tokens_out[name], self._choices_out[name])
                for name, stream in self._streams.items()
            )
        )

    def _pump_soon(self) -> None:
        if self._pump_handle is None:
            self._pump_handle = asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """Gives pairs to those that wait: replays, oldest first; then new ones, tenants in turns, which need a place too."""
        self._pump_handle = None
        for live in tuple(self._replays):
            found = self._pick(live)
            if isinstance(found, Pair):
                self._replays.remove(live)
                self._drive(live, PairPicked(found, self._clock()))
            elif self._no_pair_yet(live, found):
                break
        if self._inflight >= self._config.max_inflight:
            return
        for live in self._waiting:
            found = self._pick(live)
            if isinstance(found, Pair):
                self._waiting.take(live)
                live.dispatched = True
                self._inflight += 1
                self._metrics.queue_s.observe(self._clock() - live.arrived_s)
                live.timeline.append(TimelineEvent("queued", live.arrived_unix_s, time.time(), self._name))
                self._drive(live, PairPicked(found, self._clock()))
            elif self._no_pair_yet(live, found):
                break
            if self._inflight >= self._config.max_inflight:
                break

    def _no_pair_yet(self, live: _Live, found: NoPair) -> bool:
        """Tells the request why it waits on, or ends. True if the others need not be asked for."""
        self._drive(live, NoPairFound(found))
        return found.reason in (NoPairReason.LOADING, NoPairReason.EMPTY_POOL)

    def _pick(self, live: _Live) -> Pair | NoPair:
        wish = live.wish
        return pick_pair(
            self._view(),
            live.machine.facts,
            self._policy,
            prefer_decode=wish.prefer_decode if wish is not None else None,
            avoid=wish.avoid if wish is not None else (),
        )

    def _enqueue_replay(self, live: _Live) -> None:
        if live.machine.phase is Phase.WAITING:
            self._replays.append(live)
            self._pump_soon()

    # ---- streams call these

    def server_changed(self, name: str) -> None:
        weights = frozenset(s.hello.weights_hash for s in self._streams.values() if s.hello is not None) - {""}
        if len(weights) > 1 and weights != self._weights:
            logger.warning(
                "servers of %s have different weights (%s): only equals are paired, and answers depend on which are taken",
                self._model_name,
                ", ".join(sorted(each[:12] for each in weights)),
            )
        self._weights = weights
        self._pump_soon()
        self._notify()

    def server_said(self, name: str, message: ServerMessage) -> None:
        self._metrics.messages.labels(server=name).inc()
        live = self._live.get(message.key.request_id)
        if live is not None:
            self._drive(live, TokensCame(name, message) if isinstance(message, LegTokens) else LegEnded(name, message))
        elif isinstance(message, LegTokens):
            self._metrics.stale.inc(len(message.token_ids))
        elif message.key.request_id in self._timelines:
            kept = self._timelines[message.key.request_id]
            kept.extend(replace(event, name=f"{name}/{event.name}") for event in message.timeline)

    def server_lost(self, name: str, incarnation: str, crashed: bool, reason: str) -> None:
        self._metrics.servers_lost.labels(server=name).inc()
        event = ServerLost(name, incarnation, crashed, reason)
        for live in list(self._live.values()):
            self._drive(live, event)

    def _notify(self) -> None:
        for callback in self._changed:
            callback()

    # ---- doing what the machines say

    def _drive(self, live: _Live, event: Event) -> None:
        if live.machine.phase is Phase.WAITING and isinstance(event, DeadlinePassed):
            self._explain_wait(live)
        for instruction in live.machine.handle(event):
            self._do(live, instruction)
        if live.machine.phase is not Phase.ENDED:
            self._discharge(live)

    def _explain_wait(self, live: _Live) -> None:
        """Lets the machine know what the request waits for, for its last words."""
        place = live.dispatched or self._inflight < self._config.max_inflight
        found = self._pick(live) if place else NoPair(NoPairReason.NO_PLACE)
        if isinstance(found, NoPair):
            self._drive(live, NoPairFound(found))

    def _do(self, live: _Live, instruction: Instruction) -> None:
        match instruction:
            case Emit(accepted):
                self._emit(live, accepted)
            case Send(server, message):
                self._streams[server].send(message)
            case Attempted():
                self._attempted(live, instruction)
            case NeedPair():
                self._need_pair(live, instruction)
            case ArmVerdictTimer(attempt, delay_s, trunk):
                self._after(live, delay_s, VerdictTimeout(attempt, trunk))
            case ArmLingerTimer(attempt, delay_s):
                self._after(live, delay_s, LingerTimeout(attempt))
            case Finish():
                self._finish(live)
            case Fail(error):
                self._end(live, error)

    def _after(self, live: _Live, delay_s: float, event: Event) -> None:
        live.timers.append(asyncio.get_running_loop().call_later(delay_s, self._drive, live, event))

    def _attempted(self, live: _Live, attempted: Attempted) -> None:
        pair = attempted.pair
        live.attempt_unix_s = time.time()
        self._metrics.attempts.labels(cause=attempted.cause).inc()
        self._uncharge(live)
        live.prefill_charge = (pair.prefill.name, attempted.prefill_tokens)
        live.decode_charge = (pair.decode.name, attempted.choices)
        self._prompt_tokens_out[pair.prefill.name] += attempted.prefill_tokens
        self._choices_out[pair.decode.name] += attempted.choices
        logger.log(
            logging.DEBUG if attempted.attempt == 1 else logging.INFO,
            "attempt %d (%s): prefill on %s, decode on %s",
            attempted.attempt,
            attempted.cause,
            pair.prefill.name,
            pair.decode.name,
            extra=live.log,
        )

    def _need_pair(self, live: _Live, need: NeedPair) -> None:
        logger.warning("to be run again (%s): %s", need.cause, need.reason, extra=live.log)
        self._note_attempt(live, need.cause)
        self._uncharge(live)
        live.wish = need
        if need.delay_s > 0:
            loop = asyncio.get_running_loop()
            live.timers.append(loop.call_later(need.delay_s, self._enqueue_replay, live))
        else:
            self._enqueue_replay(live)

    def _emit(self, live: _Live, accepted: Accepted) -> None:
        now_s, count = self._clock(), len(accepted.token_ids)
        if count:
            if not live.began:
                live.began = True
                self._metrics.ttft_s.observe(now_s - live.arrived_s)
            last_s = live.heard_s.get(accepted.choice)
            if last_s is not None:
                live.longest_silence_s = max(live.longest_silence_s, now_s - last_s)
                for _ in range(count):
                    self._metrics.itl_s.observe((now_s - last_s) / count)
            live.heard_s[accepted.choice] = now_s
            self._metrics.completion_tokens.inc(count)
        text = live.texts.get(accepted.choice)
        if text is None:
            machine = live.machine
            text = ChoiceText(self._tokenizer, accepted.choice, machine.prompt_token_ids, machine.params, live.stops)
            live.texts[accepted.choice] = text
        delta = text.push(accepted)
        if delta is not None:
            live.mailbox.put(delta)
            if live.mailbox.overfull is not None:
                # Not at once: what the machine has just said is still being done.
                asyncio.get_running_loop().call_soon(self._drive, live, ShutDown(live.mailbox.overfull))
        if accepted.finish is not None or text.stopped_by is not None:
            live.heard_s.pop(accepted.choice, None)
        if text.stopped_by is not None:
            self._drive(live, StopFound(accepted.choice))

    def _note_attempt(self, live: _Live, outcome: str) -> None:
        pair = live.machine.pair
        if pair is not None and live.attempt_unix_s > 0:
            detail = f"{pair.prefill.name} > {pair.decode.name}: {outcome}"
            name = f"attempt {live.machine.attempt}"
            live.timeline.append(TimelineEvent(name, live.attempt_unix_s, time.time(), detail))
            live.attempt_unix_s = 0.0

    def _finish(self, live: _Live) -> None:
        machine = live.machine
        self._note_attempt(live, "done")
        usage = Usage(
            prompt_tokens=len(machine.prompt_token_ids),
            completion_tokens=sum(text.num_tokens for text in live.texts.values()),
            cached_tokens=machine.cached_tokens,
        )
        timeline = _sorted_timeline(live.timeline + machine.timeline)
        self._end(live, Finished(usage, timeline, machine.attempts_counted))

    def _end(self, live: _Live, end: Finished | DisaggError) -> None:
        machine = live.machine
        now_s = self._clock()
        outcome = "ok" if isinstance(end, Finished) else _outcome(end)
        if isinstance(end, DisaggError):
            self._note_attempt(live, outcome)
        for timer in live.timers:
            timer.cancel()
        self._uncharge(live)
        self._waiting.discard(live)
        if live in self._replays:
            self._replays.remove(live)
        if live.dispatched:
            self._inflight -= 1
            self._ended_s.append(now_s)
        del self._live[machine.request_id]
        self._timelines[machine.request_id] = live.timeline + machine.timeline
        while len(self._timelines) > KEPT_TIMELINES:
            self._timelines.popitem(last=False)
        tallies = machine.table.tallies
        self._metrics.duplicates.inc(tallies.duplicates)
        self._metrics.stale.inc(tallies.stale)
        self._metrics.contradictions.inc(tallies.contradictions)
        self._metrics.requests.labels(outcome=outcome).inc()
        self._metrics.whole_s.observe(now_s - live.arrived_s)
        if live.began:
            silences_s = [live.longest_silence_s, *(now_s - last_s for last_s in live.heard_s.values())]
            self._metrics.longest_silence_s.observe(max(silences_s))
        logger.info(
            "request ended: %s after %.3f s, %d tokens, %d attempts%s",
            outcome,
            now_s - live.arrived_s,
            sum(text.num_tokens for text in live.texts.values()),
            machine.attempts_counted,
            f": {end}" if isinstance(end, DisaggError) else "",
            extra=live.log,
        )
        live.held.release()
        live.mailbox.put(end)
        self._note_idle()
        self._pump_soon()

    def _note_idle(self) -> None:
        if not self._live and not self._readers:
            self._idle.set()

    # ---- what is outstanding where

    def _discharge(self, live: _Live) -> None:
        if live.prefill_charge is not None and not live.machine.prefill_busy:
            name, tokens = live.prefill_charge
            self._prompt_tokens_out[name] -= tokens
            live.prefill_charge = None
        if live.decode_charge is not None and not live.machine.decode_busy:
            name, choices = live.decode_charge
            self._choices_out[name] -= choices
            live.decode_charge = None

    def _uncharge(self, live: _Live) -> None:
        if live.prefill_charge is not None:
            self._prompt_tokens_out[live.prefill_charge[0]] -= live.prefill_charge[1]
        if live.decode_charge is not None:
            self._choices_out[live.decode_charge[0]] -= live.decode_charge[1]
        live.prefill_charge = live.decode_charge = None


def _well_formed(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest("the text has half of a surrogate pair, which is no character", "prompt") from error
    return text


def _outcome(error: DisaggError) -> str:
    return next((name for kind, name in _OUTCOMES if isinstance(error, kind)), "failed")


def _sorted_timeline(events: list[TimelineEvent]) -> tuple[TimelineEvent, ...]:
    return tuple(sorted(events, key=lambda event: (event.start_unix_s, event.end_unix_s)))


def _server_status(server: ServerView, view: ClusterView) -> dict[str, Any]:
    hello, load = server.hello, server.load
    return {
        "name": server.name,
        "role": server.role.value,
        "tp": hello.tp if hello is not None else 0,
        "pid": hello.pid if hello is not None else 0,
        "worker_pids": list(hello.worker_pids) if hello is not None else [],
        "state": view.state(server).value,
        "running": load.running if load is not None else 0,
        "waiting": load.waiting if load is not None else 0,
        "pages_used": load.pages_used if load is not None else 0,
        "pages_total": load.pages_total if load is not None else 0,
        "pages_free": load.pages_free if load is not None else 0,
        "pages_evictable": load.pages_evictable if load is not None else 0,
        "memory": to_builtins(load.memory) if load is not None else None,
        "cached_pages": list(server.cached.counts()),
        "address": server.address,
        "incarnation": hello.incarnation if hello is not None else "",
        "connected": server.connected,
        "error": server.error,
        "weights": hello.weights_hash if hello is not None else "",
        "reason": server.reason,
    }
