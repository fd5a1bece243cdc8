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
TOLD_EVERY = 4
LEAST_TOLD = 8

Step = tuple[float, float, float]  # tokens, tokens that they attend to, seconds


class _Kept:
    """The last steps of each kind."""

    def __init__(self) -> None:
        self.chunks: deque[Step] = deque(maxlen=KEPT)
        self.decodes: deque[Step] = deque(maxlen=KEPT)

    def add(self, runs: Sequence[tuple[int, int]], seconds: float) -> bool:
        """Whether it says anything."""
        tokens = sum(count for _, count in runs)
        if not tokens or seconds <= 0:
            return False
        attended = sum(count * (start + count / 2) for start, count in runs)
        (self.chunks if tokens > len(runs) else self.decodes).append((float(tokens), attended, seconds))
        return True

    def fit(self) -> tuple[float, float, float]:
        return fit(chain(self.chunks, self.decodes))


class StepTimes:
    """See the module."""

    def __init__(self) -> None:
        self._kept = _Kept()
        self._fitted: tuple[float, float, float] | None = None
        self._since = 0

    def observe(self, runs: Sequence[tuple[int, int]], seconds: float) -> None:
        """A step has been computed. runs: for each, tokens before it, and its own."""
        if not self._kept.add(runs, seconds):
            return
        self._since += 1
        if len(self._kept.chunks) >= LEAST and (self._fitted is None or self._since >= FIT_EVERY):
            self._fitted, self._since = self._kept.fit(), 0

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


class ToldTimes:
    """What steps cost, for whoever plans clusters: learned from one step in `TOLD_EVERY`, so that steps do not wait for it."""

    def __init__(self) -> None:
        self._kept = _Kept()
        self._steps = 0
        self._since = 0  # observed, and not in the line
        self._line: tuple[float, float, float] | None = None

    def wants_one(self) -> bool:
        """Asked once a step: whether this one is to be observed."""
        self._steps += 1
        return self._steps % TOLD_EVERY == 0

    def observe(self, runs: Sequence[tuple[int, int]], seconds: float) -> None:
        self._since += self._kept.add(runs, seconds)

    @property
    def line(self) -> tuple[float, float, float, int] | None:
        """(fixed, each, attended) in seconds, as `fit` has them, and from how many steps; None of too few."""
        count = len(self._kept.chunks) + len(self._kept.decodes)
        if count < LEAST_TOLD:
            return None
        if self._line is None or self._since >= FIT_EVERY:
            self._line, self._since = self._kept.fit(), 0
        return (*self._line, count)


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
