"""What not every server that may be met understands of what routers say, and who does. One row for each; pure.

A message that a server does not know ends its stream; a field that it does not know is passed over, as if it had not been said.
So what needs more than the recipient has is decided against: ask `understands` where something is planned. docs/versions.md
says when a row is due; `tests/repository/test_needs.py` finds messages and fields that have none.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from disagg.messages.legs import Drain, HandOver, RouterMessage, ServerHello, SetRole, StartLeg
from disagg.types.ids import Role


class Need(Struct, frozen=True):
    """protocol: the first whose servers understand it. said_by: the field of ServerHello by which one before says that it does.

    roles: whose servers can do what it asks for; empty: all.
    """

    protocol: int
    said_by: str
    roles: frozenset[Role] = frozenset()


_HANDS_OVER = Need(1, "hands_over", frozenset({Role.DECODE}))

# By message, and field where the message needs it only if that is not its default. A row goes when OLDEST_PROTOCOL has passed it.
NEEDS: Mapping[tuple[type, str], Need] = {
    (Drain, ""): Need(1, "drains"),
    (HandOver, ""): _HANDS_OVER,
    (SetRole, ""): Need(1, "role_change"),
    (StartLeg, "moves_attempt"): _HANDS_OVER,
    (StartLeg, "moved"): _HANDS_OVER,
    (StartLeg, "local_prefill"): Need(2, "local_prefill_tokens", frozenset({Role.DECODE})),
}

# Whoever does not know these does the same without them.
MAY_BE_PASSED_OVER = frozenset({(StartLeg, "traceparent")})


def understands(server: ServerHello, message: type, field: str = "") -> bool:
    """Whether a server understands such a message, with that field; and can do it, where that is its role's."""
    need = NEEDS.get((message, field))
    if need is None:
        return True
    by_number = server.version.protocol >= need.protocol and (not need.roles or server.role in need.roles)
    return by_number or bool(getattr(server, need.said_by))


def lacks(server: ServerHello, message: RouterMessage) -> str:
    """What of this message the server does not understand, for a log; empty if it may be sent."""
    kind = type(message)
    for (needs, field), need in NEEDS.items():
        said = needs is kind and (not field or bool(getattr(message, field)))
        if said and not understands(server, kind, field):
            what = f"{kind.__name__}.{field}" if field else kind.__name__
            roles = f" of {'/'.join(sorted(need.roles))} servers" if need.roles else ""
            return (
                f"{what} needs protocol {need.protocol}{roles}; it is a {server.role.value} server of {server.version}"
            )
    return ""
