"""Who a server is: what it says of itself to routers and to peers, whatever state it is in.

Changes when workers come up (`bringup`) or are lost (`lifecycle`). Knows names and states; nothing of sockets.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from typing import NamedTuple

from disagg.engine.facts import MemoryFacts
from disagg.messages.legs import LoadReport, PrefixGroup, PrefixRules, RoleChange, ServerHello, ServerState, StartLeg
from disagg.messages.link import LinkHello
from disagg.server.bringup import Incarnation
from disagg.server.model_identity import ModelIdentity
from disagg.server.pids import host_id
from disagg.types.ids import Role
from disagg.types.protocol import Version
from disagg.types.version import own_version

NOTE_CHARS = 1000  # of what routers are told for the operator


class Ranks(NamedTuple):
    """How a server's workers share its model: data-parallel ranks, or pipeline stages, of tp ranks each."""

    tp: int
    dp: int = 1
    pp: int = 1


class Identity:
    """load: what the server has to do at the moment."""

    def __init__(
        self,
        name: str,
        role: Role,
        ranks: Ranks,
        model: str,
        load: Callable[[], LoadReport],
        pod: str = "",
        *,
        hands_over: bool = False,
        version: Version | None = None,
    ) -> None:
        """pod: as in LinkHello. hands_over: as in ServerHello. version: this process's."""
        self.name = name
        self.state = ServerState.LOADING
        self.link_address = ""
        self.max_model_len = 0
        self.worker_pids: tuple[int, ...] = ()
        self.model: ModelIdentity | None = None  # of the last workers that came up
        self.known_model: ModelIdentity | None = None  # the last that two of them had, or the first: any other is news
        self.incarnation: Incarnation | None = None  # while workers are up
        self.role = role  # and hands_over: they change with the role
        self._ranks = ranks
        self._served_model = model
        self._load = load
        self._pod = pod
        self.hands_over = hands_over
        self.storage = ""  # as in ServerHello
        self.version = own_version() if version is None else version
        self.role_change: Callable[[], RoleChange | None] = lambda: None  # as in ServerHello
        self._server_id = secrets.token_hex(8)
        self._fingerprint = ""
        self._note = ""

    @property
    def note(self) -> str:
        """What the operator should know of this server."""
        return self._note

    @note.setter
    def note(self, note: str) -> None:
        self._note = note[:NOTE_CHARS]

    def up(self, incarnation: Incarnation) -> None:
        """Workers have come up."""
        self.incarnation = incarnation
        self.max_model_len = incarnation.facts.model.max_model_len
        self._fingerprint = incarnation.fingerprint

    def why_not(self, start: StartLeg) -> str:
        """Why a leg cannot begin here now, in whole words after this server's name; empty if it can.

        A router that has not heard of our new workers yet, whose model may be another, means the old ones.
        """
        moves = bool(start.moves_attempt) and self.state is ServerState.DRAINING
        if self.incarnation is None or not (self.state is ServerState.READY or moves):
            return f"is {self.state.value}"
        return "" if start.incarnation in ("", self.incarnation.facts.incarnation) else "has other workers now"

    def hello(self) -> ServerHello:
        """To a router."""
        up = self.incarnation
        model = self.model if up is not None else None
        return ServerHello(
            name=self.name,
            role=self.role,
            tp=self._ranks.tp,
            dp=self._ranks.dp,
            pp=self._ranks.pp,
            pid=os.getpid(),
            worker_pids=self.worker_pids,
            incarnation=up.facts.incarnation if up is not None else "",
            fingerprint=self._fingerprint,
            model=self._served_model,
            max_model_len=self.max_model_len,
            max_tokens_in_pool=up.engine.max_tokens_in_pool if up is not None else 0,
            link_address=self.link_address,
            load=self._load(),
            weights_hash=model.weights_hash if model is not None else "",
            files=dict(model.files) if model is not None else {},
            note=self.note,
            prefix=prefix_rules(up.facts.memory) if up is not None else None,
            drains=True,
            hands_over=self.hands_over,
            version=self.version,
            role_change=self.role_change(),
            storage=self.storage,
            local_prefill_tokens=self._local_prefill_tokens,
        )

    @property
    def _local_prefill_tokens(self) -> int:
        up = self.incarnation
        return up.facts.scheduling.local_prefill_tokens if up is not None and self.role is Role.DECODE else 0

    def greeting(self, generation: str) -> LinkHello | None:
        """To a peer; None while there is nobody whom it could reach."""
        up = self.incarnation
        if up is None:
            return None
        return LinkHello(
            name=self.name,
            generation=generation,
            incarnation=up.facts.incarnation,
            fingerprint=self._fingerprint,
            tp=self._ranks.tp,
            host_id=host_id(),
            ranks=up.ranks,
            server_id=self._server_id,
            pod=self._pod,
            version=self.version,
        )


def prefix_rules(memory: MemoryFacts) -> PrefixRules | None:
    """What routers look prefixes up with; None without a prefix cache."""
    if not memory.prefix_cache:
        return None
    layout = memory.layout
    return PrefixRules(
        root_parts=memory.scope.root_parts,
        page_tokens=layout.page_tokens,
        checkpoint_tokens=layout.checkpoint_tokens,
        groups=tuple(PrefixGroup(group.kind.value, group.window_tokens) for group in layout.groups),
    )
