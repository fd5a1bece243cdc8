"""`disagg model ...`: where models are, and what they are."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Final

from disagg.cli.terminal import StageProgress, note
from disagg.config.load import load_config
from disagg.config.tree import Config
from disagg.types.errors import ConfigError, DisaggError
from disagg.types.plain import one_line
from disagg.types.small_files import home_expanded

if TYPE_CHECKING:
    from disagg.convert.inspect import ModelFacts
    from disagg.text.chat import TemplateSource

CHECK_S: Final = 300.0  # importing torch on a slow disk takes most of it


def model_directory(name: str | None, file: Path | None, overrides: Mapping[str, object]) -> Path:
    """The directory in Hugging Face format, converted first if need be; progress on stderr. name None: the configured."""
    from disagg.convert.model_dir import resolve

    config = load_config(file, overrides)
    progress = StageProgress()
    try:
        return resolve(name or config.model.name, home_expanded(config.model.cache_dir, "model.cache_dir"), progress)
    finally:
        progress.close()


def show_facts(name: str | None, file: Path | None, overrides: Mapping[str, object], as_json: bool) -> None:
    """What config.json and the weights' headers say, as a table or as JSON. Raises ConfigError for what is not served."""
    import msgspec

    from disagg.convert.inspect import inspect_model

    config = load_config(file, overrides)
    directory = model_directory(name, file, overrides)
    facts = inspect_model(directory)
    unused = require_served(directory, config, facts)
    shown: dict[str, object] = {"directory": str(directory), **msgspec.structs.asdict(facts)}
    if unused is not None:
        shown["unused_parameters"] = unused  # of num_parameters: stored beside the model
    if as_json:
        print(msgspec.json.encode(shown).decode())
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for fact, value in shown.items():
        table.add_row(fact.replace("_", " "), _shown(fact, value))
    Console().print(table)


def require_served(directory: Path, config: Config, facts: ModelFacts) -> int | None:
    """How many of the stored values the model does not use, if that is known.

    Raises ConfigError with what a router or a server with this configuration would end with, as far as files say it. What
    workers would say is asked of the same code in a process of its own, which loads torch; where that is not installed, it
    is not known, and said so.
    """
    from disagg.config.load import child_environ
    from disagg.messages.heads import SliceError
    from disagg.server.device import choose_device, choose_dtype
    from disagg.text.chat import TemplateSource
    from disagg.text.model_files import ModelFiles
    from disagg.text.tokenizer_trial import try_out

    files = ModelFiles.read(directory)
    try:
        facts.check_heads(config.server.tp)
    except SliceError as error:
        raise ConfigError(f"server.tp = {config.server.tp}: {error}") from error
    facts.check_stages(config.server.pp, f"server.pp = {config.server.pp}")
    asyncio.run(try_out(files, facts.vocab_size))
    if (template := TemplateSource.of(files)) is not None:
        asyncio.run(_compile(template))
    if not all(find_spec(package) for package in ("torch", "transformers")):
        note("whether workers would take it cannot be said here: torch and transformers are not installed")
        return None
    dtype = choose_dtype(config.model.dtype, choose_device(config.model.device), facts.torch_dtype)
    ranks = (str(config.server.tp), str(config.server.pp))
    argv = [sys.executable, "-m", "disagg.worker.check", str(directory), dtype, *ranks]
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, env=child_environ(), timeout=CHECK_S, check=False
        )
        answer = json.loads(done.stdout)
    except subprocess.TimeoutExpired as error:
        raise DisaggError(f"whether workers would take {directory} was not known after {CHECK_S:g} s") from error
    except ValueError as error:
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        why = f": {one_line(last[0])}" if last else ""
        raise DisaggError(f"whether workers would take {directory} cannot be found out{why}") from error
    if answer["refused"] is not None:
        raise ConfigError(answer["refused"])
    return int(answer["unused"])


async def _compile(template: TemplateSource) -> None:
    """In a process of its own with bounds, since it is a program by whoever made the model."""
    from disagg.text.renderer import Renderer

    await (await Renderer.start(template)).close()


def show_known() -> None:
    """The models that have a name."""
    from rich.console import Console
    from rich.table import Table

    from disagg.convert.catalog import KNOWN_MODELS, find_gguf

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
