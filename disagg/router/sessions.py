"""Which servers a session was sent to last: a client's conversation, as far as it gives it a name. Pure; time is an argument.

It is a hint for what a router does not know better: what a server has of a prompt in host memory or storage, or has cached and
not said yet. So it counts less than what is known to be cached, and than load (`policies`).
"""

from __future__ import annotations

import hashlib

from disagg.types.bounded import forget_oldest

MAX_SESSIONS = 1 << 16  # some 20 MB
KEPT_S = 1800.0  # after its last request

NOWHERE: frozenset[str] = frozenset()


class Sessions:
    """Of one router. A tenant's names mean nothing for another's."""

    def __init__(self, most: int = MAX_SESSIONS, kept_s: float = KEPT_S) -> None:
        self._most = most
        self._kept_s = kept_s
        self._servers: dict[bytes, tuple[frozenset[str], float]] = {}  # the last used is last

    def __len__(self) -> int:
        return len(self._servers)

    def of(self, tenant: str, session: str, now_s: float) -> frozenset[str]:
        """Names of servers; empty: it is not known, or has no name."""
        if not session:
            return NOWHERE
        servers, noted_s = self._servers.get(_key(tenant, session), (NOWHERE, now_s))
        return servers if now_s - noted_s < self._kept_s else NOWHERE

    def note(self, tenant: str, session: str, servers: tuple[str, ...], now_s: float) -> None:
        """An attempt of one of its requests begins there."""
        if not session:
            return
        key = _key(tenant, session)
        self._servers.pop(key, None)
        self._servers[key] = (frozenset(servers), now_s)
        forget_oldest(self._servers, self._most)


def _key(tenant: str, session: str) -> bytes:
    said = f"{len(tenant)}:{tenant}{session}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(said, digest_size=16).digest()
