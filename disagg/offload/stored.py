"""What one server knows to be in storage: what it has stored, and what it was told when it asked. Pure.

Bounded: what was heard of first is forgotten first. Of what is not known, whoever is asked says whether it is there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from disagg.memory.changes import Changes
from disagg.messages.legs import KvEvents
from disagg.offload.spans import KNOWN, Key, know
from disagg.types.bounded import forget_oldest


class StoredPages:
    """Prefixes that are stored, and in which layer groups there are pages of them. known: names that are remembered."""

    def __init__(self, groups: Iterable[int], known: int = KNOWN) -> None:
        self._groups = tuple(groups)
        self._known = known
        self._prefixes: OrderedDict[bytes, None] = OrderedDict()
        self._pages: OrderedDict[Key, None] = OrderedDict()
        self._changes: Changes[Key] = Changes()
        self._ends: dict[Key, None] = {}  # where prefixes were found to end since somebody last asked

    def has_prefix(self, page_hash: bytes) -> bool:
        """Up to this page all that a sequence needs is there."""
        return page_hash in self._prefixes

    def has_page(self, key: Key) -> bool:
        return key in self._pages

    def add(self, hashes: Iterable[bytes], keys: Iterable[Key] = ()) -> None:
        """These prefixes are stored, and these pages."""
        know(self._prefixes, hashes, self._known)
        for key in keys:
            if key not in self._pages:
                self._changes.came(key)
            self._pages[key] = None
            self._pages.move_to_end(key)
        forget_oldest(self._pages, self._known)  # what is forgotten is stored still, so that is not told

    def lost(self, hashes: Sequence[bytes]) -> None:
        """Nothing of these is there: the rest of a prefix. Where that begins is told in any case, since others that are no more
        may have told that it is there."""
        self._ends.update(dict.fromkeys((g, page_hash) for page_hash in hashes[:1] for g in self._groups))
        for page_hash in hashes:
            self._prefixes.pop(page_hash, None)
            for g in self._groups:
                if (g, page_hash) in self._pages:
                    del self._pages[g, page_hash]
                    self._changes.left((g, page_hash))

    def take_events(self) -> KvEvents:
        """Pages that have become known, and are known no longer, since this was last asked."""
        stored, removed = self._changes.take()
        ends, self._ends = self._ends, {}
        gone = dict.fromkeys((*removed, *(key for key in ends if key not in self._pages)))
        return KvEvents(tuple(stored), tuple(gone))

    def snapshot(self) -> KvEvents:
        """All that is known."""
        return KvEvents(tuple(self._pages))
