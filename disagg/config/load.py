"""Builds the configuration tree from a TOML file, the environment and flags. The only place that reads the environment.

Later wins: defaults < file < `DISAGG__SECTION__FIELD` < flags. Whatever is unknown or out of range raises ConfigError
with the path of the setting, where it came from, its value and what is allowed. Knows the tree only by inspecting it.

How a value may be written follows from its field: `*_bytes` takes sizes, `*_s` durations, booleans on and off, tuples
lists (in a variable or flag: JSON, and for lists of strings also words as in a shell). One entry of a table is a setting,
too: `storage.options.region`.
"""

from __future__ import annotations

import difflib
import json
import os
import select
import shlex
import stat
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast, get_type_hints

import msgspec
from msgspec import inspect

from disagg.config.check import check_config
from disagg.config.sizes import (
    DURATION_ALLOWED,
    SIZE_ALLOWED,
    SWITCH_ALLOWED,
    format_size,
    parse_duration,
    parse_size,
    parse_switch,
)
from disagg.config.tree import Config
from disagg.types.errors import ConfigError
from disagg.types.plain import NAME_CHARS, one_line
from disagg.types.small_files import CONFIG_BYTES, MAX_DEPTH, nested_too_deep

ENV_PREFIX = "DISAGG__"
PIPE_S = 10.0  # for a configuration file that is a pipe, until all of it is there
MOST_ENTRIES = 64  # of a table


def load_config(
    file: Path | None = None,
    overrides: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """The checked tree. overrides: dotted path -> value, from flags; a value of None means "not given".

    environ: the process's own when None. Raises ConfigError.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, dict[str, object]] = {name: {} for name in _SECTIONS}
    for path, value, source in _settings(file, environ, overrides or {}):
        section, name, entry = _locate(path, source)
        if entry:
            table = values[section].get(name, {})
            assert isinstance(table, dict)
            value = {**table, entry: value}
        setting = f"{section}.{name}"
        values[section][name] = _parse(setting, _SECTIONS[section][name], value, source)
    config = msgspec.convert(values, Config)
    check_config(config)
    return config


def dump_config(config: Config) -> str:
    """The whole tree as TOML, which `load_config` reads back to an equal tree."""
    lines: list[str] = []
    for section, fields in _SECTIONS.items():
        lines.append(f"[{section}]")
        part = getattr(config, section)
        lines += [f"{name} = {_toml(name, getattr(part, name))}" for name in fields]
        lines.append("")
    return "\n".join(lines)


def child_environ(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a process that is given its configuration in a file: without our own settings.

    They are in that file already; left in the environment they would overrule what was decided since. Nor with
    PYTHONOPTIMIZE: it takes away docstrings, which transformers reads when its models are imported.
    """
    environ = os.environ if environ is None else environ
    return {
        name: value
        for name, value in environ.items()
        if not name.upper().startswith(ENV_PREFIX) and name != "PYTHONOPTIMIZE"
    }


def ucx_log_is_theirs(environ: Mapping[str, str] | None = None) -> bool:
    """Whether whoever started us says what UCX logs, and where: then nobody else does."""
    environ = os.environ if environ is None else environ
    return any(name in environ for name in ("UCX_LOG_FILE", "UCX_LOG_LEVEL", "UCX_PROTO_INFO"))


def _sections() -> dict[str, dict[str, inspect.Type]]:
    hints = get_type_hints(Config)
    sections: dict[str, dict[str, inspect.Type]] = {}
    for section in msgspec.structs.fields(Config):
        struct = inspect.type_info(hints[section.name])
        assert isinstance(struct, inspect.StructType), f"{section.name} is not a section"
        sections[section.name] = {each.name: each.type for each in struct.fields}
    return sections


_SECTIONS = _sections()


def _settings(
    file: Path | None, environ: Mapping[str, str], overrides: Mapping[str, object]
) -> Iterator[tuple[str, object, str]]:
    """(path, value, source) of every setting given, the weakest first."""
    if file is not None:
        for section, table in _read_toml(file).items():
            if not isinstance(table, dict):
                raise ConfigError(
                    f"{one_line(section, NAME_CHARS)} = {_show(table)} in {_name(file)}: settings live in sections; "
                    f"{_known_sections()}"
                )
            for name, value in table.items():
                yield f"{section}.{name}", value, _name(file)
            if not table:
                _section(section, _name(file))
    for variable in sorted(environ):
        if variable.startswith(ENV_PREFIX):
            path = variable[len(ENV_PREFIX) :].replace("__", ".").lower()
            yield path, environ[variable], f"environment variable {_name(variable)}"
    for path, value in overrides.items():
        if value is not None:
            yield path, value, "flag"


def _read_toml(file: Path) -> dict[str, object]:
    try:
        content = _read(file)
        if len(content) > CONFIG_BYTES:
            raise ConfigError(
                f"configuration file {_name(file)} has more than {CONFIG_BYTES} bytes, which are the most"
            )
        found = tomllib.loads(content.decode())
    except OSError as error:
        raise ConfigError(f"configuration file {_name(file)} cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {_name(file)} is not TOML: {error}") from error
    except RecursionError:  # of the reader; its thousands of frames say no more
        found = None
    if found is None or nested_too_deep(found):
        raise ConfigError(f"configuration file {_name(file)} is nested more than {MAX_DEPTH} deep")
    return found


def _read(file: Path) -> bytes:
    """At most CONFIG_BYTES + 1. What is no regular file, such as the pipe of `<(...)`, has PIPE_S to say it all."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb", buffering=0) as opened:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.set_blocking(descriptor, True)
            return opened.read(CONFIG_BYTES + 1)
        until_s = time.monotonic() + PIPE_S
        content = b""
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while len(content) <= CONFIG_BYTES:
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not poll.poll(left_s * 1000):
                raise ConfigError(
                    f"configuration file {_name(file)} is no regular file, and does not end within {PIPE_S:g} s"
                )
            more = opened.read(CONFIG_BYTES + 1 - len(content))
            if more == b"":
                break
            content += more or b""
        return content


def _name(given: object) -> str:
    """A file's, a section's or a setting's name in a message: whoever gave it may have given control characters."""
    return one_line(str(given))


def _locate(path: str, source: str) -> tuple[str, str, str]:
    """Section and field of a dotted path, and the entry of a table, or "". Raises ConfigError naming the nearest paths that
    exist."""
    section, dot, name = path.partition(".")
    if dot and section in _SECTIONS and name in _SECTIONS[section]:
        return section, name, ""
    table, _, entry = name.partition(".")
    if entry and isinstance(_SECTIONS.get(section, {}).get(table), inspect.DictType):
        return section, table, entry
    known = [f"{each}.{field}" for each, fields in _SECTIONS.items() for field in fields]
    same_field = [each for each in known if each.endswith(f".{name or section}")]
    near = same_field + [
        each for each in difflib.get_close_matches(path, known, n=3, cutoff=0.6) if each not in same_field
    ]
    if near:
        hint = f"nearest: {', '.join(near[:3])}"
    elif section in _SECTIONS:
        hint = f"{section} has {', '.join(_SECTIONS[section])}"
    else:
        hint = _known_sections()
    raise ConfigError(f"{one_line(path, NAME_CHARS)} ({source}) is not a setting; {hint}")


def _section(section: str, source: str) -> None:
    if section not in _SECTIONS:
        raise ConfigError(f"[{one_line(section, NAME_CHARS)}] ({source}) is not a section; {_known_sections()}")


def _known_sections() -> str:
    return f"the sections are {', '.join(_SECTIONS)}"


def _parse(path: str, kind: inspect.Type, value: object, source: str) -> object:
    try:
        parsed = _READERS[type(kind)](path, kind, value)
        return msgspec.convert(parsed, _python_type(path))
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        detail = f" ({error})" if isinstance(kind, inspect.VarTupleType) else ""
        shown = _show_table(value) if isinstance(kind, inspect.DictType) else _show(value)
        said = f"{_name(path)} = {shown} ({source}): it must be {_allowed(path, kind)}{detail}"
        raise ConfigError(said) from (None if isinstance(kind, inspect.DictType) else error)


def _python_type(path: str) -> Any:
    section, name = path.split(".")
    return get_type_hints(get_type_hints(Config)[section], include_extras=True)[name]


def _read_int(path: str, kind: inspect.Type, value: object) -> object:
    if path.endswith("_bytes"):
        return parse_size(value)
    return int(value.strip()) if isinstance(value, str) else value


def _read_float(path: str, kind: inspect.Type, value: object) -> object:
    if path.endswith("_s"):
        return parse_duration(value)
    return float(value.strip()) if isinstance(value, str) else value


def _read_bool(path: str, kind: inspect.Type, value: object) -> object:
    return parse_switch(value)


def _read_plain(path: str, kind: inspect.Type, value: object) -> object:
    return value


def _read_list(path: str, kind: inspect.Type, value: object) -> object:
    assert isinstance(kind, inspect.VarTupleType)
    if not isinstance(value, str):
        return value
    text = value.strip()
    if isinstance(kind.item_type, inspect.StrType) and not text.startswith("["):
        return shlex.split(text)
    return json.loads(text) if text else []


def _read_table(path: str, kind: inspect.Type, value: object) -> object:
    table = json.loads(value.strip() or "{}") if isinstance(value, str) else value
    if isinstance(table, dict) and len(table) > MOST_ENTRIES:
        raise ValueError(f"it has {len(table)} entries")
    return table


_READERS: dict[type[inspect.Type], Callable[[str, inspect.Type, object], object]] = {
    inspect.IntType: _read_int,
    inspect.FloatType: _read_float,
    inspect.BoolType: _read_bool,
    inspect.StrType: _read_plain,
    inspect.LiteralType: _read_plain,
    inspect.VarTupleType: _read_list,
    inspect.DictType: _read_table,
}


def _allowed(path: str, kind: inspect.Type) -> str:
    if isinstance(kind, inspect.IntType):
        return (SIZE_ALLOWED if path.endswith("_bytes") else "a whole number") + _range(path, kind)
    if isinstance(kind, inspect.FloatType):
        return (DURATION_ALLOWED if path.endswith("_s") else "a number") + _range(path, kind)
    if isinstance(kind, inspect.BoolType):
        return SWITCH_ALLOWED
    if isinstance(kind, inspect.LiteralType):
        return "one of " + ", ".join(str(each) or '""' for each in kind.values)
    if isinstance(kind, inspect.VarTupleType):
        if isinstance(kind.item_type, inspect.StructType):
            names = [each.name for each in kind.item_type.fields]
            return f'a list of tables with {", ".join(names)}; in a variable or flag JSON: [{{"{names[0]}": ..., ...}}]'
        if isinstance(kind.item_type, inspect.LiteralType):
            return f"a list of some of {', '.join(map(str, kind.item_type.values))}; in a variable or flag JSON"
        return "a list of strings"
    if isinstance(kind, inspect.DictType):
        return f"a table of at most {MOST_ENTRIES} texts, numbers and switches; in a variable or flag JSON"
    return "a string"


def _range(path: str, kind: inspect.IntType | inspect.FloatType) -> str:
    show = format_size if path.endswith("_bytes") else (lambda bound: bound)
    bounds = []
    for word, bound in (("at least", kind.ge), ("above", kind.gt), ("at most", kind.le), ("below", kind.lt)):
        if bound is not None:
            bounds.append(f"{word} {show(cast(int, bound))}")
    return ", " + " and ".join(bounds) if bounds else ""


def _show(value: object) -> str:
    """The value as the operator wrote it, not longer than a line."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return one_line(text if len(text) <= 120 else text[:117] + "...")


def _show_table(value: object) -> str:
    """What its entries are called: any of the values may be a secret."""
    if not isinstance(value, dict):
        return f"a {type(value).__name__}, which is not repeated here"
    kinds = {str(entry): f"a {type(of_entry).__name__}" for entry, of_entry in value.items()}
    return f"{_show(kinds)}, whose values are not repeated here"


def _toml(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and name.endswith("_bytes"):
        value = format_size(value)
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        # A JSON string is a TOML basic string, but for DEL, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml("", each) for each in value) + "]"
    if isinstance(value, dict):
        entries = ", ".join(f"{_toml('', entry)} = {_toml('', of_entry)}" for entry, of_entry in value.items())
        return f"{{ {entries} }}" if entries else "{}"
    assert isinstance(value, msgspec.Struct), f"{name} has no TOML form"
    pairs = [f"{each} = {_toml(each, getattr(value, each))}" for each in value.__struct_fields__]
    return "{ " + ", ".join(pairs) + " }"
