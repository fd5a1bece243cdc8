"""How large the host pool is: what was set, or so many times the device pool. Pure arithmetic."""

from __future__ import annotations

from msgspec import Struct

from disagg.config.sizes import format_size, show_bytes
from disagg.config.tree import OffloadConfig
from disagg.messages.layout import GroupKind
from disagg.offload.rules import OffloadRules
from disagg.types.arithmetic import ceil_div


class HostSize(Struct, frozen=True):
    """num_large: large pages of the host pool, as long as the device pool's. why: the settings, for the log and for errors."""

    num_large: int
    why: str


def least_large(rules: OffloadRules) -> int:
    """Large pages that hold one span of a sequence, at whatever place: without them nothing is ever offloaded."""
    layout, total = rules.layout, 0
    for g, group in enumerate(layout.groups):
        pages = rules.stride
        if group.kind is GroupKind.WINDOW:  # before its end, and, within it, before the end of a prompt
            pages += layout.pages_for(g, group.window_tokens)
        elif group.kind is GroupKind.STATE:
            pages = 2
        total += ceil_div(pages, layout.per_large[g])
    return total


def size_host(offload: OffloadConfig, rules: OffloadRules, device_large: int) -> HostSize:
    """device_large: large pages of the device pool. What the ratio gives is at least a span's; raises ValueError, with both
    numbers, if fewer bytes are set than that.
    """
    large_bytes, least = rules.layout.large_bytes, least_large(rules)
    if not offload.host_bytes:
        num_large = max(least, int(offload.host_ratio * device_large))
        return HostSize(num_large, f"offload.host_ratio = {offload.host_ratio:g}")
    num_large, why = offload.host_bytes // large_bytes, f"offload.host_bytes = {format_size(offload.host_bytes)}"
    if num_large < least:
        raise ValueError(
            f"{why} holds {num_large} large pages of {show_bytes(large_bytes)}; what is offloaded at once, "
            f"{rules.stride * rules.layout.page_tokens} tokens (offload.stride_tokens), may need {least}, "
            f"{show_bytes(least * large_bytes)}"
        )
    return HostSize(num_large, why)
