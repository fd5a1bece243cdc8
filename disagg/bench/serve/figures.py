"""From when each token was heard to the figures that are reported. Pure.

    sent ──────────────> first chunk ──> chunk ──> ... ──> last chunk
     └───── TTFT ─────────┘└─── ITL ──┘└─ ITL ─┘             │
     └──────────────────── E2E ──────────────────────────────┘      TPOT = (E2E - TTFT) / (output tokens - 1)

As `vllm bench serve` counts: an ITL is the time between two chunks with a choice, however many tokens they carry (figures say
how many they do on average), and output tokens are those of `usage`. Percentiles are interpolated linearly, as numpy's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


class Answered(Struct, frozen=True):
    """A request that was answered to its end. Moments of the client's clock, in seconds. wanted: tokens in and out that were
    asked for.
    """

    sent_s: float
    first_s: float
    last_s: float
    gaps_s: Sequence[float]  # between chunks
    input_tokens: int
    output_tokens: int
    late_s: float = 0.0  # sent so much after its time
    wanted: tuple[int, int] | None = None

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.sent_s

    @property
    def e2e_s(self) -> float:
        return self.last_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """None of an answer of one token."""
        return (self.last_s - self.first_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None


class Failed(Struct, frozen=True):
    """A request that failed. cause: a few words that equal failures have in common; detail: what else there is to say."""

    sent_s: float
    ended_s: float
    cause: str
    detail: str = ""
    late_s: float = 0.0


Outcome = Answered | Failed


def percentile(values: Sequence[float], share: float) -> float:
    """Of at least one value, between the two that are nearest."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    if at == low or ordered[low] == ordered[high]:
        return float(ordered[low])
    return float(ordered[low] + (at - low) * (ordered[high] - ordered[low]))


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """mean, p50, p90, p99 and max; None where there is no value."""
    if not len(values):
        return dict.fromkeys(("mean", *SHARES, "max"))
    array = np.asarray(values, dtype=np.float64)
    shares = {name: percentile(array, share) for name, share in SHARES.items()}  # type: ignore[arg-type]
    return {"mean": float(array.mean()), **shares, "max": float(array.max())}


def times_of(answered: Sequence[Answered]) -> dict[str, Sequence[float]]:
    """Every TTFT, ITL, TPOT and E2E, by these names."""
    gaps = [np.asarray(each.gaps_s, dtype=np.float64) for each in answered]
    return {
        "ttft": [each.ttft_s for each in answered],
        "itl": np.concatenate(gaps) if gaps else [],  # type: ignore[dict-item]
        "tpot": [tpot_s for each in answered if (tpot_s := each.tpot_s) is not None],
        "e2e": [each.e2e_s for each in answered],
    }


def figures(outcomes: Sequence[Outcome], duration_s: float) -> dict[str, Any]:
    """Of one run. duration_s: from its first request to the end of its last."""
    answered = [each for each in outcomes if isinstance(each, Answered)]
    failed = [each for each in outcomes if isinstance(each, Failed)]
    output_tokens = sum(each.output_tokens for each in answered)
    input_tokens = sum(each.input_tokens for each in answered)
    chunks = sum(1 + len(each.gaps_s) for each in answered)
    rate = 1.0 / duration_s if duration_s > 0 else 0.0
    return {
        "completed": len(answered),
        "failed": len(failed),
        "failures": causes(failed),
        "duration_s": duration_s,
        "requests_per_s": len(answered) * rate,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "output_tokens_per_s": output_tokens * rate,
        "tokens_per_s": (input_tokens + output_tokens) * rate,
        "tokens_per_chunk": output_tokens / chunks if chunks else None,
        **{f"{name}_s": spread(values) for name, values in times_of(answered).items()},
    }


def causes(failed: Sequence[Failed]) -> dict[str, int]:
    """How often each, most frequent first."""
    return dict(Counter(each.cause for each in failed).most_common())


def duration_of(outcomes: Sequence[Outcome]) -> float:
    """From the first request sent to the end of the last."""
    if not outcomes:
        return 0.0
    ends = [each.last_s if isinstance(each, Answered) else each.ended_s for each in outcomes]
    return max(ends) - min(each.sent_s for each in outcomes)


class ClientLoad(Struct, frozen=True):
    """Whether this client kept up: how late it sent, how late its loop was with timers, and how much of a core it took."""

    send_late_s: Mapping[str, float | None]
    loop_late_s: Mapping[str, float | None]
    cpu_share: float

    def warnings(self, ttft_s: float | None, itl_s: float | None) -> list[str]:
        """ttft_s, itl_s: medians of what was measured. What would make a slow client look like a slow server."""
        out = []
        late, held = self.send_late_s["p99"] or 0.0, self.loop_late_s["p99"] or 0.0
        if late > max(LATE_S, LATE_SHARE * (ttft_s or 0.0)):
            out.append(f"1% of the requests were sent {1e3 * late:.1f} ms or more after their time")
        if held > max(HELD_S, HELD_SHARE * (itl_s or 0.0)):
            out.append(f"the client's loop was {1e3 * held:.1f} ms or more late for 1% of the time")
        if self.cpu_share > BUSY_SHARE:
            out.append(f"the client took {100 * self.cpu_share:.0f}% of a core")
        return out


LATE_S, LATE_SHARE = 0.005, 0.1
HELD_S, HELD_SHARE = 0.005, 0.2
BUSY_SHARE = 0.75
