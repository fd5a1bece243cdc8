"""Requests under way: gives them pairs in their turn (`pairing`), and does what their machines say. Knows nothing of faces.

    begin ──> waiting ──a place and a pair──> legs sent ──> tokens, last words ──> ended
                            replays <── decode's verdict, a server lost

No step waits for anything, so none can be interrupted half way.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from functools import partial
from typing import Protocol

from disagg.config.tree import RouterConfig
from disagg.discovery.choice import discovery_of
from disagg.messages.legs import LegTokens, ServerMessage, TimelineEvent
from disagg.router.acceptance import Accepted
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
from disagg.router.failures import Failures
from disagg.router.fleet import Fleet
from disagg.router.live import Live
from disagg.router.metrics import RouterMetrics
from disagg.router.outcomes import Outcomes
from disagg.router.outstanding import Outstanding, Stage
from disagg.router.pairing import Pairing
from disagg.router.places import Places, queue_cost
from disagg.router.policies import Policy
from disagg.router.requests import Finished
from disagg.router.streams import Caller
from disagg.router.view import NoPair, NoPairReason, Pair, Work
from disagg.text.tokenizer import Tokenizer
from disagg.types.errors import DisaggError, Shed
from disagg.wire.tls import CLEAR, WireTls

logger = logging.getLogger(__name__)

LATE_RETRY_S = 1.0  # when there will be a place is not known


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
        self.pairing = Pairing(self.fleet, policy, self.places, self.outstanding, config.shed_wait_s)
        self.outcomes = Outcomes(metrics, caller.model)
        self._failures = Failures(config, self.fleet.circuits, self.fleet, metrics, caller.clock)
        self._name = caller.name
        self._clock = caller.clock
        self._metrics = metrics
        self._tokenizer = tokenizer
        self._owner = owner
        self._pump_handle: asyncio.Handle | None = None

    def begin(self, live: Live) -> None:
        """It waits for a place."""
        asked = live.machine.asked
        self.live[asked.request_id] = live
        cost = queue_cost(len(asked.prompt_token_ids), asked.params)
        self.places.waiting.append(asked.tenant, live, cost, asked.priority)
        self.pairing.waiting_tokens += len(asked.prompt_token_ids)
        self._after(live, max(0.0, asked.deadline_s - self._clock()), DeadlinePassed())
        if asked.slo_ttft_s is not None:
            left_s = max(0.0, live.arrived_s + asked.slo_ttft_s - self._clock())
            live.timers.append(
                asyncio.get_running_loop().call_later(left_s, self._shed_if_waiting, live, asked.slo_ttft_s)
            )
        self._pump_soon()

    def _shed_if_waiting(self, live: Live, slo_s: float) -> None:
        """Its first token would come too late now, and nothing of it was computed."""
        if not live.dispatched:
            why = f"it has waited for a place or a server for {slo_s:g} s, after which its first token is of no use"
            self.drive(live, ShutDown(Shed(f"the request is not taken: {why} (x-slo-ttft-ms)", LATE_RETRY_S)))

    def check_room(self, tenant: str) -> None:
        """Raises Overloaded where no more may wait."""
        self.places.check_room(tenant, self.fleet.view().has_pair, self._clock())

    def check_reading(self, tenant: str) -> None:
        """The same before a text is read, of which others must find room for theirs."""
        self.places.check_reading(tenant, self.fleet.view().has_pair, self._clock())

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
        for live in self.pairing.to_move(self.live.values()):
            self.drive(live, TargetSeen())
        absent: set[str] = set()  # weights that no pair has now; "": there is none at all
        for live in tuple(self.replays):
            if live.machine.weights in absent or "" in absent:
                continue
            found = self.pairing.pick(live, self._clock())
            if isinstance(found, Pair):
                self.replays.remove(live)
                self.drive(live, PairPicked(found, self._clock()))
            elif self._no_pair_yet(live, found):
                absent.add(live.machine.weights)
        for live in self.pairing.next_ones():
            found = self.pairing.pick(live, self._clock())
            if isinstance(found, Pair):
                self.places.take(live.machine.asked.tenant, live)
                live.dispatched = True
                self.pairing.waiting_tokens -= len(live.machine.prompt_token_ids)
                self._metrics.queue_s.observe(self._clock() - live.arrived_s)
                live.timeline.append(TimelineEvent("queued", live.arrived_unix_s, time.time(), self._name))
                self.drive(live, PairPicked(found, self._clock()))
            elif self._no_pair_yet(live, found):
                break
            else:
                self.places.waiting.passed_over(live)

    def _no_pair_yet(self, live: Live, found: NoPair) -> bool:
        """Tells the request why it waits on, or ends. True if the others need not be asked for."""
        self.drive(live, NoPairFound(found))
        return found.reason in (NoPairReason.LOADING, NoPairReason.EMPTY_POOL)

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
        self._metrics.message_came(name)
        live = self.live.get(message.key.request_id)
        if isinstance(message, LegTokens):
            if live is None:
                self._metrics.stale.inc(len(message.token_ids))
            else:
                self._tokens_came(live, name, message)
        elif live is None:
            self.outcomes.timelines.add(message.key.request_id, name, message.timeline)
        else:
            self.pairing.leg_ended(live, name, message, self._clock())
            self._failures.leg_ended(live, name, message)
            self.drive(live, LegEnded(name, message))

    def _tokens_came(self, live: Live, name: str, message: LegTokens) -> None:
        """Nearly all that a router hears. Where an answer just goes on, no server is done with it, and nobody need be asked."""
        machine, event = live.machine, TokensCame(name, message)
        begins = machine.begins_to_answer(name, message.key)
        if begins and machine.pair is not None:
            self._failures.began_to_answer(machine.pair)
        if begins or message.finish is not None or machine.phase is not Phase.RUNNING:
            self.drive(live, event)
            return
        for instruction in machine.handle(event):
            self._do(live, instruction)
        if machine.phase is not Phase.RUNNING:
            self._pump_soon()
            self._settle(live)

    def role_changed(self, name: str) -> None:
        self._metrics.forget_circuits(name)

    def server_lost(self, name: str, incarnation: str, crashed: bool, reason: str) -> None:
        self._metrics.servers_lost.labels(server=name).inc()
        if crashed and (role := self.fleet.role_of(name)) is not None:
            self._failures.workers_died(name, role, incarnation)
        self._incarnation_ended(ServerLost(name, incarnation, crashed, reason))

    def server_emptied(self, name: str, incarnation: str, reason: str) -> None:
        """As planned: what it did not end for us, if anything, goes on elsewhere, and nothing counts as a loss."""
        self._incarnation_ended(ServerLost(name, incarnation, False, reason))

    def _incarnation_ended(self, event: ServerLost) -> None:
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
        self._settle(live)

    def _settle(self, live: Live) -> None:
        """What servers are done with is not under way any more."""
        if live.machine.phase is Phase.ENDED:
            return
        done = live.account.end([work for work in live.account.works if not live.machine.busy(work)])
        if done and self.places.waiting:
            self._pump_soon()  # another prompt of its call or tenant may go

    def _explain_wait(self, live: Live) -> None:
        """Lets the machine know what the request waits for, for its last words."""
        found = self.pairing.why_not(live, self._clock())
        if isinstance(found, NoPair):
            self.drive(live, NoPairFound(found))

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
            case ArmVerdictTimer(attempt, delay_s, prefix_no):
                self._after(live, delay_s, VerdictTimeout(attempt, prefix_no))
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
        self._metrics.local_prefills.inc(pair.local_prefill)
        self._metrics.attempts.labels(cause=attempted.cause).inc()
        stages = [Stage(pair.decode.name, Work.DECODE, attempted.choices, attempted.choices)]
        if not pair.moves:
            to_compute = max(1, attempted.prefill_tokens - pair.hit_tokens)
            stages.append(Stage(pair.prefill.name, Work.PREFILL, to_compute, attempted.choices, pair.pages))
            if attempted.again:
                self._metrics.replayed_tokens.inc(attempted.prefill_tokens)
        live.account.begin(*stages)
        self._failures.attempted(pair)
        self.pairing.attempted(live, pair, self._clock())
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
        spent = self._failures.replayed(live, need, len(self.live))
        if spent is not None:
            self.drive(live, ShutDown(spent))
        elif need.delay_s > 0:
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
                self._metrics.itl_s.observe((now_s - last_s) / count, count)
            live.heard_s[accepted.choice] = now_s
            self._metrics.completion_tokens.value += count
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
        # All tokens may be here before the request can be ended for want of room: some of its text is gone all the same.
        self._end(live, live.mailbox.overfull or live.finished())

    def _end(self, live: Live, end: Finished | DisaggError) -> None:
        machine = live.machine
        now_s = self._clock()
        for timer in live.timers:
            timer.cancel()
        live.account.end(Work)
        self.places.waiting.discard(live)
        if live in self.replays:
            self.replays.remove(live)
        if live.dispatched:
            self.places.leave(machine.asked.tenant, now_s)
        else:
            self.pairing.waiting_tokens -= len(machine.prompt_token_ids)
        del self.live[machine.request_id]
        self._failures.request_ended()
        outcome = self.outcomes.ended(live, end, now_s)
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
