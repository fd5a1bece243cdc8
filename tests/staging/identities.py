"""A slice by all that its identity names, each under one name: for tests that change one of them at a time."""

from __future__ import annotations

from typing import Any

from disagg.messages.pieces import HeadSlice, Piece, RankSlice
from disagg.types.ids import LegKey

IDENTITY: dict[str, Any] = {
    "request_id": "r-1",
    "attempt": 1,
    "prefix_no": 0,
    "src_incarnation": "aa",
    "dst_incarnation": "bb",
    "group": 0,
    "layer_start": 0,
    "layer_stop": 4,
    "token_start": 16,
    "token_stop": 32,
    "src_rank": 0,
    "dst_rank": 1,
}


def slice_of(**changed: Any) -> RankSlice:
    """IDENTITY's, but for what is named here."""
    named = IDENTITY | changed
    assert named.keys() == IDENTITY.keys()
    return RankSlice(
        LegKey(named["request_id"], named["attempt"], named["prefix_no"]),
        Piece(*(named[name] for name in ("group", "layer_start", "layer_stop", "token_start", "token_stop"))),
        HeadSlice(named["src_rank"], named["dst_rank"], 0, 0, 1),
        named["src_incarnation"],
        named["dst_incarnation"],
    )
