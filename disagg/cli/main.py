"""The `disagg` command: names, flags and help. What a command does is imported when it runs.

Exit statuses are those of `types/status`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from disagg.cli.cache_commands import cache
from disagg.cli.engine_command import bench_engine
from disagg.cli.flags import (
    MAX_DEADLINE_S,
    Command,
    client_options,
    config_options,
    finite,
    given_settings,
    insecure_option,
    overrides_of,
    text,
    wait_options,
)
from disagg.cli.group import CommandGroup
from disagg.cli.interrupts import end_at_ctrl_c, raise_at_ctrl_c
from disagg.cli.load_commands import bench_serve, report
from disagg.cli.plan_command import plan
from disagg.cli.terminal import write_whatever_is_said
from disagg.cli.transfer_command import bench_transfer
from disagg.cli.up_settings import up_settings

DEFAULT_HTTP = "http://127.0.0.1:8000"
MAX_COUNT = 2**31 - 1  # what the wire carries
DEFAULT_GRPC = "127.0.0.1:50051"
RUN_DIR = "~/.cache/disagg/run"


def _show_version(ctx: click.Context, param: click.Parameter, asked: bool) -> None:
    from disagg.types.version import version

    if asked:
        click.echo(f"disagg {version()}")
        ctx.exit()


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show the version."
)
def cli() -> None:
    """Serve a large language model from separately scaled prefill and decode pools."""


def main() -> None:
    """Entry of the `disagg` command."""
    end_at_ctrl_c()
    write_whatever_is_said()
    cli(prog_name="disagg")


# ---- options that several commands share


def _supervised_options(command: Command) -> Command:
    """What a supervising parent adds; not for people."""
    command = click.option("--heartbeat-fd", type=int, hidden=True)(command)
    return click.option("--parent-pid", type=int, hidden=True)(command)


def _http_option(command: Command) -> Command:
    return click.option(
        "--http", "base_url", default=DEFAULT_HTTP, show_default=True, metavar="URL", callback=text, help="The router."
    )(client_options(command))


def _host_port(ctx: click.Context, param: click.Parameter, value: str) -> str:
    from disagg.types.addresses import split

    try:
        split(text(ctx, param, value))
    except ValueError as error:
        raise click.BadParameter("it must be HOST:PORT, such as 127.0.0.1:50051 or [::1]:50051", ctx, param) from error
    return value


# ---- the cluster


@cli.command()
@up_settings
@click.option("--prefill", default=1, show_default=True, type=click.IntRange(0, 64), help="Prefill servers.")
@click.option("--decode", default=1, show_default=True, type=click.IntRange(0, 64), help="Decode servers.")
@click.option("--mixed", default=0, show_default=True, type=click.IntRange(0, 64), help="Servers that do both.")
@click.option(
    "--routers", default=1, show_default=True, type=click.IntRange(1, 64), help="Routers, which share the two ports."
)
@click.option("--prefill-tp", type=click.IntRange(1, 64), help="Ranks per prefill server.  [default: 1]")
@click.option("--decode-tp", type=click.IntRange(1, 64), help="Ranks per decode server.  [default: 1]")
@click.option("--mixed-tp", type=click.IntRange(1, 64), help="Ranks per mixed server.  [default: 1]")
@click.option("--mixed-pp", type=click.IntRange(1, 64), help="Pipeline stages per mixed server.  [default: 1]")
@click.option(
    "--mixed-dp",
    type=click.IntRange(1, 64),
    help="Data-parallel ranks per mixed server, of --mixed-tp ranks and a KV pool each.  [default: 1]",
)
@click.option(
    "--run-dir",
    default=RUN_DIR,
    show_default=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Where this run gets a directory for its logs.",
)
@click.option("--parent-pid", type=int, hidden=True)
@insecure_option
@config_options
def up(file: Path | None, sets: tuple[str, ...], run_dir: Path, parent_pid: int | None, **sizes: Any) -> None:
    """Run a whole cluster on this machine, until Ctrl-C.

    Starts a router, prefill and decode servers, says `ready` when requests will succeed, and starts again what dies.
    Ctrl-C, SIGTERM or a closed terminal drains; a second Ctrl-C kills. What is said here is also in RUN_DIR/up.log, and
    the cluster needs nobody to read it: behind `| head -1` it goes on, and with nohup it outlives the terminal.
    """
    from disagg.cli.up import UpOptions, run_up
    from disagg.telemetry.process import die_with_parent
    from disagg.types.small_files import home_expanded

    if parent_pid is not None:
        die_with_parent(parent_pid)
    options = UpOptions(
        num_prefill=sizes["prefill"],
        num_decode=sizes["decode"],
        num_mixed=sizes["mixed"],
        num_routers=sizes["routers"],
        prefill_tp=sizes["prefill_tp"],
        decode_tp=sizes["decode_tp"],
        mixed_tp=sizes["mixed_tp"],
        mixed_dp=sizes["mixed_dp"],
        mixed_pp=sizes["mixed_pp"],
        run_parent=home_expanded(run_dir, "--run-dir"),
    )
    sys.exit(run_up(options, file, {**overrides_of(sets), **given_settings()}))


@cli.command()
@click.argument("prompt", callback=text)
@click.option(
    "--grpc",
    "address",
    default=DEFAULT_GRPC,
    show_default=True,
    metavar="HOST:PORT",
    callback=_host_port,
    help="The router.",
)
@client_options
@click.option("--model", default="", callback=text, help="Served name.  [default: the router's only model]")
@click.option("--max-tokens", type=click.IntRange(1, MAX_COUNT), metavar="N", help="[default: as many as fit]")
@click.option("--min-tokens", type=click.IntRange(0, MAX_COUNT), default=0, metavar="N")
@click.option(
    "--temperature",
    type=float,
    default=1.0,
    show_default=True,
    callback=finite,
    help="0 takes the most likely token always.",
)
@click.option("--top-k", type=click.IntRange(0, MAX_COUNT), default=0, metavar="N")
@click.option("--top-p", type=float, default=1.0, callback=finite, metavar="P")
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), metavar="N")
@click.option("--stop", multiple=True, metavar="TEXT", callback=text, help="End before this text; may be repeated.")
@click.option("--ignore-eos", is_flag=True, help="Go on after the model's end-of-sequence token.")
@click.option(
    "--deadline",
    type=click.FloatRange(0, MAX_DEADLINE_S, min_open=True),
    callback=finite,
    metavar="SECONDS",
    help="How long the request may take.",
)
@click.option(
    "--chat/--raw",
    default=None,
    help="Render the prompt with the model's chat template, or send it as it is.  [default: chat, where it has one here]",
)
@click.option("--timeline", is_flag=True, help="Draw where the time went.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end instead of text as it comes.")
def generate(prompt: str, **options: Any) -> None:
    """Continue PROMPT ("-" reads it from stdin), printing text as it comes."""
    from disagg.cli.generate import GenerateOptions, run_generate

    text = prompt
    if prompt == "-":
        try:
            text = sys.stdin.buffer.read().decode()
        except UnicodeDecodeError as error:
            raise click.BadParameter(f"stdin is not UTF-8 at byte {error.start}", param_hint="PROMPT") from error
    sys.exit(run_generate(text, GenerateOptions(**options)))


@cli.command()
@_http_option
@click.option("--memory", is_flag=True, help="Draw the KV memory of every server instead.")
@click.option("--json", "as_json", is_flag=True, help="Print the router's answer as it is, which has everything.")
def status(base_url: str, memory: bool, as_json: bool) -> None:
    """Show both pools, and what they are doing."""
    from disagg.cli.status import show_status

    show_status(base_url, as_json, memory)


@cli.command()
@click.argument("name", callback=text)
@_http_option
@click.option(
    "--force",
    is_flag=True,
    help="Also the last ready server of its role, though nobody else does its work and requests may have to wait.",
)
@click.option("--undo", is_flag=True, help="Let it take requests again.")
@wait_options("it has nothing left", 600.0)
def drain(name: str, base_url: str, force: bool, undo: bool, wait: bool, timeout_s: float) -> None:
    """Empty the server NAME: it takes nothing new, and what it decodes goes on at other decode servers.

    Answers move with their KV, so nothing is computed again and clients see a short pause. What a prefill or a mixed server
    has, or what no other decode server can hold, ends there. The process goes on: end it when `status` says `drained`, or
    have it take requests again with --undo. The last ready server of its role is refused without --force, unless ready mixed
    servers, or a pair in place of a mixed one, do its work.
    """
    from disagg.cli.drain import run_drain

    raise_at_ctrl_c()
    sys.exit(run_drain(base_url, name, undo=undo, force=force, wait=wait, timeout_s=timeout_s))


@cli.command()
@click.argument("name", callback=text)
@click.argument("role", type=click.Choice(["prefill", "decode", "mixed"]))
@_http_option
@click.option(
    "--force",
    is_flag=True,
    help="Also the last server of its role, though nobody else does its work and requests may have to wait.",
)
@wait_options("it has the role", 900.0)
def role(name: str, role: str, base_url: str, force: bool, wait: bool, timeout_s: float) -> None:
    """Have the server NAME become a ROLE server: it drains, and its workers begin anew, under the same name.

    What it decodes goes on at other decode servers, as with `drain`. If workers of the new role cannot start, it is again what
    it was, and says why. The role lasts until the process ends: one that is started anew has that of its command.
    """
    from disagg.cli.role_change import run_role_change

    raise_at_ctrl_c()
    sys.exit(run_role_change(base_url, name, role, force=force, wait=wait, timeout_s=timeout_s))


@cli.command()
@click.option("--model", metavar="NAME|DIR", help="[default: smollm2-135m]")
def demo(model: str | None) -> None:
    """Start a cluster, ask it over gRPC and over HTTP, draw where the time went, and shut it down."""
    from disagg.cli.demo import run_demo

    raise_at_ctrl_c()
    sys.exit(run_demo(model))


# ---- looking into things


@cli.group()
def debug() -> None:
    """Look into a running cluster."""


@debug.command("dump")
@_http_option
def debug_dump(base_url: str) -> None:
    """Print everything that the router and the servers know of what they are doing."""
    from disagg.cli.status import show_dump

    show_dump(base_url)


@cli.group()
def bench() -> None:
    """Measure an endpoint, or parts of the system on this machine."""


bench.add_command(bench_engine)
bench.add_command(bench_serve)
bench.add_command(bench_transfer)
cli.add_command(plan)
cli.add_command(report)


@cli.group()
def model() -> None:
    """Models in Hugging Face format, converted where need be."""


@model.command("path")
@click.argument("name", required=False)
@config_options
def model_path(name: str | None, file: Path | None, sets: tuple[str, ...]) -> None:
    """Print the model's directory, converting the model first if need be."""
    from disagg.cli.models import model_directory

    click.echo(model_directory(name, file, overrides_of(sets)))


@model.command("convert")
@click.argument("name", required=False)
@config_options
def model_convert(name: str | None, file: Path | None, sets: tuple[str, ...]) -> None:
    """Convert the model into the cache."""
    from disagg.cli.models import model_directory

    click.echo(model_directory(name, file, overrides_of(sets)), err=True)


@model.command("inspect")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True)
@config_options
def model_inspect(name: str | None, as_json: bool, file: Path | None, sets: tuple[str, ...]) -> None:
    """Show what there is to know of a model without loading it, or why it is not served.

    Exit status 2 and one line for a model that a router or a server with this configuration would refuse.
    """
    from disagg.cli.models import show_facts

    show_facts(name, file, overrides_of(sets), as_json)


@model.command("list")
def model_list() -> None:
    """List the models that are known by name."""
    from disagg.cli.models import show_known

    show_known()


cli.add_command(cache)


@cli.group()
def config() -> None:
    """Settings."""


@config.command("show")
@config_options
def config_show(file: Path | None, sets: tuple[str, ...]) -> None:
    """Print every setting as TOML, with what file, environment and flags say. Secrets are shown as "***"."""
    from disagg.cli.cache import without_secrets
    from disagg.config.load import dump_config, load_config

    click.echo(dump_config(without_secrets(load_config(file, overrides_of(sets)))), nl=False)


# ---- one process


def _role_command(role: str, what: str) -> None:
    def run(file: Path, sets: tuple[str, ...], heartbeat_fd: int | None, parent_pid: int | None) -> None:
        from disagg.cli.roles import run_role

        overrides = {**overrides_of(sets), **given_settings()}
        sys.exit(run_role(role, file, overrides, heartbeat_fd, parent_pid))  # type: ignore[arg-type]

    cli.command(role, help=f"Run one {what} (what `disagg up` and Kubernetes start).")(
        _supervised_options(insecure_option(config_options(run)))
    )


_role_command("router", "router")
_role_command("prefill", "prefill server")
_role_command("decode", "decode server")
_role_command("mixed", "mixed server, for both phases of whole requests")
