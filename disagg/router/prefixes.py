"""How much of a prompt a server has cached, as far as the router can tell. Pure.

    prompt ── once, when it is accepted ──> a chain of page hashes for each way in which servers name pages (PrefixRules)
    chain  ── per server ──> the longest prefix that is valid in all of its layer groups: its hit

A hit is looked up as servers do (memory/cache), in what they have said of their caches, their hosts' memory and their storage. It
is a hint, and errs towards less: a server that does not say how it names pages has none.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Container, Iterable, Sequence
from functools import partial
from itertools import pairwise

from msgspec import Struct

from disagg.memory.hashing import chain_root, extend_hashes
from disagg.memory.prefixes import longest_checkpointed, longest_windowed
from disagg.memory.spans import pages_for
from disagg.messages.layout import GroupKind
from disagg.messages.legs import PrefixRules

MAX_WAYS = 4  # of naming pages, for which a prompt is hashed
MAX_PAGES = 1 << 15  # of a prompt; what goes beyond is not looked up
TURN_PAGES = 512  # hashed at once: about half a millisecond
PAGE_BYTES = 200  # of one hash, here and among those that are being computed

_NOTHING: Container[bytes] = frozenset()


class PromptPages(Struct, frozen=True):
    """The names of a prompt's pages, by the rules under which servers name them so."""

    chains: tuple[tuple[PrefixRules, tuple[bytes, ...]], ...] = ()

    def of(self, rules: PrefixRules | None) -> tuple[bytes, ...]:
        """Empty: they are not known."""
        return next((chain for known, chain in self.chains if known is rules or known == rules), ())


NO_PAGES = PromptPages()


def ways_of(rules: Iterable[PrefixRules | None]) -> tuple[PrefixRules, ...]:
    """Each once, and not too many."""
    ways: list[PrefixRules] = []
    for each in rules:
        if each is not None and each not in ways:
            ways.append(each)
    return tuple(ways[:MAX_WAYS])


def num_pages(ways: Sequence[PrefixRules], num_tokens: int) -> int:
    """That `PromptHashing` will name."""
    return sum(min(MAX_PAGES, num_tokens // rules.page_tokens) for rules in ways)


class Hit(Struct, frozen=True):
    """Tokens of a prompt that need not be computed: first those in the prefix cache, then those that are brought from the host,
    then those that come from storage."""

    gpu: int = 0
    host: int = 0
    storage: int = 0

    @property
    def tokens(self) -> int:
        return self.gpu + self.host + self.storage


NO_HIT = Hit()


class _InAny:
    """Pages that are in one of several tiers."""

    def __init__(self, tiers: Sequence[Collection[bytes]]) -> None:
        self._tiers = tiers

    def __contains__(self, page: object) -> bool:
        for tier in self._tiers:  # noqa: SIM110 - `any` takes three times as long, for each page of a prompt
            if page in tier:
                return True
        return False

    def __bool__(self) -> bool:
        return any(self._tiers)


class PromptHashing:
    """Names a prompt's pages, some at each `step`; `pages` when it is `done`."""

    def __init__(self, ways: Sequence[PrefixRules], salt: str, token_ids: tuple[int, ...]) -> None:
        self._token_ids = token_ids
        self._left = [(rules, chain_root(*rules.root_parts, salt)) for rules in reversed(ways)]
        self._hashes: list[bytes] = []
        self._chains: list[tuple[PrefixRules, tuple[bytes, ...]]] = []

    @property
    def done(self) -> bool:
        return not self._left

    @property
    def pages(self) -> PromptPages:
        return PromptPages(tuple(self._chains))

    def step(self) -> None:
        """At most TURN_PAGES pages more."""
        rules, root = self._left[-1]
        pages = num_pages((rules,), len(self._token_ids))
        stop = min(pages, len(self._hashes) + TURN_PAGES)
        extend_hashes(self._hashes, root, self._token_ids[: stop * rules.page_tokens], rules.page_tokens)
        if stop == pages:
            self._chains.append((rules, tuple(self._hashes)))
            self._hashes = []
            self._left.pop()


def hit_of(
    rules: PrefixRules,
    tiers: Sequence[Sequence[Collection[bytes]]],
    hashes: Sequence[bytes],
    at_most: int,
    coming: Container[bytes] = _NOTHING,
) -> Hit:
    """tiers: of a server, its prefix cache, its host and its storage, each as `hit_tokens` wants it; empty, if it has none. A
    page may be in several, and counts where it is nearest.
    """
    found = [hit_tokens(rules, tiers[0], hashes, at_most, coming)]
    for number in range(1, len(tiers)):
        together = [
            _InAny([tier[g] for tier in tiers[: number + 1] if g < len(tier)]) for g in range(len(rules.groups))
        ]
        may_go_on = tiers[number] and found[-1] < at_most
        more = hit_tokens(rules, together, hashes, at_most, coming, found[-1]) if may_go_on else 0
        found.append(max(found[-1], more))
    gpu, *further = found
    return Hit(gpu, *(stop - start for start, stop in pairwise([gpu, *further])))


def hit_tokens(
    rules: PrefixRules,
    groups: Sequence[Container[bytes]],
    hashes: Sequence[bytes],
    at_most: int,
    coming: Container[bytes] = _NOTHING,
    known: int | None = None,
) -> int:
    """Tokens, in whole pages and at most so many, of the longest prefix that is cached in every layer group.

    known: of pages that may have gaps, as a host's and a storage's may, how many tokens there are in any case of full attention;
    behind them each page is looked up. None: of a prefix cache, which loses the end of a prefix before its beginning.

    groups: cached pages by layer group; groups without any may be left out at the end. coming: pages of prompts that the
    server computes now. Whoever comes with the same waits for them, but of windows and states it may keep other pages; so they
    count only where all attention is full.
    """
    kinds = {group.kind for group in rules.groups}
    if not kinds <= {GroupKind.FULL, GroupKind.WINDOW, GroupKind.STATE, GroupKind.IMAGE}:
        return 0
    if not kinds <= {GroupKind.FULL, GroupKind.IMAGE}:
        coming = _NOTHING
    found = min(at_most // rules.page_tokens, len(hashes))
    rest = []
    for g, group in enumerate(rules.groups):
        pages: Container[bytes] = groups[g] if g < len(groups) else ()
        if group.kind == GroupKind.FULL:
            is_missing = partial(_is_missing, pages, coming)
            if known is None:
                found = bisect_left(hashes, True, hi=found, key=is_missing)
            else:
                behind = range(min(found, known // rules.page_tokens), found)
                found = next((at for at in behind if is_missing(hashes[at])), found)
        elif group.kind != GroupKind.IMAGE:
            rest.append((group, pages))
    before = -1
    while found and found != before:
        before = found
        for group, pages in rest:
            if group.kind == GroupKind.WINDOW:
                found = longest_windowed(pages, hashes, found, pages_for(group.window_tokens, rules.page_tokens))
            else:
                every = max(1, rules.checkpoint_tokens // rules.page_tokens)
                found = longest_checkpointed(pages, hashes, found, every) if pages else 0
    return found * rules.page_tokens


def _is_missing(pages: Container[bytes], coming: Container[bytes], page: bytes) -> bool:
    return page not in pages and page not in coming
