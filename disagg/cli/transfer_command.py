"""`disagg bench transfer`: names, flags and help. What it does is imported when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from disagg.cli.flags import size_of
from disagg.cli.interrupts import raise_at_ctrl_c

DEFAULT_PORT = 7600  # as in bench/transfer/far, which is not imported for help
MOST_TOKENS, MOST_IN_FLIGHT, MOST_REPEATS = 1 << 22, 1024, 100_000
_OF_LISTENING = ("device", "ucx_tls", "ucx_net_devices")


def _only_what_listening_takes(ctx: click.Context) -> None:
    """Raises UsageError for options that the other end decides."""
    given = [name for name in ctx.params if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT]
    if wrong := [name for name in given if name not in (*_OF_LISTENING, "listen")]:
        flags = {parameter.name: parameter.opts[0] for parameter in ctx.command.params}
        raise click.UsageError(
            f"{', '.join(flags[name] for name in wrong)} beside --listen: who dials with --to says that; --listen takes "
            f"{', '.join(flags[name] for name in _OF_LISTENING)}"
        )


@click.command("transfer")
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="auto: the GPUs, if there are any.",
)
@click.option(
    "--tp",
    "pairs",
    multiple=True,
    metavar="PREFILL:DECODE",
    help="TP sizes of the two sides; may be repeated.  [default: 1:1, 1:2, 2:1, 2:2, where the KV heads allow it]",
)
@click.option(
    "--tokens",
    multiple=True,
    type=click.IntRange(1, MOST_TOKENS),
    metavar="N",
    help="Length of the sequence that is moved; may be repeated.  [default: 2048, 8192, 32768; on CPU 256, 1024]",
)
@click.option(
    "--shape",
    metavar="NAME|LxHxDxDTYPE",
    help='Layers, KV heads, head_dim and dtype of the KV, such as 32x8x128xbfloat16, or "llama-3.1-8b" or '
    '"smollm2-135m".  [default: llama-3.1-8b; on CPU smollm2-135m]',
)
@click.option("--page-tokens", type=click.IntRange(1, 1024), default=16, show_default=True, metavar="N")
@click.option(
    "--piece",
    "piece_bytes",
    callback=size_of,
    metavar="SIZE",
    help="KV in one write, at most.  [default: 64MiB; on CPU 4MiB]",
)
@click.option(
    "--in-flight",
    type=click.IntRange(2, MOST_IN_FLIGHT),
    metavar="N",
    help="Gather buffers of each prefill rank: so many writes at once.  [default: 4]",
)
@click.option(
    "--arena",
    "arena_bytes",
    callback=size_of,
    metavar="SIZE",
    help="Memory of each decode rank into which pieces are written.  [default: 1GiB; on CPU 64MiB]",
)
@click.option(
    "--kernels",
    type=click.Choice(["auto", "triton", "torch"]),
    default="auto",
    show_default=True,
    help="What gathers and scatters.",
)
@click.option("--ucx-tls", metavar="LIST", help="UCX_TLS.  [default: UCX chooses; on CPU posix,cma,tcp]")
@click.option(
    "--ucx-net-devices",
    metavar="LIST",
    help="UCX_NET_DEVICES.  [default: UCX chooses; on CPU lo, between machines the device of the connection]",
)
@click.option(
    "--repeat",
    "repeats",
    type=click.IntRange(1, MOST_REPEATS),
    metavar="N",
    help="Trials per row.  [default: 15; on CPU 7]",
)
@click.option("--unstaged", is_flag=True, help="Also move it without staging: a descriptor per page, layer and plane.")
@click.option(
    "--idle",
    is_flag=True,
    help="Let links fall asleep before each transfer and each plain copy, which on NVLink costs 0.3 ms. Without, each transfer "
    "follows the one of a chunk before it.",
)
@click.option("--curve/--no-curve", default=True, show_default=True, help="Draw GB/s by size of pieces.")
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Keep every figure."
)
@click.option(
    "--listen",
    is_flag=False,
    flag_value="0.0.0.0",
    metavar="[ADDR[:PORT]]",
    help=f"Hold the decode ranks for another machine that measures with --to.  [default: 0.0.0.0:{DEFAULT_PORT}]",
)
@click.option("--to", metavar="HOST[:PORT]", help="Have the decode ranks on a machine where --listen runs.")
@click.pass_context
def bench_transfer(ctx: click.Context, /, listen: str | None, **options: Any) -> None:
    """Move KV cache between prefill and decode ranks, and show how fast that is.

    Starts one process per rank on this machine, with a KV pool of random bytes each, and moves one sequence's KV as a
    cluster does: pages are gathered into buffers, written into the other side's memory, checked, and scattered into its
    pages. No model is needed and no cluster is running meanwhile. Each row is also given as a share of a plain copy of the
    same bytes, which is what the hardware could do at best. The first column is the TP size of either side; where they
    differ, KV heads are cut and joined on the way.

    Between two machines, or pods: `--listen` on one holds the decode ranks, `--to` on the other sends to them and shows what
    it measured, and by what UCX wrote. Both must run the same code. Nobody is asked who he is, so end it when done.

    Typical: `disagg bench transfer` first; then `--piece` and `--in-flight` to find what suits the machine, which are
    transfer.gather_bytes and transfer.gather_buffers in the configuration. The exit status is 1 if a single page that
    landed is not what was sent.
    """
    from disagg.bench.transfer.far import parse_address
    from disagg.bench.transfer.measure import TransferOptions, run_transfer_bench
    from disagg.cli.terminal import note

    raise_at_ctrl_c()
    if listen is not None:
        from disagg.bench.transfer.listen import ListenOptions
        from disagg.bench.transfer.listen import listen as serve

        _only_what_listening_takes(ctx)
        host, port = parse_address(listen, "--listen")
        taken = {name: options[name] for name in _OF_LISTENING}
        sys.exit(serve(ListenOptions(host=host, port=port, **taken), note))
    sys.exit(run_transfer_bench(TransferOptions(**options), note))
