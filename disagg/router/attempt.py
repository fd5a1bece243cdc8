"""What one attempt of a request sends to its servers: a leg for each trunk (see `LegKey`), which both of them hear of; and what
bounds attempts. Pure.
"""

from __future__ import annotations

from msgspec import Struct

from disagg.messages.legs import StartLeg
from disagg.router.acceptance import AcceptanceTable
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
    """One trunk, and what the two servers have said of it. handed_over: decode has stopped it, and keeps its KV."""

    __slots__ = (
        "choices",
        "decode_ended",
        "decode_spoke",
        "handed_over",
        "key",
        "prefill_ended",
        "prefill_failed",
        "verdict_armed",
    )

    def __init__(self, key: LegKey, choices: tuple[int, ...]) -> None:
        self.key = key
        self.choices = choices
        self.prefill_ended = False
        self.prefill_failed = False
        self.decode_ended = False
        self.decode_spoke = False
        self.handed_over = False
        self.verdict_armed = False


def legs_of(
    asked: Asked, params: SamplingParams, pair: Pair, table: AcceptanceTable, attempt: int, now_s: float
) -> tuple[dict[LegKey, AttemptLeg], list[tuple[str, StartLeg]]]:
    """The legs, and what is sent to which server. A mixed server hears of each leg once.

    Of a request that moves, the KV of each choice's last token is not written yet: it is what a first token is elsewhere.
    """
    trunks: dict[tuple[int, ...], list[int]] = {}
    for choice in table.unfinished():
        trunks.setdefault(table.token_ids(choice), []).append(choice)
    legs, sends = {}, []
    for trunk, (outputs, choices) in enumerate(trunks.items()):
        key = LegKey(asked.request_id, attempt, trunk)
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
            )
            sends.append((server.name, start))
    return legs, sends
