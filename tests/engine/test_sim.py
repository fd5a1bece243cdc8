"""A seed of the simulated world is one run, whatever Python's hashes of strings are, and wherever objects lie."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

WORLDS = """
from tests.engine.sim import World
from tests.engine.test_pair import PROFILES, TIERS

for seed in range(1, 3):
    for world in (World(seed, PROFILES["everything"], tight=True), World(seed, TIERS["everything"], offload=True)):
        world.run()
        world.settle()
        print(seed, world.steps, world.rng.random())
"""


def test_a_seed_is_a_run() -> None:
    """Nothing that matters is done in the order of a set of strings, or of objects."""
    root = Path(__file__).resolve().parents[2]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WORLDS],
            cwd=root,
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for seed in range(2)
    ]
    said = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert said[0] == said[1] and len(said[0].splitlines()) == 4
