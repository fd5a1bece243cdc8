"""A plan as charts. Pure: figures in, SVG out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from disagg.bench.charts import Axis, Series, cdf, cdf_axis, chart, standalone
from disagg.bench.serve.figures import Answered, Outcome, times_of
from disagg.bench.serve.goodput import Slo

COLOURS = ("decode", "prefill", "third", "cached")


def plot_plan(kept: Mapping[str, Any], outcomes: Sequence[Outcome], slo: Slo) -> str:
    """CDFs of TTFT and ITL with their limits, TTFT over time, and GPUs of each alternative by its worst time."""
    answered = [each for each in outcomes if isinstance(each, Answered)]
    times = times_of(answered)
    ttft, itl = ([1e3 * each for each in times[name]] for name in ("ttft", "itl"))
    share = Axis("share", 0.0, 1.0)
    charts = []
    for title, name, values, colour in (
        ("Predicted time to first token", "ttft", ttft, "prefill"),
        ("Predicted time between tokens", "itl", itl, "decode"),
    ):
        limit_s = slo.limits_s.get(name)
        marks = [] if limit_s is None else [(1e3 * limit_s, "SLO")]
        beside = [] if limit_s is None else [1.05e3 * limit_s]
        axis = cdf_axis("ms", [*values, *beside])
        charts.append(chart(title, [Series(name.upper(), *cdf(values), colour)], axis, share, marks))
    if answered:
        sent = [each.sent_s for each in answered]
        dots = Series("each request's", sent, ttft, "prefill", "dots")
        charts.append(
            chart(
                "TTFT by when it was sent", [dots], Axis("s", 0.0, max(sent) or 1.0), Axis("ms", 0.0, 1.05 * max(ttft))
            )
        )
    if tried := _tried(kept):
        charts.append(_alternatives(tried, slo))
    return standalone(charts, f"disagg plan: {kept['gpus']} GPUs")


def _tried(kept: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [each for each in (kept, *kept.get("alternatives", ())) if "ttft_s" in each]


def _alternatives(tried: Sequence[Mapping[str, Any]], slo: Slo) -> str:
    """The worst share of its limit that each comes to, by its GPUs: below 1 is within."""
    key = {0.5: "p50", 0.9: "p90"}.get(slo.share, "p99")
    worst = [
        max(
            each[f"{name}_s"][key] / limit_s
            for name, limit_s in slo.limits_s.items()
            if each[f"{name}_s"][key] is not None
        )
        for each in tried
    ]
    series = []
    for number, each in enumerate(tried[: len(COLOURS)]):
        name = "mixed" if not each.get("decode") else f"{each['prefill']}+{each['decode']}"
        series.append(Series(name, [each["gpus"]], [worst[number]], COLOURS[number], "dots"))
    most = max(each["gpus"] for each in tried)
    limit = Series("SLO", [0, 1.1 * most], [1.0, 1.0], "bad", dashed=True)
    return chart(
        f"Worst {key} by its limit",
        [*series, limit],
        Axis("GPUs", 0.0, 1.1 * most),
        Axis("of the limit", 0.0, 1.1 * max(1.0, *worst)),
    )
