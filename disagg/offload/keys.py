"""What stored KV is called, so that whoever needs it finds it, at any TP size, on any server. Pure.

    root of a tenant = chain_root(version, weights, dtype, page tokens, every layer group, salt)
        └─ page 0 ── page 1 ── page 2 ...      one hash chain (memory/hashing), the same for every layer group
    root of a group  = chain_root(root of the tenant, group)
        └─ page_key(root, page)                what a page of that group is called

    v1/<model>/<tenant>/spans/<xx>/<first page>                          what a span of pages consists of
    v1/<model>/<tenant>/parts/<xx>/<first key>.<draw>.<heads>            the bytes of some heads of one group
    v1/<model>/<tenant>/reads/<xx>/<first page>                          empty; when the span was last read

There is no TP size in it, no rank and no server. `draw` is random, so that two writers of one span never write one object.
"""

from __future__ import annotations

import hashlib
import re

import msgspec
from msgspec import Struct

from disagg.memory.hashing import chain_root
from disagg.messages.layout import LayerGroup

LAYOUT = "v1"
SPANS, PARTS, READS = "spans", "parts", "reads"
DEEPEST = 6  # names in the path of an object
_ID_CHARS = 16
_PATH = re.compile(
    rf"{LAYOUT}/(?P<model>[0-9a-f]{{{_ID_CHARS}}})/(?P<tenant>[0-9a-f]{{{_ID_CHARS}}})/"
    r"(?P<kind>spans|parts|reads)/[0-9a-f]{2}/(?P<name>[0-9a-f]{64})(?P<rest>\.[0-9a-f]{16}\.[0-9]{1,6}-[0-9]{1,6})?"
)


class Scope(Struct, frozen=True):
    """Whose KV it is. weights: their identity (models/identity). groups: of the whole model. salt: the tenant's cache salt."""

    weights: str
    dtype: str
    page_tokens: int
    groups: tuple[LayerGroup, ...]
    salt: str = ""

    @property
    def root(self) -> bytes:
        """What the hash chain of a sequence of tokens begins with."""
        return chain_root(*self.root_parts, self.salt)

    @property
    def root_parts(self) -> tuple[str, ...]:
        """What a chain begins with, but the salt."""
        return (LAYOUT, *self._model())

    def group_root(self, g: int) -> bytes:
        """What the keys of a group's pages begin with."""
        return group_root(self.root, self.groups[g])

    @property
    def place(self) -> str:
        """The folder of this model's and tenant's objects."""
        model, tenant = chain_root("model", *self._model()).hex(), chain_root("tenant", self.salt).hex()
        return f"{LAYOUT}/{model[:_ID_CHARS]}/{tenant[:_ID_CHARS]}"

    def _model(self) -> tuple[str, ...]:
        return (self.weights, self.dtype, str(self.page_tokens), *map(_text, self.groups))


class Place(Struct, frozen=True):
    """A path of ours, taken apart. name: 64 hex digits. rest: of a part, its draw and heads."""

    model: str
    tenant: str
    kind: str
    name: str
    rest: str

    @property
    def folder(self) -> str:
        return f"{LAYOUT}/{self.model}/{self.tenant}"


def group_root(root: bytes, group: LayerGroup) -> bytes:
    """root: of a tenant."""
    return chain_root(root.hex(), _text(group))


def page_key(root: bytes, page_hash: bytes) -> bytes:
    """root: of a group. page_hash: of the chain."""
    return hashlib.sha256(root + page_hash).digest()


def span_path(folder: str, first_hash: bytes) -> str:
    name = first_hash.hex()
    return f"{folder}/{SPANS}/{name[:2]}/{name}"


def read_path(folder: str, first_hash: bytes) -> str:
    name = first_hash.hex()
    return f"{folder}/{READS}/{name[:2]}/{name}"


def part_path(folder: str, first_key: bytes, draw: int, head_start: int, head_stop: int) -> str:
    """draw: 64 random bits."""
    name = first_key.hex()
    return f"{folder}/{PARTS}/{name[:2]}/{name}.{draw:016x}.{head_start}-{head_stop}"


def parse_path(path: str) -> Place | None:
    """None: the object is not one of ours."""
    found = _PATH.fullmatch(path)
    if found is None or (found["kind"] == PARTS) != bool(found["rest"]):
        return None
    return Place(found["model"], found["tenant"], found["kind"], found["name"], found["rest"] or "")


def _text(group: LayerGroup) -> str:
    return msgspec.json.encode(group).decode()
