"""Memory that large requests took goes back once they are done with it."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.telemetry import memory
from disagg.telemetry.memory import GROWN_BYTES, LARGE_BYTES, MOST_S, GiveBack, Growth


async def test_what_is_free_goes_back_after_the_last_large_request_and_not_only_after_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[float] = []
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(memory, "GIVE_BACK_AFTER_S", 0.2)
    monkeypatch.setattr(memory, "give_back_memory", lambda: given.append(loop.time()))
    give_back = GiveBack()
    give_back.after(LARGE_BYTES)
    await asyncio.sleep(0.3)
    assert not given, "small ones find their memory again"
    give_back.after(LARGE_BYTES + 1)
    await asyncio.sleep(0.15)
    give_back.after(LARGE_BYTES + 1)
    last_s = loop.time()
    async with asyncio.timeout(10):
        while not given or given[-1] < last_s + 0.2:
            await asyncio.sleep(0.02)
    await asyncio.sleep(0.3)
    assert len(given) == 2


@given(st.lists(st.tuples(st.integers(0, 1 << 32), st.floats(0.0, 1.0)), max_size=200))
def test_whoever_has_grown_gives_back_at_once_and_asks_again_in_bounded_time(looks: list[tuple[int, float]]) -> None:
    growth, least, last, last_s = Growth(1 << 30), 1 << 30, 1 << 30, -math.inf
    for now_s, (resident, kept) in enumerate(looks):
        least, last = min(least, resident), min(last, resident)
        due = growth.due(resident, 10.0 * now_s)
        if due:
            assert resident > least + GROWN_BYTES, "who has not grown is left alone"
            last, last_s = int(resident * kept), 10.0 * now_s
            growth.gave_back(resident, last, last_s)
        else:
            assert resident <= last + GROWN_BYTES
            assert resident <= least + GROWN_BYTES or 10.0 * now_s < last_s + MOST_S


GROWS_AND_FREES = """
import sys
from disagg.telemetry import memory

memory.few_arenas()
memory.LOOK_S = 0.1
before = memory.resident_bytes()
if "watched" in sys.argv:
    memory.give_back_always()
blocks = [bytes(1000) for _ in range(200_000)]
assert memory.resident_bytes() > before + 150_000_000
blocks = blocks[::1000]  # which stand between the system and what is free
print("freed", flush=True)
for _ in sys.stdin:
    print(memory.resident_bytes() - before, flush=True)
"""


@pytest.mark.parametrize("watched", [True, False])
def test_what_was_freed_without_a_word_goes_back(watched: bool) -> None:
    """As where gRPC noted each header of a block without end, on connections that are gone."""
    words = [sys.executable, "-c", GROWS_AND_FREES, *(["watched"] if watched else [])]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "freed\n"
        until_s = time.monotonic() + (60.0 if watched else 0.5)  # whoever watches looks when the machine lets it
        while True:
            process.stdin.write("how much?\n")
            process.stdin.flush()
            grown = int(process.stdout.readline())
            if grown < GROWN_BYTES or time.monotonic() > until_s:
                break
            time.sleep(0.05)
        process.stdin.close()
    assert (grown < GROWN_BYTES) is watched


KEEPS = """
import gc
import weakref
from disagg.telemetry.memory import keep_loaded

class Node:
    pass

def cycle():
    node = Node()
    node.itself = node
    return weakref.ref(node)

before = cycle()
keep_loaded()
assert before() is None, "what was garbage stays"
kept, looked_through = gc.get_freeze_count(), len(gc.get_objects())
after = cycle()
gc.collect()
assert after() is None, "new garbage stays"
print(kept, looked_through)
"""


def test_what_is_loaded_is_not_looked_through_again() -> None:
    words = [sys.executable, "-c", KEEPS]
    kept, looked_through = map(int, subprocess.run(words, check=True, capture_output=True, text=True).stdout.split())
    assert kept > 1000 and looked_through < 100
