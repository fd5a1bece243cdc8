"""What people see of a plan: progress while it is made, tables at its end. Knows figures; decides nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from disagg.bench.progress import PacedProgress
from disagg.bench.serve.goodput import Slo

FILE_COLUMNS = 120
IN_STEPS = (
    "in steps: share of the time in which a pool's servers compute one; whoever decodes anything always does, so 100% does not "
    "say that they are full"
)


class Progress(PacedProgress):
    """Of the cluster that is being simulated."""

    def __init__(self, requests: int, say: Callable[[str], None]) -> None:
        super().__init__(requests, say)
        self._requests = requests
        self._cluster = ""
        self._tried = 0

    def begins(self, cluster: str) -> None:
        """Another cluster is simulated."""
        self._cluster = cluster
        self._tried += 1

    def ended(self, ended: int) -> None:
        """So many requests of it have ended."""
        if self.is_due():
            words = f"simulation {self._tried}: {self._cluster}"
            self.show(ended, words, f"{words}: {ended} of {self._requests} requests have ended")


def show_plan(kept: Mapping[str, Any], slo: Slo) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else FILE_COLUMNS)
    trace, times = kept["trace"], kept["times"]
    rate = f" at {trace['requests_per_s']:.3g} a second" if trace["requests_per_s"] else " at once"
    console.print(
        f"{trace['requests']} requests{rate}, {trace['input_tokens']} tokens in, {trace['output_tokens']} out, within {slo}",
        markup=False,
    )
    console.print(f"step times: {times['source']}{' (assumed)' if times['assumed'] else ''}\n", markup=False)
    recommended = kept.get("recommended")
    rows = [(("recommended" if recommended == "pools" else "pools") if recommended else "this cluster", kept)]
    for each in kept.get("alternatives", ()):
        is_best = recommended == "mixed" and each.get("within") and each["gpus"] == kept["mixed"]["gpus"]
        rows.append(("recommended" if is_best and "mixed" in each else "", each))
    console.print(_clusters(rows))
    console.print(IN_STEPS, markup=False)
    _say_chosen(console, kept)


def _clusters(rows: list[tuple[str, Mapping[str, Any]]]) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("")
    for name in ("servers", "GPUs", "TTFT ms p50", "p99", "ITL ms p50", "p99", "good 1/s", "in steps"):
        table.add_column(name, justify="left" if name == "servers" else "right")
    for word, each in rows:
        if "ttft_s" not in each:
            over = ", ".join(f"{name} {_ms(found)}" for name, found in each["over"].items())
            table.add_row(word, _servers(each), str(each["gpus"]), f"not within: {over}")
            continue
        in_steps = ", ".join(f"{name} {use['busy']:.0%}" for name, use in each["utilization"].items())
        times = [_ms(each[name][share]) for name in ("ttft_s", "itl_s") for share in ("p50", "p99")]
        table.add_row(word, _servers(each), str(each["gpus"]), *times, f"{each['good_requests_per_s']:.3g}", in_steps)
    return table


def _servers(each: Mapping[str, Any]) -> str:
    if each.get("decode"):
        return f"{each['prefill']} prefill TP {each['prefill_tp']}, {each['decode']} decode TP {each['decode_tp']}"
    count = each["mixed"] if isinstance(each["mixed"], int) else each["servers"]["mixed"]
    return f"{count} mixed TP {each['mixed_tp']}"


def _say_chosen(console: Console, kept: Mapping[str, Any]) -> None:
    goodput = kept["goodput_requests_per_s"]
    if goodput is not None:
        console.print(f"\ngoodput: {goodput:.3g} requests/s, coming in the pattern of the trace", markup=False)
    if kept["over"]:
        over = ", ".join(f"{name} {_ms(found)} ms" for name, found in kept["over"].items())
        console.print(f"not within the SLO: {over}", markup=False)
    for words, each in (("here", kept["overheads"]["chosen"]), ("at 64 x 256 servers", kept["overheads"]["64x256"])):
        scaled = f" and {each['scale']:.3g} times the load" if "scale" in each else ""
        console.print(
            f"{words}{scaled}: {each['router_cores']:.2f} cores of routers ({each['router_processes']} processes), "
            f"{each['links']} links between pairs, {each['beats_per_s']:.0f} heartbeats a second",
            markup=False,
        )


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.4g}"
