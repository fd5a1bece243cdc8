"""What a server's own sizes make impossible is refused when it starts, with the smallest size that works."""

from __future__ import annotations

import re
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given

from disagg.config.staging import PAGE_BYTES, size_staging
from disagg.config.tree import TransferConfig
from disagg.engine.facts import EngineFacts
from disagg.engine.handoff.fitting import most_pieces
from disagg.messages.layout import LayerGroup
from disagg.messages.pieces import Piece
from disagg.server.piece_sizes import check_longest, check_rows
from disagg.staging.pieces import TRAILER_BYTES, split_group_piece
from disagg.transfer.session import MAX_PIECES
from disagg.types.errors import ConfigError
from tests.engine.lone_engine import changed, facts


def layers(num_layers: int, kv_heads: int, head_dim: int, dtype: str = "float32") -> LayerGroup:
    return LayerGroup(name="full", layers=tuple(range(num_layers)), kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)


SMALL = facts(layers(30, 3, 64), chunk_tokens=256)


def least_of(refused: pytest.ExceptionInfo[ConfigError]) -> int:
    found = re.search(r"it must be at least (\d+)", str(refused.value))
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize(("sends", "name"), [(True, "gather_bytes"), (False, "segment_bytes")])
@pytest.mark.parametrize("tokens", [6_000, 8_192, 100_000])
def test_a_size_that_cuts_the_longest_prompt_into_too_many_pieces_is_refused_with_the_least_that_works(
    sends: bool, name: str, tokens: int
) -> None:
    tight = changed(SMALL, gather_bytes=4096, segment_bytes=4096)
    with pytest.raises(ConfigError, match=rf"^transfer.{name} = 4096: the longest prompt, {tokens} tokens") as refused:
        check_longest(tight, tokens, sends=sends)
    least = least_of(refused)
    assert least % PAGE_BYTES == 0
    check_longest(changed(tight, **{name: least}), tokens, sends=sends)
    with pytest.raises(ConfigError):
        check_longest(changed(tight, **{name: least - PAGE_BYTES}), tokens, sends=sends)


def test_a_larger_gather_buffer_needs_a_segment_that_it_fits() -> None:
    with pytest.raises(ConfigError, match=r"and transfer.segment_bytes = 4096 as large as that"):
        check_longest(changed(SMALL, gather_bytes=4096, segment_bytes=4096), 8192, sends=True)


def test_chunks_so_small_that_no_buffer_helps_are_named_themselves() -> None:
    tiny = changed(SMALL, gather_bytes=1 << 22, segment_bytes=1 << 22, chunk_tokens=1)
    with pytest.raises(ConfigError, match=r"^engine.chunk_tokens = 1: ") as refused:
        check_longest(tiny, 131_072, sends=True)
    pieces = most_pieces(tiny.model.groups, lambda g: 3, 131_072, least_of(refused), 1 << 50, 4)
    assert pieces <= MAX_PIECES


def large_model(device: str, num_layers: int = 80, kv_heads: int = 8) -> EngineFacts:
    sizes = size_staging(TransferConfig(), "cuda" if device == "cuda" else "cpu")
    return facts(
        layers(num_layers, kv_heads, 128, "bfloat16" if device == "cuda" else "float32"),
        chunk_tokens=1024 if device == "cuda" else 256,
        gather_bytes=sizes.gather_bytes,
        segment_bytes=sizes.segment_bytes,
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("sends", [True, False])
def test_a_large_model_with_a_long_context_is_served_with_the_sizes_that_are_chosen(device: str, sends: bool) -> None:
    check_longest(large_model(device), 131_072, sends=sends)


def test_a_row_that_does_not_fit_is_refused_with_a_size_that_is_allowed() -> None:
    transfer = TransferConfig(gather_bytes=4096, segment_bytes=8192, arena_bytes=4 * 8192)
    with pytest.raises(ConfigError, match=r"^transfer.gather_bytes = 4096: .* at least 8192$"):
        check_rows([layers(2, 4, 128)], transfer)
    check_rows([layers(2, 4, 64)], transfer)


@given(
    num_layers=st.integers(1, 9),
    tokens=st.integers(1, 120),
    chunk=st.integers(1, 40),
    cached_pages=st.integers(0, 40),
    rows=st.integers(1, 60),
)
def test_no_prompt_is_cut_into_more_pieces_than_were_foreseen(
    num_layers: int, tokens: int, chunk: int, cached_pages: int, rows: int
) -> None:
    group, page_tokens = layers(num_layers, 1, 4), 4
    entry_bytes = rows * group.bytes_per_token_layer + TRAILER_BYTES
    cached = min(cached_pages * page_tokens, tokens - 1)
    bounds = [0, *([cached] if cached else []), *range(cached + chunk, tokens, chunk), tokens]
    cut = sum(
        len(split_group_piece(Piece(0, 0, num_layers, start, stop), 1, group, entry_bytes, page_tokens))
        for start, stop in pairwise(bounds)
    )
    assert cut <= most_pieces([group], lambda g: 1, tokens, chunk, entry_bytes, page_tokens)
