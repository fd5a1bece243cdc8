"""What one attempt of a request sends to its servers: a leg for each prefix (see `LegKey`), which both of them hear of; and what
bounds attempts. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec import Struct

from disagg.messages.legs import AbortLeg, StartLeg
from disagg.router.acceptance import AcceptanceTable
from disagg.router.crashes import Owed
from disagg.router.events import Instruction, LegEnded, Send, ServerLost
from disagg.router.requests import Asked
from disagg.router.view import Pair
from disagg.types.ids import LegKey
from disagg.types.sampling import SamplingParams

GIVEN_BACK_PAUSE_S = 0.05  # doubled each time, up to:
PEER_LOST_PAUSE_S = (
    0.5  # doubled each time: whoever broke a link learns meanwhile that its workers are lost, and says so
)
MAX_PAUSE_S = 1.0


class Bounds(Struct, frozen=True, kw_only=True):
    """The same for all requests of a router. max_total_tokens: the model's context. verdict_s: for decode's verdict once
    prefill has failed. linger_s: for the servers' last words once all tokens are there.
    """

    max_total_tokens: int
    max_attempts: int
    verdict_s: float
    linger_s: float


def pause_s(first_s: float, before: int) -> float:
    """Before the next attempt; before: how many had to wait already."""
    return min(MAX_PAUSE_S, first_s * 2.0 ** min(10, before))


class AttemptLeg:
    """One leg, and what the two servers have said of it. handed_over: decode has stopped it, and keeps its KV."""

    __slots__ = (
        "choices",
        "decode_ended",
        "decode_spoke",
        "handed_over",
        "key",
        "prefill_ended",
        "prefill_failure",
        "verdict_armed",
    )

    def __init__(self, key: LegKey, choices: tuple[int, ...]) -> None:
        self.key = key
        self.choices = choices
        self.prefill_ended = False
        self.prefill_failure = ""  # what was said of it, once it has failed
        self.decode_ended = False
        self.decode_spoke = False
        self.handed_over = False
        self.verdict_armed = False


class Legs:
    """The legs of one attempt, and what the pair that it was sent to still owes of them. Empty between attempts."""

    __slots__ = ("_legs", "_pair", "_table")

    def __init__(
        self, table: AcceptanceTable, pair: Pair | None = None, legs: Mapping[LegKey, AttemptLeg] | None = None
    ) -> None:
        self._table = table
        self._pair = pair
        self._legs = dict(legs or {})

    def __iter__(self) -> Iterator[AttemptLeg]:
        return iter(self._legs.values())

    def __contains__(self, key: LegKey) -> bool:
        return key in self._legs

    def get(self, key: LegKey) -> AttemptLeg | None:
        return self._legs.get(key)

    def goes_on(self, leg: AttemptLeg) -> bool:
        return any(self._table.finished(choice) is None for choice in leg.choices)

    def verdict_owed(self, leg: AttemptLeg) -> bool:
        """Prefill has failed, and whether decode holds all it needs is for decode to say."""
        return bool(leg.prefill_failure) and not (leg.decode_spoke or leg.decode_ended) and self.goes_on(leg)

    def abort(self, leg: AttemptLeg) -> list[Instruction]:
        """Ends the leg on its servers, as far as they have not said its end. The answer may still come, or not."""
        assert self._pair is not None
        sides = zip(
            self._pair.servers, (leg.prefill_ended, leg.decode_ended), strict=False
        )  # a mixed one ends both at once
        return [Send(name, AbortLeg(leg.key)) for name, ended in sides if not ended]

    def owed(self) -> set[Owed]:
        """Ends that have not been heard: of which leg, by a server's name and incarnation."""
        if self._pair is None:
            return set()
        prefill, decode = self._pair.prefill, self._pair.decode
        sides = [(leg, prefill) for leg in self if not leg.prefill_ended]
        sides += [(leg, decode) for leg in self if not leg.decode_ended]
        return {(leg.key, ref.name, ref.incarnation) for leg, ref in sides}

    def note_end(self, event: LegEnded) -> AttemptLeg | None:
        """Marks a side's end; the leg, unless it is not ours or had ended there."""
        leg = self._legs.get(event.end.key)
        if leg is None or self._pair is None:
            return None
        prefill, decode = event.server == self._pair.prefill.name, event.server == self._pair.decode.name
        if not prefill and not decode:
            return None
        known = leg.prefill_ended if prefill else leg.decode_ended
        leg.prefill_ended |= prefill
        leg.decode_ended |= decode
        return None if known else leg

    def note_loss(self, event: ServerLost) -> tuple[bool, bool]:
        """Marks what the lost incarnation owed; whether that hit the prefill side, and the decode side."""
        prefill_hit = decode_hit = False
        if self._pair is None:
            return prefill_hit, decode_hit
        lost = (event.server, event.incarnation)
        for leg in self._legs.values():
            if lost == (self._pair.prefill.name, self._pair.prefill.incarnation) and not leg.prefill_ended:
                leg.prefill_ended = prefill_hit = True
                leg.prefill_failure = f"{event.server}: {event.reason}"
            if lost == (self._pair.decode.name, self._pair.decode.incarnation) and not leg.decode_ended:
                leg.decode_ended = True
                decode_hit = decode_hit or self.goes_on(leg)
        return prefill_hit, decode_hit


def begin_legs(
    asked: Asked, params: SamplingParams, pair: Pair, table: AcceptanceTable, attempt: int, now_s: float
) -> tuple[Legs, list[tuple[str, StartLeg]]]:
    """The legs, and what is sent to which server. A mixed server hears of each leg once.

    Of a request that moves, the KV of each choice's last token is not written yet: it is what a first token is elsewhere.
    """
    prefixes: dict[tuple[int, ...], list[int]] = {}
    for choice in table.unfinished():
        prefixes.setdefault(table.token_ids(choice), []).append(choice)
    legs, sends = {}, []
    for prefix_no, (outputs, choices) in enumerate(prefixes.items()):
        key = LegKey(asked.request_id, attempt, prefix_no)
        legs[key] = AttemptLeg(key, tuple(choices))
        for server, peer in ((pair.prefill, pair.decode), (pair.decode, pair.prefill))[: len(pair.servers)]:
            start = StartLeg(
                key=key,
                token_ids=asked.prompt_token_ids + (outputs[:-1] if pair.moves else outputs),
                num_prompt=len(asked.prompt_token_ids),
                params=params,
                choices=tuple(choices),
                peer=peer,
                deadline_s=max(0.001, asked.deadline_s - now_s),
                cache_salt=asked.cache_salt,
                incarnation=server.incarnation,
                tenant=asked.tenant,
                priority=asked.priority,
                traceparent=asked.trace.traceparent if asked.trace is not None else "",
                moves_attempt=attempt - 1 if pair.moves and server is pair.prefill else 0,
                moved=pair.moves and server is pair.decode,
                local_prefill=pair.local_prefill,
            )
            sends.append((server.name, start))
    return Legs(table, pair, legs), sends
