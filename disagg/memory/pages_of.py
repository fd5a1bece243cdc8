"""Which class keeps a sequence's pages of a layer group."""

from __future__ import annotations

from disagg.memory.full_pages import FullPages
from disagg.memory.groups import GroupSpec
from disagg.memory.state_pages import StatePages
from disagg.memory.window_pages import WindowPages
from disagg.messages.layout import GroupKind
from disagg.types.errors import ConfigError

KINDS: dict[GroupKind, type[FullPages] | type[StatePages]] = {
    GroupKind.FULL: FullPages,
    GroupKind.WINDOW: WindowPages,
    GroupKind.STATE: StatePages,
}


def pages_of(group: GroupSpec) -> type[FullPages] | type[StatePages]:
    """What keeps a sequence's pages of this group. Raises ConfigError for a kind that no engine serves: images, budgets."""
    kind = KINDS.get(group.kind)
    if kind is None:
        served = ", ".join(KINDS)
        raise ConfigError(f"layer group {group.name!r} keeps {group.kind.value} pages; engines serve {served}")
    return kind
