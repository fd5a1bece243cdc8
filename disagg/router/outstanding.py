"""What this router has sent each server and does not know to be done: the part of a server's load that it knows exactly.

Counted in what the work is made of: prompt tokens where a server computes prompts, choices where it decodes. And what one call
and one tenant have under way, of which prefill servers get only so much at once: a server holds a slot for each choice of a
prompt that it computes, and whoever comes then waits for one. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable

from msgspec import Struct

from disagg.router.view import Work

_NO_PAGES: Container[bytes] = frozenset()

CALL_CHOICES = 32  # of one call, on each prefill server at once: half of what engine.max_running is on a CPU by default
TENANT_CHOICES = 64  # of one tenant, while there are others; before they are reached, it may send another prompt


def call_may_go(computing: int, choices: int, prefill_servers: int) -> bool:
    """Whether a prompt of a call is sent to prefill, of which so many choices are computed there now. Its turn comes with the
    end of another of its prompts: whoever sends hundreds in one call keeps those busy that are there, and leaves room on each.
    """
    return computing == 0 or computing + choices <= CALL_CHOICES * max(1, prefill_servers)


def tenant_may_go(computing: int, others: bool, prefill_servers: int) -> bool:
    """The same for a tenant with any requests; others: there are requests of other tenants. Whatever the next one's size, so that
    a large one is not overtaken by small ones for ever.
    """
    return not others or computing < TENANT_CHOICES * max(1, prefill_servers)


class Stage(Struct, frozen=True):
    """What one server has to do for an attempt. amount: in what its work is counted in. pages: names of those that it computes
    or has, from the first one on."""

    server: str
    work: Work
    amount: int
    choices: int
    pages: tuple[bytes, ...] = ()


class Outstanding:
    """Of all servers of one router."""

    def __init__(self) -> None:
        self._amounts: Counter[tuple[str, Work]] = Counter()
        self._choices: Counter[tuple[str, Work]] = Counter()
        self._pages: dict[str, Counter[bytes]] = {}  # by server; some are in more than one prompt
        self._calls: Counter[tuple[str, Work]] = Counter()
        self._tenants: Counter[tuple[str, Work]] = Counter()

    def amount(self, server: str, work: Work) -> int:
        return self._amounts[server, work]

    def choices(self, server: str, work: Work) -> int:
        return self._choices[server, work]

    def pages(self, server: str) -> Container[bytes]:
        """Names of pages of the prompts that it computes."""
        return self._pages.get(server, _NO_PAGES)

    def of_call(self, call: str, work: Work) -> int:
        """Choices of all its prompts."""
        return self._calls[call, work]

    def of_tenant(self, tenant: str, work: Work) -> int:
        """Choices of all its requests."""
        return self._tenants[tenant, work]

    def tenants(self, work: Work) -> dict[str, int]:
        """Choices of each that has some."""
        return {tenant: choices for (tenant, of), choices in self._tenants.items() if of is work}

    def account(self, tenant: str, call: str = "") -> Account:
        """For one request. call: that it is part of with others; empty: it is one by itself."""
        return Account(self, tenant, call)

    def add(self, stage: Stage, tenant: str, call: str, sign: int) -> None:
        _grow(self._amounts, (stage.server, stage.work), sign * stage.amount)
        _grow(self._choices, (stage.server, stage.work), sign * stage.choices)
        if stage.pages:
            self._add_pages(stage, sign)
        _grow(self._tenants, (tenant, stage.work), sign * stage.choices)
        if call:
            _grow(self._calls, (call, stage.work), sign * stage.choices)

    def _add_pages(self, stage: Stage, sign: int) -> None:
        pages = self._pages.setdefault(stage.server, Counter())
        if sign > 0:
            pages.update(stage.pages)
            return
        pages.subtract(stage.pages)
        for page in stage.pages:
            if pages[page] <= 0:
                del pages[page]
        if not pages:
            del self._pages[stage.server]


class Account:
    """What one request has under way, a stage for each kind of work."""

    def __init__(self, outstanding: Outstanding, tenant: str, call: str) -> None:
        self._outstanding = outstanding
        self._whose = (tenant, call)
        self._stages: dict[Work, Stage] = {}

    @property
    def works(self) -> tuple[Work, ...]:
        """That are under way."""
        return tuple(self._stages)

    def begin(self, *stages: Stage) -> None:
        """An attempt; nothing of one before is under way any more."""
        self.end(Work)
        for stage in stages:
            self._stages[stage.work] = stage
            self._outstanding.add(stage, *self._whose, 1)

    def end(self, works: Iterable[Work]) -> list[Stage]:
        """Those are done, or given up; what of them was under way."""
        ended = [self._stages.pop(work) for work in works if work in self._stages]
        for stage in ended:
            self._outstanding.add(stage, *self._whose, -1)
        return ended


def _grow(counts: Counter[tuple[str, Work]], key: tuple[str, Work], by: int) -> None:
    counts[key] += by
    assert counts[key] >= 0, (key, counts[key])
    if not counts[key]:
        del counts[key]
