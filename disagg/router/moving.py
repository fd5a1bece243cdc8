"""Which servers have room for answers that stop at a server which drains, to go on elsewhere. Pure.

An answer that has stopped stands still until the other server has pages for it, so it is stopped only where these are there.
What a server says of them is up to a heartbeat old, and says nothing of answers that are on their way to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from disagg.messages.legs import LoadReport
from disagg.router.machine import RequestMachine
from disagg.router.view import ClusterView, ServerView

MOVES_AT_ONCE = 8  # answers that stand still, of each server that drains
AHEAD_TOKENS = 512  # of output that an answer must have room for where it goes on: engine.lookahead_tokens, by default
MANY_TOKENS = 1 << 31  # as many as fit
PART_TOKENS = 32  # of a choice, for pages that are full in part


def tokens_of(machine: RequestMachine) -> int:
    """That what is unfinished of a request comes to where it goes on, as far as is looked ahead."""
    outputs = [len(machine.table.token_ids(choice)) for choice in machine.table.unfinished()]
    most = machine.params.max_tokens or MANY_TOKENS
    return len(machine.prompt_token_ids) + sum(min(most, each + AHEAD_TOKENS) + PART_TOKENS for each in outputs)


class Room:
    """Of all servers, as one router knows it. In tokens."""

    def __init__(self) -> None:
        self._servers: dict[str, ServerView] = {}
        self._given: dict[str, tuple[LoadReport | None, int]] = {}  # by server: since it has said this
        self._coming: Counter[str] = Counter()  # by server: of answers that stand still on their way to it

    def look(self, view: ClusterView, machines: Iterable[RequestMachine]) -> None:
        """What is so now. An answer of which it is not known where it goes counts everywhere."""
        self._servers = {server.name: server for server in view.servers}
        self._given = {
            name: (load, tokens)
            for name, (load, tokens) in self._given.items()
            if name in self._servers and self._servers[name].load is load
        }
        self._coming.clear()
        for machine in machines:
            pair = machine.pair
            if pair is None or not machine.stopping:
                continue
            tokens, bound = tokens_of(machine), pair.moves and not machine.answers
            for name in [pair.decode.name] if bound else self._servers:
                self._coming[name] += tokens

    def is_there(self, tokens: int, server: ServerView) -> bool:
        """For one that comes to so many. An empty server takes whatever fits it at all; one that is too old to say has room."""
        load = server.load
        if load is None or load.spare_tokens is None:
            return load is not None
        _, given = self._given.get(server.name, (None, 0))
        taken = max(given, self._coming[server.name])
        return (not load.pages_used and not taken) or tokens <= load.spare_tokens - taken

    def give(self, name: str, tokens: int) -> None:
        """One more goes there."""
        _, given = self._given.get(name, (None, 0))
        self._given[name] = (self._servers[name].load, given + tokens)
        self._coming[name] += tokens
