"""Random walks of a world, much faster than a state machine: for mutations, which have to be noticed one after the other."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from disagg.offload.host import HostPool
from disagg.offload.manager import OffloadManager
from tests.offload.machines import HOST_ONLY, NAMES, PROMPTS
from tests.offload.world import MODELS, PAGE_TOKENS, World

STEPS = 150


def walk(
    seed: int,
    manager: Callable[..., OffloadManager] = OffloadManager,
    host: Callable[..., HostPool] = HostPool,
) -> World:
    """Raises AssertionError where something is not as it must be."""
    random = Random(seed)
    faults, storage = random.random() < 0.5, random.random() < 0.6
    world = World(
        random.choice(sorted(MODELS)),
        ranks=random.randint(1, 3),
        stride_tokens=random.choice([0, 4, 8, 9]),
        host_large=random.choice([1, 3, 6, 12, 40, 400]),
        storage=storage,
        lingering=random.choice([0, 3, 40]),
        manager=manager,
        host=host,
    )
    whole: list[tuple[list[bytes], int]] = []
    lost = False
    for _ in range(STEPS):
        kind, name = random.random(), random.choice(NAMES)
        if kind < 0.5 and name not in world.sequences:
            world.begin(name, random.choice(PROMPTS), to_storage=name != HOST_ONLY)
        if kind < 0.5:
            _serve(world, random, name, kind, whole)
        elif kind < 0.92:
            lost |= _hear(world, random, kind, faults)
        elif faults and storage:
            lost = True
            _trouble(world, random, kind)
        elif faults:
            world.do(world.manager.give_up_waiting())
        world.check()
        _check_chains(world)
    for name in [*world.sequences]:
        world.finish(name, tail=False)
    world.settle()
    world.do(world.manager.give_up_waiting())
    world.check()
    world.check_end()
    if storage and not lost and not world.manager.counts["dropped"]:
        for hashes, pages in whole:
            assert world.stored_pages(hashes) >= pages, "pages that were never stored"
        assert max(world.stored.values(), default=1) == 1, "a page is stored twice"
        assert not world.manager.counts["failed"], "nothing failed, and something is said to have"
        world.seen["whole"] += 1
    return world


def _serve(world: World, random: Random, name: str, kind: float, whole: list[tuple[list[bytes], int]]) -> None:
    sequence = world.sequences[name]
    if kind < 0.2:
        world.write(name, random.randint(1, 9))
    elif kind < 0.4:
        while sequence.written < sequence.prompt_tokens:
            world.write(name, 9)
        for _ in range(random.randint(1, 9)):
            world.sample(name, random.randint(0, 1))
            world.write(name, 1)
    else:
        tail = random.random() < 0.8
        if tail and name != HOST_ONLY:
            whole.append((sequence.hashes, world.rules.last_point(sequence.written // PAGE_TOKENS)))
        world.finish(name, tail=tail, asked=world.storing and random.random() < 0.3)


def _hear(world: World, random: Random, kind: float, faults: bool) -> bool:
    """What ranks do and report, and the store. Whether something was lost."""
    rank = random.choice(world.ranks)
    if kind < 0.6:
        world.make_copy(rank)
    elif kind < 0.68:
        world.report_copies(rank, random.choice([0, 0, 1]))
    elif kind < 0.76:
        fails = faults and random.random() < 0.05
        world.make_upload(rank, fails=fails)
        return fails
    elif kind < 0.84:
        world.report_uploads(rank, random.choice([0, 0, 1]))
    elif kind < 0.86:
        world.answer(random.randrange(99), known=random.random() < 0.7)
    else:
        outcome = random.choice(["done"] * 12 + (["lost", "failed"] if faults else []))
        world.publish(random.randrange(99), outcome)
        return outcome != "done"
    return False


def _trouble(world: World, random: Random, kind: float) -> None:
    if kind < 0.94 and world.sequences:
        world.other_server(random.choice(sorted(world.sequences)), random.randint(1, 5))
    elif kind < 0.96:
        world.set_store(random.random() < 0.7)
    elif kind < 0.98:
        world.do(world.manager.give_up_waiting())
    elif world.sequences:
        world.find(world.sequences[random.choice(sorted(world.sequences))].hashes)


def _check_chains(world: World) -> None:
    """Without storage, what a running sequence has passed is on the host, or on its way there."""
    manager = world.manager
    if manager.host.whole_prefixes and not any(world.published):
        full = [g for g in world.groups if world.kinds[g].value == "full"]
        for flow in manager._flows.values():
            for page_hash in flow.hashes[: flow.at]:
                there = all(manager.host.find(g, page_hash) is not None for g in full)
                assert there or page_hash in manager._in_flight.hashes or manager.stored.has_prefix(page_hash), (
                    "a hole on the host"
                )
