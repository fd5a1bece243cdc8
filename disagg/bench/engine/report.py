"""Draws what a bench of an engine found: a table, and the roofline. Pure: measurements in, text out."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from rich.table import Table
from rich.text import Text

from disagg.bench.charts import STYLE, Axis, Series, chart
from disagg.bench.engine.work import Ceilings


class Measured(Struct, frozen=True):
    """tokens: that each sequence has, or of the prompt. seconds: of a step, or of a whole prompt; compute_s: those in which
    workers computed. nbytes, flops: of one rank, at least. why_not: it could not be run; empty: it was."""

    tp: int
    what: str
    sequences: int
    tokens: int
    seconds: float = 0.0
    compute_s: float = 0.0
    floor_s: float = 0.0
    tokens_out: int = 0
    nbytes: float = 0.0
    flops: float = 0.0
    why_not: str = ""

    @property
    def share(self) -> float:
        """Of what the device could do: 1 at the floor."""
        return self.floor_s / self.seconds if self.seconds else 0.0

    @property
    def intensity(self) -> float:
        """FLOP for each byte."""
        return self.flops / self.nbytes if self.nbytes else 0.0


def table_of(measured: Sequence[Measured]) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("TP", no_wrap=True)
    table.add_column("step", no_wrap=True)
    for name in ("sequences", "tokens", "ms", "computing", "floor", "of floor", "tokens/s", "FLOP/B"):
        table.add_column(name, justify="right", no_wrap=True)
    if any(each.why_not for each in measured):
        table.add_column("")
    before = None
    for each in measured:
        if before not in (None, (each.tp, each.what)):
            table.add_section()
        before = each.tp, each.what
        figures = [""] * 6
        if not each.why_not:
            figures = [
                f"{1e3 * each.seconds:.2f}",
                f"{1e3 * each.compute_s:.2f}",
                f"{1e3 * each.floor_s:.2f}",
                f"{each.seconds / each.floor_s:.2f}x" if each.floor_s else "",
                f"{each.tokens_out / each.seconds:.0f}" if each.seconds else "",
                f"{each.intensity:.1f}",
            ]
        why = (each.why_not,) if each.why_not else ()
        table.add_row(str(each.tp), each.what, str(each.sequences), str(each.tokens), *figures, *why)
    return table


def legend(ceilings: Ceilings, device: str) -> Text:
    lines = [
        f"{ceilings.device}: {ceilings.describe()}, measured in this run.",
        "ms: of a step of all sequences, or of a prompt up to its first token; computing: of that, while workers computed.",
        "floor: weights and KV read once and multiplied, at these rates; what ranks say to each other is not in it.",
    ]
    if device == "cpu":
        lines.append("Ranks on a CPU have its rates between them.")
    return Text("\n".join(lines), style="dim")


def roofline(measured: Sequence[Measured], ceilings: Ceilings) -> str:
    """SVG: FLOP/s of each row over its FLOP for each byte, under what the device could do."""
    ran = [each for each in measured if not each.why_not and each.intensity]
    ridge = ceilings.sustained / ceilings.copy
    low = min([each.intensity for each in ran] + [ridge]) / 2
    high = max([each.intensity for each in ran] + [ridge]) * 2
    roof = Series(
        "what the device can do",
        [low, ridge, high],
        [low * ceilings.copy / 1e12, ceilings.sustained / 1e12, ceilings.sustained / 1e12],
        "limit",
    )
    dots = [
        Series(
            what,
            [each.intensity for each in of],
            [each.flops / each.seconds / 1e12 for each in of],
            what,
            kind="dots",
        )
        for what in ("prefill", "decode")
        if (of := [each for each in ran if each.what == what])
    ]
    values = [value for series in (roof, *dots) for value in series.y]
    x = Axis("FLOP / byte", low, high, log=True)
    y = Axis("TFLOP/s", min(values) / 2, max(values) * 2, log=True)
    drawn = chart(f"Roofline: {ceilings.device}", [roof, *dots], x, y)
    return drawn.replace(">", f"><style>{STYLE}</style>", 1)
