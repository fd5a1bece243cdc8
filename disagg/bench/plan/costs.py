"""What a plan knows of servers: how long their steps take, what they hold, and how KV goes from one to another. Pure.

    seconds of a step = (fixed + token * tokens + attended * (tokens that they attend to)) * how far measured steps were off

The last factor is drawn from the measured ones, so that percentiles are those of a real machine and not of a formula.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

Phase = Literal["prefill", "decode"]

_TIME = re.compile(r"(\d+(?:\.\d+)?(?:e-?\d+)?|\.\d+)(ns|us|ms|s)")
_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
MOST_STEP_S = 3600.0


class StepCost(Struct, frozen=True):
    """Of one server. ratios: measured seconds by those of the line, as steps followed each other. steps: that were measured.
    most_decoding: sequences that decoded in the largest of them; 0 where that is not known.
    """

    fixed_s: float
    token_s: float
    attended_s: float
    ratios: tuple[float, ...] = (1.0,)
    steps: int = 0
    most_decoding: int = 0

    @property
    def ratio(self) -> float:
        """On average."""
        return sum(self.ratios) / len(self.ratios)

    def work_s(self, tokens: float, attended: float) -> float:
        """What so much adds to a step that takes place anyway."""
        return self.token_s * tokens + self.attended_s * attended

    def seconds(self, tokens: float, attended: float) -> float:
        """Of a step, on average."""
        return (self.fixed_s + self.work_s(tokens, attended)) * self.ratio


class Handoff(Struct, frozen=True):
    """From the end of a prompt's last step until its KV has landed: a line, and by how much measured ones were later."""

    fixed_s: float = 0.0
    token_s: float = 0.0
    later_s: tuple[float, ...] = (0.0,)

    def seconds(self, tokens: int, later_s: float) -> float:
        return max(0.0, self.fixed_s + self.token_s * tokens + later_s)


class ServerFacts(Struct, frozen=True):
    """Of a server of one TP size. kv_tokens: that its pool holds. tell_s: from a step's end until routers hear of its tokens."""

    tp: int
    cost: StepCost
    chunk_tokens: int = 8192
    kv_tokens: int = 1 << 40
    max_running: int = 256
    tell_s: float = 0.0


class Measured(Struct, frozen=True):
    """By TP size. mixed: measured ones; others are put together from the two phases. assumed: not of this model and machine.

    router_s: from the client to a server and back, beside all that servers do.
    """

    prefill: Mapping[int, ServerFacts]
    decode: Mapping[int, ServerFacts]
    mixed: Mapping[int, ServerFacts]
    handoff: Handoff
    source: str
    assumed: bool = False
    router_s: float = 0.0


class MixedFacts(Struct, frozen=True):
    """A mixed server: what prompts and what decoding add to its steps."""

    prefill: ServerFacts
    decode: ServerFacts
    measured: bool


def mixed_facts(measured: Measured) -> dict[int, MixedFacts]:
    """By TP size: as measured, else of the sizes at which both phases were."""
    found = {tp: MixedFacts(facts, facts, True) for tp, facts in measured.mixed.items()}
    for tp in measured.prefill.keys() & measured.decode.keys() - found.keys():
        found[tp] = MixedFacts(measured.prefill[tp], measured.decode[tp], False)
    return dict(sorted(found.items()))


# ---- as the command line says it


def parse_step(text: str) -> tuple[int, StepCost]:
    """(TP size, cost) of "tp=1,fixed=4ms,token=15us,attended=29ns". Raises ValueError."""
    given: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals or name not in ("tp", "fixed", "token", "attended") or name in given:
            raise ValueError(
                f'"{part.strip()}" is not one of tp, fixed, token, attended with a value, such as fixed=4ms'
            )
        given[name] = value
    if "token" not in given:
        raise ValueError(f'"{text}" does not say what a token costs, such as token=15us')
    tp = given.pop("tp", "1")
    if not (tp.isascii() and tp.isdecimal() and 1 <= int(tp) <= 64):
        raise ValueError(f'"tp={tp}" is no TP size from 1 to 64')
    times = {name: parse_time(value) for name, value in given.items()}
    if not times["token"] > 0:
        raise ValueError(f'"token={given["token"]}": a token takes more than no time')
    return int(tp), StepCost(times.get("fixed", 0.0), times["token"], times.get("attended", 0.0))


def parse_time(text: str) -> float:
    """Seconds of "4ms", "29ns", 0. Raises ValueError."""
    if text.strip() == "0":
        return 0.0
    found = _TIME.fullmatch(text.strip())
    if found is None or not (seconds := float(found[1]) * _UNITS[found[2]]) <= MOST_STEP_S:
        raise ValueError(f'"{text}" is no time up to an hour with a unit, such as 4ms, 15us or 29ns')
    return seconds


def given(prefill: Sequence[tuple[int, StepCost]], decode: Sequence[tuple[int, StepCost]]) -> Measured:
    """As the command line says."""
    return Measured(
        {tp: ServerFacts(tp, cost) for tp, cost in prefill},
        {tp: ServerFacts(tp, cost) for tp, cost in decode},
        {},
        Handoff(),
        "the command line",
    )


def with_limits(
    measured: Measured, limits: Mapping[str, int], router_s: float | None, handoff: Handoff | None
) -> Measured:
    """limits: fields of ServerFacts that are to count instead of what was measured, for all servers."""
    pools = {
        name: {tp: replace(facts, **limits) for tp, facts in getattr(measured, name).items()}
        for name in ("prefill", "decode", "mixed")
    }
    out = replace(measured, **pools)
    out = out if router_s is None else replace(out, router_s=router_s)
    return out if handoff is None else replace(out, handoff=handoff)


# Measured on H200s with a random model of Llama-3.1-8B's shape in bfloat16: docs/benchmarks.md, "A worker's steps on a GPU"
# (prompts of 2k to 32k tokens, 1 to 256 sequences of 1k to 32k) and "What a client of a GPU cluster sees". A pool of 80 GiB.
DOCUMENTED = Measured(
    {1: ServerFacts(1, StepCost(1.7e-3, 21.8e-6, 0.93e-9), 8192, 655_360, 256, 0.5e-3)},
    {1: ServerFacts(1, StepCost(3.96e-3, 15e-6, 29e-9), 8192, 655_360, 256, 0.5e-3)},
    {},
    Handoff(2.3e-3, 0.1e-6),
    "figures of an H200 and a model of Llama-3.1-8B's shape (docs/benchmarks.md)",
    assumed=True,
    router_s=4e-3,
)
