"""How the caches of a model lie in memory: layer groups and their page arithmetic. Pure numbers.

A layer group is layers whose cache has one shape and one lifetime. Page-major: a small page of a group is one contiguous
byte range, and the same page id names it for every layer of the group:

    page 7 of a group of attention layers                              page 7 of a group of recurrent layers
    ┌──────────────────────────────┬──────────────────────────────┐    ┌──────────────┬──────────────┬── ...
    │ layer 0                      │ layer 1                      │    │ layer 0      │ layer 1      │
    │ K: head 0 │ head 1 │ V: 0 │ 1│ K: head 0 │ head 1 │ V: 0 │ 1│    │ conv   │ ssm │ conv   │ ssm │
    └──────────────────────────────┴──────────────────────────────┘    └──────────────┴──────────────┴── ...
      └ [page_tokens, head_dim]: contiguous, the unit that gathers move    └ one sequence's state after some token
"""

from __future__ import annotations

import enum
import hashlib
import math

import msgspec
from msgspec import Struct

from disagg.messages.heads import heads_per_rank
from disagg.types.arithmetic import round_up

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}

KV_FORMAT = 3  # raised only when equal bytes come to mean something else: it parts servers that could pair before

STATE_ALIGN_BYTES = 16


class GroupKind(enum.StrEnum):
    """What a group keeps of a sequence, which decides what may be freed and what a prefix needs (see memory/groups)."""

    FULL = "full"  # every token: full attention, MLA latents, a draft model
    WINDOW = "window"  # the last tokens
    STATE = "state"  # one state, whatever the length, and checkpoints of it
    IMAGE = "image"  # what images gave, whole images: cross-attention, vision embeddings
    BUDGET = "budget"  # at most so many tokens, chosen by the layers (PyramidKV)


class StatePart(Struct, frozen=True):
    """One tensor of a recurrent layer's state, such as its convolution window. shape: of one sequence."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # a key of DTYPE_BYTES

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class LayerGroup(Struct, frozen=True):
    """Layers whose cache has one shape and one lifetime. layers: the model's layer indices. kv_heads: the model's, whatever
    the TP size, but in a group made by `on_rank`.

    planes: 2 for K and V. window: how many tokens a WINDOW layer attends to, the new one among them (transformers'
    `sliding_window`). parts: of each layer of a STATE group, whose row is one state: one head, head_dim bytes.
    """

    name: str
    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    dtype: str  # a key of DTYPE_BYTES
    kind: GroupKind = GroupKind.FULL
    window: int = 0
    planes: int = 2
    parts: tuple[StatePart, ...] = ()

    def __post_init__(self) -> None:
        assert self.layers == tuple(sorted(set(self.layers))), f"layers {self.layers} are not in rising order"
        assert self.layers, "a layer group has at least one layer"
        assert self.kv_heads > 0 and self.head_dim > 0, f"{self.kv_heads} heads of {self.head_dim} dims"
        assert self.dtype in DTYPE_BYTES, f"dtype {self.dtype!r} is none of {sorted(DTYPE_BYTES)}"
        assert (self.kind is GroupKind.WINDOW) == (self.window > 0), f"{self.kind.value} with window {self.window}"
        assert (self.kind is GroupKind.STATE) == bool(self.parts), f"{self.kind.value} with {len(self.parts)} parts"

    @classmethod
    def of_states(cls, name: str, layers: tuple[int, ...], parts: tuple[StatePart, ...]) -> LayerGroup:
        """Recurrent layers: a page is one state of one sequence, all its layers."""
        head_dim = state_offsets(parts)[-1]
        return cls(name, layers, 1, head_dim, "uint8", GroupKind.STATE, planes=1, parts=parts)

    def keeping_all(self) -> LayerGroup:
        """The same group, but what leaves its window is kept as if it were full attention."""
        return msgspec.structs.replace(self, kind=GroupKind.FULL, window=0) if self.window else self

    def on_rank(self, tp: int) -> LayerGroup:
        """What each of `tp` ranks keeps of it: some of the KV heads, or all of a state. Raises SliceError."""
        if self.is_state:
            return self
        return msgspec.structs.replace(self, kv_heads=heads_per_rank(tp, self.kv_heads))

    def on_stage(self, first: int, stop: int) -> LayerGroup | None:
        """Those of its layers that are in [first, stop); None if there are none."""
        layers = tuple(layer for layer in self.layers if first <= layer < stop)
        return msgspec.structs.replace(self, layers=layers) if layers else None

    @property
    def is_state(self) -> bool:
        return self.kind is GroupKind.STATE

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def bytes_per_token_layer(self) -> int:
        """One token in one layer, all planes and heads; of a state group, one layer's state."""
        return self.planes * self.kv_heads * self.head_dim * self.dtype_bytes

    @property
    def bytes_per_token(self) -> int:
        return len(self.layers) * self.bytes_per_token_layer

    def rows_per_page(self, page_tokens: int) -> int:
        """Tokens, or states, of one page."""
        return 1 if self.is_state else page_tokens

    def page_bytes(self, page_tokens: int) -> int:
        """Bytes of one small page."""
        assert page_tokens > 0, f"page_tokens is {page_tokens}"
        return self.rows_per_page(page_tokens) * self.bytes_per_token

    def align_bytes(self, page_tokens: int) -> int:
        """What a page's distance to the next must be a multiple of, so that its views have whole strides."""
        return STATE_ALIGN_BYTES if self.is_state else page_tokens * self.head_dim * self.dtype_bytes


def state_offsets(parts: tuple[StatePart, ...]) -> tuple[int, ...]:
    """Where each part begins within a layer's state, and at last where the state ends; all aligned."""
    offsets = [0]
    for part in parts:
        offsets.append(round_up(offsets[-1] + part.nbytes, STATE_ALIGN_BYTES))
    return tuple(offsets)


class GroupPages(Struct, frozen=True, array_like=True):
    """Part of one sequence's page table in one group: `pages` are those from page number `first` on.

    Page number i of an attention group holds tokens [i * page_tokens, (i + 1) * page_tokens). Those of a state group number
    states in the order in which they were written; the last is the newest.
    """

    first: int
    pages: tuple[int, ...]


class Fingerprint(Struct, frozen=True):
    """What two servers must have in common before KV may cross between them. Nothing of it is the software's version: a field
    added here or to LayerGroup parts old servers from new ones. protocol: KV_FORMAT.
    """

    protocol: int
    weights_hash: str
    page_tokens: int
    checkpoint_tokens: int
    groups: tuple[LayerGroup, ...]

    def digest(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:32]
