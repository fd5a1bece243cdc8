"""`disagg bench serve` and `disagg report`: names, flags and help. What they do is imported when one runs."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import click

from disagg.cli.flags import FILE, ca_option, finite, slo_options, text, trace_block_option, trace_option
from disagg.cli.interrupts import raise_at_ctrl_c

MAX_REQUESTS = 1_000_000
MAX_SECONDS = 86400.0


def _positive(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    if value is not None and (math.isnan(value) or value <= 0):
        raise click.BadParameter("it must be more than 0", ctx, param)
    return value


@click.command("serve")
@click.option("--url", required=True, metavar="URL", help="The endpoint, such as http://127.0.0.1:8000.")
@click.option("--model", default="", metavar="NAME", callback=text, help="[default: the only one of /v1/models]")
@click.option(
    "--api-key", default="", envvar="OPENAI_API_KEY", show_envvar=True, metavar="KEY", help="If it wants one."
)
@ca_option("Certificates (PEM) that are trusted for its own, of https.")
@click.option("--rate", type=float, callback=_positive, metavar="R", help="Requests a second, or inf.  [default: inf]")
@click.option("--concurrency", type=click.IntRange(1, 65536), metavar="N", help="So many at a time instead.")
@click.option(
    "--burstiness",
    type=float,
    default=1.0,
    show_default=True,
    callback=_positive,
    metavar="G",
    help="Shape of the gaps' gamma distribution: 1 is Poisson, less comes in bursts, more is evener.",
)
@click.option("--requests", type=click.IntRange(1, MAX_REQUESTS), metavar="N", help="[default: 100, or all of a trace]")
@click.option("--input-tokens", default="512", show_default=True, metavar="N|A-B", help="Of each prompt, or a range.")
@click.option("--output-tokens", default="128", show_default=True, metavar="N|A-B", help="Of each answer.")
@trace_option(
    "JSON lines with timestamp (ms), input_length, output_length and hash_ids, as Mooncake's. With --rate or --concurrency "
    "only its lengths and what prompts have in common count."
)
@trace_block_option
@click.option(
    "--speed", type=float, default=1.0, show_default=True, callback=_positive, metavar="X", help="Of a trace's clock."
)
@click.option(
    "--prefix-tokens", type=click.IntRange(0, 1 << 22), default=0, metavar="N", help="Before the input tokens, shared."
)
@click.option(
    "--prefix-groups",
    type=click.IntRange(1, MAX_REQUESTS),
    default=1,
    show_default=True,
    metavar="N",
    help="Different ones.",
)
@click.option(
    "--turns",
    type=click.IntRange(1, 1000),
    default=1,
    show_default=True,
    metavar="N",
    help="Requests of a conversation: each begins with all that was said.",
)
@click.option(
    "--think",
    "think_s",
    type=click.FloatRange(0, MAX_SECONDS),
    default=0.0,
    callback=finite,
    metavar="SECONDS",
    help="From an answer to the next turn.",
)
@slo_options("ttft=2s,itl=100ms")
@click.option(
    "--goodput", is_flag=True, help="Look for the highest rate that is within the SLO, a run at each that is tried."
)
@click.option(
    "--tolerance",
    type=click.FloatRange(0.001, 1.0),
    default=0.05,
    show_default=True,
    metavar="P",
    help="Of the goodput.",
)
@click.option(
    "--warmup",
    type=click.IntRange(0, 10_000),
    default=4,
    show_default=True,
    metavar="N",
    help="Requests before, which are not counted.",
)
@click.option(
    "--prompts",
    type=click.Choice(["auto", "ids", "text"]),
    default="auto",
    show_default=True,
    help="As token ids, or as text.",
)
@click.option("--token-ids", metavar="A-B", help="Range of the ids.  [default: as large as the endpoint takes]")
@click.option(
    "--ignore-eos/--no-ignore-eos",
    default=True,
    show_default=True,
    help="Ask for answers of full length, where that can be asked.",
)
@click.option(
    "--temperature", type=click.FloatRange(0, 100), default=0.0, show_default=True, callback=finite, metavar="T"
)
@click.option("--extra-body", metavar="JSON", callback=text, help="More fields of each request.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0, MAX_SECONDS, min_open=True),
    default=600.0,
    show_default=True,
    callback=finite,
    metavar="SECONDS",
    help="Of one request.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**32 - 1),
    metavar="N",
    help="[default: drawn, so that no prompt is cached from before]",
)
@click.option("--details", is_flag=True, help="Keep the times of every request in the JSON.")
@click.option("--json", "json_file", type=FILE, metavar="FILE", help="Keep every figure.")
@click.option("--plot", "plot_file", type=FILE, metavar="FILE", help="Draw them, as SVG.")
def bench_serve(**options: Any) -> None:
    """Put load on an OpenAI endpoint, and show what its clients see.

    Any server with a streaming /v1/completions will do. Without --concurrency the load is open: requests come at --rate, or
    as the trace says, whatever has been answered. Times count from when a request was sent; how late that was, and how
    busy this client was, is shown, with a warning if the client may be what is measured.

    \b
    disagg bench serve --url http://127.0.0.1:8000 --rate 4 --requests 300
    disagg bench serve --url http://127.0.0.1:8000 --concurrency 32 --input-tokens 100-2000 --json out.json
    disagg bench serve --url http://127.0.0.1:8000 --trace trace.jsonl --speed 2
    disagg bench serve --url http://127.0.0.1:8000 --goodput --slo ttft=2s,itl=100ms --requests 300

    The exit status is 1 if no request was completed.
    """
    from disagg.bench.serve.measure import ServeOptions, run_serve_bench
    from disagg.cli.terminal import note

    raise_at_ctrl_c()
    sys.exit(run_serve_bench(ServeOptions(**options), note))


@click.command("report")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path, file_okay=False, exists=True))
def report(directory: Path) -> None:
    """Draw what `disagg up --record DIR` has recorded: DIR/report.html, one page with everything in it.

    Requests, tokens and rates; CDFs of time to first token and between tokens; a timeline of tokens; and for each server
    the tokens of its steps against their budget, step times, and pages. It can be asked for while the cluster runs.
    """
    from disagg.bench.report.write import write_report
    from disagg.cli.terminal import note, result

    result(str(write_report(directory, note)))
