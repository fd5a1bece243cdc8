"""Names for prefixes: a hash chain over whole pages of tokens. Equal names mean equal tokens from the first one on.

    root ──┬── tokens 0..15 ──> h0 ──┬── tokens 16..31 ──> h1 ── ...
           └ weights, cache salt     └ and what else the page shows, such as an image's hash

Knows tokens and bytes; nothing of pages in memory.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Mapping, Sequence
from types import MappingProxyType

_NOTHING: Mapping[int, bytes] = MappingProxyType({})

TOKEN_BYTES = 4


def chain_root(*parts: str) -> bytes:
    """What a chain begins with: whatever the content of pages depends on beside tokens. Order and borders count."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()


def extend_hashes(
    hashes: list[bytes],
    root: bytes,
    tokens: Sequence[int],
    page_tokens: int,
    extra: Mapping[int, bytes] = _NOTHING,
) -> None:
    """Appends the name of every page that `tokens`, the whole sequence, fills beyond those that `hashes` names already.

    extra: by page number, what its content depends on beside its tokens and those before it. Costs O(new pages).
    """
    known = len(hashes)
    filled = len(tokens) // page_tokens
    if filled <= known:
        return
    words = array("I", tokens[known * page_tokens : filled * page_tokens])
    assert words.itemsize == TOKEN_BYTES
    if sys.byteorder == "big":
        words.byteswap()
    data = memoryview(words).cast("B")
    page_bytes = page_tokens * TOKEN_BYTES
    sha256 = hashlib.sha256
    previous = hashes[-1] if hashes else root
    for page, start in enumerate(range(0, len(data), page_bytes), start=known):
        content = previous + data[start : start + page_bytes]
        if page in extra:
            content += extra[page]
        previous = sha256(content).digest()
        hashes.append(previous)
