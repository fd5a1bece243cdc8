"""Options that several groups of commands share, and how their values are read."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from disagg.types.errors import ConfigError

Command = TypeVar("Command", bound=Callable[..., Any])
FILE = click.Path(path_type=Path, dir_okay=False)
MAX_DEADLINE_S = 10.0 * 365 * 86400


def config_options(command: Command) -> Command:
    command = click.option(
        "--set",
        "sets",
        multiple=True,
        metavar="SECTION.FIELD=VALUE",
        help="Overrule one setting; may be repeated. `disagg config show` lists them.",
    )(command)
    return click.option(
        "--config",
        "file",
        type=click.Path(path_type=Path, dir_okay=False),
        help="TOML file with settings. DISAGG__SECTION__FIELD in the environment overrules it.",
    )(command)


SETTINGS = "disagg.settings"  # of a command's context: what its flags say, by path


def setting(flag: str, path: str, **attributes: Any) -> Callable[[Command], Command]:
    """A flag that stands for a setting. Its value, if it is given, is in `given_settings`, and no parameter of the command."""

    def keep(ctx: click.Context, param: click.Parameter, value: object) -> None:
        if value is not None:
            ctx.meta.setdefault(SETTINGS, {})[path] = value

    return click.option(flag, expose_value=False, callback=keep, **attributes)


insecure_option = setting(
    "--insecure",
    "auth.insecure",
    is_flag=True,
    default=None,  # else it would overrule what a file says where it is not given
    help="Listen beyond this machine without asking who is there.",
)


def given_settings() -> dict[str, object]:
    """What flags made by `setting` say, by the settings' paths."""
    return dict(click.get_current_context().meta.get(SETTINGS, {}))


KEY_FILE, CA = "disagg.key_file", "disagg.ca"  # of a command's context


Given = TypeVar("Given", str, None, tuple[str, ...])


def text(ctx: click.Context, param: click.Parameter, value: Given) -> Given:
    """The command line is bytes; what is no text cannot be sent."""
    for each in value if isinstance(value, tuple) else (value,):
        try:
            (each or "").encode()
        except UnicodeEncodeError as error:
            raise click.BadParameter(f"it is not UTF-8 at character {error.start}", ctx, param) from error
    return value


def client_options(command: Command) -> Command:
    """Options of commands that ask a router. What they say is in `given_key` and `given_ca`, and no parameter of the command."""

    def keep(ctx: click.Context, param: click.Parameter, value: Path | None) -> None:
        if value is not None:
            ctx.meta[CA if param.name == "ca" else KEY_FILE] = value

    command = ca_option(
        "Certificates (PEM) that are trusted for the router's; gRPC speaks TLS if it is given.",
        expose_value=False,
        callback=keep,
    )(command)
    return click.option(
        "--api-key-file",
        expose_value=False,
        callback=keep,
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        help="Shows the router the first key in FILE: its first word, or that of the first line of KEY TENANT.",
    )(command)


def ca_option(help_text: str, **attributes: Any) -> Callable[[Command], Command]:
    """--ca: whose certificates are trusted, beside none."""
    return click.option(
        "--ca", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help=help_text, **attributes
    )


def given_ca() -> Path | None:
    """The file that `--ca` names, if it does."""
    context = click.get_current_context(silent=True)
    return None if context is None else context.meta.get(CA)


def given_key() -> str:
    """The key that `--api-key-file` names; empty without. Raises ConfigError, without the key."""
    context = click.get_current_context(silent=True)
    path = context.meta.get(KEY_FILE) if context is not None else None
    if path is None:
        return ""
    from disagg.types.small_files import read_small

    try:
        content = read_small(path, 16 << 20)
    except FileNotFoundError as error:
        raise ConfigError(f"--api-key-file {path}: there is no such file") from error
    words = [line.split()[0] for line in content.splitlines() if line.split() and not line.lstrip().startswith(b"#")]
    if not words or not all(0x21 <= each <= 0x7E for each in words[0]):
        raise ConfigError(f"--api-key-file {path}: it does not begin with a key, which is printable ASCII")
    return words[0].decode("ascii")


def overrides_of(sets: tuple[str, ...]) -> dict[str, object]:
    out: dict[str, object] = {}
    for each in sets:
        path, equals, value = each.partition("=")
        if not equals:
            raise ConfigError(f'--set {each}: it must be SECTION.FIELD=VALUE, such as "engine.page_tokens=16"')
        out[path.strip()] = value.strip()
    return out


def size_of(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    from disagg.config.sizes import parse_size

    if value is None:
        return None
    try:
        size = parse_size(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    if size <= 0:
        raise click.BadParameter("it must be more than nothing")
    return size


def finite(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise click.BadParameter("it must be a finite number", ctx, param)
    return value


def trace_option(what: str, *, required: bool = False) -> Callable[[Command], Command]:
    return click.option("--trace", required=required, type=FILE, metavar="FILE", help=what)


trace_block_option = click.option(
    "--trace-block",
    type=click.IntRange(1, 65536),
    default=512,
    show_default=True,
    metavar="N",
    help="Tokens per hash id.",
)


def slo_options(example: str, *, required: bool = False) -> Callable[[Command], Command]:
    """--slo, and --share of what must be within it."""

    def both(command: Command) -> Command:
        command = click.option(
            "--share",
            type=click.FloatRange(0.5, 1.0),
            default=0.99,
            show_default=True,
            metavar="P",
            help="Of each time must be within the SLO.",
        )(command)
        also = f"Such as {example}; also tpot and e2e."
        return click.option("--slo", required=required, metavar="LIST", help=also)(command)

    return both


def wait_options(until: str, default_s: float) -> Callable[[Command], Command]:
    """--wait until then, and --timeout of that."""

    def both(command: Command) -> Command:
        command = click.option(
            "--timeout",
            "timeout_s",
            default=default_s,
            show_default=True,
            type=click.FloatRange(0, MAX_DEADLINE_S, min_open=True),
            callback=finite,
            metavar="SECONDS",
            help="How long it may take, with all that it asks.",
        )(command)
        return click.option("--wait", is_flag=True, help=f"Return when {until}, and say how far it is.")(command)

    return both
