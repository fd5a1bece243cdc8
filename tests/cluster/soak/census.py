"""What the processes of a cluster hold, sampled over time: memory, descriptors, threads, asyncio tasks, files.

A process is *flat* when a line through its samples, by least squares, rises by less than an allowance over the whole time.
The first samples are left out: caches fill, allocators grow to what a busy process needs. Of samples that follow each other the
least counts: what is lost stays, and what a flood of connections holds while it lasts does not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

MIB = 1 << 20
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

AT_ONCE = 5  # samples of which the least counts: more than a flood lasts
# How far the line of a process may rise over the whole soak. Memory: Python and malloc keep what a peak has needed.
ALLOWED = {"rss_mib": 24.0, "descriptors": 4.0, "threads": 2.0, "tasks": 4.0, "files": 8.0}


@dataclass(frozen=True)
class Census:
    """One process at one moment. tasks: of its asyncio loop, None where nobody can be asked."""

    rss_mib: float
    descriptors: int
    threads: int
    tasks: int | None = None


@dataclass
class Series:
    """Samples of one quantity of one process: when, and how much."""

    at_s: list[float] = field(default_factory=list)
    amount: list[float] = field(default_factory=list)

    def add(self, at_s: float, amount: float) -> None:
        self.at_s.append(at_s)
        self.amount.append(amount)

    def after(self, begin_s: float) -> Series:
        kept = [(t, a) for t, a in zip(self.at_s, self.amount, strict=True) if t >= begin_s]
        return Series([t for t, _ in kept], [a for _, a in kept])

    def least(self, count: int) -> Series:
        """Of each `count` samples that follow each other the least, at the moment of the last."""
        starts = range(0, len(self.at_s) - count + 1, count)
        return Series([self.at_s[s + count - 1] for s in starts], [min(self.amount[s : s + count]) for s in starts])

    def slope(self) -> float:
        """Per second, by least squares; 0 where there are too few samples to say."""
        n = len(self.at_s)
        if n < 3:
            return 0.0
        mean_t, mean_a = sum(self.at_s) / n, sum(self.amount) / n
        spread = sum((t - mean_t) ** 2 for t in self.at_s)
        return sum((t - mean_t) * (a - mean_a) for t, a in zip(self.at_s, self.amount, strict=True)) / spread

    def rise(self) -> float:
        """How far the line through the samples rises from the first to the last of them."""
        return self.slope() * (self.at_s[-1] - self.at_s[0]) if self.at_s else 0.0


def take_census(pid: int, tasks: int | None = None) -> Census | None:
    """None when the process has ended."""
    try:
        rss_pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
        threads = len(os.listdir(f"/proc/{pid}/task"))
    except (FileNotFoundError, ProcessLookupError):
        return None
    return Census(rss_pages * PAGE_BYTES / MIB, descriptors, threads, tasks)


def count_files(*directories: Path) -> int:
    return sum(len(files) for directory in directories for _, _, files in os.walk(directory))


class Ledger:
    """All series of a soak, by (process, quantity)."""

    def __init__(self) -> None:
        self.series: dict[tuple[str, str], Series] = {}

    def add(self, at_s: float, who: str, amounts: Mapping[str, float | None]) -> None:
        for what, amount in amounts.items():
            if amount is not None:
                self.series.setdefault((who, what), Series()).add(at_s, amount)

    def rises(self, warm_s: float, lived_s: float) -> dict[tuple[str, str], tuple[float, Series]]:
        """Of what lived for `lived_s` after its own warm-up: how far each line rose, and its samples."""
        out = {}
        for key, series in self.series.items():
            kept = series.after(series.at_s[0] + warm_s)
            if kept.at_s and kept.at_s[-1] - kept.at_s[0] >= lived_s:
                out[key] = (kept.least(AT_ONCE).rise(), kept)
        return out

    def show(self, rises: Mapping[tuple[str, str], tuple[float, Series]]) -> None:
        table = Table(title="lines by least squares, through the least of samples that follow each other")
        for header in ("process", "what", "first", "last", "largest", "slope per hour", "rise", "allowed"):
            table.add_column(header)
        for (who, what), (rise, series) in sorted(rises.items()):
            first, last = series.amount[0], series.amount[-1]
            per_hour = series.least(AT_ONCE).slope() * 3600
            numbers = (first, last, max(series.amount), per_hour, rise, ALLOWED[what])
            table.add_row(who, what, *(f"{number:.1f}" for number in numbers))
        Console(width=120).print(table)


def too_steep(rises: Mapping[tuple[str, str], tuple[float, Series]]) -> Sequence[str]:
    return [f"{who}: {what} rose by {rise:.1f}" for (who, what), (rise, _) in rises.items() if rise > ALLOWED[what]]
