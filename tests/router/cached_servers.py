"""Servers that have prompts cached, requests that know their pages, and what is picked for them. On values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from disagg.memory.hashing import chain_root, extend_hashes
from disagg.messages.legs import KvEvents, PrefixGroup, PrefixRules
from disagg.router.placement import pick_pair
from disagg.router.policies import KvAware, Policy, RequestFacts
from disagg.router.prefixes import PromptPages
from disagg.router.speeds import Speed
from disagg.router.view import CachedPages, ClusterView, Pair, ServerView

PAGE = 4
FULL = PrefixRules(("v1", "w"), PAGE, 16, (PrefixGroup("full"),))
SPEED = Speed(0.001, 0.001, 100)


def hashes_of(tokens: Sequence[int], rules: PrefixRules = FULL, salt: str = "") -> tuple[bytes, ...]:
    hashes: list[bytes] = []
    extend_hashes(hashes, chain_root(*rules.root_parts, salt), tokens, rules.page_tokens)
    return tuple(hashes)


def asked(tokens: Sequence[int], rules: PrefixRules = FULL, **changes: Any) -> RequestFacts:
    pages = PromptPages(((rules, hashes_of(tokens, rules)),))
    facts = RequestFacts(prefill_tokens=len(tokens), total_tokens=len(tokens) + 8, pages=pages)
    return replace(facts, **changes)


def having(server: ServerView, *prompts: Sequence[int], rules: PrefixRules = FULL, **changes: Any) -> ServerView:
    """The server says how it names pages, and has cached these prompts, in every group."""
    assert server.hello is not None
    cached = CachedPages()
    for tokens in prompts:
        pages = hashes_of(tokens, rules)
        cached.apply(KvEvents(tuple((g, page) for g in range(len(rules.groups)) for page in pages)))
    hello = replace(server.hello, prefix=rules, max_model_len=1 << 20, max_tokens_in_pool=1 << 20)
    return replace(server, **{"hello": hello, "cached": cached, "speed": SPEED, "usual_speed": SPEED, **changes})


def pick(servers: Sequence[ServerView], facts: RequestFacts, policy: Policy | None = None, **wishes: Any) -> Pair:
    found = pick_pair(ClusterView(tuple(servers)), facts, policy or KvAware(), **wishes)
    assert isinstance(found, Pair), found
    return found


PROMPT = tuple(range(100, 180))
