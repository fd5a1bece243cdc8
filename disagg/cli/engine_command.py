"""`disagg bench engine`: names, flags and help. What it does is imported when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from disagg.cli.flags import FILE, config_options, overrides_of
from disagg.cli.interrupts import raise_at_ctrl_c

MOST_SEQUENCES, MOST_TOKENS = 4096, 1 << 22


class _SequencesByTokens(click.ParamType[tuple[int, int]]):
    name = "NxTOKENS"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        count, _, tokens = str(value).partition("x")
        if not (count.isascii() and tokens.isascii() and count.isdigit() and tokens.isdigit()):
            self.fail(f"{value!r} is not of the form NxTOKENS, such as 32x1024", param, ctx)
        found = int(count[:9]), int(tokens[:9])
        if not (1 <= found[0] <= MOST_SEQUENCES and 1 <= found[1] <= MOST_TOKENS):
            self.fail(f"{value!r}: 1 to {MOST_SEQUENCES} sequences of 1 to {MOST_TOKENS} tokens", param, ctx)
        return found


@click.command("engine")
@click.option("--model", "model", metavar="NAME|DIR", help="As of `disagg up`.  [default: model.name]")
@click.option(
    "--tp",
    "tps",
    multiple=True,
    type=click.IntRange(1, 64),
    metavar="N",
    help="Ranks of the engine; may be repeated.  [default: server.tp]",
)
@click.option(
    "--decode",
    "decodes",
    multiple=True,
    type=_SequencesByTokens(),
    metavar="NxTOKENS",
    help="Steps of so many sequences that begin with so many tokens; may be repeated.  [default: 1, 32, 128 and 256 of 1024 "
    "tokens, 32x8192, 1x32768; on CPU 1, 4 and 16 of 256; none beside --prefill]",
)
@click.option(
    "--prefill",
    "prompts",
    multiple=True,
    type=click.IntRange(1, MOST_TOKENS),
    metavar="TOKENS",
    help="A prompt of so many; may be repeated.  [default: 2048, 8192, 32768; on CPU 256, 1024; none beside --decode]",
)
@click.option("--steps", type=click.IntRange(1, 10000), metavar="N", help="Of each decode.  [default: 24; on CPU 8]")
@click.option(
    "--rounds", type=click.IntRange(1, 1000), default=3, show_default=True, metavar="N", help="Of each prompt."
)
@click.option("--json", "json_file", type=FILE, metavar="FILE", help="Keep every figure.")
@click.option("--plot", "plot_file", type=FILE, metavar="FILE", help="Draw the roofline, as SVG.")
@config_options
def bench_engine(
    file: Path | None, sets: tuple[str, ...], model: str | None, steps: int | None, **options: Any
) -> None:
    """Run an engine by itself, and show how near it comes to what its device can do.

    Starts the workers of one mixed server with a model, and nothing else: no router, no transfer. The engine schedules random
    prompts as it would anybody's, with all that the configuration says but the prefix cache. Each row is compared with its
    floor: the time in which the device could read the weights and the KV once and multiply them, at the rates that a plain
    copy and one large product had in the same run. 1.00x is the floor, and what is more is lost.

    Typical: `disagg bench engine --model DIR --plot roofline.svg`; then `--set engine.chunk_tokens=...` to see what it brings.
    The exit status is 1 if no row could be run.
    """
    from disagg.bench.engine.measure import EngineOptions, run_engine_bench
    from disagg.cli.models import model_directory
    from disagg.cli.terminal import note
    from disagg.config.load import load_config

    raise_at_ctrl_c()
    overrides = overrides_of(sets)
    config = load_config(file, overrides)
    sys.exit(
        run_engine_bench(
            EngineOptions(steps=steps or 0, **options), config, model_directory(model, file, overrides), note
        )
    )
