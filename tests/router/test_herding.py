"""Routers that know caches do not herd: in a simulation of prefill servers, with views that are many ticks old."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from disagg.messages.legs import KvEvents
from disagg.router.policies import KvAware, LeastLoaded, Policy
from disagg.router.prefixes import hit_tokens
from disagg.router.view import CachedPages, others_prompts
from disagg.types.ids import Role
from tests.router.cached_servers import FULL, SPEED, asked, hashes_of, having, pick
from tests.router.test_policies import d, p


def test_what_a_server_has_of_others_is_what_it_said_less_what_it_was_sent() -> None:
    load = p("p", running=3, waiting=2).load
    assert load is not None
    assert [others_prompts(role, load, 1) for role in (Role.PREFILL, Role.MIXED, Role.DECODE)] == [4, 1, 0]
    assert others_prompts(Role.PREFILL, load, 9) == 0


class World:
    """Prefill servers in ticks, and routers that hear of each other's work only in reports, every `stale` ticks."""

    def __init__(self, servers: int, routers: int, stale: int, policy: Policy, fresh: bool = True) -> None:
        self.queues = [[0.0] * servers for _ in range(routers)]  # tokens of each router at each server
        self.prompts = [[0] * servers for _ in range(routers)]
        self.given = [0] * servers
        self.computed = 0
        self.caches = [CachedPages() for _ in range(servers)]
        self.told = [CachedPages() for _ in range(servers)]
        self.others = [[0] * servers for _ in range(routers)]
        self.policy, self.stale, self.fresh = policy, stale, fresh
        self.ticks, self.serials = 0, [0] * routers
        self.longest = 0.0

    def tick(self, rate: float) -> None:
        """Each server computes that many tokens, of all routers alike."""
        self.ticks += 1
        for s in range(len(self.given)):
            left = sum(queue[s] for queue in self.queues)
            share = max(0.0, left - rate) / left if left else 0.0
            for queue, prompts in zip(self.queues, self.prompts, strict=True):
                queue[s] *= share
                prompts[s] = 0 if queue[s] < 1 else prompts[s]
        self.longest = max(self.longest, *(sum(queue[s] for queue in self.queues) for s in range(len(self.given))))
        if self.ticks % self.stale == 0:
            for s, (told, cached) in enumerate(zip(self.told, self.caches, strict=True)):
                told.apply(KvEvents(tuple((0, page) for page in cached.groups[0])) if cached.groups else KvEvents())
                for r in range(len(self.queues)):
                    self.others[r][s] = sum(prompts[s] for i, prompts in enumerate(self.prompts) if i != r)

    def ask(self, router: int, tokens: Sequence[int], rng: random.Random) -> None:
        servers = [
            replace(
                having(p(f"p{s}")),
                cached=self.told[s],
                fresh=self.fresh,
                outstanding_prompt_tokens=round(self.queues[router][s]),
                outstanding_prompts=self.prompts[router][s],
                others_prompts=self.others[router][s],
                speed=replace(SPEED, prompt_tokens=len(tokens)),
            )
            for s in range(len(self.given))
        ]
        facts = asked(tokens, serial=self.serials[router], draw=rng.getrandbits(32))
        self.serials[router] += 1
        s = int(pick((*servers, having(d("d"))), facts, self.policy).prefill.name[1:])
        pages = hashes_of(tokens)
        new = len(tokens) - hit_tokens(FULL, self.caches[s].groups, pages, len(tokens) - 1)
        self.caches[s].apply(KvEvents(tuple((0, page) for page in pages)))
        self.queues[router][s] += new
        self.prompts[router][s] += 1
        self.given[s] += new
        self.computed += new


def run(world: World, routers: int, shared: int, seed: int = 1) -> World:
    """600 prompts that nobody has, each behind a beginning of so many tokens that all have; two thirds of what can be done."""
    rng = random.Random(seed)
    for turn in range(300):
        for router in range(routers):
            for _ in range(2 // routers):
                own = [rng.randrange(1 << 30) for _ in range(rng.randrange(40, 160))]
                world.ask(router, (*range(shared), *own), rng)
        world.tick(75.0)
        del turn
    return world


def spread(world: World) -> float:
    return max(world.given) / (sum(world.given) / len(world.given))


def test_without_caches_it_balances_as_least_loaded_does() -> None:
    ours = run(World(4, 1, 1, KvAware()), 1, 0)
    theirs = run(World(4, 1, 1, LeastLoaded()), 1, 0)
    assert spread(ours) < 1.1 and spread(theirs) < 1.1
    assert ours.longest <= 1.2 * theirs.longest


@pytest.mark.parametrize("stale", [1, 10, 50])
@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "not heard"])
@pytest.mark.parametrize("shared", [0, 400])
def test_two_routers_with_stale_views_do_not_herd(stale: int, fresh: bool, shared: int) -> None:
    """Neither for want of news of the other's work, nor because one server has what all prompts begin with."""
    world = run(World(4, 2, stale, KvAware(), fresh), 2, shared)
    assert spread(world) < 1.35, world.given
    if shared:
        assert world.computed < 600 * (100 + shared) / 2, "the beginning was computed for most prompts"
