"""Prefill and decode engines together, in a world where everything is late and much goes wrong."""

from __future__ import annotations

import pytest

from tests.engine.sim import Faults, World

PROFILES = {
    "nothing": Faults(),
    "aborts": Faults(abort_share=0.6),
    "pieces": Faults(corrupt_pieces=2, lost_notifications=3),
    "links": Faults(abort_share=0.2, lost_links=3, failed_writes=1),
    "workers": Faults(lost_workers=2),
    "dispatches": Faults(abort_share=0.2, lost_dispatches=2),
    "everything": Faults(
        abort_share=0.3,
        corrupt_pieces=1,
        lost_notifications=1,
        failed_writes=1,
        lost_links=2,
        lost_workers=2,
        lost_dispatches=1,
    ),
}
SEEDS = pytest.mark.parametrize(
    "seeds",
    [
        range(3),
        pytest.param(range(3, 30), marks=pytest.mark.long),
        pytest.param(range(30, 330), marks=pytest.mark.slow),
    ],
    ids=["some", "many", "very many"],
)


def live(profile: str, seed: int) -> None:
    world = World(seed, PROFILES[profile])
    world.run()
    world.check_answers()
    world.settle()
    world.check_nothing_leaked()


@SEEDS
@pytest.mark.parametrize("profile", PROFILES)
def test_every_request_ends_with_the_right_tokens_and_nothing_leaks(profile: str, seeds: range) -> None:
    for seed in seeds:
        live(profile, seed)
