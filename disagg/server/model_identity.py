"""Which model the workers have, by what they say that they loaded. Pure.

Ranks that have loaded different models never start together, and an incarnation that comes up with another model than the one
before says so: its server's KV, prefix cache and fingerprint are then of that other model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from disagg.messages.control import Loaded
from disagg.text.model_files import LIMITS

SHOWN_DIGITS = 12


class ModelIdentity(Struct, frozen=True):
    """weights_hash: see models/identity. files: digests of the small files beside the weights, by name."""

    weights_hash: str
    files: Mapping[str, str]


def disagreement(loaded: Sequence[Loaded]) -> str:
    """Why these ranks cannot be the workers of one server; empty if they can."""
    first = loaded[0]
    for other in loaded[1:]:
        if other.weights_hash != first.weights_hash or other.files != first.files:
            return (
                f"ranks {first.rank} and {other.rank} have loaded different models: "
                f"{difference(identity_of(first), identity_of(other))}; the files must have been replaced meanwhile"
            )
        if replace(other, rank=first.rank, load_s=first.load_s) != first:
            return f"ranks {first.rank} and {other.rank} have loaded one model and say different things of it"
    return ""


def identity_of(loaded: Loaded) -> ModelIdentity:
    return ModelIdentity(loaded.weights_hash, loaded.files)


def difference(before: ModelIdentity, after: ModelIdentity) -> str:
    """What is not the same, for a person; empty if all is."""
    parts = []
    if before.weights_hash != after.weights_hash:
        parts.append(f"weights {before.weights_hash[:SHOWN_DIGITS]} and {after.weights_hash[:SHOWN_DIGITS]}")
    files = [name for name in LIMITS if before.files.get(name) != after.files.get(name)]
    return ", ".join(parts + files)


def changed(path: str, before: ModelIdentity | None, after: ModelIdentity) -> str:
    """What the operator must know when workers have come up; empty if their model is that of those before."""
    what = "" if before is None else difference(before, after)
    if not what:
        return ""
    return (
        f"the model in {path} is not the one that was there before ({what}): from here on this server serves the new one, "
        "and is paired only with servers that do; restart those that have the old one, and routers"
    )
