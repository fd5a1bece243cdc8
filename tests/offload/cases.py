"""Cases of the offload manager: worlds with requests that run in them, and the tests that mutations are put through, too."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from tests.offload import world as worlds

NAMED: list[Callable[[], None]] = []  # tests that mutations are put through, too


def named(test: Callable[[], None]) -> Callable[[], None]:
    NAMED.append(test)
    return test


def named_in(*modules: ModuleType) -> list[Callable[[], None]]:
    names = {module.__name__ for module in modules}
    return [test for test in NAMED if test.__module__ in names]


def new_world(model: str, **options: object) -> worlds.World:
    return worlds.World(model, manager=worlds.OffloadManager, host=worlds.HostPool, **options)  # type: ignore[arg-type]


def run(world: worlds.World, name: str, prompt: int, outputs: int, chunk: int = 4, first: int = 0) -> None:
    """A prompt in chunks, then tokens one by one, the last of which is not written."""
    world.begin(name, range(first, first + prompt))
    while world.sequences[name].written < prompt:
        world.write(name, chunk)
    for token in range(outputs):
        world.sample(name, 1000 + token)
        if token:
            world.write(name, 1)


def spans(world: worlds.World) -> list[tuple[int, int]]:
    return [(upload.start, upload.start + len(upload.hashes)) for upload in world.uploads.values()]


def page_nos(world: worlds.World, g: int) -> list[int]:
    return sorted(page_no for upload in world.uploads.values() for page_no in upload.shares[g].page_nos)
