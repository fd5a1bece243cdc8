"""What people see of a load: progress while it runs, a table at its end. Knows figures; measures nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from disagg.bench.progress import PacedProgress
from disagg.bench.serve.figures import Answered, Failed, Outcome
from disagg.bench.serve.goodput import Slo
from disagg.bench.serve.load import LoadResult

FILE_COLUMNS = 120
TIMES = (
    ("ttft", "time to first token"),
    ("itl", "between chunks (ITL)"),
    ("tpot", "per output token (TPOT)"),
    ("e2e", "whole request"),
)
MISSED = 0.05  # of the tokens that were asked for


class Progress(PacedProgress):
    """Of the requests of one load."""

    def __init__(self, total: int, say: Callable[[str], None]) -> None:
        super().__init__(total, say)
        self._total = total
        self._sent = self._ended = self._failed = 0

    def sent(self) -> None:
        self._sent += 1

    def heard(self, outcome: Outcome) -> None:
        self._ended += 1
        self._failed += isinstance(outcome, Failed)
        is_last = self._ended >= self._total
        if not self.is_due(at_once=is_last):
            return
        under_way = max(0, self._sent - self._ended)
        words = f"{under_way} under way" + (f", {self._failed} failed" if self._failed else "")
        self.show(self._ended, words, "" if is_last else f"{self._ended} of {self._total} requests have ended, {words}")


def show_run(kept: dict[str, Any], slo: Slo | None) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else FILE_COLUMNS)
    rate = kept["load"]["rate"]
    at = f", offered {rate:g} a second" if rate is not None else ""
    console.print(
        f"\n{kept['completed']} requests completed, {kept['failed']} failed, in {kept['duration_s']:.2f} s{at}: "
        f"{kept['requests_per_s']:.2f} requests/s, {kept['output_tokens_per_s']:.1f} output tokens/s "
        f"({kept['input_tokens']} tokens in, {kept['output_tokens']} out)"
    )
    for cause, count in kept["failures"].items():
        console.print(f"  failed {count} times: {cause}", markup=False)
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("ms")
    for name in ("mean", "p50", "p90", "p99", "max"):
        table.add_column(name, justify="right")
    if slo is not None:
        table.add_column("SLO", justify="right")
    for name, words in TIMES:
        row = [words, *(_ms(kept[f"{name}_s"][each]) for each in ("mean", "p50", "p90", "p99", "max"))]
        if slo is not None:
            limit_s = slo.limits_s.get(name)
            row.append("" if limit_s is None else f"{1e3 * limit_s:g}" + (" !" if name in kept["slo"]["over"] else ""))
        table.add_row(*row)
    console.print(table)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.2f}"


def say_run(run: LoadResult, kept: dict[str, Any]) -> list[str]:
    """What there is to know beside the table."""
    out = []
    client = run.client
    late = "" if client.send_late_s["p99"] is None else f"sent at most {_ms(client.send_late_s['max'])} ms late, "
    out.append(
        f"client: {late}its loop {_ms(client.loop_late_s['p99'])} ms late at p99, {100 * client.cpu_share:.0f}% of a core"
    )
    out += [f"WARNING: the client may be what is measured: {each}" for each in kept["client"]["warnings"]]
    if kept["failures"]:
        first = next(each for each in run.outcomes if isinstance(each, Failed))
        out.append(f"the first that failed: {first.cause}: {first.detail}")
    if run.unfinished:
        out.append(f"stopped: {run.unfinished} requests were under way or not sent yet, and are not counted")
    if run.made_up:
        out.append(
            f"in {run.made_up} turns random tokens stand for the answer before, of which the endpoint gave no ids"
        )
    out += _beside_wishes([each for each in run.outcomes if isinstance(each, Answered) and each.wanted])
    per_chunk = kept["tokens_per_chunk"]
    if per_chunk is not None and per_chunk > 1 + MISSED:
        out.append(f"a chunk carried {per_chunk:.2f} tokens on average: ITL is between chunks, TPOT counts tokens")
    return out


def _beside_wishes(answered: Sequence[Answered]) -> list[str]:
    """What was not as long as it was to be, by more than MISSED."""
    out = []
    for what, number, found in (
        ("prompts", 0, sum(each.input_tokens for each in answered)),
        ("answers", 1, sum(each.output_tokens for each in answered)),
    ):
        wanted = sum(each.wanted[number] for each in answered if each.wanted)
        if abs(found - wanted) > MISSED * wanted:
            each = len(answered)
            out.append(f"{what} had {found / each:.1f} tokens on average where {wanted / each:.1f} were asked for")
    return out


def show_goodput(kept: dict[str, Any], say: Callable[[str], None]) -> None:
    """One line for a rate that was tried."""
    slo = kept["slo"]
    verdict = "within" if slo["within"] else f"not within ({', '.join(slo['over']) or 'given up early'})"
    say(
        f"{kept['load']['rate']:.3g} requests/s: TTFT p99 {_ms(kept['ttft_s']['p99'])} ms, ITL p99 "
        f"{_ms(kept['itl_s']['p99'])} ms, {kept['failed']} failed: {verdict}"
    )
    for warning in kept["client"]["warnings"]:
        say(f"WARNING: the client may be what is measured: {warning}")
