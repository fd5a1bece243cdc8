"""What min_p, top_k and top_p leave of a row, found without sorting it. For the CPU, where sorting a vocabulary takes longest.

What is left is a beginning of the order of sampler_order, so only its end is looked for: tokens are counted, or weighed, by the
upper half of their logit's bits, and none are sorted but those of the bin in which the end lies. Sums are added up in another
order than along a sorted row; where that could decide, the row is to be sorted. Knows values; nothing of requests.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from disagg.worker.sampler_order import in_order

BINS = 1 << 16
MARGIN = 1e-11  # of the mass: far more than the rounding of a sum over any vocabulary, far less than a token's share


def nucleus(
    values: NDArray[np.float32], weights: NDArray[np.float64], allowed: NDArray[np.bool_], top_k: int, top_p: float
) -> NDArray[np.bool_] | None:
    """Which tokens are left, [V]; None if rounding could decide.

    values, weights: [V], logits and e to the power of what they are scaled to; allowed: [V], by min_p; top_p: a share of the
    weights that top_k and min_p leave; infinite, if there is none.
    """
    bins = _bins(values)
    kept = allowed if top_k >= values.size else allowed & _first(values, bins, top_k)
    if not np.isfinite(top_p):
        return kept
    left = np.where(kept, weights, 0.0)
    mass = left.sum()
    limit, margin = top_p * mass, MARGIN * mass
    upto = np.bincount(bins, weights=left, minlength=BINS)[::-1].cumsum()
    end = int(np.searchsorted(upto, limit))  # counted from the top: all bins before it are below the limit
    if end == BINS:
        return None if abs(upto[-1] - limit) <= margin else kept
    order = _within(kept & (bins == BINS - 1 - end), values)
    behind = (upto[end - 1] if end else 0.0) + left[order].cumsum()
    before = behind - left[order]
    if (np.abs(np.append(before, behind[-1:]) - limit) <= margin).any():
        return None
    found = kept & (bins > BINS - 1 - end)
    found[order[before < limit]] = True
    return found


def _first(values: NDArray[np.float32], bins: NDArray[np.int64], count: int) -> NDArray[np.bool_]:
    """The first of the order, so many."""
    upto = np.bincount(bins, minlength=BINS)[::-1].cumsum()
    end = int(np.searchsorted(upto, count))
    order = _within(bins == BINS - 1 - end, values)
    found = bins > BINS - 1 - end
    found[order[: count - (int(upto[end - 1]) if end else 0)]] = True
    return found


def _within(among: NDArray[np.bool_], values: NDArray[np.float32]) -> NDArray[np.int64]:
    """Which these are, by the order."""
    at = np.flatnonzero(among)
    return at[np.lexsort((at, -values[at]))]


def _bins(values: NDArray[np.float32]) -> NDArray[np.int64]:
    """Of the order of values, the largest last."""
    return (in_order(torch.from_numpy(values)).numpy() >> 16).astype(np.int64) + (BINS >> 1)
