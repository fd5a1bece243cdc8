"""What a server's role decides. The rows are in prefill_server/ and decode_server/."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from disagg.engine.data_parallel import DataParallel
from disagg.engine.engine import Engine
from disagg.engine.facts import EngineFacts
from disagg.types.ids import Role


class ServerRole(Struct, frozen=True):
    role: Role
    engine: Callable[[EngineFacts], Engine]
    receives: bool  # KV lands in an arena of each rank, from servers that it dials
    sends: bool  # KV leaves through gather buffers of each rank, to servers that dial it
    small_steps: bool  # most of its steps compute one token of each sequence
    # So many ranks, whether in lockstep, and the clock that events have their times from.
    data_parallel: Callable[[EngineFacts, int, bool, Callable[[], float]], DataParallel] | None = None
    hands_over: bool = False  # what goes on here can be stopped and sent to another server
    slots_beside: int = 0  # for choices, beside one for each of the `engine.max_running` sequences


RoleOf = Callable[[Role], ServerRole]  # what each role is
