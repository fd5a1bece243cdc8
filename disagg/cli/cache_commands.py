"""The commands of `disagg cache`: names, flags and help. What they do is in `cli/cache`, imported when one runs."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from disagg.cli.flags import Command, config_options, overrides_of, size_of


@click.group()
def cache() -> None:
    """Look after stored KV: what there is, whether it is whole, and how much of it stays."""


def _cache_options(command: Command) -> Command:
    command = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")(config_options(command))
    return click.option(
        "--storage",
        metavar="URL",
        help="file:///directory, s3://bucket/folder, gs:// or az://.  [default: storage.url]",
    )(command)


def _cache_settings(storage: str | None, sets: tuple[str, ...]) -> dict[str, object]:
    return {**overrides_of(sets), **({} if storage is None else {"storage.url": storage})}


@cache.command("stats")
@_cache_options
def cache_stats(storage: str | None, as_json: bool, file: Path | None, sets: tuple[str, ...]) -> None:
    """Count pages, bytes, tenants and models. A page covers all heads, and counts once per layer group."""
    from disagg.cli.cache import show_stats

    show_stats(file, _cache_settings(storage, sets), as_json)


@cache.command("ls")
@_cache_options
def cache_ls(storage: str | None, as_json: bool, file: Path | None, sets: tuple[str, ...]) -> None:
    """List the stored spans of pages, the least recently used first."""
    from disagg.cli.cache import list_spans

    list_spans(file, _cache_settings(storage, sets), as_json)


@cache.command("verify")
@click.option("--remove", is_flag=True, help="Remove what is damaged, with the spans that name it.")
@_cache_options
def cache_verify(storage: str | None, as_json: bool, file: Path | None, sets: tuple[str, ...], remove: bool) -> None:
    """Read every object to its end and check it. Exits with 1 if one is damaged or missing, and names it."""
    from disagg.cli.cache import verify_storage

    sys.exit(verify_storage(file, _cache_settings(storage, sets), as_json, remove))


@cache.command("gc")
@click.option(
    "--budget",
    "budget_bytes",
    callback=size_of,
    metavar="SIZE",
    help="What may be left, everything counted.  [default: storage.budget_bytes]",
)
@_cache_options
def cache_gc(
    storage: str | None, as_json: bool, file: Path | None, sets: tuple[str, ...], budget_bytes: int | None
) -> None:
    """Remove what cannot be used, and then the least recently used until the budget is kept. Servers may go on meanwhile."""
    from disagg.cli.cache import collect_garbage

    settings = {**_cache_settings(storage, sets), "storage.budget_bytes": budget_bytes}
    sys.exit(collect_garbage(file, settings, as_json))
