"""Options that several groups of commands share, and how their values are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from disagg.types.errors import ConfigError

Command = TypeVar("Command", bound=Callable[..., Any])


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


def given_settings() -> dict[str, object]:
    """What flags made by `setting` say, by the settings' paths."""
    return dict(click.get_current_context().meta.get(SETTINGS, {}))


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
