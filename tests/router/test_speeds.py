"""How fast servers are taken to be, from what was timed: of those that are alike, slow, new, or stood still once."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.router.speeds import GUESS, Speeds


def test_a_speed_is_a_line_through_what_was_timed() -> None:
    rng, speeds, now_s = random.Random(1), Speeds(), 0.0
    assert speeds.of("p0", now_s) == speeds.usual
    assert speeds.usual.seconds(1, 700) == pytest.approx(GUESS.seconds(1, 700))
    for _ in range(200):
        tokens = rng.randrange(10, 2000)
        speeds.ended("p0", tokens, now_s, now_s + 0.02 + tokens * 0.0005, now_s)
        now_s += 2
    line = speeds.of("p0", now_s)
    assert line.prompt_s == pytest.approx(0.02, rel=0.3)
    assert line.token_s == pytest.approx(0.0005, rel=0.1)
    assert speeds.of("p1", now_s).token_s == pytest.approx(0.0005, rel=0.2), (
        "one that is not known is as the others are"
    )
    speeds.forget("p0")
    assert speeds.of("p0", now_s) == speeds.of("p1", now_s)


def test_prompts_computed_at_once_are_timed_as_one_after_the_other() -> None:
    speeds = Speeds()
    for turn in range(100):
        for _ in range(4):
            speeds.ended("p0", 100, turn * 10.0, turn * 10.0 + 0.4, turn * 10.0)
    assert speeds.of("p0", 1000.0).usual_s == pytest.approx(0.1, rel=0.3)


@given(st.lists(st.tuples(st.integers(0, 1 << 20), *[st.floats(0, 60)] * 2, st.floats(0, 1e9)), max_size=30))
def test_a_speed_is_positive_and_finite_whatever_is_timed(seen: list[tuple[int, float, float, float]]) -> None:
    speeds = Speeds()
    for tokens, sent_s, ended_s, now_s in seen:
        speeds.ended("p0", tokens, sent_s, ended_s, now_s)
        for line in (speeds.of("p0", now_s), speeds.of("p1", now_s), speeds.usual):
            assert line.prompt_s >= 0 and 0 < line.token_s < 1e9 and line.prompt_tokens > 0


def test_servers_whose_times_differ_a_little_are_equally_fast_and_one_that_is_slow_is_not() -> None:
    """Or all that comes while nobody is busy would go to whichever was a little faster before."""
    rng, speeds = random.Random(3), Speeds()
    ended_s = dict.fromkeys(("p0", "p1", "slow"), 0.0)
    for _ in range(200):
        for server, factor in (("p0", 1.0), ("p1", 1.15), ("slow", 4.0)):
            tokens = rng.randrange(100, 2000)
            began_s = ended_s[server]
            ended_s[server] += factor * rng.uniform(0.9, 1.1) * (0.01 + 2e-4 * tokens)
            speeds.ended(server, tokens, began_s, ended_s[server], ended_s[server])
    now_s = min(ended_s.values())
    assert speeds.of("p0", now_s).usual_s == pytest.approx(speeds.of("p1", now_s).usual_s, rel=0.2)
    assert speeds.of("slow", now_s).seconds(1, 1000) > 2 * speeds.of("p0", now_s).seconds(1, 1000)

    alike = Speeds()
    for number, (server, seconds) in enumerate((("p0", 0.10), ("p1", 0.12), ("p0", 0.11), ("p1", 0.13))):
        alike.ended(server, 600, float(number), number + seconds, number + seconds)
    assert alike.of("p0", 4.0) == alike.of("p1", 4.0) == alike.usual


@pytest.mark.parametrize("before", [0, 3, 40])
def test_a_server_that_stood_still_once_is_soon_as_fast_as_the_others(before: int) -> None:
    """Nothing that it is not sent could show that it is."""
    speeds, now_s = Speeds(), 0.0
    for _ in range(before):
        now_s += 1.0
        for server in ("stopped", "p1"):
            speeds.ended(server, 600, now_s, now_s + 0.05, now_s)
    speeds.ended("stopped", 600, now_s, now_s + 60.0, now_s + 60.0)
    now_s += 60.0
    for _ in range(60):
        now_s += 1.0
        speeds.ended("p1", 600, now_s, now_s + 0.05, now_s)
    assert speeds.of("stopped", now_s).seconds(1, 600) < 4 * speeds.of("p1", now_s).seconds(1, 600)
    speeds.ended("stopped", 600, now_s, now_s + 0.05, now_s)
    assert speeds.of("stopped", now_s).seconds(1, 600) < 4 * speeds.of("p1", now_s).seconds(1, 600), "and stays so"


def test_a_server_that_became_slow_is_known_to_be_after_a_few_prompts_and_is_tried_again_later() -> None:
    speeds, now_s = Speeds(), 0.0
    for turn in range(60):
        now_s += 1.0
        for server, seconds in (("p0", 0.05), ("p1", 0.05), ("slow", 0.05 if turn < 40 else 2.0)):
            speeds.ended(server, 600, now_s, now_s + seconds, now_s)
    assert speeds.of("slow", now_s).seconds(1, 600) > 5 * speeds.of("p0", now_s).seconds(1, 600)
    for _ in range(120):
        now_s += 1.0
        for server in ("p0", "p1"):
            speeds.ended(server, 600, now_s, now_s + 0.05, now_s)
    assert speeds.of("slow", now_s).seconds(1, 600) < 2 * speeds.of("p0", now_s).seconds(1, 600)


def test_a_server_that_has_computed_nothing_is_tried() -> None:
    """Also beside one that is faster than anybody guessed."""
    speeds = Speeds()
    for number in range(3):
        speeds.ended("p0", 64, float(number), number + 1e-4, float(number))
        assert speeds.of("p1", float(number)) == speeds.of("p0", float(number))
    for number in range(50):
        speeds.ended("slow", 64, float(number), number + 0.5, float(number))
        speeds.ended("p0", 64, float(number), number + 1e-4, float(number))
    assert speeds.of("p1", 50.0) == speeds.of("p0", 50.0)
    assert speeds.of("p1", 50.0).usual_s < speeds.of("slow", 50.0).usual_s
