"""One request's life, from the queue to its last token: events in, instructions out. No I/O, no clock, no text.

    waiting ──PairPicked──> running ──every choice finished──> closing ──every leg ended, or lingered──> ended
       ^                       │
       └── decode's verdict, or decode lost: replay ──┘          (any) ──deadline, client gone, refused──> ended

An *attempt* sends its legs to one pair, one leg per prefix (see `LegKey`). Rules that are not obvious:

- A mixed server does the work of both; what it says is decode's word, and it hears of the leg once.
- Only the decode server's verdict, or its loss, replays. When the prefill side fails, decode may hold all it needs: it is
  asked for its verdict by waiting, at most `verdict_s`, unless it has begun to speak.
- A replay takes all unfinished choices, grouped by equal outputs, and retires the whole attempt. Tokens accepted stay.
- Where the KV did not come over and the decode server is well, the next attempt prefers that server: what landed is in its
  prefix cache, and shortens the next transfer.
- Once a token is accepted, only servers with the weights that gave it may give the rest.
- What prefill gave back unstarted does not count as an attempt.
- Where decode drains, its legs are asked to stop, and when all have, the next attempt *moves* them: the server that has the KV
  takes prefill's part in it, and the last token that it said that of the first token. It does not count as an attempt.
- A request that was present when two incarnations of workers died, or that they failed, is poison: it is not tried a third time.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from disagg.messages.legs import AbortLeg, HandOver, Outcome, PeerRef, TimelineEvent
from disagg.router.acceptance import AcceptanceTable, Accepted, Dropped
from disagg.router.attempt import GIVEN_BACK_PAUSE_S, PEER_LOST_PAUSE_S, AttemptLeg, Bounds, Legs, begin_legs, pause_s
from disagg.router.crashes import Crashes
from disagg.router.events import (
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
    Send,
    ServerLost,
    ShutDown,
    StopFound,
    TargetSeen,
    TokensCame,
    VerdictTimeout,
)
from disagg.router.policies import RequestFacts
from disagg.router.requests import Asked, subject_of
from disagg.router.view import NoPairReason, Pair, Work
from disagg.types.errors import (
    Cancelled,
    DeadlineExceeded,
    DisaggError,
    InvalidRequest,
    NoCompatiblePeer,
    RequestFailed,
)
from disagg.types.ids import FinishReason, LegKey

_STAY_ON_DECODE = frozenset({Outcome.PEER_LOST, Outcome.BAD_TRANSFER})


class RequestMachine:
    """The state of one request. `handle` takes every event; what it returns is to be done in order."""

    def __init__(self, asked: Asked, bounds: Bounds) -> None:
        self.asked = asked
        self.request_id = asked.request_id
        self.prompt_token_ids = asked.prompt_token_ids
        self.params = asked.params
        self.phase = Phase.WAITING
        self.attempt = 0
        self.attempts_counted = 0
        self.pair: Pair | None = None
        self.cached_tokens = 0  # of the prompt, the most that any prefill leg took out of its cache
        self.timeline: list[TimelineEvent] = []
        self.table = AcceptanceTable(asked.params.n)
        self.error: DisaggError | None = None
        self._bounds = bounds
        self._legs = Legs(self.table)
        self._crashes = Crashes()
        self._landed_at: PeerRef | None = None  # the decode server that has part of the KV, from an attempt before
        self._cause = "first"
        self._waiting_for = "it was not dispatched yet"
        self._prefilled = False  # a prefill or mixed server was given the prompt
        self._given_back = False
        self._asked_to_stop = False  # decode, of all legs of the attempt

    # ---- what others may ask

    @property
    def movable(self) -> PeerRef | None:
        """The decode server that could be asked to hand the request over, and was not."""
        if self.phase is not Phase.RUNNING or self.pair is None or self._asked_to_stop:
            return None
        return self.pair.decode if self.pair.local_prefill or not self.pair.whole else None

    @property
    def answers(self) -> bool:
        """Decode has begun to speak of everything."""
        return self.phase is Phase.RUNNING and all(leg.decode_spoke for leg in self._legs)

    def begins_to_answer(self, server: str, key: LegKey) -> bool:
        """What this server says of this leg now are decode's first tokens of it."""
        leg = self._legs.get(key)
        return leg is not None and not leg.decode_spoke and self.pair is not None and server == self.pair.decode.name

    @property
    def stopping(self) -> str:
        """The server whose answer stands still, or soon will, until it goes on elsewhere; empty if none does."""
        if self.phase is not Phase.RUNNING or self.pair is None:
            return ""
        if self.pair.moves and not self.answers:
            return self.pair.prefill.name
        return self.pair.decode.name if self._asked_to_stop and self.answers else ""

    @property
    def weights(self) -> str:
        """Of which tokens were accepted: only they may give the rest. Empty while there are none."""
        return self.pair.weights if self.pair is not None and self.table.begun else ""

    @property
    def facts(self) -> RequestFacts:
        unfinished, prompt = self.table.unfinished(), len(self.prompt_token_ids)
        return RequestFacts(
            prefill_tokens=prompt + (outputs := max((len(self.table.token_ids(c)) for c in unfinished), default=0)),
            total_tokens=prompt + max(outputs + 1, self.params.max_tokens),
            choices=max(1, len(unfinished)),
            serial=self.asked.serial,
            weights=self.weights,
            draw=zlib.crc32(self.request_id.encode()),
            pages=self.asked.pages,
            turns=self.asked.turns,
            first=self.attempt == 0,
        )

    def busy(self, work: Work) -> bool:
        """Whoever does this work of the current attempt is still at it, as far as we know."""
        if self.phase not in (Phase.RUNNING, Phase.CLOSING):
            return False
        if work is Work.PREFILL:
            return any(not (leg.prefill_ended or leg.decode_spoke) for leg in self._legs)
        return any(not leg.decode_ended for leg in self._legs)

    def handle(self, event: Event) -> list[Instruction]:
        row = _ROWS.get((self.phase, type(event)))
        assert row is not None, f"{self.request_id}: no row for {type(event).__name__} while {self.phase.value}"
        return row(self, event)

    # ---- waiting

    def _dispatch(self, event: PairPicked) -> list[Instruction]:
        pair = event.pair
        self.phase = Phase.RUNNING
        self.attempt += 1
        self.attempts_counted += 1
        self.pair = pair
        self._given_back = self._asked_to_stop = False
        if self.params.max_tokens == 0:
            room = min(pair.max_total_tokens, self._bounds.max_total_tokens) - len(self.prompt_token_ids)
            self.params = replace(self.params, max_tokens=room, min_tokens=min(self.params.min_tokens, room))
        self.table.begin(self.attempt)
        self._crashes.begin(self.attempt)
        self._legs, sends = begin_legs(self.asked, self.params, pair, self.table, self.attempt, event.now_s)
        lengths = {start.key: len(start.token_ids) for _, start in sends}
        prefill_tokens = 0 if pair.moves else sum(lengths.values())
        choices = len(self.table.unfinished())
        begun = Attempted(self.attempt, pair, self._cause, prefill_tokens, choices, again=self._prefilled)
        self._prefilled = self._prefilled or not pair.local_prefill
        return [begun, *(Send(server, start) for server, start in sends)]

    def _no_pair(self, event: NoPairFound) -> list[Instruction]:
        no_pair = event.no_pair
        if no_pair.reason in (NoPairReason.NO_COMPATIBLE, NoPairReason.MISMATCH):
            return self._fail(NoCompatiblePeer(no_pair.reason.value))
        if no_pair.reason is NoPairReason.OTHER_WEIGHTS:
            return self._fail(RequestFailed(f"the answer cannot be continued: {no_pair.reason.value}"))
        if no_pair.reason is NoPairReason.TOO_LARGE and self.attempt == 0:
            prompt, asked = len(self.prompt_token_ids), max(1, self.params.max_tokens)
            name = self.asked.prompt_name
            return self._fail(
                InvalidRequest(
                    f"{subject_of(name)} has {prompt} tokens and {asked} are asked for, {prompt + asked} in all; "
                    f"the servers can hold {no_pair.limit_tokens} tokens",
                    name if prompt >= no_pair.limit_tokens else "max_tokens",
                )
            )
        self._waiting_for = no_pair.reason.value
        return []

    # ---- running

    def _tokens(self, event: TokensCame) -> list[Instruction]:
        message = event.message
        leg = self._legs.get(message.key)
        assert self.pair is not None
        if leg is None or message.choice not in leg.choices or event.server not in self._servers():
            self.table.counts.stale += len(message.token_ids)
            return []
        from_decode = event.server == self.pair.decode.name
        if from_decode:
            leg.decode_spoke = True
        result = self.table.accept(message.key.attempt, message)
        if isinstance(result, Accepted):
            instructions: list[Instruction] = [Emit(result)]
            return instructions + self._closing_if_finished() if result.finish is not None else instructions
        if result is Dropped.CONTRADICTION and from_decode:
            # What decode says next continues another text than the one that the client has.
            return self._replay("contradiction", f"{event.server} contradicted an accepted token")
        return []

    def _leg_ended(self, event: LegEnded) -> list[Instruction]:
        leg, end = self._note_end(event), event.end
        if leg is None:
            return self._late_end(event)
        assert self.pair is not None
        if end.outcome is Outcome.WORKER_LOST:
            ref = self.pair.decode if event.server == self.pair.decode.name else self.pair.prefill
            self._crashes.add(ref.name, ref.incarnation)
        if end.outcome is Outcome.GIVEN_BACK:
            self._given_back = True
        if event.server == self.pair.prefill.name and not self.pair.whole:
            if end.outcome is Outcome.REFUSED:
                return self._fail(InvalidRequest(end.reason))
            if end.outcome is Outcome.DONE:
                return []
            if end.outcome is Outcome.GIVEN_BACK:  # decode was never told of it, and has what it had
                return self._replay(end.outcome.value, f"{event.server}: {end.reason}", landed_at=self._landed_at)
            leg.prefill_failure = f"{event.server}: {end.reason}"
            return self._await_verdicts()
        if not self._legs.goes_on(leg):
            return []
        if end.outcome is Outcome.HANDED_OVER and self._asked_to_stop:
            leg.handed_over = True
            return self._move_if_stopped()
        if end.outcome is Outcome.REFUSED:
            return self._fail(InvalidRequest(end.reason))
        if end.outcome is Outcome.DONE:
            return self._replay("incomplete", f"{event.server} ended the leg before all its tokens were here")
        stays = end.outcome in _STAY_ON_DECODE or (self.pair.local_prefill and end.outcome is Outcome.GIVEN_BACK)
        landed_at = self.pair.decode if stays else None
        return self._replay(end.outcome.value, f"{event.server}: {end.reason}", landed_at=landed_at)

    def _target_seen(self, event: TargetSeen) -> list[Instruction]:
        source = self.movable
        if source is None:
            return []
        self._asked_to_stop = True
        return [Send(source.name, HandOver(leg.key)) for leg in self._legs if not leg.decode_ended]

    def _move_if_stopped(self) -> list[Instruction]:
        """Everything that is not finished stands still at decode: the next attempt goes on from there."""
        assert self.pair is not None
        if any(self._legs.goes_on(leg) and not leg.handed_over for leg in self._legs):
            return []
        if not all(self.table.token_ids(choice) for choice in self.table.unfinished()):
            return self._replay("incomplete", f"{self.pair.decode.name} handed over what had not begun")
        self.attempts_counted -= 1
        source = self.pair.decode
        return [*self._abort_all(), self._wait_again("moved", f"{source.name} drains", source=source)]

    def _server_lost(self, event: ServerLost) -> list[Instruction]:
        if late := self._late_loss(event):
            return late
        prefill_hit, decode_hit = self._note_loss(event)
        if decode_hit:
            return self._replay("decode_lost", f"{event.server}: {event.reason}")
        return self._await_verdicts() if prefill_hit else []

    def _await_verdicts(self) -> list[Instruction]:
        """A timer for each leg that needs one and has none."""
        owing = [leg for leg in self._legs if self._legs.verdict_owed(leg) and not leg.verdict_armed]
        for leg in owing:
            leg.verdict_armed = True
        return [ArmVerdictTimer(self.attempt, self._bounds.verdict_s, leg.key.prefix_no) for leg in owing]

    def _verdict_timeout(self, event: VerdictTimeout) -> list[Instruction]:
        leg = self._legs.get(LegKey(self.request_id, event.attempt, event.prefix_no))
        if leg is None or not self._legs.verdict_owed(leg):
            return []
        assert self.pair is not None
        wait_s = self._bounds.verdict_s
        reason = f"{leg.prefill_failure}; and {self.pair.decode.name} gave no verdict in {wait_s:g} s"
        return self._replay("no_verdict", reason)

    def _stop_found(self, event: StopFound) -> list[Instruction]:
        if not self.table.finish(event.choice, FinishReason.STOP):
            return []
        assert self.pair is not None
        instructions: list[Instruction] = []
        for leg in self._legs:
            if event.choice not in leg.choices or leg.decode_ended:
                continue
            if self._legs.goes_on(leg):
                instructions.append(Send(self.pair.decode.name, AbortLeg(leg.key, event.choice)))
            else:
                instructions.extend(self._legs.abort(leg))
        return instructions + self._closing_if_finished()

    def _replay(self, cause: str, reason: str, landed_at: PeerRef | None = None) -> list[Instruction]:
        """landed_at: the decode server whose prefix cache may have part of the KV."""
        assert self.pair is not None
        aborts = self._abort_all()
        delay_s = 0.0
        if cause == Outcome.PEER_LOST.value:
            # The same pair may look well still: one loss would take an attempt for each link that is dialled to the dead.
            delay_s = pause_s(PEER_LOST_PAUSE_S, self.attempts_counted - 1)
        if self._given_back:
            delay_s = pause_s(GIVEN_BACK_PAUSE_S, self.attempt - self.attempts_counted)
            self.attempts_counted -= 1
            cause = Outcome.GIVEN_BACK.value
        if poison := self._crashes.poison:
            return aborts + self._fail(RequestFailed(f"{poison}; at last: {reason}"))
        if self.attempts_counted >= self._bounds.max_attempts:
            message = f"the request was tried {self.attempts_counted} times and did not finish; at last: {reason}"
            return aborts + self._fail(RequestFailed(message))
        self._landed_at = landed_at
        return [*aborts, self._wait_again(cause, reason, delay_s)]

    def _late_end(self, event: LegEnded) -> list[Instruction]:
        """The other server's word had ended that attempt before this one came."""
        known = self._crashes.late_end(event.server, event.end)
        return self._end_if_poison(f"{event.server}: {event.end.reason}") if known else []

    def _late_loss(self, event: ServerLost) -> list[Instruction]:
        """As `_late_end`."""
        known = self._crashes.late_loss(event.server, event.incarnation, died=event.crashed)
        return self._end_if_poison(f"{event.server}: {event.reason}") if known else []

    def _end_if_poison(self, reason: str) -> list[Instruction]:
        poison = self._crashes.poison
        return [*self._abort_all(), *self._fail(RequestFailed(f"{poison}; at last: {reason}"))] if poison else []

    def _wait_again(self, cause: str, reason: str, delay_s: float = 0.0, source: PeerRef | None = None) -> Instruction:
        assert self.pair is not None
        self.phase = Phase.WAITING
        self._cause, self._waiting_for = cause, reason
        self.params = self.asked.params  # where as many are wanted as fit, the next pair says how many
        if source is not None:
            return NeedPair(None, frozenset((source.name,)), delay_s, cause, reason, source)
        avoid = frozenset(ref.name for ref in (self.pair.prefill, self.pair.decode) if ref != self._landed_at)
        return NeedPair(self._landed_at, avoid, delay_s, cause, reason)

    def _closing_if_finished(self) -> list[Instruction]:
        if self.table.unfinished():
            return self._move_if_stopped() if self._asked_to_stop else []
        self.phase = Phase.CLOSING
        return self._ended_if_closed() or [ArmLingerTimer(self.attempt, self._bounds.linger_s)]

    # ---- closing

    def _closing_leg_ended(self, event: LegEnded) -> list[Instruction]:
        self._note_end(event)
        return self._ended_if_closed()

    def _closing_server_lost(self, event: ServerLost) -> list[Instruction]:
        self._note_loss(event)
        return self._ended_if_closed()

    def _ended_if_closed(self) -> list[Instruction]:
        if any(not leg.prefill_ended or not leg.decode_ended for leg in self._legs):
            return []
        self.phase = Phase.ENDED
        return [Finish()]

    def _close_now(self, event: Event) -> list[Instruction]:
        """The tokens are all there: nothing that happens now can spoil the request."""
        if isinstance(event, LingerTimeout) and event.attempt != self.attempt:
            return []
        aborts = self._abort_all()
        self.phase = Phase.ENDED
        return [*aborts, Finish()]

    # ---- any

    def _deadline(self, event: DeadlinePassed) -> list[Instruction]:
        said = sum(len(self.table.token_ids(choice)) for choice in range(self.params.n))
        where = f"waiting: {self._waiting_for}" if self.phase is Phase.WAITING else f"running, with {said} tokens"
        return self._fail(DeadlineExceeded(f"the request's deadline of {self.asked.limit_s:g} s passed ({where})"))

    def _client_gone(self, event: ClientGone) -> list[Instruction]:
        return self._fail(Cancelled(event.reason))

    def _shut_down(self, event: ShutDown) -> list[Instruction]:
        return self._fail(event.error)

    def _ignore(self, event: Event) -> list[Instruction]:
        return []

    def _ignore_tokens(self, event: TokensCame) -> list[Instruction]:
        self.table.counts.stale += len(event.message.token_ids)
        return []

    def _closing_tokens(self, event: TokensCame) -> list[Instruction]:
        if event.message.key in self._legs and event.server in self._servers():
            self.table.accept(event.message.key.attempt, event.message)
            return []
        return self._ignore_tokens(event)

    def _end_while_waiting(self, event: LegEnded) -> list[Instruction]:
        self._record(event)
        return self._late_end(event)

    def _record_end(self, event: LegEnded) -> list[Instruction]:
        self._record(event)
        return []

    # ---- helpers

    def _servers(self) -> tuple[str, ...]:
        assert self.pair is not None
        return self.pair.servers

    def _fail(self, error: DisaggError) -> list[Instruction]:
        aborts = self._abort_all() if self.phase in (Phase.RUNNING, Phase.CLOSING) else []
        self.phase = Phase.ENDED
        self.error = error
        return [*aborts, Fail(error)]

    def _abort_all(self) -> list[Instruction]:
        aborts = [instruction for leg in self._legs for instruction in self._legs.abort(leg)]
        self._crashes.owe(self._legs.owed())
        self._legs = Legs(self.table)
        return aborts

    def _record(self, event: LegEnded) -> None:
        self.timeline.extend(replace(entry, name=f"{event.server}/{entry.name}") for entry in event.end.timeline)

    def _note_end(self, event: LegEnded) -> AttemptLeg | None:
        """Records a leg's last word; the leg, unless it is not ours or had ended."""
        self._record(event)
        leg = self._legs.note_end(event)
        if leg is not None and self.pair is not None and event.server == self.pair.prefill.name:
            self.cached_tokens = max(self.cached_tokens, min(event.end.cached_tokens, len(self.prompt_token_ids)))
        return leg

    def _note_loss(self, event: ServerLost) -> tuple[bool, bool]:
        """Whether the loss hit the prefill side, and the decode side."""
        prefill_hit, decode_hit = self._legs.note_loss(event)
        if event.crashed and (prefill_hit or decode_hit):
            self._crashes.add(event.server, event.incarnation)
        return prefill_hit, decode_hit


_M = RequestMachine
_ROWS: Mapping[tuple[Phase, type[Event]], Callable[..., list[Instruction]]] = {
    (Phase.WAITING, PairPicked): _M._dispatch,
    (Phase.WAITING, NoPairFound): _M._no_pair,
    (Phase.WAITING, TokensCame): _M._ignore_tokens,
    (Phase.WAITING, LegEnded): _M._end_while_waiting,
    (Phase.WAITING, ServerLost): _M._late_loss,
    (Phase.WAITING, StopFound): _M._ignore,
    (Phase.WAITING, VerdictTimeout): _M._ignore,
    (Phase.WAITING, LingerTimeout): _M._ignore,
    (Phase.WAITING, DeadlinePassed): _M._deadline,
    (Phase.WAITING, ClientGone): _M._client_gone,
    (Phase.WAITING, ShutDown): _M._shut_down,
    #
    (Phase.RUNNING, TokensCame): _M._tokens,
    (Phase.RUNNING, LegEnded): _M._leg_ended,
    (Phase.RUNNING, ServerLost): _M._server_lost,
    (Phase.RUNNING, StopFound): _M._stop_found,
    (Phase.RUNNING, TargetSeen): _M._target_seen,
    (Phase.RUNNING, VerdictTimeout): _M._verdict_timeout,
    (Phase.RUNNING, LingerTimeout): _M._ignore,
    (Phase.RUNNING, DeadlinePassed): _M._deadline,
    (Phase.RUNNING, ClientGone): _M._client_gone,
    (Phase.RUNNING, ShutDown): _M._shut_down,
    #
    (Phase.CLOSING, TokensCame): _M._closing_tokens,
    (Phase.CLOSING, LegEnded): _M._closing_leg_ended,
    (Phase.CLOSING, ServerLost): _M._closing_server_lost,
    (Phase.CLOSING, StopFound): _M._ignore,
    (Phase.CLOSING, VerdictTimeout): _M._ignore,
    (Phase.CLOSING, LingerTimeout): _M._close_now,
    (Phase.CLOSING, DeadlinePassed): _M._close_now,
    (Phase.CLOSING, ClientGone): _M._client_gone,
    (Phase.CLOSING, ShutDown): _M._close_now,
    #
    (Phase.ENDED, TokensCame): _M._ignore_tokens,
    (Phase.ENDED, LegEnded): _M._record_end,
    (Phase.ENDED, ServerLost): _M._ignore,
    (Phase.ENDED, StopFound): _M._ignore,
    (Phase.ENDED, VerdictTimeout): _M._ignore,
    (Phase.ENDED, LingerTimeout): _M._ignore,
    (Phase.ENDED, DeadlinePassed): _M._ignore,
    (Phase.ENDED, ClientGone): _M._ignore,
    (Phase.ENDED, ShutDown): _M._ignore,
}
