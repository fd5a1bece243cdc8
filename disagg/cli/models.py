"""`disagg model ...`: where models are, and what they are."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

from disagg.cli.terminal import StageProgress
from disagg.config.load import load_config


def model_directory(name: str | None, file: Path | None, overrides: Mapping[str, object]) -> Path:
    """The directory in Hugging Face format, converted first if need be; progress on stderr. name None: the configured."""
    from disagg.convert.model_dir import resolve

    config = load_config(file, overrides)
    progress = StageProgress()
    try:
        return resolve(name or config.model.name, Path(config.model.cache_dir).expanduser(), progress)
    finally:
        progress.close()


def show_facts(name: str | None, file: Path | None, overrides: Mapping[str, object], as_json: bool) -> None:
    """What config.json and the weights' headers say, as a table or as JSON."""
    import msgspec

    from disagg.convert.inspect import inspect_model

    directory = model_directory(name, file, overrides)
    facts = inspect_model(directory)
    if as_json:
        print(msgspec.json.encode({"directory": str(directory), **msgspec.structs.asdict(facts)}).decode())
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("directory", str(directory))
    for fact, value in msgspec.structs.asdict(facts).items():
        table.add_row(fact.replace("_", " "), _shown(fact, value))
    Console().print(table)


def show_known() -> None:
    """The models that have a name."""
    from rich.console import Console
    from rich.table import Table

    from disagg.convert.catalog import KNOWN_MODELS, find_gguf
    from disagg.types.errors import ConfigError

    table = Table()
    for column in ("name", "installed", "licence", "description"):
        table.add_column(column, overflow="fold")
    hints = []
    for model in KNOWN_MODELS.values():
        installed = "yes"
        try:
            find_gguf(model.name)
        except ConfigError as error:
            installed = "no"
            hints.append(str(error))
        table.add_row(model.name, installed, model.licence, model.description)
    console = Console()
    console.print(table)
    for hint in hints:
        console.print(hint, soft_wrap=True, highlight=False)


def _shown(fact: str, value: object) -> str:
    if fact == "weight_bytes" and isinstance(value, int):
        return f"{value} ({value / (1 << 20):.1f} MiB)"
    if fact == "layer_types" and isinstance(value, tuple):  # runs of equal layers, rather than one word per layer
        return ", ".join(f"{len(list(run))} x {kind}" for kind, run in groupby(value))
    if isinstance(value, tuple):
        return ", ".join(str(each) for each in value)
    return "none" if value is None else str(value)
