"""Whether the configured sizes can carry this model's KV: one row at least in a piece, and the longest prompt in few enough.

Pure. Raises ConfigError with the setting, its value and the smallest that works.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from disagg.config.staging import PAGE_BYTES
from disagg.config.tree import TransferConfig
from disagg.engine.facts import EngineFacts
from disagg.engine.handoff.fitting import most_pieces
from disagg.messages.layout import LayerGroup
from disagg.staging.pieces import framed_bytes
from disagg.transfer.session import MAX_PIECES
from disagg.types.arithmetic import round_up
from disagg.types.errors import ConfigError

MOST_BYTES = 1 << 50  # no piece is so large


def check_rows(groups: Sequence[LayerGroup], transfer: TransferConfig) -> None:
    """The smallest piece is one row of one layer on one rank. groups: as a rank keeps them."""
    for layers in groups:
        needed = round_up(framed_bytes(layers.bytes_per_token_layer), PAGE_BYTES)
        for name, given in (("gather_bytes", transfer.gather_bytes), ("segment_bytes", transfer.segment_bytes)):
            if needed > given:
                raise ConfigError(
                    f"transfer.{name} = {given}: one row of one layer of {layers.name} is sent at once, so it must be at "
                    f"least {needed}"
                )


def check_longest(facts: EngineFacts, longest_tokens: int, *, sends: bool) -> None:
    """longest_tokens: of any prompt that this server can hold. sends: it does, with gather buffers; else it receives, in
    segments. A peer of as many ranks has slices as wide as this server's; one of more has narrower ones, which are cut less.
    """
    groups = tuple(group.on_rank(facts.tp) for group in facts.model.groups)
    tokens = max(1, longest_tokens)
    # A receiver does not know in what chunks its peers compute.
    chunk = facts.scheduling.chunk_tokens if sends else tokens
    name = "gather_bytes" if sends else "segment_bytes"
    given = facts.transfer.gather_bytes if sends else facts.transfer.segment_bytes

    def pieces(entry_bytes: int, chunk_tokens: int) -> int:
        page_tokens = facts.memory.page_tokens
        return most_pieces(groups, lambda g: groups[g].kv_heads, tokens, chunk_tokens, entry_bytes, page_tokens)

    cut = pieces(given, chunk)
    if cut <= MAX_PIECES:
        return
    said = f"the longest prompt, {tokens} tokens, would be sent in {cut} pieces, and at most {MAX_PIECES} may be"
    if pieces(MOST_BYTES, chunk) > MAX_PIECES:
        least = _least(1, tokens, lambda chunk_tokens: pieces(MOST_BYTES, chunk_tokens) <= MAX_PIECES)
        raise ConfigError(f"engine.chunk_tokens = {chunk}: {said}; it must be at least {least}")
    least = PAGE_BYTES * _least(
        given // PAGE_BYTES, MOST_BYTES // PAGE_BYTES, lambda size: pieces(size * PAGE_BYTES, chunk) <= MAX_PIECES
    )
    room = facts.transfer.segment_bytes
    beside = f", and transfer.segment_bytes = {room} as large as that" if least > room else ""
    raise ConfigError(f"transfer.{name} = {given}: {said}; it must be at least {least}{beside}")


def _least(low: int, high: int, works: Callable[[int], bool]) -> int:
    """From low, which does not work, to high, which does; what works with so much works with more."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if works(middle) else (middle, high)
    return high
