"""Requests under way: who gets a pair and when, and doing what their machines say. Knows nothing of faces and of text's limits.

    begin ──> waiting ──a place and a pair──> legs sent ──> tokens, last words ──> ended
                            replays <── decode's verdict, a server lost

No step waits for anything, so none can be interrupted half way.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from functools import partial
from typing import Protocol

from disagg.config.tree import RouterConfig
from disagg.discovery.choice import discovery_of
from disagg.messages.legs import LegEnd, LegTokens, Outcome, PrefixRules, ServerMessage, TimelineEvent
from disagg.router.acceptance import Accepted
from disagg.router.alarms import Recent
from disagg.router.choice_text import ChoiceText
from disagg.router.dial import dial_server
from disagg.router.events import (
    ArmLingerTimer,
    ArmVerdictTimer,
    Attempted,
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
    Send,
    ServerLost,
    ShutDown,
    StopFound,
    TargetSeen,
    TokensCame,
    VerdictTimeout,
)
from disagg.router.fleet import Fleet
from disagg.router.live import Live
from disagg.router.metrics import RouterMetrics
from disagg.router.outstanding import Outstanding, Stage, call_may_go, tenant_may_go
from disagg.router.placement import pick_pair, pick_target
from disagg.router.places import Places, queue_cost
from disagg.router.policies import Policy
from disagg.router.request_spans import Ended, request_spans
from disagg.router.requests import Finished
from disagg.router.streams import Caller
from disagg.router.timelines import Timelines
from disagg.router.view import NoPair, NoPairReason, Pair, Work
from disagg.telemetry.traces import Traces
from disagg.text.tokenizer import Tokenizer
from disagg.types.errors import (
    Cancelled,
    DeadlineExceeded,
    DisaggError,
    NoCompatiblePeer,
    Overloaded,
    RequestError,
    Unavailable,
)
from disagg.types.ids import Role
from disagg.wire.tls import CLEAR, WireTls

logger = logging.getLogger(__name__)

_OUTCOMES: tuple[tuple[type[DisaggError], str], ...] = (
    (RequestError, "invalid"),
    (Overloaded, "overloaded"),
    (NoCompatiblePeer, "no_compatible_peer"),
    (Unavailable, "unavailable"),
    (DeadlineExceeded, "deadline"),
    (Cancelled, "cancelled"),
)


MOVES_AT_ONCE = 8  # answers that stand still, of each server that drains
CHUNK = "chunk"  # of a prompt, in what servers say of a leg's time


class DispatchOwner(Protocol):
    """Is told what happens, on the event loop; must not block."""

    def fleet_changed(self) -> None: ...

    def request_ended(self) -> None: ...


class Dispatch:
    """Of one router. live: every request from its acceptance to its end, by id."""

    def __init__(
        self,
        config: RouterConfig,
        caller: Caller,
        policy: Policy,
        metrics: RouterMetrics,
        tokenizer: Tokenizer,
        owner: DispatchOwner,
        tls: WireTls = CLEAR,
    ) -> None:
        self.outstanding = Outstanding()
        dial = partial(dial_server, channel_to=tls.dial)
        self.fleet = Fleet(discovery_of(config), caller, self.outstanding, owner=self, dial=dial)
        self.live: dict[str, Live] = {}
        self.places: Places[Live] = Places(config.max_inflight, config.max_queued, config.tenant_share)
        self.replays: deque[Live] = deque()  # for a server; they have a place
        self.timelines = Timelines()
        self.recent = Recent()
        self.traces = Traces()
        self._model = caller.model
        self._name = caller.name
        self._clock = caller.clock
        self._policy = policy
        self._metrics = metrics
        self._tokenizer = tokenizer
        self._owner = owner
        self._pump_handle: asyncio.Handle | None = None

    @property
    def ways(self) -> tuple[PrefixRules, ...]:
        """In which servers name pages, if the policy asks what they have of a prompt."""
        return self.fleet.ways() if self._policy.uses_caches else ()

    def begin(self, live: Live) -> None:
        """It waits for a place."""
        asked = live.machine.asked
        self.live[asked.request_id] = live
        cost = queue_cost(len(asked.prompt_token_ids), asked.params)
        self.places.waiting.append(asked.tenant, live, cost, asked.priority)
        self._after(live, max(0.0, asked.deadline_s - self._clock()), DeadlinePassed())
        self._pump_soon()

    def note_outcome(self, outcome: str) -> None:
        """Of a request that ended, or was not begun."""
        self._metrics.requests.labels(outcome=outcome).inc()
        self.recent.note(outcome, self._clock())

    def check_room(self, tenant: str) -> None:
        """Raises Overloaded where no more may wait."""
        self.places.check_room(tenant, self.fleet.view().has_pair, self._clock())

    def make_room(self, tenant: str) -> None:
        """For one more; raises as `check_room`."""
        displaced = self.places.make_room(tenant, self.fleet.view().has_pair, self._clock())
        if displaced is not None:
            live, reason = displaced
            self.drive(live, ShutDown(reason))

    def end_all(self, reason: DisaggError, waiting_only: bool = False) -> None:
        for live in list(self.live.values()):
            if not (waiting_only and live.dispatched):
                self.drive(live, ShutDown(reason))

    async def close(self, flush_s: float) -> None:
        await self.fleet.close(flush_s)
        if self._pump_handle is not None:
            self._pump_handle.cancel()

    def silence_s(self) -> float:
        """The longest time that a choice which has begun and not finished has now been silent."""
        now_s = self._clock()
        return max((now_s - s for live in self.live.values() for s in live.heard_s.values()), default=0.0)

    # ---- pairs

    def _pump_soon(self) -> None:
        if self._pump_handle is None:
            self._pump_handle = asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """Gives pairs to those that wait: replays, oldest first; then new ones, tenants in turns, which need a place too."""
        self._pump_handle = None
        self._move_what_drains()
        for live in tuple(self.replays):
            found = self._pick(live)
            if isinstance(found, Pair):
                self.replays.remove(live)
                self.drive(live, PairPicked(found, self._clock()))
            elif self._no_pair_yet(live, found):
                break
        prefills = self._num_prefills()
        for live in self.places.next_ones(lambda tenant: self._tenant_may_go(tenant, prefills)):
            if not self._call_may_go(live, prefills):
                continue
            found = self._pick(live)
            if isinstance(found, Pair):
                self.places.take(live.machine.asked.tenant, live)
                live.dispatched = True
                self._metrics.queue_s.observe(self._clock() - live.arrived_s)
                live.timeline.append(TimelineEvent("queued", live.arrived_unix_s, time.time(), self._name))
                self.drive(live, PairPicked(found, self._clock()))
            elif self._no_pair_yet(live, found):
                break

    def _move_what_drains(self) -> None:
        """Asks decode servers that drain to hand over what can go on elsewhere: what has not begun to answer at once, since that
        moves when it does; of the rest so much at once that nobody stands still for long.
        """
        view = self.fleet.view()
        sources = {server.peer_ref for server in view.servers if server.hands_over}
        if not sources:
            return
        stopping = Counter(live.machine.stopping for live in self.live.values())
        for live in list(self.live.values()):
            machine, source = live.machine, live.machine.movable
            if source not in sources or (machine.answers and stopping[source.name] >= MOVES_AT_ONCE):
                continue
            if pick_target(view, machine.facts, self._policy, source) is not None:
                self.drive(live, TargetSeen())
                stopping[source.name] += machine.answers

    def _call_may_go(self, live: Live, prefills: int) -> bool:
        call = live.machine.asked.call
        return not call or call_may_go(self.outstanding.of_call(call, Work.PREFILL), live.machine.params.n, prefills)

    def _tenant_may_go(self, tenant: str, prefills: int) -> bool:
        computing = self.outstanding.of_tenant(tenant, Work.PREFILL)
        return tenant_may_go(computing, self.places.others(tenant), prefills)

    def _num_prefills(self) -> int:
        """Servers that prompts can be sent to now."""
        return sum(server.usable and server.role is not Role.DECODE for server in self.fleet.view().servers)

    def _no_pair_yet(self, live: Live, found: NoPair) -> bool:
        """Tells the request why it waits on, or ends. True if the others need not be asked for."""
        self.drive(live, NoPairFound(found))
        return found.reason in (NoPairReason.LOADING, NoPairReason.EMPTY_POOL)

    def _pick(self, live: Live) -> Pair | NoPair:
        wish, view = live.wish, self.fleet.view()
        if wish is not None and wish.source is not None:
            target = pick_target(view, live.machine.facts, self._policy, wish.source)
            if target is not None:
                return target
        return pick_pair(
            view,
            live.machine.facts,
            self._policy,
            prefer_decode=wish.prefer_decode if wish is not None else None,
            avoid=wish.avoid if wish is not None else (),
        )

    def _enqueue_replay(self, live: Live) -> None:
        if live.machine.phase is Phase.WAITING:
            self.replays.append(live)
            self._pump_soon()

    # ---- the fleet calls these

    def server_left(self, name: str) -> None:
        self._metrics.forget(name)

    def fleet_changed(self) -> None:
        self._pump_soon()
        self._owner.fleet_changed()

    def server_said(self, name: str, message: ServerMessage) -> None:
        self._metrics.messages.labels(server=name).inc()
        live = self.live.get(message.key.request_id)
        if live is not None and isinstance(message, LegEnd):
            self._note_speed(live, name, message)
        if live is not None:
            self.drive(live, TokensCame(name, message) if isinstance(message, LegTokens) else LegEnded(name, message))
        elif isinstance(message, LegTokens):
            self._metrics.stale.inc(len(message.token_ids))
        else:
            self.timelines.add(message.key.request_id, name, message.timeline)

    def _note_speed(self, live: Live, name: str, end: LegEnd) -> None:
        """What a server says of a prompt that it computed, by its own clock."""
        chunks = [event for event in end.timeline if event.name == CHUNK]
        if end.outcome is Outcome.DONE and chunks and end.key.attempt == live.machine.attempt:
            tokens = len(live.machine.prompt_token_ids) - end.cached_tokens
            began_s = min(chunk.start_unix_s for chunk in chunks)
            self.fleet.speeds.ended(name, tokens, began_s, max(chunk.end_unix_s for chunk in chunks))

    def server_lost(self, name: str, incarnation: str, crashed: bool, reason: str) -> None:
        self._metrics.servers_lost.labels(server=name).inc()
        event = ServerLost(name, incarnation, crashed, reason)
        for live in list(self.live.values()):
            self.drive(live, event)

    # ---- doing what the machines say

    def drive(self, live: Live, event: Event) -> None:
        if live.machine.phase is Phase.WAITING and isinstance(event, DeadlinePassed):
            self._explain_wait(live)
        stopping = live.machine.stopping
        for instruction in live.machine.handle(event):
            self._do(live, instruction)
        if stopping and not live.machine.stopping:
            self._pump_soon()  # another one may be moved
        if live.machine.phase is Phase.ENDED:
            return
        done = live.account.end([work for work in live.account.works if not live.machine.busy(work)])
        if done and self.places.waiting:
            self._pump_soon()  # another prompt of its call or tenant may go

    def _explain_wait(self, live: Live) -> None:
        """Lets the machine know what the request waits for, for its last words."""
        found = self._why_not(live)
        if isinstance(found, NoPair):
            self.drive(live, NoPairFound(found))

    def _why_not(self, live: Live) -> Pair | NoPair:
        if live.dispatched:
            return self._pick(live)
        if self.places.free <= 0:
            return NoPair(NoPairReason.NO_PLACE)
        if not self.places.may_take(live.machine.asked.tenant):
            return NoPair(NoPairReason.NO_SHARE)
        prefills = self._num_prefills()
        if not (self._tenant_may_go(live.machine.asked.tenant, prefills) and self._call_may_go(live, prefills)):
            return NoPair(NoPairReason.COMPUTING)
        return self._pick(live)

    def _do(self, live: Live, instruction: Instruction) -> None:
        match instruction:
            case Emit(accepted):
                self._emit(live, accepted)
            case Send(server, message):
                self.fleet.send(server, message)
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

    def _after(self, live: Live, delay_s: float, event: Event) -> None:
        live.timers.append(asyncio.get_running_loop().call_later(delay_s, self.drive, live, event))

    def _attempted(self, live: Live, attempted: Attempted) -> None:
        pair = attempted.pair
        live.attempt_unix_s = time.time()
        self._metrics.expected_hits.inc(pair.hit_tokens)
        self._metrics.attempts.labels(cause=attempted.cause).inc()
        stages = [Stage(pair.decode.name, Work.DECODE, attempted.choices, attempted.choices)]
        if not pair.moves:
            to_compute = max(1, attempted.prefill_tokens - pair.hit_tokens)
            stages.append(Stage(pair.prefill.name, Work.PREFILL, to_compute, attempted.choices, pair.pages))
            if attempted.attempt > 1:
                self._metrics.replayed_tokens.inc(attempted.prefill_tokens)
        live.account.begin(*stages)
        logger.log(
            logging.DEBUG if attempted.attempt == 1 else logging.INFO,
            "attempt %d (%s): on %s",
            attempted.attempt,
            attempted.cause,
            " and ".join(pair.servers),
            extra=live.log,
        )

    def _need_pair(self, live: Live, need: NeedPair) -> None:
        level, what = (logging.INFO, "to go on elsewhere") if need.source else (logging.WARNING, "to be run again")
        logger.log(level, "%s (%s): %s", what, need.cause, need.reason, extra=live.log)
        live.note_attempt(need.cause, time.time())
        live.account.end(Work)
        live.wish = need
        if need.delay_s > 0:
            loop = asyncio.get_running_loop()
            live.timers.append(loop.call_later(need.delay_s, self._enqueue_replay, live))
        else:
            self._enqueue_replay(live)

    def _emit(self, live: Live, accepted: Accepted) -> None:
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
            if delta.finish is not None:
                self._metrics.choices.labels(reason=delta.finish.value).inc()
                live.finish_reasons.append(delta.finish.value)
            if live.mailbox.overfull is not None:
                # Not at once: what the machine has just said is still being done.
                asyncio.get_running_loop().call_soon(self.drive, live, ShutDown(live.mailbox.overfull))
        if accepted.finish is not None or text.stopped_by is not None:
            live.heard_s.pop(accepted.choice, None)
        if text.stopped_by is not None:
            self.drive(live, StopFound(accepted.choice))

    def _finish(self, live: Live) -> None:
        live.note_attempt("done", time.time())
        self._end(live, live.finished())

    def _end(self, live: Live, end: Finished | DisaggError) -> None:
        machine = live.machine
        now_s = self._clock()
        outcome = "ok" if isinstance(end, Finished) else outcome_of(end)
        if isinstance(end, DisaggError):
            live.note_attempt(outcome, time.time())
            reason = "abort" if isinstance(end, Cancelled) else "error"
            self._metrics.choices.labels(reason=reason).inc(len(machine.table.unfinished()))
        for timer in live.timers:
            timer.cancel()
        live.account.end(Work)
        self.places.waiting.discard(live)
        if live in self.replays:
            self.replays.remove(live)
        if live.dispatched:
            self.places.leave(machine.asked.tenant, now_s)
        del self.live[machine.request_id]
        self.timelines.keep(machine.request_id, live.events)
        self._count_end(live, outcome, now_s)
        self._trace(live, outcome, end)
        logger.info(
            "request ended: %s after %.3f s, %d tokens, %d attempts%s",
            outcome,
            now_s - live.arrived_s,
            live.num_tokens,
            machine.attempts_counted,
            f": {end}" if isinstance(end, DisaggError) else "",
            extra=live.log,
        )
        live.held.release()
        live.mailbox.put(end)
        self._owner.request_ended()
        self._pump_soon()

    def _trace(self, live: Live, outcome: str, end: Finished | DisaggError) -> None:
        machine = live.machine
        trace = machine.asked.trace
        if trace is None:
            return
        failed = isinstance(end, DisaggError) and not isinstance(end, Cancelled)
        ended = Ended(
            asked=machine.asked,
            model=self._model,
            arrived_unix_s=live.arrived_unix_s,
            ended_unix_s=time.time(),
            output_tokens=live.num_tokens,
            cached_tokens=machine.cached_tokens,
            attempts=machine.attempts_counted,
            finish_reasons=tuple(live.finish_reasons),
            timeline=tuple(live.timeline),
            outcome=outcome,
            error=str(end) if failed else "",
        )
        self.traces.put(request_spans(ended, trace))

    def _count_end(self, live: Live, outcome: str, now_s: float) -> None:
        tallies = live.machine.table.tallies
        self._metrics.duplicates.inc(tallies.duplicates)
        self._metrics.stale.inc(tallies.stale)
        self._metrics.contradictions.inc(tallies.contradictions)
        self.note_outcome(outcome)
        self._metrics.whole_s.observe(now_s - live.arrived_s)
        if live.began:
            silences_s = [live.longest_silence_s, *(now_s - last_s for last_s in live.heard_s.values())]
            self._metrics.longest_silence_s.observe(max(silences_s))


def outcome_of(error: DisaggError) -> str:
    return next((name for kind, name in _OUTCOMES if isinstance(error, kind)), "failed")
