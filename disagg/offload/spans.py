"""What the offload manager remembers of a sequence, and of pages on their way. Pure; changed by the manager alone."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

from disagg.messages.layout import GroupKind
from disagg.offload.host import HostPool, Placed
from disagg.offload.instructions import GpuPage, Upload, UploadShare
from disagg.offload.rules import OffloadRules
from disagg.types.bounded import forget_oldest

Key = tuple[int, bytes]  # (group, hash)
View = Callable[[int, int], int | None]  # (group, page_no) -> page of the GPU

KNOWN = 1 << 18  # names that are remembered, about 150 bytes each; of others, whoever is asked says that they are there


class SpanState(enum.Enum):
    """How far the storing of a span has come."""

    COPYING = "copying"
    WAITING = "waiting"
    UPLOADING = "uploading"
    UPLOADED = "uploaded"
    PUBLISHING = "publishing"
    STORED = "stored"
    ENDED = "ended"


class Span:
    """Pages [start, stop) of a chain, on their way. placed: by group, {page_no: page of the host}, each held."""

    def __init__(self, flow: Flow, hashes: Sequence[bytes], parent_hash: bytes, parent: Span | None) -> None:
        """From where the flow is."""
        self.state = SpanState.COPYING
        self.salt = flow.salt
        self.start = flow.at
        self.hashes = tuple(hashes)
        self.parent_hash = parent_hash
        self.parent = parent
        self.children: list[Span] = []
        self.followers: list[Flow] = []  # sequences that it is a part of
        self.before: tuple[bytes, ...] = ()
        self.to_storage = False
        self.upload = 0
        self.placed: list[dict[int, int]] = []
        self.names: dict[tuple[int, int], tuple[bytes, bytes]] = {}  # (group, page_no) -> (hash, the one before)
        self.moved: list[tuple[GpuPage, int]] = []  # what is copied, and where to

    @property
    def stop(self) -> int:
        return self.start + len(self.hashes)

    @property
    def keys(self) -> Iterable[Key]:
        return ((g, self.names[g, page_no][0]) for g, pages in enumerate(self.placed) for page_no in pages)

    @property
    def held(self) -> list[Placed]:
        """Group, page number and page of the host, of each that it has."""
        return [(g, page_no, page) for g, pages in enumerate(self.placed) for page_no, page in pages.items()]

    def name(self, flow: Flow, g: int, page_no: int) -> bytes:
        """It has this page, of that name."""
        page_hash = flow.hashes[page_no]
        self.names[g, page_no] = page_hash, flow.hash_before(page_no)
        return page_hash

    def place(
        self, flow: Flow, ready: Sequence[dict[int, int]], moved: Sequence[Sequence[tuple[GpuPage, int]]]
    ) -> None:
        """By group: what is on the host, {page_no: page}, and what is copied there."""
        for there, pages in zip(ready, moved, strict=True):
            self.moved += pages
            here = {**there, **{page.page_no: at for page, at in pages}}
            self.placed.append(dict(sorted(here.items())))
        # A hit at the end of a span may need pages of a window before its start that no span before has.
        first = min([self.start, *(min(pages) for pages in self.placed if pages)])
        self.before = tuple(flow.hashes[first : self.start])

    def follow(self, flow: Flow) -> None:
        """A sequence has it as a part."""
        flow.open += 1
        self.followers.append(flow)

    def leave_parent(self) -> None:
        """It is found without it."""
        if self.parent is not None:
            self.parent.children.remove(self)
            self.parent = None

    def goes_on_from(self, found: int, rules: OffloadRules) -> tuple[list[Placed], list[Span]]:
        """Somebody else's span has its first so many pages: it is what follows them. Returns the pages that it lets go of, and
        the spans that went on from those.
        """
        at, first = self.start + found, self.start - len(self.before)
        names = (*self.before, *self.hashes)
        full = [group.kind is GroupKind.FULL for group in rules.layout.groups]
        left = [
            (g, page_no, page)
            for g, page_no, page in self.held
            if page_no < at and (full[g] or page_no not in rules.needed(g, self.stop))
        ]
        for g, page_no, _ in left:
            del self.placed[g][page_no]
        self.start, self.parent, self.parent_hash, self.hashes = at, None, self.hashes[found - 1], self.hashes[found:]
        self.before = names[min([at, *(min(pages) for pages in self.placed if pages)]) - first : at - first]
        others = [child for child in self.children if child.start <= at]
        self.children = [child for child in self.children if child.start > at]
        for child in others:
            child.parent = None
        return left, others

    def as_upload(self) -> Upload:
        shares = tuple(
            UploadShare(tuple(pages), tuple(self.names[g, page_no][0] for page_no in pages), tuple(pages.values()))
            for g, pages in enumerate(self.placed)
        )
        return Upload(self.upload, self.salt, self.start, self.parent_hash, self.hashes, self.before, shares)


class InFlightSpans:
    """Spans on their way. hashes: by hash of a page, the one that it is in; keys: by page of the host, the one that has it."""

    def __init__(self) -> None:
        self.hashes: dict[bytes, Span] = {}
        self.keys: dict[Key, Span] = {}

    def add(self, span: Span) -> None:
        self.hashes.update(dict.fromkeys(span.hashes, span))
        self.keys.update(dict.fromkeys(span.keys, span))

    def remove(self, span: Span) -> None:
        for key in span.keys:
            del self.keys[key]
        for page_hash in span.hashes:
            if self.hashes.get(page_hash) is span:
                del self.hashes[page_hash]

    def only_to_host(self, keys: Iterable[Key]) -> bool:
        """One of these pages is in a span that is not stored."""
        spans = map(self.keys.get, keys)
        return any(span is not None and not span.to_storage for span in spans)


class Flow:
    """What is known of one sequence. at: pages that are stored, or in a span. next: pages from which there is more to do."""

    def __init__(
        self, root: bytes, hashes: Sequence[bytes], prompt_end: int, salt: str, *, to_storage: bool = True
    ) -> None:
        self.root = root
        self.salt = salt
        self.to_storage = to_storage
        self.hashes = hashes
        self.prompt_end = prompt_end
        self.pages = 0
        self.at = 0
        self.next = 0
        self.blocked_since = -1  # the manager's version when it was last found that there is no room
        self.ended = False
        self.asked = False  # it has ended, and storage has yet to say what it has of it
        # Without storage a sequence holds on the host what it has there, and lets go of all of it at its end: so nothing is
        # evicted before what goes on from it. open: spans that it has to wait for then.
        self.kept: list[Placed] = []
        self.open = 0
        self.gone = False
        self.pinned: dict[tuple[int, int], int] = {}  # of one that has ended: what waits for room on the host

    def go_back(self, at: int) -> None:
        """Its pages from this one on are to be offloaded, again or still."""
        self.at, self.next, self.blocked_since = at, 0, -1

    def to_be_copied(self, rules: OffloadRules, host: HostPool, view: View) -> dict[tuple[int, int], int]:
        """Pages of the GPU that its last point needs and no span has, by group and page number."""
        wanted: dict[tuple[int, int], int] = {}
        for g, group in enumerate(rules.layout.groups):
            for page_no in rules.needed(g, rules.last_point(self.pages)):
                page = view(g, page_no)
                is_own = group.kind is not GroupKind.FULL or page_no >= self.at
                if is_own and page is not None and host.find(g, self.hashes[page_no]) is None:
                    wanted[g, page_no] = page
        return wanted

    def hash_before(self, page_no: int) -> bytes:
        return self.hashes[page_no - 1] if page_no else self.root


def gpu_pages(pages: Mapping[tuple[int, int], int]) -> tuple[GpuPage, ...]:
    """pages: by group and page number."""
    return tuple(GpuPage(g, page_no, page) for (g, page_no), page in pages.items())


def know(known: OrderedDict[bytes, None], names: Iterable[bytes], most: int = KNOWN) -> None:
    """Remembers names, and forgets those that were heard of first when there are too many."""
    for name in names:
        known[name] = None
        known.move_to_end(name)
        forget_oldest(known, most)
