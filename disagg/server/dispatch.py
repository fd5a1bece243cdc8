"""Between an engine and the world: what happens goes into the engine, and what it returns is done.

    routers, links, workers ── what happens ──> engine ── instructions ──> routers, links, workers

Whatever stands at the three sides is a `Protocol` here: a server's sockets, or a simulation of them. Decides nothing about
legs, pages or pieces. Tokens go out once a step; a link or a router hears all that one event gave at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from disagg.engine.data_parallel import AnyEngine
from disagg.engine.engine import Engine
from disagg.engine.instructions import (
    DialLink,
    DropLink,
    ForgetLink,
    Instruction,
    PublishKv,
    ToLink,
    ToRouter,
    ToStore,
    ToTransfer,
    ToWorkers,
)
from disagg.engine.now import Now
from disagg.messages.heads import SliceError
from disagg.messages.legs import (
    AbortLeg,
    Drain,
    HandOver,
    KvEvents,
    LegEnd,
    Outcome,
    PeerRef,
    PodGone,
    RouterMessage,
    ServerMessage,
    SetRole,
    StartLeg,
    Tier,
)
from disagg.messages.link import LinkHello, LinkMessage
from disagg.messages.plan import StepResult, WorkerPlan
from disagg.messages.tiers import PartsRead, PartsWritten, TierCommand, TierEvent
from disagg.messages.transfer import TransferCommand, TransferEvent
from disagg.offload.instructions import StoreCommand, StoreEvent
from disagg.server.leg_spans import LegSpans
from disagg.server.recorder import Unrecorded
from disagg.types.errors import ProtocolError
from disagg.types.ids import LegKey, Role

logger = logging.getLogger(__name__)


class Workers(Protocol):
    """Of one incarnation."""

    def publish(self, plan: WorkerPlan) -> None:
        """To every rank."""

    def send(self, rank: int, messages: Sequence[TransferCommand | TierCommand]) -> None:
        """To the transfer and offload threads of one."""


class Routers(Protocol):
    def tell(self, router: int, message: ServerMessage) -> None: ...

    def publish(self, tier: Tier, events: KvEvents) -> None:
        """To all of them."""

    def flush(self) -> None:
        """What was told goes out."""


class LinkPort(Protocol):
    def send(self, number: int, message: LinkMessage) -> None: ...

    def flush(self) -> None:
        """What was sent goes out."""

    def dial(self, peer: PeerRef) -> None: ...

    def drop(self, number: int, reason: str) -> None:
        """`Dispatch.link_down` follows."""

    def pod_gone(self, pod: str) -> None:
        """`Dispatch.link_down` and `link_gone` follow, of peers in that pod."""

    def forget(self, number: int) -> None:
        """Whether the peer of this lost link exits is nobody's concern."""


class StorePort(Protocol):
    """What an engine has done in storage. Of one incarnation; answers are events (`Dispatch.store_event`)."""

    def do(self, command: StoreCommand) -> None: ...

    def rank_report(self, rank: int, report: PartsWritten | PartsRead) -> None:
        """Before the engine hears of it."""


class Dispatch:
    """See the module. `routers` and `links` are set before anything happens; an engine comes and goes with its workers."""

    routers: Routers
    links: LinkPort
    recorder = Unrecorded()
    leg_spans: LegSpans | None = None  # where legs are traced

    def __init__(
        self,
        name: str,
        tp: int,
        clock: Callable[[], Now],
        why_not: Callable[[StartLeg], str],
        asked_to_drain: Callable[[bool], None] = lambda on: None,
        asked_for_role: Callable[[Role], None] = lambda role: None,
        wake_at: Callable[[float], None] = lambda at_s: None,
    ) -> None:
        """why_not: why a leg cannot begin here now, after the name; empty if it can. wake_at: asks for `wake` at a moment of the
        clock; only the last one counts."""
        self._name = name
        self._tp = tp
        self._clock = clock
        self._why_not = why_not
        self._asked_to_drain = asked_to_drain
        self._asked_for_role = asked_for_role
        self._wake_at = wake_at
        self.engine: AnyEngine | None = None
        self._workers: Workers | None = None
        self._store: StorePort | None = None
        self._doing = False
        self._lease_ends: list[tuple[int, str]] = []  # that came while something was done: routers, and why

    def attach(self, engine: AnyEngine, workers: Workers, store: StorePort | None = None) -> None:
        """An incarnation's workers are up. store: of an engine that has storage."""
        self.engine, self._workers, self._store = engine, workers, store
        self.recorder.up(engine, self._clock())

    def detach(self, reason: str, outcome: Outcome = Outcome.WORKER_LOST) -> AnyEngine | None:
        """The workers are gone. Ends every leg with `outcome`, does nothing else that the engine wants, and returns it."""
        engine, self.engine, self._workers, self._store = self.engine, None, None, None
        if engine is not None:
            for instruction in engine.end_all(outcome, reason):
                if isinstance(instruction, ToRouter):
                    self._tell(instruction)
        self.recorder.down()
        if self.leg_spans is not None:
            self.leg_spans.down()
        return engine

    @property
    def _linked(self) -> Engine | None:
        """What hears of links, if anything does."""
        return None if self.engine is None else self.engine.linked

    # ---- what happens

    def router_message(self, router: int, message: RouterMessage) -> None:
        match message:
            case StartLeg():
                if why := self._why_not(message):
                    # Not begun, so given back: it costs the request no attempt.
                    self.routers.tell(router, LegEnd(message.key, Outcome.GIVEN_BACK, f"{self._name} {why}"))
                    self.routers.flush()
                elif self.engine is not None:
                    logger.info("leg begins: %d tokens", len(message.token_ids), extra=_log_of(message.key))
                    self.recorder.started(message, self._clock())
                    if self.leg_spans is not None:
                        self.leg_spans.started(message, self._clock())
                    self._do(self.engine.start_leg(router, message, self._clock()))
            case AbortLeg():
                if self.engine is not None:
                    self._do(self.engine.abort_leg(message))
            case HandOver():
                if self.engine is not None:
                    self._do(self.engine.hand_over(message.key))
            case Drain():
                self._asked_to_drain(message.on)
            case SetRole():
                self._asked_for_role(message.role)
            case PodGone():
                self.links.pod_gone(message.pod)

    def lease_end(self, router: int, reason: str) -> None:
        """Also while a router is told something that is too much for it: then what is being done goes first."""
        if self._doing:
            self._lease_ends.append((router, reason))
        elif self.engine is not None:
            self._do(self.engine.end_router(router, reason))

    def step_done(self, result: StepResult) -> None:
        if self.engine is not None:
            self.recorder.computed(result)
            self._do(self.engine.step_done(result, self._clock()), step=True)

    def transfer_event(self, rank: int, message: TransferEvent | TierEvent) -> None:
        if self.engine is None:
            return
        if not isinstance(message, TierEvent):
            self._do(self.engine.transfer_event(rank, message, self._clock()))
            return
        if self._store is not None and isinstance(message, PartsWritten | PartsRead):
            self._store.rank_report(rank, message)
        self._do(self.engine.tier_event(rank, message, self._clock()))

    def store_event(self, message: StoreEvent) -> None:
        if self.engine is not None:
            self._do(self.engine.store_event(message, self._clock()))

    def link_up(self, number: int, peer: LinkHello, *, dialled: bool) -> None:
        engine = self._linked
        if engine is None:
            return
        try:
            self._do(engine.link_up(number, peer, self._clock(), dialled=dialled))
        except SliceError as error:
            logger.error("%s and %s cannot exchange KV: %s", self._name, peer.name, error)
            self.links.drop(number, str(error))
            self._do(engine.dial_failed(peer.name, peer.incarnation, str(error)))

    def link_message(self, number: int, message: LinkMessage) -> None:
        try:
            if (engine := self._linked) is not None:
                self._do(engine.link_message(number, message, self._clock()))
        except ProtocolError as error:
            logger.error("link %d: %s", number, error)
            self.links.drop(number, str(error))

    def link_down(self, number: int, gone: bool, reason: str) -> None:
        if (engine := self._linked) is not None:
            self._do(engine.link_down(number, gone, reason))

    def link_gone(self, number: int) -> None:
        """A lost link's peer has exited."""
        if (engine := self._linked) is not None:
            engine.peer_gone(number)

    def dial_failed(self, peer: PeerRef, reason: str) -> None:
        logger.warning("no link to %s: %s", peer.name, reason)
        if (engine := self._linked) is not None:
            self._do(engine.dial_failed(peer.name, peer.incarnation, reason))

    def tick(self) -> None:
        """Time has passed."""
        self.recorder.tick(self._clock())
        if self.engine is not None:
            self._do(self.engine.tick(self._clock()))

    def wake(self) -> None:
        """A plan that was held is due, unless it has been sent."""
        self._do([])

    def give_back(self, reason: str) -> None:
        """The server drains: prompts that wait here need not."""
        if self.engine is not None:
            self._do(self.engine.give_back(reason))
        self.routers.flush()

    def drain(self, reason: str) -> None:
        """The server shuts down: what is left is given back."""
        if self.engine is not None:
            self._do(self.engine.end_all(Outcome.DRAINED, reason))
        self.routers.flush()

    # ---- what the engine wants done

    def _do(self, instructions: list[Instruction], step: bool = False) -> None:
        """Carry out what the engine returned, then let it schedule; tokens go out once a step."""
        engine, workers = self.engine, self._workers
        if engine is None or workers is None:
            return
        outer, self._doing = self._doing, True
        try:
            drops = self._carry_out([*instructions, *engine.schedule(self._clock())], workers)
            if step or not engine.computing:
                self.routers.flush()
        finally:
            self._doing = outer
        if engine.due_s is not None:
            self._wake_at(engine.due_s)
        for drop in drops:
            self.links.drop(drop.link, drop.reason)
        while self._lease_ends and not self._doing:
            self.lease_end(*self._lease_ends.pop(0))

    def _carry_out(self, instructions: list[Instruction], workers: Workers) -> list[DropLink]:
        """In their order. Links that are to be dropped when all is done."""
        commands: dict[int, list[TransferCommand | TierCommand]] = {}
        asked: list[StoreCommand] = []
        drops: list[DropLink] = []
        for instruction in instructions:
            match instruction:
                case ToWorkers():
                    workers.publish(instruction.plan)
                    self.recorder.planned(instruction.plan, self._clock())
                case ToRouter():
                    self._tell(instruction)
                case ToTransfer():
                    ranks = range(self._tp) if instruction.rank is None else (instruction.rank,)
                    for rank in ranks:
                        commands.setdefault(rank, []).append(instruction.message)
                case ToStore():
                    asked.append(instruction.command)
                case ToLink():
                    self.links.send(instruction.link, instruction.message)
                case PublishKv():
                    self.routers.publish(instruction.tier, instruction.events)
                case DialLink():
                    self.links.dial(instruction.peer)
                case DropLink():
                    drops.append(instruction)
                case ForgetLink():
                    self.links.forget(instruction.link)
        for rank, messages in commands.items():
            workers.send(rank, messages)
        if self._store is not None:
            for command in asked:
                self._store.do(command)
        self.links.flush()
        return drops

    def _tell(self, instruction: ToRouter) -> None:
        message = instruction.message
        if isinstance(message, LegEnd):
            done = message.outcome in (Outcome.DONE, Outcome.ABORTED, Outcome.HANDED_OVER)
            why = f"{message.outcome.value}: {message.reason}" if message.reason else message.outcome.value
            logger.log(logging.INFO if done else logging.WARNING, "leg ended: %s", why, extra=_log_of(message.key))
        self.recorder.told(message, self._clock())
        if self.leg_spans is not None:
            self.leg_spans.told(message, self._clock())
        self.routers.tell(instruction.router, message)


def _log_of(key: LegKey) -> dict[str, object]:
    """What ties a log line to its request, in every process under the same names."""
    return {"request_id": key.request_id, "attempt": key.attempt, "trunk": key.prefix_no}
