"""One request's machine for tests: brought into a state, told events, and what its instructions say."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from disagg.messages.legs import AbortLeg, LegEnd, LegTokens, Outcome, PeerRef, StartLeg
from disagg.router import machine as r
from disagg.router.requests import Asked
from disagg.router.view import Pair
from disagg.types.ids import LegKey
from disagg.types.sampling import SamplingParams

PROMPT = (1, 2, 3)


def pair(prefill: str = "p0", decode: str = "d0", weights: str = "w") -> Pair:
    refs = (PeerRef(name, f"{name}:1", f"{name}-i") for name in (prefill, decode))
    return Pair(*refs, max_total_tokens=100, weights=weights)


def machine(n: int = 1, max_tokens: int = 8, **changes: Any) -> r.RequestMachine:
    params = SamplingParams(max_tokens=max_tokens, n=n)
    asked = Asked(
        request_id="r", prompt_token_ids=PROMPT, params=params, cache_salt="s", deadline_s=100.0, limit_s=60.0
    )
    bounds = {"max_total_tokens": 90, "max_attempts": 3, "verdict_s": 10.0, "linger_s": 0.2}
    return r.RequestMachine(asked, r.Bounds(**{**bounds, **changes}))


def running(n: int = 1, **changes: Any) -> r.RequestMachine:
    made = machine(n, **changes)
    made.handle(r.PairPicked(pair(), 40.0))
    return made


def tokens(m: r.RequestMachine, server: str, choice: int, first: int, *ids: int, **more: Any) -> list[r.Instruction]:
    prefix_no = more.pop("prefix_no", 0)
    attempt = more.pop("attempt", m.attempt)
    return m.handle(r.TokensCame(server, LegTokens(LegKey("r", attempt, prefix_no), choice, first, ids, (), **more)))


def ended(
    m: r.RequestMachine, server: str, outcome: Outcome = Outcome.DONE, prefix_no: int = 0, cached: int = 2
) -> list[r.Instruction]:
    return m.handle(r.LegEnded(server, LegEnd(LegKey("r", m.attempt, prefix_no), outcome, "why", (), cached)))


def lost(m: r.RequestMachine, server: str, crashed: bool = False) -> list[r.Instruction]:
    return m.handle(r.ServerLost(server, f"{server}-i", crashed, "gone"))


def aborts(instructions: list[r.Instruction]) -> list[tuple[str, int, int | None]]:
    sends = [i for i in instructions if isinstance(i, r.Send) and isinstance(i.message, AbortLeg)]
    return [(s.server, s.message.key.prefix_no, s.message.choice) for s in sends if isinstance(s.message, AbortLeg)]


def starts(instructions: list[r.Instruction]) -> list[tuple[str, StartLeg]]:
    return [(i.server, i.message) for i in instructions if isinstance(i, r.Send) and isinstance(i.message, StartLeg)]


def need(instructions: list[r.Instruction]) -> r.NeedPair:
    [found] = [i for i in instructions if isinstance(i, r.NeedPair)]
    return found


def failure(instructions: list[r.Instruction]) -> Exception:
    [found] = [i for i in instructions if isinstance(i, r.Fail)]
    return found.error


def moving(m: r.RequestMachine) -> list[tuple[str, StartLeg]]:
    return starts(m.handle(r.PairPicked(replace(pair("d0", "d1"), moves=True), 41.0)))
