"""How KV of a model lies in memory: layer groups and their page arithmetic. Pure numbers.

Page-major: a small page of a group is one
contiguous byte range, and the same page id names it for every layer of the group:

    page 7 of group "full"
    ┌────────────────────────────────┬────────────────────────────────┬── ...
    │ layer slot 0                   │ layer slot 1                   │
    │ K: head 0 │ head 1 │ V: 0 │ 1  │ K: head 0 │ head 1 │ V: 0 │ 1  │
    └────────────────────────────────┴────────────────────────────────┴── ...
      └ [page_tokens, head_dim]: contiguous, the unit that gathers move
"""

from __future__ import annotations

import hashlib

import msgspec
from msgspec import Struct

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

PROTOCOL_VERSION = 1


class LayerGroup(Struct, frozen=True):
    """Layers whose KV has one shape and one lifetime. layers: the model's layer indices."""

    name: str
    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    dtype: str  # a key of DTYPE_BYTES

    def __post_init__(self) -> None:
        assert self.layers == tuple(sorted(set(self.layers))), f"layers {self.layers} are not in rising order"
        assert self.layers, "a layer group has at least one layer"
        assert self.kv_heads > 0 and self.head_dim > 0, f"{self.kv_heads} heads of {self.head_dim} dims"
        assert self.dtype in DTYPE_BYTES, f"dtype {self.dtype!r} is none of {sorted(DTYPE_BYTES)}"

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def bytes_per_token_layer(self) -> int:
        """K and V of one token in one layer, all heads."""
        return 2 * self.kv_heads * self.head_dim * self.dtype_bytes

    @property
    def bytes_per_token(self) -> int:
        return len(self.layers) * self.bytes_per_token_layer

    def page_bytes(self, page_tokens: int) -> int:
        """Bytes of one small page."""
        assert page_tokens > 0, f"page_tokens is {page_tokens}"
        return page_tokens * self.bytes_per_token


class Fingerprint(Struct, frozen=True):
    """What two servers must have in common before KV may cross between them."""

    protocol: int
    weights_hash: str
    page_tokens: int
    groups: tuple[LayerGroup, ...]

    def digest(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:32]
