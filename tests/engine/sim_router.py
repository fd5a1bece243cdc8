"""The router of the simulated world: it starts legs, joins what servers answer, and replays what is lost."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from disagg.messages.legs import AbortLeg, HandOver, LegEnd, LegTokens, Outcome, StartLeg
from disagg.types.ids import FinishReason, LegKey
from disagg.types.sampling import SamplingParams
from tests.engine.mixed_role import NOBODY
from tests.engine.sim_server import Server

if TYPE_CHECKING:
    from tests.engine.sim import World

STALL_S = 8.0  # its patience where prefill failed or a dispatch was lost
MAX_ATTEMPTS = 40  # faults are bounded, so attempts are, but for those that this world itself costs: more is a livelock


@dataclass
class Request:
    """What a router remembers of a request."""

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    attempt: int = 0
    credited: int = (
        0  # attempts that may have been lost as this world restarted workers, which is no fault of its profile
    )
    moves: int = 0  # attempts that went on elsewhere, with all of their KV
    asked: int = 0  # the attempt that decode was asked to hand over
    handed_over: set[LegKey] = field(default_factory=set)
    accepted: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, FinishReason | None] = field(default_factory=dict)
    held: dict[int, dict[int, tuple[int, FinishReason | None]]] = field(default_factory=dict)
    legs: dict[LegKey, tuple[int, ...]] = field(default_factory=dict)  # of this attempt -> choices
    local: bool = False  # its attempt is a decode server's alone
    given_back: int = 0  # attempts, by decode servers that were to compute too much
    answering: dict[LegKey, Server] = field(default_factory=dict)  # who says the last token, of every attempt
    decode_next: dict[tuple[LegKey, int], int] = field(default_factory=dict)
    pair: tuple[Server, Server] | None = None
    pair_incarnations: tuple[str, str] = ("", "")
    stalled_since_s: float | None = None
    done_s: float | None = None
    lingered: bool = False
    aborted: bool = False
    dropped: set[int] = field(default_factory=set)
    abort_at: int | None = None  # simulated step; until the request arrives: steps after that
    after: Request | None = None  # that it goes on from: it arrives when that one is answered

    @property
    def done(self) -> bool:
        return self.aborted or len(self.finished) == self.params.n


class Router:
    """cached_tokens: that legs had, as their ends say: of all tiers, and by tier. draining: a decode server, at most one."""

    def __init__(self, world: World, requests: list[Request]) -> None:
        self._world = world
        self.requests = requests
        self.arrivals = deque(requests)
        self.cached_tokens: Counter[str] = Counter()
        self.draining: Server | None = None

    @property
    def next_may_come(self) -> bool:
        return bool(self.arrivals) and (self.arrivals[0].after is None or self.arrivals[0].after.done)

    @property
    def done(self) -> bool:
        return not self.arrivals and all(request.done for request in self.requests)

    def _start(self, request: Request, source: Server | None = None) -> None:
        """The next attempt: one leg for each distinct prefix. source: who has the KV of the one before, and hands it over."""
        moves, request.attempt = request.attempt, request.attempt + 1
        assert request.attempt - request.credited < MAX_ATTEMPTS, f"{request.request_id} is tried for ever"
        request.stalled_since_s = None
        request.legs, request.held = {}, {}
        taking = [server for server in self._world.decodes if server is not self.draining]
        prefill, decode = source or self._world.rng.choice(self._world.prefills), self._world.rng.choice(taking)
        if self._world.mixed and source is None and self._world.rng.random() < 0.5:
            prefill = decode = self._world.rng.choice(self._world.servers)
        request.local = (
            not self._world.mixed and request.attempt == request.params.n == 1 and self._world.local_rng.random() < 0.2
        )
        if request.local:
            prefill = decode = self._world.local_rng.choice(taking)
        request.pair = (prefill, decode)
        request.pair_incarnations = (prefill.facts.incarnation, decode.facts.incarnation)
        groups: dict[tuple[int, ...], list[int]] = {}
        for choice in range(request.params.n):
            if choice not in request.finished:
                groups.setdefault(tuple(request.accepted.get(choice, ())), []).append(choice)
        for prefix_no, (outputs, choices) in enumerate(groups.items()):
            key = LegKey(request.request_id, request.attempt, prefix_no)
            request.legs[key] = tuple(choices)
            request.answering[key] = decode
            whole = ((decode, decode.ref if request.local else NOBODY),)
            pair = ((prefill, decode.ref), (decode, prefill.ref))
            for server, peer in whole if prefill is decode else pair:
                start = StartLeg(
                    key,
                    request.prompt + (outputs if source is None else outputs[:-1]),
                    len(request.prompt),
                    request.params,
                    tuple(choices),
                    peer,
                    1e9,
                    tenant=request.request_id[-1] if self._world.many_tenants else "",
                    moves_attempt=moves if server is source else 0,
                    moved=source is not None and server is decode,
                    local_prefill=request.local,
                )
                if self._world.spend("lost_dispatches", 0.1):
                    request.stalled_since_s = self._world.now_s
                else:
                    server.from_router.append((server.facts.incarnation, start))

    def arrive(self) -> None:
        request = self.arrivals.popleft()
        if request.abort_at is not None:
            request.abort_at += self._world.steps
        self._start(request)

    def _retire(self, request: Request) -> None:
        for key in request.legs:
            for server in request.pair or ():
                server.from_router.append((server.facts.incarnation, AbortLeg(key)))

    def _replay(self, request: Request) -> None:
        self._retire(request)
        self._start(request)

    def abort(self, request: Request) -> None:
        """A client goes away, or a stop string ends one choice."""
        open_choices = [c for c in range(request.params.n) if c not in request.finished]
        if len(open_choices) < 2 or self._world.rng.random() < 0.5:
            request.aborted = True
            self._retire(request)
            return
        request.abort_at = None
        choice = self._world.rng.choice(open_choices)
        request.finished[choice] = None
        request.dropped.add(choice)
        for key, choices in request.legs.items():
            if choice in choices and request.pair is not None:
                for server in request.pair:
                    server.from_router.append((server.facts.incarnation, AbortLeg(key, choice)))
        self._move_if_stopped(request)
        if self._world.rng.random() < 0.3:
            request.abort_at = self._world.steps + self._world.rng.randrange(100)

    def hear(self, server: Server) -> None:
        message = server.to_router.popleft()
        request = next(r for r in self.requests if r.request_id == message.key.request_id)
        if isinstance(message, LegTokens):
            self._tokens(server, request, message)
            return
        told = Counter(all=message.cached_tokens, host=message.host_tokens, storage=message.storage_tokens)
        assert told["host"] + told["storage"] <= told["all"], message
        self.cached_tokens += told
        if server in self._world.decodes:
            self.cached_tokens["host, by decode"] += message.host_tokens
        if message.key in request.legs:
            if server is request.answering[message.key]:
                if not request.done:
                    self._leg_ended(server, request, message)
            elif message.outcome is not Outcome.DONE and request.stalled_since_s is None:
                request.stalled_since_s = self._world.now_s

    def _tokens(self, server: Server, request: Request, message: LegTokens) -> None:
        if server is request.answering[message.key]:
            due = request.decode_next.get((message.key, message.choice), message.first_index)
            assert message.first_index == due, f"{message} came where index {due} was due"
            request.decode_next[message.key, message.choice] = due + len(message.token_ids)
        accepted = request.accepted.setdefault(message.choice, [])
        if request.aborted or message.choice in request.finished or message.key not in request.legs:
            for index, token in enumerate(message.token_ids, start=message.first_index):
                assert index >= len(accepted) or accepted[index] == token, "an accepted token was contradicted"
            return
        held = request.held.setdefault(message.choice, {})
        for index, token in enumerate(message.token_ids, start=message.first_index):
            last = index == message.first_index + len(message.token_ids) - 1
            if index < len(accepted):
                assert accepted[index] == token, "an accepted token was contradicted"
            else:
                held[index] = (token, message.finish if last else None)
        while len(accepted) in held and message.choice not in request.finished:
            token, finish = held.pop(len(accepted))
            accepted.append(token)
            if finish is not None:
                request.finished[message.choice] = finish
                self._move_if_stopped(request)  # what stands still may have waited for this choice alone

    def _move_if_stopped(self, request: Request) -> None:
        """Everything that has not finished was handed over: the next attempt goes on from there."""
        going_on = [key for key, choices in request.legs.items() if set(choices) - request.finished.keys()]
        if request.pair is not None and going_on and request.handed_over.issuperset(going_on):
            request.moves += 1
            self._start(request, source=request.pair[1])

    def _leg_ended(self, server: Server, request: Request, end: LegEnd) -> None:
        assert end.outcome is not Outcome.REFUSED, end
        if end.outcome is Outcome.DONE:
            for choice in request.legs[end.key]:
                assert choice in request.finished, f"decode says done of {end.key}; choice {choice} has not finished"
        elif end.outcome is Outcome.HANDED_OVER:
            request.handed_over.add(end.key)
            self._move_if_stopped(request)
        elif request.local and end.outcome is Outcome.GIVEN_BACK:
            assert "not cached any more" in end.reason
            request.given_back += 1
            self._replay(request)
        else:
            assert self._world.faults.any, f"an attempt was lost though nothing went wrong: {end}"
            if (
                "quarantined" in end.reason
            ):  # only the end of those workers brings the arena back: somebody restarts them
                for prefill in self._world.prefills:
                    self._world.lose_workers(prefill)
                for each in self.requests:
                    each.credited += not each.done
            self._replay(request)

    def drain(self) -> None:
        """One decode server at a time drains, and begins again when it is empty."""
        if self.draining is None and self._world.spend("drains", 0.01):
            self.draining = self._world.rng.choice(self._world.decodes)
        at = self.draining
        if at is None:
            return
        here = [r for r in self.requests if not r.done and r.pair is not None and r.pair[1] is at]
        for request in here:
            has_it = request.pair is not None and (request.pair[0] is not at or request.local)
            if request.asked != request.attempt and has_it:
                request.asked = request.attempt
                for key in request.legs:
                    at.from_router.append((request.pair_incarnations[1], HandOver(key)))
        if not here and at.engine.idle and not at.from_router:
            self.draining = None

    def look_around(self) -> None:
        """Lost incarnations, and patience."""
        for request in self.requests:
            stalled = request.stalled_since_s is not None and self._world.now_s - request.stalled_since_s > STALL_S
            if request.done and self._world.faults.any and not request.lingered:
                if request.done_s is None:
                    request.done_s = self._world.now_s
                elif (
                    self._world.now_s - request.done_s > STALL_S
                ):  # one server has lost it, so the other would wait for ever
                    request.lingered = True
                    self._retire(request)
            if request.done or request.pair is None:
                continue
            prefill, decode = request.pair
            if decode.facts.incarnation != request.pair_incarnations[1]:
                self._replay(request)
            elif prefill.facts.incarnation != request.pair_incarnations[0] and request.stalled_since_s is None:
                request.stalled_since_s = self._world.now_s
            elif stalled:
                self._replay(request)
