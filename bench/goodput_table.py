"""What `bench.goodput` has found, as tables in Markdown: rungs, goodputs, and who serves how many times as much. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from msgspec import Struct

from bench.ladder import Goodput, Rung, goodput, ratio
from disagg.bench.serve.goodput import Slo


class Configuration(Struct, frozen=True):
    """A cluster. flags: for `disagg up`, all that is set."""

    name: str
    gpus: int
    flags: tuple[str, ...]
    says: str


class Found(Struct):
    """What was measured of one. beside: what ran at the same time on other GPUs; trouble: why there is no more."""

    configuration: Configuration
    beside: tuple[str, ...]
    rungs: list[Rung]
    chosen: str = ""
    trouble: str = ""

    def goodput(self, slo: Slo) -> Goodput:
        """Of each GPU."""
        return goodput(self.rungs, slo).per(self.configuration.gpus)


class Pair(Struct, frozen=True):
    """Two configurations, how many times the goodput of the other the one should have, per GPU; tight: where the ITL is."""

    one: str
    other: str
    goal: float
    tight: bool = False


PAIRS = (
    Pair("sarathi", "orca", 2.0),
    Pair("sarathi", "vllm", 1.3),
    Pair("1p1d", "2mixed", 1.3, tight=True),
    Pair("1p1d", "sarathi", 1.3, tight=True),
)


def packed(configurations: Iterable[Configuration], gpus: int) -> list[list[Configuration]]:
    """Stages, in order: those of one run side by side on different GPUs. Those that need more GPUs are left out."""
    stages: list[list[Configuration]] = []
    for each in configurations:
        if each.gpus > gpus:
            continue
        if not stages or sum(other.gpus for other in stages[-1]) + each.gpus > gpus:
            stages.append([])
        stages[-1].append(each)
    return stages


def limits(slo: Slo) -> str:
    return ", ".join(f"{name.upper()} {1e3 * limit_s:g} ms" for name, limit_s in slo.limits_s.items())


def row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def head(*cells: str, left: int = 1) -> list[str]:
    """left: so many columns are of words."""
    return [row(cells), "|" + "---|" * left + "---:|" * (len(cells) - left)]


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}" if math.isfinite(seconds) else "none"


def rung_cells(rung: Rung) -> list[str]:
    times = [ms(by[name]) for name in ("ttft", "itl") for by in (rung.p50_s, rung.p99_s)]
    lag = f"{ms(rung.client.send_late_s['p99'] or 0.0)}, {ms(rung.client.loop_late_s['p99'] or 0.0)}"
    lost = sum(rung.failed.values())
    asked = str(rung.requests) + (f" ({lost} failed)" if lost else "")
    asked += f" (given up with {rung.unfinished})" if rung.unfinished else ""
    busy = f"{100 * rung.client.cpu_share:.0f}%"
    return [f"{rung.rate:.3g}", asked, *times, f"{rung.output_tokens_per_s:.0f}", f"{lag}, {busy}"]


def rung_table(found: Sequence[Found]) -> list[str]:
    lines = head(
        *(
            "",
            "GPUs",
            "requests/s, of all GPUs",
            "requests",
            "TTFT P50, ms",
            "P99",
            "ITL P50, ms",
            "P99",
            "output tokens/s",
        ),
        "client late: sending P99, loop P99, ms; of a core",
    )
    for each in found:
        for rung in sorted(each.rungs, key=lambda rung: rung.rate):
            lines.append(row([each.configuration.name, str(each.configuration.gpus), *rung_cells(rung)]))
    return lines


def goodput_cell(found: Goodput) -> str:
    if found.good is None or found.rate is None:
        return f"below {found.bad:.3g}" if found.bad else "-"
    return f"{found.rate:.3g} ({found.good:.3g} to {found.bad:.3g})" if found.bad else f"at least {found.good:.3g}"


def goodput_table(found: Sequence[Found], slos: Sequence[Slo]) -> list[str]:
    lines = head("requests/s of each GPU", *map(limits, slos))
    return lines + [
        row([each.configuration.name, *(goodput_cell(each.goodput(slo)) for slo in slos)]) for each in found
    ]


def pair_table(found: Sequence[Found], slos: Sequence[Slo]) -> list[str]:
    """Only of pairs of which both were measured."""
    by_name = {each.configuration.name: each for each in found if each.rungs}
    lines = head("goodput per GPU, times the other's", *map(limits, slos), "goal")
    for pair in PAIRS:
        if pair.one in by_name and pair.other in by_name:
            one, other = by_name[pair.one], by_name[pair.other]
            ratios = [str(ratio(one.goodput(slo), other.goodput(slo))) for slo in slos]
            goal = f"{pair.goal:g}" + (" where the ITL is tight" if pair.tight else "")
            lines.append(row([f"{pair.one} / {pair.other}", *ratios, goal]))
    return lines


def winners(found: Sequence[Found], slos: Sequence[Slo]) -> list[str]:
    """Of each SLO, who serves most on a GPU, beginning with the best."""
    lines = []
    for slo in slos:
        of_all = [(each.goodput(slo), each.configuration.name) for each in found if each.rungs]
        of_all.sort(key=lambda each: (each[0].rate or 0.0, each[0].bad or 0.0), reverse=True)
        lines.append(f"- {limits(slo)}: " + ", ".join(f"{name} {goodput_cell(rates)}" for rates, name in of_all))
    return lines


def report(found: Sequence[Found], slos: Sequence[Slo]) -> str:
    notes = [
        "goodput: the rate at which P99 TTFT or P99 ITL reaches its limit, on the line between the last rate that holds and the",
        "first one that does not (both in brackets). Where the run at the latter was given up, since no SLO could hold any more,",
        "or requests failed, the P99 there is not known, and the goodput is the former.",
        "",
    ]
    beside = [
        f"{each.configuration.name}: {each.configuration.says}"
        + (f"; side by side with {', '.join(each.beside)} on other GPUs" if each.beside else "")
        + (f"; {each.chosen}" if each.chosen else "")
        + (f"; TROUBLE: {each.trouble}" if each.trouble else "")
        for each in found
    ]
    slow = {each.configuration.name: [rung for rung in each.rungs if rung.warnings] for each in found}
    warnings = [
        f"WARNING: {name} at {', '.join(f'{rung.rate:.3g}' for rung in rungs)}/s: the client may be what is measured, as at the "
        f"first of these: {'; '.join(rungs[0].warnings)}"
        for name, rungs in slow.items()
        if rungs
    ]
    tables = [rung_table(found), goodput_table(found, slos), pair_table(found, slos), winners(found, slos)]
    return "\n".join([*beside, *warnings, "", *notes, *(line for table in tables for line in [*table, ""])])
