"""Which servers have room for answers that stop at a server which drains, to go on elsewhere. Pure.

An answer that has stopped stands still until the other server has pages for it, so it is stopped only where these are there.
What a server says of them is up to a heartbeat old, and says nothing of answers that are on their way to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

from disagg.messages.legs import LoadReport
from disagg.router.machine import RequestMachine
from disagg.router.view import ClusterView, ServerView
from disagg.types.arithmetic import ceil_div

MOVES_AT_ONCE = 8  # answers that stand still, of each server that drains
AHEAD_TOKENS = 512  # of output that an answer must have room for where it goes on: engine.lookahead_tokens, by default
Needs = Callable[[ServerView], int]


def needs_of(machine: RequestMachine) -> Needs:
    """Large pages that what is unfinished of a request comes to need at a server, as far as is looked ahead."""
    outputs = [len(machine.table.token_ids(choice)) for choice in machine.table.unfinished()]
    choices = [min(machine.params.max_tokens, each + AHEAD_TOKENS) for each in outputs]
    return partial(pages_at, len(machine.prompt_token_ids) + sum(choices), len(choices))


def pages_at(tokens: int, choices: int, server: ServerView) -> int:
    """Large pages for so many tokens. One that is alone there has all of them, whatever it comes to need."""
    hello, load = server.hello, server.load
    if hello is None or load is None:
        return 0
    return min(load.pages_total, ceil_div(tokens * load.pages_total, max(1, hello.max_tokens_in_pool)) + choices)


class Room:
    """Of all servers, as one router knows it."""

    def __init__(self) -> None:
        self._servers: dict[str, ServerView] = {}
        self._given: dict[str, tuple[LoadReport | None, int]] = {}  # by server: pages since it has said this
        self._coming: Counter[str] = Counter()  # by server: pages for answers that stand still on their way to it

    def look(self, view: ClusterView, machines: Iterable[RequestMachine]) -> None:
        """What is so now. An answer of which it is not known where it goes counts everywhere."""
        self._servers = {server.name: server for server in view.servers}
        self._given = {
            name: (load, pages)
            for name, (load, pages) in self._given.items()
            if name in self._servers and self._servers[name].load is load
        }
        self._coming.clear()
        for machine in machines:
            pair = machine.pair
            if pair is None or not machine.stopping:
                continue
            needs, bound = needs_of(machine), pair.decode.name if pair.moves and not machine.answers else ""
            for server in view.servers:
                if bound in ("", server.name):
                    self._coming[server.name] += needs(server)

    def is_there(self, needs: Needs, server: ServerView) -> bool:
        """For one that needs so much."""
        _, given = self._given.get(server.name, (None, 0))
        return needs(server) <= server.spare_pages - max(given, self._coming[server.name])

    def give(self, name: str, needs: Needs) -> None:
        """One more goes there."""
        server = self._servers[name]
        _, given = self._given.get(name, (None, 0))
        self._given[name] = (server.load, given + needs(server))
        self._coming[name] += needs(server)
