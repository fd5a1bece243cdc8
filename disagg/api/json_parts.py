"""JSON in pieces: cut into its fields or elements before any of them is read, and read with errors that say where.

Cutting makes no objects, so what a body holds can be measured first. msgspec's sentences become OpenAI's here. Pure.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from disagg.api.errors import BadField
from disagg.types.errors import InvalidRequest
from disagg.types.plain import quoted

MAX_SMALL_BYTES = 4 << 10  # of a message's other fields, and of parts that are no text
MAX_UNKNOWN = 8  # unknown fields that are looked at, in case they are null
MAX_NAME_CHARS = 64  # of an unknown field, as it is said


def cut_fields(raw: bytes, known: tuple[str, ...], what: str, path: str = "") -> dict[str, bytes]:
    """The fields of a JSON object, each still as JSON. Those not `known` are refused here only if they are too many."""
    unknown: tuple[str, ...] = ()
    while True:
        names = (*known, *unknown)
        try:
            cut = decoded(raw, _known_object(names) if not unknown else _object_of(names))
        except msgspec.ValidationError as error:
            named = _QUOTED.match(str(error))
            if named is None:
                raise BadField(f"{what} must be a JSON object", path or None, "invalid_type") from error
            name = named["name"]
            if len(unknown) == MAX_UNKNOWN or name in names or not _PLAIN_NAME.fullmatch(name):
                raise bad_field(str(error), path) from error
            unknown = (*unknown, name)
        else:
            raws = (getattr(cut, f"f{at}") for at in range(len(names)))
            return {name: bytes(raw).strip() for name, raw in zip(names, raws, strict=True) if raw is not UNSET}


def _object_of(names: tuple[str, ...]) -> type[Struct]:
    """A struct with a field `f0`, `f1`, ... for each name, that takes any JSON as it is."""
    fields = [(f"f{at}", Raw | UnsetType, msgspec.field(default=UNSET, name=name)) for at, name in enumerate(names)]
    return msgspec.defstruct("Object", fields, forbid_unknown_fields=True)


_known_object = lru_cache(8)(_object_of)  # of names that no client chose


def decoded(raw: bytes, to: Any = Any) -> Any:
    try:
        return msgspec.json.decode(raw, type=to)
    except msgspec.ValidationError as error:
        if to is not Any:
            raise
        raise _no_json(error, raw) from error  # a number that no 64 bits hold
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _no_json(error, raw) from error


_HALF = re.compile(  # the first half of a pair in an escape, without the other
    rb"(?<!\\)(?:\\\\)*\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})"
)
_MISLED = ("truncated", "unexpected end", "surrogate")  # what msgspec then says


def _no_json(error: Exception, raw: bytes) -> BadField:
    problem = str(error)
    if any(said in problem for said in _MISLED) and _HALF.search(raw):
        problem = "a text has half of a surrogate pair, which is no character"
    return BadField(f"the body cannot be read as JSON: {problem}", None, "invalid_json")


def elements(raw: bytes, most: int) -> list[bytes] | None:
    """The elements of a JSON list, each still as JSON; None if there are more than `most`: they are not even cut."""
    try:
        cut = decoded(raw, _list_of(most))
    except msgspec.ValidationError:
        return None
    found = (getattr(cut, f"f{at}") for at in range(most))
    return [bytes(element) for element in found if element is not UNSET]


@lru_cache(4)
def _list_of(most: int) -> type[Struct]:
    fields = [(f"f{at}", Raw | UnsetType, UNSET) for at in range(most)]
    return msgspec.defstruct("List", fields, array_like=True, forbid_unknown_fields=True)


def without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


_B = TypeVar("_B")
_PLAIN_NAME = re.compile(rf"[\w.-]{{1,{MAX_NAME_CHARS}}}")  # of an unknown field that may be null
_PATH = re.compile(r" - at `(?:key in )?\$\.?(?P<path>[^`]*)`$")
_IN_DICT = re.compile(r" - at `\$\.(?P<name>\w+)\[\.\.\.\]`$")
_QUOTED = re.compile(r"^Object (?P<what>contains unknown|missing required) field `(?P<name>.*?)`", re.DOTALL)


def converted(fields: object, to: type[_B], root: str = "") -> _B:
    """`fields` as a `to`. root: the name of the field that `fields` is, if it is not the whole body."""
    try:
        return msgspec.convert(fields, to)
    except msgspec.ValidationError as error:
        raise bad_field(_with_key(str(error), fields, to), root) from error


def _with_key(problem: str, fields: object, to: type) -> str:
    """msgspec says `$.metadata[...]` for a value that does not fit: of which key, is sought here."""
    found = _IN_DICT.search(problem)
    if found is None or not isinstance(fields, dict):
        return problem
    name = found["name"]
    of = next(field.type for field in msgspec.structs.fields(to) if field.name == name)
    for key, value in fields[name].items():
        try:
            msgspec.convert({key: value}, of)
        except msgspec.ValidationError:
            shown = quoted(key).replace("`", "'")
            return f"{problem[: found.start()]} - at `$.{name}[{shown}]`"
    return problem


def bad_field(problem: str, root: str) -> BadField:
    """msgspec's sentence, e.g. "Expected `int`, got `str` - at `$.stop[0]`", in OpenAI's words."""
    found = _PATH.search(problem)
    path = root + (found["path"] if found else "")
    problem = problem[: found.start()] if found else problem
    named = _QUOTED.match(problem)
    if named is None:
        return BadField(f"{path}: {problem}" if path else problem, path or None, "invalid_type")
    name = named["name"][:MAX_NAME_CHARS]
    path = f"{path}.{name}" if path else name
    if named["what"] == "contains unknown":
        return BadField(f"unknown field {path}", path, "unknown_parameter")
    return BadField(f"{path} is required", path, "missing_required_parameter")


def small(raw: bytes, path: str) -> Any:
    if len(raw) > MAX_SMALL_BYTES:
        raise InvalidRequest(f"{path} has {len(raw)} bytes of JSON; at most {MAX_SMALL_BYTES} are allowed", path)
    return decoded(raw)


_R = TypeVar("_R")


def read(raw: bytes, to: type[_R], path: str) -> _R:
    try:
        found: _R = decoded(raw, to)
    except msgspec.ValidationError as error:
        raise bad_field(str(error), path) from error
    return found
