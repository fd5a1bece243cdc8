"""`disagg cache ...`: what is in a store of KV, whether it is whole, and how much of it stays."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from disagg.cli.terminal import note
from disagg.config.load import load_config
from disagg.config.sizes import format_size, show_bytes
from disagg.config.tree import Config
from disagg.offload.options import is_secret
from disagg.types.errors import ConfigError, Unavailable, first_of

if TYPE_CHECKING:
    from disagg.offload.store import ObjectStore
    from disagg.offload.survey import StoredSpan

SAY_EVERY_S = 2.0
SHOWN_DIGITS = 12
T = TypeVar("T")


def without_secrets(config: Config) -> Config:
    """To be shown."""
    options = {name: "***" if is_secret(name) else value for name, value in config.storage.options.items()}
    storage = msgspec.structs.replace(config.storage, options=options)
    return msgspec.structs.replace(config, storage=storage)


def show_stats(file: Path | None, overrides: Mapping[str, object], as_json: bool) -> None:
    """As a table or as JSON."""
    from disagg.offload.survey import statistics, survey

    config = load_config(file, overrides)
    stats = statistics(_with_store(config, lambda store: survey(store, _Progress())))
    if as_json:
        _print_json(msgspec.structs.asdict(stats))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in msgspec.structs.asdict(stats).items():
        shown = f"{value} ({show_bytes(value)})" if name.endswith("bytes") else str(value)
        table.add_row(name.replace("_", " "), shown)
    Console().print(table)


def list_spans(file: Path | None, overrides: Mapping[str, object], as_json: bool) -> None:
    """As a table or as JSON, the least recently used first."""
    from disagg.offload.survey import eviction_order, survey

    config = load_config(file, overrides)
    found = _with_store(config, lambda store: survey(store, _Progress()))
    rows = [_row(each) for each in eviction_order(found.spans)]
    if as_json:
        _print_json({"spans": rows})
        return
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for column in ("model", "tenant", "first page", "at page", "pages", "parts", "bytes", "written", "read"):
        table.add_column(column, no_wrap=True, justify="right" if column in ("at page", "pages", "parts") else "left")
    for row in rows:
        table.add_row(
            str(row["model"]),
            str(row["tenant"]),
            str(row["first_page"])[:SHOWN_DIGITS],
            str(row["start_page"]),
            str(row["pages"]),
            str(row["parts"]),
            show_bytes(int(str(row["bytes"]))),
            str(row["written"]),
            str(row["read"] or "-"),
        )
    console = Console() if sys.stdout.isatty() else Console(width=160)
    console.print(table if rows else "no spans")


def verify_storage(file: Path | None, overrides: Mapping[str, object], as_json: bool, remove: bool) -> int:
    """The exit code: 1 if anything is damaged. remove: takes it away."""
    from disagg.offload.survey import Collected, Damage, Survey, remove_damaged, survey, verify

    async def run(store: ObjectStore) -> tuple[Survey, list[Damage], Collected | None]:
        found = await survey(store, _Progress())
        damage = await verify(store, found, _Progress())
        return found, damage, await remove_damaged(store, found, damage) if remove else None

    found, damage, removed = _with_store(load_config(file, overrides), run)
    parts = sum(len(each.parts) for each in found.spans)
    if as_json:
        listed = [msgspec.structs.asdict(each) for each in damage]
        gone = {} if removed is None else {"removed": msgspec.structs.asdict(removed)}
        _print_json({"spans": len(found.spans), "parts": parts, "damage": listed, **gone})
        return int(bool(damage))
    for each in damage:
        print(f"{each.cause}: {each.path}: {each.why}")
    whole = "all whole" if found.spans else "nothing is stored there"
    print(f"{len(found.spans)} spans with {parts} parts: {f'{len(damage)} damaged' if damage else whole}")
    if removed is not None and damage:
        print(f"removed {removed.spans} spans, {removed.objects} objects in all{removed.reasons(0)}")
    return int(bool(damage))


def collect_garbage(file: Path | None, overrides: Mapping[str, object], as_json: bool) -> int:
    """Says what was removed, and what is left. The exit code: 1 if something could not be removed."""
    from disagg.offload.survey import collect

    config = load_config(file, overrides)
    budget_bytes = config.storage.budget_bytes
    done = _with_store(config, lambda store: collect(store, budget_bytes, _Progress()))
    if as_json:
        _print_json({**msgspec.structs.asdict(done), "budget_bytes": budget_bytes})
        return int(bool(done.undeleted))
    budget = f"of a budget of {format_size(budget_bytes)}" if budget_bytes else "without a budget"
    print(
        f"removed {done.spans} spans, {done.objects} objects in all, {show_bytes(done.freed_bytes)}; "
        f"{show_bytes(done.left_bytes)} are left, {budget}{done.reasons(budget_bytes)}"
    )
    return int(bool(done.undeleted))


def _with_store(config: Config, work: Callable[[ObjectStore], Awaitable[T]]) -> T:
    try:
        from disagg.offload.store import StoreError, open_store
    except ImportError as error:
        raise ConfigError(f"storage needs what `pip install disagg[storage]` installs: {error}") from error

    async def run() -> T:
        return await work(open_store(config.storage.url, config.storage.options, make=False))

    try:
        return asyncio.run(run())
    except* StoreError as errors:
        why = first_of(errors)
        raise Unavailable(f"the store at {config.storage.url} did not do what it was asked: {why}") from None


def _row(each: StoredSpan) -> dict[str, object]:
    return {
        "model": each.model,
        "tenant": each.tenant,
        "first_page": each.span.hashes[0].hex(),
        "start_page": each.span.start,
        "pages": each.pages,
        "parts": len(each.parts),
        "bytes": each.nbytes + sum(part.nbytes for part in each.parts),
        "written": _when(each.written_s),
        "read": _when(each.read_s) if each.read_s else None,
    }


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _print_json(value: object) -> None:
    print(json.dumps(value))


class _Progress:
    """On stderr, once in a while: how far long work has come."""

    def __init__(self) -> None:
        self._said_s = time.monotonic()

    def __call__(self, what: str, done: int, total: int) -> None:
        now_s = time.monotonic()
        if now_s - self._said_s >= SAY_EVERY_S:
            self._said_s = now_s
            note(f"{what}: {done}{f' of {total}' if total else ''}")
