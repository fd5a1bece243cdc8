"""Charts as SVG, with nothing but what is written here: axes, lines, areas and rows of marks. Pure: numbers in, text out.

Colours are names of CSS variables (`STYLE`), so that a page in which charts stand may be dark or light.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

import numpy as np
from msgspec import Struct

from disagg.types.arithmetic import ceil_div

WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 34, 40
MOST_POINTS = 700
STYLE = """
:root { --bg: #ffffff; --card: #ffffff; --ink: #1d2733; --dim: #66717f; --line: #e3e8ee; --prefill: #e07b39; --decode: #2f6fde;
  --cached: #9cc9c0; --limit: #8893a1; --bad: #cf3f4f; --good: #2f9e6b; --third: #8a5fd0 }
@media (prefers-color-scheme: dark) { :root { --bg: #12171e; --card: #1a212b; --ink: #e4e9f0; --dim: #93a0b0; --line: #2c3643;
  --prefill: #f0975a; --decode: #6b9df2; --cached: #3f7a70; --limit: #76828f; --bad: #ec6a77; --good: #55c18f; --third: #b08ef0 }
}
svg text { font: 11px system-ui, sans-serif; fill: var(--dim) }
svg text.title { font-size: 13px; font-weight: 600; fill: var(--ink) }
svg .grid { stroke: var(--line); stroke-width: 1 }
"""


class Series(Struct, frozen=True):
    """kind: line, step, area (from `base` or 0 up), or dots."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str
    kind: str = "line"
    base: Sequence[float] | None = None
    dashed: bool = False


class Axis(Struct, frozen=True):
    label: str
    low: float
    high: float
    log: bool = False

    def at(self, value: float, begin: float, end: float) -> float:
        low, high, value = (_log(v) if self.log else v for v in (self.low, self.high, value))
        share = 0.0 if high <= low else min(1.0, max(0.0, (value - low) / (high - low)))
        return begin + share * (end - begin)


def _log(value: float) -> float:
    return math.log10(max(value, 1e-12))


def chart(title: str, series: Sequence[Series], x: Axis, y: Axis, marks: Sequence[tuple[float, str]] = ()) -> str:
    """marks: vertical lines, with a word each."""
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = _begun(title, WIDTH, HEIGHT)
    for value in ticks(y, 5):
        at = y.at(value, bottom, TOP)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{short(value)}</text>')
    for value in ticks(x, 7):
        at = x.at(value, LEFT, right)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(f'<text x="{at:.1f}" y="{bottom + 14}" text-anchor="middle">{short(value)}</text>')
    parts += [_drawn(each, lambda v: x.at(v, LEFT, right), lambda v: y.at(v, bottom, TOP)) for each in series]
    for value, word in marks:
        at = x.at(value, LEFT, right)
        parts.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}" stroke="var(--bad)" stroke-dasharray="3 3"/>'
            f'<text x="{at + 3:.1f}" y="{TOP + 10}">{escape(word)}</text>'
        )
    parts.append(f'<text x="{right}" y="{HEIGHT - 8}" text-anchor="end">{escape(x.label)}</text>')
    parts.append(f'<text x="6" y="{TOP - 6}">{escape(y.label)}</text>')
    parts.append(_legend(series))
    parts.append("</svg>")
    return "".join(parts)


def _begun(title: str, width: int, height: int) -> list[str]:
    return [
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title, quote=True)}" '
        'xmlns="http://www.w3.org/2000/svg">',
        f'<text class="title" x="{LEFT}" y="16">{escape(title)}</text>',
    ]


def _legend(series: Sequence[Series]) -> str:
    parts, at = [], LEFT
    for each in (each for each in series if each.name):
        y = HEIGHT - 12
        parts.append(f'<rect x="{at}" y="{y}" width="10" height="4" rx="1" fill="var(--{each.colour})"/>')
        parts.append(f'<text x="{at + 14}" y="{y + 5}">{escape(each.name)}</text>')
        at += 24 + round(6.2 * len(each.name))
    return "".join(parts)


def _drawn(series: Series, at_x: Callable[[float], float], at_y: Callable[[float], float]) -> str:
    points = [(at_x(x), at_y(y)) for x, y in zip(series.x, series.y, strict=True)]
    if not points:
        return ""
    colour = f"var(--{series.colour})"
    if series.kind == "dots":
        return "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points)
    if series.kind in ("step", "area"):
        points = [
            corner for a, b in zip(points, [*points[1:], points[-1]], strict=True) for corner in (a, (b[0], a[1]))
        ]
    path = _path(points)
    if series.kind == "area":
        floor = [at_y(v) for v in (series.base if series.base is not None else [0.0] * len(series.x))]
        xs = [at_x(x) for x in series.x]
        under = [
            corner for i in range(len(xs)) for corner in ((xs[i], floor[i]), (xs[min(i + 1, len(xs) - 1)], floor[i]))
        ]
        back = _path(under[::-1]).replace("M", "L", 1)
        return f'<path d="{path}{back}Z" fill="{colour}" fill-opacity="0.75"/>'
    dashes = ' stroke-dasharray="5 4"' if series.dashed else ""
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.6" stroke-linejoin="round"{dashes}/>'


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


class TimelineRow(Struct, frozen=True):
    """bars: (from, to, colour); ticks: moments."""

    label: str
    bars: Sequence[tuple[float, float, str]]
    ticks: Sequence[float]


def timelines(title: str, rows: Sequence[TimelineRow], x: Axis, row_height: int = 9) -> str:
    """A row for each request: when it waited and was computed, and a tick for each token."""
    width = 2 * WIDTH
    height = TOP + row_height * len(rows) + BOTTOM
    right, bottom = width - RIGHT, height - BOTTOM + 4
    parts = _begun(title, width, height)
    for value in ticks(x, 12):
        at = x.at(value, LEFT, right)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP - 6}" y2="{bottom}"/>')
        parts.append(f'<text x="{at:.1f}" y="{bottom + 14}" text-anchor="middle">{short(value)}</text>')
    thick = row_height - 3
    for number, row in enumerate(rows):
        top = TOP + number * row_height
        parts.append(f"<g><title>{escape(row.label)}</title>")
        for begin, end, colour in row.bars:
            left = x.at(begin, LEFT, right)
            wide = max(0.5, x.at(end, LEFT, right) - left)
            parts.append(f'<rect x="{left:.1f}" y="{top}" width="{wide:.1f}" height="{thick}" fill="var(--{colour})"/>')
        places = sorted({round(x.at(value, LEFT, right), 1) for value in row.ticks})
        if places:
            path = "".join(f"M{place} {top}v{thick}" for place in places)
            parts.append(f'<path d="{path}" stroke="var(--decode)" stroke-width="0.9"/>')
        parts.append("</g>")
    parts.append(f'<text x="{right}" y="{height - 6}" text-anchor="end">{escape(x.label)}</text></svg>')
    return "".join(parts)


# ---- numbers


def cdf(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Values in order, and which share is not above each; at most MOST_POINTS of them."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    if not len(ordered):
        return [], []
    at = np.unique(np.linspace(0, len(ordered) - 1, MOST_POINTS).astype(np.int64))
    return ordered[at].tolist(), ((at + 1) / len(ordered)).tolist()


def cdf_axis(label: str, *all_values: Sequence[float]) -> Axis:
    """Logarithmic where the tail is far from the middle."""
    values = np.concatenate([np.asarray(each, dtype=np.float64) for each in all_values] or [np.zeros(0)])
    values = values[values > 0]
    if not len(values):
        return Axis(label, 0.0, 1.0)
    low, high = float(np.percentile(values, 1)), float(values.max())
    if high > 20 * float(np.median(values)):
        return Axis(label, max(low / 2, high / 1e5), high * 1.1, log=True)
    return Axis(label, 0.0, high * 1.03)


def binned(
    times: Sequence[float], values: Sequence[float], end: float, bins: int, how: str
) -> tuple[list[float], list[float]]:
    """(begin of each bin in which something is, mean, max or sum of what is in it), from 0 to `end`."""
    at, value = np.asarray(times, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if not len(at) or end <= 0:
        return [], []
    index = np.clip((at / end * bins).astype(np.int64), 0, bins - 1)
    counts = np.bincount(index, minlength=bins)
    if how == "max":
        found = np.full(bins, -np.inf)
        np.maximum.at(found, index, value)
    else:
        found = np.bincount(index, weights=value, minlength=bins)
        if how == "mean":
            found = found / np.maximum(counts, 1)
    there = counts > 0 if how != "sum" else np.ones(bins, dtype=bool)
    begins = np.arange(bins) * (end / bins)
    return begins[there].tolist(), found[there].tolist()


def ticks(axis: Axis, about: int) -> list[float]:
    """Round numbers from the low to the high end."""
    if axis.log:
        low, high = math.floor(_log(axis.low)), math.ceil(_log(axis.high))
        steps = (1, 2, 5) if high - low <= 3 else (1,)
        found = [step * 10.0**power for power in range(low, high + 1) for step in steps]
        return [value for value in found if axis.low <= value <= axis.high]
    span = axis.high - axis.low
    if span <= 0:
        return [axis.low]
    raw = span / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= raw)
    first = math.ceil(axis.low / step)
    return [n * step for n in range(first, math.floor(axis.high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """1500 as 1.5k."""
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.4g}{unit}"
    return f"{value:.4g}"


def standalone(charts: Sequence[str], title: str, columns: int = 2) -> str:
    """One SVG file with charts side by side."""
    rows = ceil_div(len(charts), columns)
    width, height = columns * WIDTH, rows * HEIGHT + 30
    placed = [
        each.replace(
            "<svg ",
            f'<svg x="{n % columns * WIDTH}" y="{30 + n // columns * HEIGHT}" width="{WIDTH}" height="{HEIGHT}" ',
            1,
        )
        for n, each in enumerate(charts)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f'<style>{STYLE}</style><rect width="100%" height="100%" fill="var(--bg)"/>'
        f'<text class="title" x="16" y="20">{escape(title)}</text>{"".join(placed)}</svg>\n'
    )
