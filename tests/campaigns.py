"""How many examples fuzzing campaigns have, and what long ones say of themselves while they run.

Each campaign is one test in three sizes: a short one in `make check`, one in `make test`, and one in `make test-slow`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

SHORT, MIDDLE, MANY = 200, 2_000, 50_000
SAY_EVERY_S = 20.0

_most: int | None = None  # examples of each, to try campaigns out and to learn how long they take


def limit(most: int | None) -> None:
    """What --campaign says."""
    global _most
    _most = most


def sizes(short: int = SHORT, *, middle_marks: Sequence[pytest.MarkDecorator] = ()) -> pytest.MarkDecorator:
    """The parameter `examples`."""
    return pytest.mark.parametrize(
        "examples",
        [
            pytest.param(short, marks=pytest.mark.short),
            pytest.param(MIDDLE, marks=[pytest.mark.long, pytest.mark.timeout(900), *middle_marks]),
            pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
        ],
    )


class Campaign:
    """Counts examples of one campaign. `begin` each; `check` at the end that there were as many as were asked for."""

    def __init__(self, examples: int) -> None:
        self.examples = examples if _most is None else min(examples, _most)
        self._says = examples >= MANY
        self._begun = 0
        self._since_s = self._said_s = time.monotonic()
        self._cpu_since_s = time.process_time()

    def begin(self) -> None:
        self._begun += 1
        now_s = time.monotonic()
        if self._says and now_s - self._said_s >= SAY_EVERY_S:
            self._said_s = now_s
            rate = self._begun / (now_s - self._since_s)
            left_s = (self.examples - self._begun) / rate
            print(
                f"\n  {self._begun} of {self.examples} examples, {rate:.0f} a second, {left_s / 60:.0f} min left",
                flush=True,
            )

    def check(self) -> None:
        took_s = time.monotonic() - self._since_s
        if self._says:
            cpu_s = time.process_time() - self._cpu_since_s
            many = MANY / max(1, self._begun) / 60
            print(
                f"\n  {self._begun} examples in {took_s:.1f} s, {cpu_s:.1f} s of them computing here; {MANY} take "
                f"{took_s * many:.0f} min, or {cpu_s * many:.0f} min of computing",
                flush=True,
            )
        assert self._begun >= self.examples, f"{self._begun} of {self.examples} examples were tried"
