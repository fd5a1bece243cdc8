"""The figures of a load as charts. Pure: outcomes in, SVG out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from disagg.bench.charts import Axis, Series, binned, cdf, cdf_axis, chart, standalone
from disagg.bench.serve.figures import Answered, Outcome, times_of
from disagg.bench.serve.goodput import Slo

BINS = 200


def plot_run(outcomes: Sequence[Outcome], title: str) -> str:
    """CDFs of TTFT, ITL and TPOT, and output tokens a second."""
    answered = [each for each in outcomes if isinstance(each, Answered)]
    times = times_of(answered)
    ttft, itl, tpot = ([1e3 * v for v in times[name]] for name in ("ttft", "itl", "tpot"))
    share = Axis("share", 0.0, 1.0)
    charts = [
        chart("Time to first token", [Series("TTFT", *cdf(ttft), "prefill")], cdf_axis("ms", ttft), share),
        chart(
            "Between tokens",
            [Series("ITL", *cdf(itl), "decode"), Series("TPOT", *cdf(tpot), "third")],
            cdf_axis("ms", itl, tpot),
            share,
        ),
    ]
    if answered:
        began_s = min(each.sent_s for each in answered)
        heard = [at_s - began_s for each in answered for at_s in accumulate(each.gaps_s, initial=each.first_s)]
        end_s = max(heard) * 1.001 + 1e-9
        bins = max(1, min(BINS, len(heard) // 4))
        x, y = binned(heard, [bins / end_s] * len(heard), end_s, bins, "sum")
        rate = Series("chunks with tokens a second", x, y, "decode", "step")
        charts.append(chart("Throughput", [rate], Axis("s", 0.0, end_s), Axis("1/s", 0.0, 1.1 * max(y))))
        sent = [each.sent_s - began_s for each in answered]
        dots = Series("each request's", sent, [1e3 * each.ttft_s for each in answered], "prefill", "dots")
        top = Axis("ms", 0.0, 1.05 * max(ttft))
        charts.append(chart("TTFT by when it was sent", [dots], Axis("s", 0.0, max(sent) or 1.0), top))
    return standalone(charts, title)


def plot_goodput(trials: Sequence[Mapping[str, Any]], slo: Slo, title: str) -> str:
    """Each time's percentile over the rate, with its limit."""
    charts = []
    key = {0.5: "p50", 0.9: "p90", 0.99: "p99"}.get(slo.share, "p99")
    ordered = sorted(trials, key=lambda each: float(each["load"]["rate"]))
    for name, limit_s in slo.limits_s.items():
        points = [(t["load"]["rate"], 1e3 * t[f"{name}_s"][key]) for t in ordered if t[f"{name}_s"][key] is not None]
        if not points:
            continue
        x, y = zip(*points, strict=True)
        limit = Series("SLO", [min(x), max(x)], [1e3 * limit_s] * 2, "bad", dashed=True)
        series = [Series(f"{name} {key}", x, y, "decode"), Series("", x, y, "decode", "dots"), limit]
        top = min(max(max(y), 1e3 * limit_s), 4e3 * limit_s)
        charts.append(
            chart(
                f"{name.upper()} {key} over the rate",
                series,
                Axis("requests/s", 0.0, 1.05 * max(x)),
                Axis("ms", 0.0, 1.1 * top),
            )
        )
    return standalone(charts, title)
