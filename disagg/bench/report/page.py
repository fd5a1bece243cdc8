"""The report: one HTML page with its charts in it, and nothing from elsewhere. Pure: records in, text out."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from disagg.bench.charts import STYLE, Axis, Series, TimelineRow, binned, cdf, cdf_axis, chart, timelines
from disagg.bench.report.merge import Answer, busiest
from disagg.bench.report.read import Records, numbers

BINS = 280
RATE_BINS = 90
TIMELINES = 60
FAR = 2.5
MOST_SERVERS = 64  # of which charts are drawn
CSS = """
* { box-sizing: border-box }
body { margin: 0; background: var(--bg); color: var(--ink); font: 14px/1.45 system-ui, sans-serif }
main { max-width: 1240px; margin: 0 auto; padding: 28px 24px 60px }
h1 { font-size: 22px; margin: 0 0 2px } h2 { font-size: 16px; margin: 34px 0 10px } p { margin: 4px 0; color: var(--dim) }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(162px, 1fr)); gap: 10px; margin-top: 18px }
.tile, .card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px }
.tile b { display: block; font-size: 18px; font-variant-numeric: tabular-nums } .tile span { color: var(--dim); font-size: 12px }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 12px }
.card svg { display: block; width: 100%; height: auto } .scroll { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th { text-align: right; font-weight: 500; color: var(--dim); font-size: 12px } td { text-align: right }
th, td { padding: 5px 10px; border-bottom: 1px solid var(--line); white-space: nowrap } tr:last-child td { border-bottom: 0 }
th:first-child, td:first-child { text-align: left } .bad { color: var(--bad) }
"""


class Report:
    def __init__(self, records: Records, answers: Sequence[Answer], source: str) -> None:
        self._records = records
        self._answers = list(answers)
        self._source = source
        begins, ends = [], []
        if records.steps is not None:
            at, took = numbers(records.steps, "time_s"), numbers(records.steps, "seconds")
            begins.append(float(at.min()))
            ends.append(float((at + took).max()))
        if answers:
            begins.append(min(each.arrival_s for each in answers))
            ends.append(max(each.end_s for each in answers))
        self._begin_s = min(begins)
        self._span_s = max(1e-3, max(ends) - self._begin_s)
        self._ttft = [1e3 * ttft_s for each in self._answers if (ttft_s := each.ttft_s) is not None]
        gaps = [np.diff(each.times_s) for each in self._answers]
        self._itl: list[float] = (1e3 * np.concatenate(gaps)).tolist() if gaps else []

    def html(self) -> str:
        title = f"disagg report: {self._source}"
        sections = [
            self._head(),
            self._tiles(),
            self._latencies(),
            self._timelines(),
            self._throughput(),
            self._servers(),
        ]
        return (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
            f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}{CSS}</style></head>'
            f"<body><main>{''.join(sections)}</main></body></html>\n"
        )

    # ---- summary

    def _head(self) -> str:
        begin = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self._begin_s))
        passed = "".join(
            f'<p class="bad">{escape(name)} {escape(why)}</p>' for name, why in self._records.passed_over[:20]
        )
        more = len(self._records.passed_over) - 20
        return (
            f"<h1>{escape(self._source)}</h1><p>from {begin}, {self._span_s:.1f} s, {self._records.files} files; times are the "
            f"servers' own: a request begins when it arrives at a server</p>{passed}"
            + (f'<p class="bad">and {more} files more</p>' if more > 0 else "")
        )

    def _tiles(self) -> str:
        answers = self._answers
        how = Counter(each.what for each in answers)
        outputs = sum(len(each.token_s) for each in answers)
        prompts = sum(each.prompt_tokens for each in answers)
        cached = sum(each.cached_tokens for each in answers)
        tiles = [
            ("answers", str(len(answers))),
            ("completed", str(how["completed"])),
            ("answers/s", f"{how['completed'] / self._span_s:.2f}"),
            ("prompt tokens", f"{prompts:,}"),
            ("of them cached", f"{100 * cached / prompts:.1f}%" if prompts else "-"),
            ("output tokens", f"{outputs:,}"),
            ("output tokens/s", f"{outputs / self._span_s:.1f}"),
            ("TTFT p50", _percentile(self._ttft, 50)),
            ("TTFT p99", _percentile(self._ttft, 99)),
            ("ITL p50", _percentile(self._itl, 50)),
            ("ITL p99", _percentile(self._itl, 99)),
            ("gave way for pages", str(sum(each.preemptions for each in answers))),
            ("tried more than once", str(sum(each.attempts > 1 for each in answers))),
        ]
        tiles += [(what, str(count)) for what, count in how.most_common() if what != "completed"]
        boxes = (f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in tiles)
        return f'<div class="tiles">{"".join(boxes)}</div>'

    # ---- of requests

    def _latencies(self) -> str:
        if not self._answers:
            return ""
        share = Axis("share", 0.0, 1.0)
        waits = [1e3 * max(0.0, a.admitted_s - a.arrival_s) for a in self._answers if a.admitted_s < float("inf")]
        whole = [1e3 * (a.end_s - a.arrival_s) for a in self._answers if a.completed]
        first = [Series("TTFT", *cdf(self._ttft), "prefill"), Series("until its first step", *cdf(waits), "limit")]
        charts = [
            chart("Time to first token", first, cdf_axis("ms", self._ttft, waits), share),
            chart("Between tokens (ITL)", [Series("ITL", *cdf(self._itl), "decode")], cdf_axis("ms", self._itl), share),
            chart("Whole answers", [Series("arrival to end", *cdf(whole), "third")], cdf_axis("ms", whole), share),
            self._under_way(),
        ]
        return _section("Latency", charts)

    def _under_way(self) -> str:
        moments = sorted(
            [(a.arrival_s, 1) for a in self._answers] + [(a.end_s, -1) for a in self._answers], key=lambda each: each[0]
        )
        times = [at_s - self._begin_s for at_s, _ in moments]
        counts = np.cumsum([change for _, change in moments])
        x, y = binned(times, counts.tolist(), self._span_s, BINS, "max")
        return chart(
            "Under way at once",
            [Series("answers", x, y, "third", "step")],
            Axis("s", 0.0, self._span_s),
            Axis("", 0.0, 1.1 * max(y)),
        )

    def _timelines(self) -> str:
        chosen = busiest(self._answers, TIMELINES)
        if not chosen:
            return ""
        begin_s = min(each.arrival_s for each in chosen)
        end_s = max(each.end_s for each in chosen)
        rows = []
        for each in chosen:
            times = [at_s - begin_s for at_s in each.times_s]
            arrival, first = each.arrival_s - begin_s, times[0] if times else each.end_s - begin_s
            admitted = min(each.admitted_s - begin_s, first)
            label = (
                f"{each.request_id} choice {each.choice}: {each.prompt_tokens} prompt tokens ({each.cached_tokens} cached), "
                f"{len(times)} output, {each.what}, on {', '.join(each.servers)}"
            )
            rows.append(TimelineRow(label, [(arrival, admitted, "line"), (admitted, first, "prefill")], times))
        drawn = timelines(
            f"{len(chosen)} answers where most were under way: waiting, prompt, and a tick for each token",
            rows,
            Axis("s", 0.0, end_s - begin_s),
        )
        return f'<h2>Token timelines</h2><div class="card">{drawn}</div>'

    # ---- of steps

    def _throughput(self) -> str:
        steps = self._records.steps
        if steps is None:
            return ""
        at = numbers(steps, "time_s") - self._begin_s
        width_s = self._span_s / RATE_BINS
        out = []
        for name, colour in (("prefill", "prefill"), ("decode", "decode")):
            x, y = binned(
                at.tolist(), (numbers(steps, f"{name}_tokens") / width_s).tolist(), self._span_s, RATE_BINS, "sum"
            )
            series = [Series(f"{name} tokens/s", x, y, colour, "area")]
            axis = Axis("tokens/s", 0.0, 1.1 * max([*y, 1e-9]))
            out.append(chart(f"Computed by all servers: {name}", series, Axis("s", 0.0, self._span_s), axis))
        return _section("Throughput", out)

    def _servers(self) -> str:
        steps = self._records.steps
        if steps is None:
            return ""
        names = sorted(set(steps.column("server").to_pylist()))
        rows: list[list[str]] = []
        sections: list[str] = []
        for name in names:
            mine = _of(steps, name)
            rows.append(_server_row(name, mine))
            if len(sections) < MOST_SERVERS:
                sections.append(_section(f"{name}", self._server_charts(mine)))
        head = (
            "server", "role", "lives", "steps", "step ms p50", "p99", "prefill tokens", "decode tokens",
            "budget used", "busy", "most pages",
        )  # fmt: skip
        table = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
        heads = "".join(f"<th>{each}</th>" for each in head)
        return (
            f'<h2>Servers</h2><div class="card scroll"><table><tr>{heads}</tr>{table}</table></div>{"".join(sections)}'
        )

    def _server_charts(self, steps: Any) -> list[str]:
        at = (numbers(steps, "time_s") - self._begin_s).tolist()
        x_axis, span = Axis("s", 0.0, self._span_s), self._span_s
        restarts = [(when - self._begin_s, "restarted") for when in _restarts(steps)]
        column = {name: numbers(steps, name) for name in steps.column_names if name not in TEXT}

        def mean(values: Any) -> tuple[list[float], list[float]]:
            return binned(at, values.tolist(), span, BINS, "mean")

        x, prefill = mean(column["prefill_tokens"])
        _, both = mean(column["prefill_tokens"] + column["decode_tokens"])
        _, budget = mean(column["budget_tokens"])
        use = [
            Series("prefill", x, prefill, "prefill", "area"),
            Series("decode", x, both, "decode", "area", base=prefill),
        ]
        far = max(budget) > FAR * max(both)  # it would leave nothing else to see
        words = f"budget {max(budget):.0f}{', far above' if far else ''}"
        use.append(Series(words, [] if far else x, [] if far else budget, "limit", "step", dashed=True))
        _, used = mean(column["pages_used"])
        _, held = mean(column["pages_used"] + column["pages_evictable"])
        total = float(column["pages_total"].max())
        pages = [
            Series("used", x, used, "decode", "area"),
            Series("cached", x, held, "cached", "area", base=used),
            Series("all", [0.0, span], [total, total], "limit", dashed=True),
        ]
        _, longest = binned(at, (1e3 * column["seconds"]).tolist(), span, BINS, "max")
        _, seconds = mean(1e3 * column["seconds"])
        took = [Series("longest", x, longest, "cached"), Series("mean", x, seconds, "third")]
        _, running = mean(column["running"])
        _, waiting = mean(column["waiting"])
        queue = [Series("run", x, running, "decode", "step"), Series("wait", x, waiting, "bad", "step")]
        return [
            chart(
                "Tokens of a step, and its budget", use, x_axis, _top("tokens", both if far else budget, both), restarts
            ),
            chart("Large pages", pages, x_axis, _top("pages", [total]), restarts),
            chart("Step time", took, x_axis, _top("ms", longest), restarts),
            chart("Sequences", queue, x_axis, _top("", running, waiting), restarts),
            *_pool_chart(steps, at, x_axis, span),
        ]


TEXT = {"server", "role", "incarnation", "pools"}


def _pool_chart(steps: Any, at: list[float], x_axis: Axis, span: float) -> list[str]:
    """Pages by layer group, where there is more than one."""
    pools = steps.column("pools").combine_chunks()
    names = list(dict.fromkeys(pools.flatten().field("name").to_pylist()))
    if len(names) < 2:
        return []
    used = pools.flatten().field("used").to_numpy(zero_copy_only=False).reshape(-1, len(names))
    series, tops = [], []
    for number, name in enumerate(names[:5]):
        x, y = binned(at, used[:, number].tolist(), span, BINS, "mean")
        series.append(Series(name, x, y, ("decode", "prefill", "third", "good", "bad")[number], "step"))
        tops.append(y)
    return [chart("Small pages used, by layer group", series, x_axis, _top("pages", *tops))]


def _top(label: str, *values: Sequence[float]) -> Axis:
    return Axis(label, 0.0, 1.1 * max((max(each, default=0.0) for each in values), default=0.0) or 1.0)


def _of(steps: Any, server: str) -> Any:
    """The steps of one server, in order."""
    import pyarrow.compute as pc

    return steps.filter(pc.equal(steps.column("server"), server)).sort_by("time_s")


def _restarts(steps: Any) -> list[float]:
    """When another incarnation took its first step."""
    names, at = steps.column("incarnation").to_pylist(), numbers(steps, "time_s")
    return [float(at[n]) for n in range(1, len(names)) if names[n] != names[n - 1]][:20]


def _server_row(name: str, steps: Any) -> list[str]:
    seconds = numbers(steps, "seconds")
    at = numbers(steps, "time_s")
    prefill, decode = numbers(steps, "prefill_tokens"), numbers(steps, "decode_tokens")
    budget = numbers(steps, "budget_tokens").sum()
    span_s = max(1e-9, float(at.max() + seconds.max() - at.min()))
    return [
        name,
        steps.column("role")[0].as_py(),
        str(len(set(steps.column("incarnation").to_pylist()))),
        f"{len(seconds):,}",
        f"{1e3 * float(np.percentile(seconds, 50)):.2f}",
        f"{1e3 * float(np.percentile(seconds, 99)):.2f}",
        f"{int(prefill.sum()):,}",
        f"{int(decode.sum()):,}",
        f"{100 * (prefill.sum() + decode.sum()) / budget:.1f}%" if budget else "-",
        f"{100 * min(1.0, float(seconds.sum()) / span_s):.0f}%",
        f"{int(numbers(steps, 'pages_used').max())} of {int(numbers(steps, 'pages_total').max())}",
    ]


def _section(title: str, charts: Sequence[str]) -> str:
    cards = "".join(f'<div class="card">{each}</div>' for each in charts)
    return f'<h2>{escape(title)}</h2><div class="charts">{cards}</div>'


def _percentile(values: Sequence[float], percent: int) -> str:
    """Of milliseconds."""
    if not len(values):
        return "-"
    value = float(np.percentile(values, percent))
    return f"{value / 1e3:.2f} s" if value >= 1000 else f"{value:.1f} ms" if value < 100 else f"{value:.0f} ms"
