"""Which prefixes are valid in a layer group whose shorter prefixes need not be. Pure; lengths are in pages.

For a server's own cache (`cache`), and for routers, which know of a cache what its server has said.
"""

from __future__ import annotations

from collections.abc import Container, Sequence


def longest_windowed(pages: Container[bytes], hashes: Sequence[bytes], most: int, window: int) -> int:
    """The longest prefix of at most `most` pages whose last `window` pages are cached, or all if it has fewer."""
    length = page_no = most
    while page_no > max(0, length - window):
        page_no -= 1
        if hashes[page_no] not in pages:
            length = page_no
    return length


def longest_checkpointed(pages: Container[bytes], hashes: Sequence[bytes], most: int, every: int) -> int:
    """The longest prefix of at most `most` pages, of a multiple of `every`, at whose end a state is cached."""
    return next((end for end in range(most // every * every, 0, -every) if hashes[end - 1] in pages), 0)
