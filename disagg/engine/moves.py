"""Answers that go on elsewhere: the choices of a leg are stopped, kept, and sent to the decode server that a router picks.

    HandOver ────> every choice runs ──> none of them is planned ──> plans in flight have reported ──> LegEnd, KV is kept
    StartLeg ────> announced, granted, written as a prompt's KV is (engine/handoff/send) ──> complete: let go
    (moves_attempt)

A choice that stands still has n + 1 tokens and KV of n: what a prefill server has of a prompt of n tokens and its first token.
So whoever receives it knows no difference, and grants as it grants prompts. While it waits for that grant it holds pages here,
so two servers must not wait for each other: one that drains takes nothing, and should that change meanwhile, what is kept is
let go after some time, and computed again elsewhere.

A leg moves whole. One that is still being received, or of which a choice is parked or waits for a slot, goes on here until all
of its choices run. Knows legs, sequences and time; nothing of routers, links or pieces.
"""

from __future__ import annotations

from dataclasses import dataclass

from disagg.engine.choices import Choices
from disagg.engine.core import Core
from disagg.engine.handoff.send import Sender
from disagg.engine.legs import Leg, Stage
from disagg.engine.now import Now
from disagg.engine.sequences import Sequence, State
from disagg.messages.legs import Outcome
from disagg.scheduler.policies import Phase
from disagg.transfer.states import SendState
from disagg.types.ids import LegKey

KEEP_S = 10.0  # what was handed over and is not asked for
GRANT_S = 60.0  # what has been asked for and gets no pages there

Place = tuple[str, int, int]  # request, attempt that was handed over, choice


@dataclass(slots=True, eq=False)
class Kept:
    """A choice whose leg was handed over, with its pages, until another server asks for them or until_s has come."""

    sequence: Sequence
    until_s: float


class Moves(Stage):
    """See the module. Legs that move something pass through the sender before this."""

    def __init__(self, core: Core, choices: Choices, sender: Sender) -> None:
        self._legs = core.legs
        self._batch = core.batch
        self._counters = core.counters
        self._choices = choices
        self._sender = sender
        self._wanted: dict[LegKey, Leg] = {}  # legs to be handed over
        self._kept: dict[Place, Kept] = {}

    # ---- out of the batch

    def hand_over(self, leg: Leg) -> None:
        """A router wants it to go on elsewhere."""
        if not leg.ended and not leg.start.moves_attempt:
            self._wanted[leg.key] = leg

    def schedule(self, now: Now) -> None:
        for leg in list(self._wanted.values()):
            self._try(leg, now)

    def _try(self, leg: Leg, now: Now) -> None:
        going_on = [sequence for sequence in self._choices.sequences(leg.key) if not sequence.done]
        if not going_on or not all(s.state is State.RUNNING and s.phase is Phase.DECODE for s in going_on):
            return
        for sequence in going_on:
            sequence.stops = True
        if not all(map(self._batch.stands_still, going_on)):
            return
        for sequence in going_on:
            self._batch.hold(sequence)
            place = leg.key.request_id, leg.key.attempt, sequence.choice
            self._kept[place] = Kept(sequence, now.s + KEEP_S)
            self._counters.handed_over_tokens += sequence.computed
        del self._wanted[leg.key]
        self._choices.end(leg, now, Outcome.HANDED_OVER)

    # ---- to another server

    def start(self, leg: Leg, now: Now) -> None:
        """What it moves has been handed over, or it is given back."""
        start = leg.start
        if not start.moves_attempt:
            return
        places = [(leg.key.request_id, start.moves_attempt, choice) for choice in start.choices]
        kept = [self._kept.pop(place).sequence for place in places if place in self._kept]
        if len(kept) < len(places) or any(s.tokens[:-1] != list(start.token_ids) for s in kept):
            for sequence in kept:
                sequence.in_transfer = False
            self._legs.close(leg, Outcome.GIVEN_BACK, "what it was to move is not kept any more")
            return
        sent, *others = kept
        for sequence in others:  # the choices of a leg have the same tokens
            sequence.in_transfer = False
        self._sender.send_held(leg, sent)

    def close(self, leg: Leg, outcome: Outcome, reason: str) -> None:
        self._wanted.pop(leg.key, None)

    def tick(self, now: Now) -> None:
        for place, kept in list(self._kept.items()):
            if now.s > kept.until_s:
                del self._kept[place]
                kept.sequence.in_transfer = False
        for transfer in list(self._sender.transfers.values()):
            waits = transfer.session.state is SendState.WAITING and not transfer.leg.ended
            if waits and now.s - transfer.leg.received.s > GRANT_S:
                peer = transfer.leg.start.peer.name
                self._legs.close(transfer.leg, Outcome.GIVEN_BACK, f"{peer} had no pages for it in {GRANT_S:g} s")

    # ---- what others want to know

    @property
    def waiting(self) -> int:
        """Choices that are kept, and legs that move some."""
        return len(self._kept) + len(self._sender.transfers)

    def forget(self, leg: Leg) -> None:
        self._wanted.pop(leg.key, None)

    def dump(self) -> dict[str, object]:
        return {
            "to be handed over": [str(key) for key in self._wanted],
            "kept": [f"{request_id}/{attempt} choice {choice}" for request_id, attempt, choice in self._kept],
        }

    def check_integrity(self) -> None:
        for kept in self._kept.values():
            assert kept.sequence.in_transfer and kept.sequence.pages is not None
