"""Whether a server may be emptied or given another role, and what came of that. Pure: decides on the picture of the cluster."""

from __future__ import annotations

from collections.abc import Container, Iterable

from disagg.messages.legs import RoleChange, ServerState
from disagg.router.view import ClusterView, ServerView
from disagg.types.errors import InvalidRequest, Unavailable, UnknownServer
from disagg.types.ids import Role
from disagg.types.plain import quoted

ANSWER_S = 5.0  # which a server has to say what comes of it


class Leaving:
    """Servers that this router has told to leave their pool, for as long as they may not have said that they do: of two calls at
    once each would find the other one's server there."""

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}

    def told(self, name: str, leaves: bool, now_s: float) -> None:
        """leaves: False where that is over, or was undone."""
        self._until_s.pop(name, None)
        if leaves:
            self._until_s[name] = now_s + ANSWER_S

    def now(self, now_s: float) -> frozenset[str]:
        return frozenset(name for name, until_s in self._until_s.items() if now_s < until_s)


def role_named(name: str) -> Role:
    """Raises InvalidRequest."""
    try:
        return Role(name)
    except ValueError:
        allowed = ", ".join(role.value for role in Role)
        raise InvalidRequest(f"role {quoted(name)}: it must be one of {allowed}", "role") from None


def server_named(view: ClusterView, name: str) -> ServerView:
    """One that can be told something now. Raises UnknownServer, Unavailable."""
    found = next((server for server in view.servers if server.name == name), None)
    if found is None:
        names = ", ".join(str(server.name) for server in view.servers) or "none"
        raise UnknownServer(f"there is no server {quoted(name)}; there are: {names}", "name")
    if found.hello is None or not found.connected or found.lost:
        raise Unavailable(f"server {name} is not heard now{f': {found.error}' if found.error else ''}")
    return found


def check_drain(view: ClusterView, name: str, *, force: bool, leaving: Container[str] = ()) -> ServerView:
    """The server, which may be told to take nothing new. force: also the last ready one of its role, where no other role does its
    work (`_others`). leaving: servers that were told to take nothing new, or to change their role, and may not have said so yet.

    Raises UnknownServer, InvalidRequest, Unavailable.
    """
    server = server_named(view, name)
    if not force and server.usable and not _others(view, server, leaving):
        raise InvalidRequest(_last(view, server, leaving), "name")
    return server


def needs_change(view: ClusterView, name: str, role: Role, *, force: bool, leaving: Container[str] = ()) -> bool:
    """False where the server is that already, or is becoming it. force, leaving: as above.

    Raises UnknownServer, InvalidRequest for what is refused whenever it is asked, Unavailable for what may pass.
    """
    server = server_named(view, name)
    assert server.hello is not None
    change = server.hello.role_change
    if change is None:
        raise InvalidRequest(
            f"server {name} is of a version that keeps the role that it was started in; start it anew as "
            f"a {role.value} server",
            "name",
        )
    if change.becomes is not None:
        if change.becomes is role:
            return False
        raise Unavailable(f"server {name} is becoming {change.becomes.value} now; ask again when it is")
    if server.role is role:
        return False
    state = view.state(server)
    if state in (ServerState.DRAINING, ServerState.DRAINED):
        raise Unavailable(
            f"server {name} is {state.value}: have it take requests again first (`disagg drain {name} --undo`), or wait until it "
            "has begun anew"
        )
    if not server.hello.incarnation:
        raise Unavailable(f"server {name} is {state.value}; ask again when it is ready")
    if not force and not _others(view, server, leaving):
        raise InvalidRequest(_last(view, server, leaving), "name")
    return True


def change_begun(server: ServerView | None, role: Role, asked_before: int) -> bool | None:
    """Of a change that was asked for: True when it has begun, or is done; None while nothing is heard of it.

    asked_before: as the server's hello had it then. Raises Unavailable with the server's reason where it refuses.
    """
    change = _change(server)
    if server is None or change is None or change.asked <= asked_before:
        return None
    if change.becomes is role or server.role is role:
        return True
    raise Unavailable(f"server {server.name}: {change.failed or 'another role was asked for meanwhile'}")


def asked_before(server: ServerView) -> int:
    change = _change(server)
    return change.asked if change is not None else 0


def _change(server: ServerView | None) -> RoleChange | None:
    return server.hello.role_change if server is not None and server.hello is not None else None


def _others(view: ClusterView, server: ServerView, leaving: Container[str]) -> list[ServerView]:
    """Servers that do the same work, and would go on doing it, as far as was heard lately: those of its role, and of them only
    such as fit one of the other role, if it does; beside a prefill or decode server also mixed ones, which take whole requests;
    beside a mixed one also pairs.
    """
    stay = [each for each in _staying(view, leaving) if each.name != server.name]
    if server.role is Role.MIXED:
        return [each for each in stay if each.role is Role.MIXED or _has_peer(each, stay)]
    alike = [each for each in stay if each.role is server.role]
    if _has_peer(server, stay):
        alike = [each for each in alike if _has_peer(each, stay)]
    return [*alike, *(each for each in stay if each.role is Role.MIXED)]


def _staying(view: ClusterView, leaving: Container[str]) -> list[ServerView]:
    """Servers that work and go on doing it, as far as was heard lately."""
    return [each for each in view.servers if each.name not in leaving and each.usable and each.fresh]


def _has_peer(server: ServerView, others: Iterable[ServerView]) -> bool:
    return any(server.fits(other) for other in others)


def _last(view: ClusterView, server: ServerView, leaving: Container[str]) -> str:
    allowed = [str(other.name) for other in view.servers if other.usable and _others(view, other, leaving)]
    role, state = server.role.value, view.state(server)
    now = "" if state is ServerState.READY else f" ({state.value} now)"
    others_role = (server.role, Role.MIXED) if server.role is not Role.MIXED else tuple(Role)
    alike = [other for other in view.servers if other.role in others_role and other.name != server.name]
    why = [f"{other.name} was told to leave a moment ago" for other in alike if other.name in leaving]
    why += [
        f"{other.name} has been silent for {other.silent_s:.0f} s"
        for other in alike
        if other.usable and not other.fresh
    ]
    stay = _staying(view, leaving)
    other_role = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}.get(server.role)
    why += [
        f"{other.name} fits no {other_role.value} server"
        for other in alike
        if other_role is not None and other in stay and not _has_peer(other, stay)
    ]
    others = "".join(f"; {each}" for each in why)
    return (
        f"server {server.name} is the last {role} server that is ready{now}{others}, and requests may need one; allowed are "
        f"{', '.join(allowed) or 'none now'}, or this one with --force"
    )
