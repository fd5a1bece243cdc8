"""How long steps take, learned from those that were measured: what a step may cost if it shall take so long. Pure.

    seconds = fixed + each * tokens + attended * (tokens that they attend to)

The three are fitted to the last steps by least squares of relative errors, so that a step that was held up for once counts
no more than others. Steps with one token of each sequence and steps with chunks are kept apart, as many of either, so that a
long time of only one kind does not forget the other.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain

from disagg.scheduler.budget import Budget

KEPT = 32  # steps of each kind
LEAST = 4  # with chunks, before anything is said
FIT_EVERY = 8  # steps

Step = tuple[float, float, float]  # tokens, tokens that they attend to, seconds


class StepTimes:
    """See the module."""

    def __init__(self) -> None:
        self._chunks: deque[Step] = deque(maxlen=KEPT)
        self._decodes: deque[Step] = deque(maxlen=KEPT)
        self._fitted: tuple[float, float, float] | None = None
        self._since = 0

    def observe(self, runs: Sequence[tuple[int, int]], seconds: float) -> None:
        """A step has been computed. runs: for each, tokens before it, and its own."""
        tokens = sum(count for _, count in runs)
        if not tokens or seconds <= 0:
            return
        attended = sum(count * (start + count / 2) for start, count in runs)
        kind = self._chunks if tokens > len(runs) else self._decodes
        kind.append((float(tokens), attended, seconds))
        self._since += 1
        if len(self._chunks) >= LEAST and (self._fitted is None or self._since >= FIT_EVERY):
            self._fitted, self._since = fit(chain(self._chunks, self._decodes)), 0

    def budget(self, target_s: float, most_tokens: int) -> Budget:
        """What a step of target_s may cost: most_tokens while nothing is known, and never more."""
        if self._fitted is None:
            return Budget(most_tokens, most_tokens=most_tokens)
        fixed, each, attended = self._fitted
        cost = max(0.0, (target_s - fixed) / each)
        return Budget(cost, each / attended if attended > 0 else math.inf, most_tokens)

    def even(self, most_tokens: int) -> Budget:
        """What so many tokens cost at the beginning of a prompt: behind others, fewer cost as much, once that is known."""
        if self._fitted is None or self._fitted[2] <= 0:
            return Budget(most_tokens, most_tokens=most_tokens)
        _, each, attended = self._fitted
        return Budget(most_tokens, each / attended, most_tokens)


def fit(steps: Iterable[Step]) -> tuple[float, float, float]:
    """(fixed, each, attended) in seconds, none of them negative and the second one above 0, for at least one step."""
    rows = [(1 / s, tokens / s, attended / s) for tokens, attended, s in steps]
    best = None
    for used in ((0, 1, 2), (0, 1), (1, 2), (1,)):
        found = _least_squares(rows, used)
        if found is not None and all(value >= 0 for value in found) and found[used.index(1)] > 0:
            values = dict(zip(used, found, strict=True))
            solution = (values.get(0, 0.0), values[1], values.get(2, 0.0))
            error = sum((sum(a * b for a, b in zip(row, solution, strict=True)) - 1) ** 2 for row in rows)
            if best is None or error < best[0]:
                best = error, solution
    assert best is not None, "one coefficient alone always fits"
    return best[1]


def _least_squares(rows: Sequence[tuple[float, ...]], used: tuple[int, ...]) -> list[float] | None:
    """Coefficients of the used columns for which each row comes nearest to 1; None where they cannot be told apart."""
    scale = [math.sqrt(sum(row[column] ** 2 for row in rows)) or 1.0 for column in used]
    columns = [[row[column] / size for row in rows] for column, size in zip(used, scale, strict=True)]
    matrix = [
        [*(sum(map(float.__mul__, a, b)) for b in columns), sum(a)] for a in columns
    ]  # the normal equations, and their right side
    for i in range(len(matrix)):
        pivot = max(range(i, len(matrix)), key=lambda row: abs(matrix[row][i]))
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        if abs(matrix[i][i]) < 1e-9:
            return None
        for row in range(len(matrix)):
            if row != i:
                factor = matrix[row][i] / matrix[i][i]
                matrix[row] = [a - factor * b for a, b in zip(matrix[row], matrix[i], strict=True)]
    return [row[-1] / row[i] / size for i, (row, size) in enumerate(zip(matrix, scale, strict=True))]
