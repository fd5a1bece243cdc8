"""When requests are sent: moments in seconds from the start of a run. Pure: randomness is an argument.

open loop     the server's pace does not matter: Poisson, gamma, a trace, or all at once
closed loop   the next one is sent when one has ended: no moments, only how many at a time
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def random_arrivals(count: int, rate: float, burstiness: float, rng: np.random.Generator) -> list[float]:
    """`count` moments, the first at 0, at `rate` a second on average; rate inf: all at 0.

    Gaps follow a gamma distribution of shape `burstiness`: 1 is a Poisson process, less comes in bursts, more is evener (as in
    `vllm bench serve`). Gaps are stretched so that the last request comes at exactly (count - 1) / rate: runs at one rate are
    comparable however few requests they have.
    """
    assert rate > 0 and burstiness > 0
    if math.isinf(rate) or count <= 1:
        return [0.0] * count
    gaps = rng.gamma(burstiness, 1.0 / (rate * burstiness), count - 1)
    total = float(gaps.sum())
    if not total > 0.0:  # of very bursty ones each may be too small for a float
        return [0.0] * (count - 1) + [(count - 1) / rate]
    moments = np.cumsum(gaps) * ((count - 1) / rate / total)
    return [0.0, *map(float, moments)]


def trace_arrivals(moments_s: Sequence[float], speed: float) -> list[float]:
    """Those of a trace, from 0 on and in order, `speed` times as fast."""
    assert speed > 0
    ordered = sorted(moments_s)
    return [(at_s - ordered[0]) / speed for at_s in ordered]
