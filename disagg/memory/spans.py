"""How many tokens lie in how many pages: of a window, before a checkpoint, and beside what is under way. Pure arithmetic."""

from __future__ import annotations

from disagg.types.arithmetic import ceil_div

MAX_TOKENS = 1 << 62  # more than any sequence has

# A window's pages are let go when a run has reported: while one is under way and another is planned, so many runs' tokens
# are held beside the window. It begins and ends within a page. (In pipeline stages, scheduler/pipeline.plans_in_flight.)
PLANS_IN_FLIGHT = 2
PARTIAL_PAGES = 2


def pages_for(tokens: int, page_tokens: int) -> int:
    """How many pages hold this many tokens."""
    return ceil_div(tokens, page_tokens)


def window_first(num_tokens: int, window_tokens: int, page_tokens: int) -> int:
    """The first page that overlaps the window of the token after num_tokens: what is kept of them, and what a prefix of so
    many needs, begins with it."""
    return (num_tokens - window_tokens) // page_tokens if num_tokens > window_tokens else 0


def window_start(num_tokens: int, window_tokens: int, page_tokens: int) -> int:
    """First token, on a page boundary, that a window group must still hold after num_tokens tokens.

    Counted from the last full page and not from the last token, so that the prefix of full pages can be a cache hit.
    """
    full_tokens = num_tokens // page_tokens * page_tokens
    return window_first(full_tokens, window_tokens, page_tokens) * page_tokens


def window_pages(window_tokens: int, late_tokens: int, page_tokens: int) -> int:
    """Most pages that a sequence needs of a window, and of late_tokens beside it whose runs have not reported."""
    return pages_for(window_tokens + late_tokens, page_tokens) + PARTIAL_PAGES


def last_checkpoint(num_tokens: int, checkpoint_tokens: int) -> int:
    """Tokens after which a sequence of num_tokens was last checkpointed, before its end; 0 for never."""
    return max(0, num_tokens - 1) // checkpoint_tokens * checkpoint_tokens
