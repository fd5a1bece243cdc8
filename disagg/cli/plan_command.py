"""`disagg plan`: names, flags and help. What it does is imported when it runs."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from disagg.cli.flags import FILE, Command, client_options, slo_options, trace_block_option, trace_option
from disagg.cli.interrupts import raise_at_ctrl_c

COUNT = click.IntRange(1, 1 << 40)


def _positive(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    if value is not None and not (math.isfinite(value) and value > 0):
        raise click.BadParameter("it must be a finite number above 0", ctx, param)
    return value


def _rate_option(flag: str, name: str, default: float | None, help_text: str) -> Callable[[Command], Command]:
    shown = default is not None
    return click.option(
        flag, name, type=float, default=default, show_default=shown, callback=_positive, metavar="R", help=help_text
    )


@click.command("plan")
@trace_option("As `disagg bench serve --trace` reads it.", required=True)
@slo_options("ttft=2s,itl=200ms", required=True)
@click.option(
    "--record",
    "records",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="DIR",
    help="Step times from what `disagg up --record DIR` has written; files of clusters of several TP sizes may lie in it.",
)
@click.option(
    "--http",
    metavar="URL",
    help="Step times from a running cluster's router: of its last steps, without what lies between them; --record says more.",
)
@click.option(
    "--prefill-step",
    "prefill_steps",
    multiple=True,
    metavar="COST",
    help="Step times by hand: tp=1,fixed=2ms,token=22us,attended=1ns. Once for each TP size.",
)
@click.option("--decode-step", "decode_steps", multiple=True, metavar="COST", help="Likewise, of decode servers.")
@click.option(
    "--chunk-tokens", type=COUNT, metavar="N", help="engine.chunk_tokens of all.  [default: as recorded, or 8192]"
)
@click.option(
    "--kv-tokens", type=COUNT, metavar="N", help="That a server's pool holds.  [default: as recorded, or no limit]"
)
@click.option("--max-running", type=COUNT, metavar="N", help="Sequences at once.  [default: as recorded, or 256]")
@click.option(
    "--handoff", metavar="TIME", help="From a prompt's end until decode has its KV.  [default: as recorded, or 0]"
)
@click.option("--router-latency", "router", metavar="TIME", help="From a client to a server and back.  [default: 0]")
@_rate_option("--router-requests", "router_requests", 400.0, "A second that one router process takes.")
@_rate_option("--router-tokens", "router_tokens", 15_000.0, "A second that one router process relays.")
@click.option(
    "--requests", type=click.IntRange(1, 1_000_000), metavar="N", help="The first of the trace.  [default: all]"
)
@trace_block_option
@_rate_option("--speed", "speed", 1.0, "Of the trace's clock.")
@_rate_option("--rate", "rate", None, "Requests a second, at random moments instead of the trace's.")
@click.option("--prefix-cache/--no-prefix-cache", "caches", default=True, show_default=True, help="Of prefill servers.")
@click.option("--prefill", type=click.IntRange(1, 1024), metavar="N", help="With --decode: say what these would do.")
@click.option("--decode", type=click.IntRange(1, 1024), metavar="N", help="With --prefill: say what these would do.")
@click.option("--mixed", type=click.IntRange(1, 1024), metavar="N", help="Say what so many mixed servers would do.")
@click.option(
    "--most-prefill", type=click.IntRange(1, 64), default=64, show_default=True, metavar="N", help="That are tried."
)
@click.option(
    "--most-decode", type=click.IntRange(1, 256), default=256, show_default=True, metavar="N", help="That are tried."
)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=1, show_default=True, metavar="N")
@_rate_option("--limit", "limit_s", 600.0, "Seconds that all of it may take.")
@click.option("--json", "as_json", is_flag=True, help="Print every figure as one JSON object.")
@click.option("--plot", "plot_file", type=FILE, metavar="FILE", help="Draw what is predicted, as SVG.")
@client_options
def plan(http: str | None, **options: Any) -> None:
    """Say how many prefill and decode servers, of which TP size, a trace needs to stay within an SLO.

    Simulates the cluster with step times that were measured, and looks for the fewest GPUs; mixed servers are tried, too. Only TP
    sizes whose steps were measured are. Without any measured times it takes those of an H200 and a model of 8e9 parameters, and
    says so: they show how it works, and are no plan for anything else.

    \b
    disagg up --record records                                 # and some load on it
    disagg plan --trace trace.jsonl --slo ttft=2s,itl=200ms --record records
    disagg plan --trace trace.jsonl --slo ttft=2s,itl=200ms --record records --prefill 2 --decode 3
    disagg plan --trace trace.jsonl --slo ttft=2s,itl=200ms --http http://127.0.0.1:8000    # of a cluster that runs
    disagg plan --trace trace.jsonl --slo ttft=2s,itl=50ms --json \\
        --prefill-step fixed=2ms,token=22us,attended=1ns --decode-step fixed=4ms,token=15us,attended=29ns

    A step takes fixed + token * its tokens + attended * the tokens they attend to. The exit status is 1 if nothing that was tried
    is within the SLO; what came nearest is said then.
    """
    from disagg.bench.plan.run import PlanOptions, run_plan
    from disagg.cli.terminal import get_http, note, result

    raise_at_ctrl_c()
    status = None if http is None else (http, get_http(http, "/status"))
    sys.exit(run_plan(PlanOptions(**options, status=status), note, result))
