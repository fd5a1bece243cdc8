"""Models, token chains and random pages for tests of storage, and a naive writer of whole sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from disagg.memory.hashing import extend_hashes
from disagg.messages.layout import GroupKind, LayerGroup, StatePart
from disagg.messages.stored import Span
from disagg.offload import objects
from disagg.offload.keys import Scope
from disagg.offload.units import Bytes, cut_page, heads_of, written_by
from tests.offload.joined import join_page

if TYPE_CHECKING:  # its libraries are not everywhere that pages are tested
    from disagg.offload.tier import StorageTier

PAGE_TOKENS = 4
CHECKPOINT_TOKENS = 8

FULL = LayerGroup("full", (0, 2), 12, 2, "float32")
WINDOW = LayerGroup("window", (1, 3, 4), 2, 4, "bfloat16", GroupKind.WINDOW, window=7)
STATE = LayerGroup.of_states("state", (5,), (StatePart("conv", (3, 5), "float32"), StatePart("ssm", (7,), "bfloat16")))
SCOPES = {
    "full": Scope("weights", "float32", PAGE_TOKENS, (FULL,)),
    "full and window": Scope("weights", "float32", PAGE_TOKENS, (FULL, WINDOW)),
    "everything": Scope("weights", "float32", PAGE_TOKENS, (FULL, WINDOW, STATE)),
}


def chain(scope: Scope, tokens: Sequence[int]) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, scope.root, tokens, scope.page_tokens)
    return hashes


def whole_page(scope: Scope, g: int, page_hash: bytes) -> Bytes:
    """What a page of all heads holds: random bytes that depend on its name alone."""
    group = scope.groups[g]
    seed = int.from_bytes(page_hash[:8], "little") + g
    return np.random.default_rng(seed).integers(0, 256, group.page_bytes(scope.page_tokens), dtype=np.uint8)


def rank_page(scope: Scope, g: int, page_hash: bytes, rank: int, tp: int) -> Bytes:
    """What one rank's page holds of it."""
    group = scope.groups[g]
    units = cut_page(whole_page(scope, g, page_hash), group, scope.page_tokens)
    own = group.on_rank(tp)
    out = np.empty(own.page_bytes(scope.page_tokens), np.uint8)
    join_page([units[head] for head in heads_of(rank, tp, group)], own, scope.page_tokens, out)
    return out


async def store_span(
    tier: StorageTier,
    hashes: Sequence[bytes],
    start: int,
    stop: int,
    tp: int = 1,
    page_nos: Sequence[Sequence[int]] | None = None,
) -> Span:
    """Pages [start, stop), as `tp` ranks write them. page_nos: by group; all, but of a state the last."""
    scope = tier.scope
    if page_nos is None:
        page_nos = [(stop - 1,) if group.is_state else range(start, stop) for group in scope.groups]
    shares = []
    for g, group in enumerate(scope.groups):
        parts = []
        for rank in range(tp if page_nos[g] else 0):
            heads = written_by(rank, tp, group)
            if not heads:
                continue
            own = group.on_rank(tp)
            pages = [rank_page(scope, g, hashes[page_no], rank, tp) for page_no in page_nos[g]]
            units = np.stack([cut_page(page, own, scope.page_tokens) for page in pages], axis=1)
            part = await tier.write_part(
                g, [hashes[each] for each in page_nos[g]], heads.start, np.ascontiguousarray(units)
            )
            parts.append(part)
        shares.append(tier.share(g, page_nos[g], parts))
    first = min([start, *(each[0] for each in page_nos if each)])
    parent = hashes[start - 1] if start else scope.root
    return await tier.publish(tier.span(start, parent, hashes[start:stop], hashes[first:start], shares))


async def load_page(tier: StorageTier, hashes: Sequence[bytes], g: int, page_no: int, rank: int, tp: int) -> Bytes:
    """A rank's page, from storage. Raises Missed."""
    scope, group = tier.scope, tier.scope.groups[g]
    found = await tier.walk(hashes)
    heads = heads_of(rank, tp, group)
    units = {}
    for read in tier.reads(found, g, [page_no], heads):
        units.update({unit.head: unit.data for unit in await tier.fetch(read)})
    own = group.on_rank(tp)
    out = np.empty(own.page_bytes(scope.page_tokens), np.uint8)
    join_page([units[head] for head in heads], own, scope.page_tokens, out)
    return out


def of_version(data: bytes, version: int) -> bytes:
    """An object as another version would have written it, whose header means something else."""
    end = objects.header_end(data)
    header = data[objects.FRAME_BYTES : end]
    total = objects.sum_bytes(header, objects._seed(version))
    return objects._FRAME.pack(objects.MAGIC, version, len(header), total) + data[objects.FRAME_BYTES :]
