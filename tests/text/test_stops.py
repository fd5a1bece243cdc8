from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.text.stops import StopFinder, StopTable

LETTERS = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4).map(tuple)


def brute_force(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """What is emitted of the whole text, and the stop: the one that ends first, of those the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(finder: StopFinder, chunks: list[str]) -> tuple[str, bool]:
    shown = ""
    for chunk in chunks:
        text, hit = finder.push(chunk)
        shown += text
        if hit:
            return shown, True
    return shown + finder.finish(), False


@given(text=LETTERS, stops=STOPS, include=st.booleans(), cuts=st.lists(st.integers(0, 30), max_size=6))
@settings(derandomize=True, deadline=None, max_examples=500)
def test_every_chunking_emits_what_a_search_of_the_whole_text_says(
    text: str, stops: tuple[str, ...], include: bool, cuts: list[int]
) -> None:
    edges = [0, *sorted(cuts), len(text)]
    finder = StopFinder(StopTable(stops), include)
    expected, stop = brute_force(text, stops, include)
    assert run(finder, [text[a:b] for a, b in itertools.pairwise(edges)]) == (expected, stop is not None)
    assert finder.hit == stop


@given(text=LETTERS, stops=STOPS)
@settings(derandomize=True, deadline=None, max_examples=300)
def test_only_what_may_begin_a_stop_string_is_held_back(text: str, stops: tuple[str, ...]) -> None:
    finder, shown = StopFinder(StopTable(stops)), ""
    for at, char in enumerate(text, start=1):
        part, hit = finder.push(char)
        shown += part
        if hit:
            return
        held = text[len(shown) : at]
        beginnings = [stop[:n] for stop in stops for n in range(1, len(stop))]
        longest = max((b for b in beginnings if text[:at].endswith(b)), key=len, default="")
        assert held == longest


def test_a_stop_string_across_three_pushes_is_found() -> None:
    finder = StopFinder(StopTable(("STOP",)))
    assert finder.push("go S") == ("go ", False)
    assert finder.push("TO") == ("", False)
    assert finder.push("P more") == ("", True)
    assert finder.finish() == ""


def test_after_a_hit_late_text_is_dropped() -> None:
    finder = StopFinder(StopTable(("x",)))
    assert finder.push("ax") == ("a", True)
    assert finder.push("late") == ("", True)


def test_without_stop_strings_everything_passes_at_once() -> None:
    finder = StopFinder(StopTable(()))
    assert finder.push("anything") == ("anything", False)
    assert finder.finish() == ""


def test_a_false_beginning_is_given_out_at_the_end() -> None:
    finder = StopFinder(StopTable(("\n\nUser:",)))
    assert finder.push("answer\n\nUse") == ("answer", False)
    assert finder.finish() == "\n\nUse"


def test_an_empty_stop_string_is_a_bug_of_the_caller() -> None:
    with pytest.raises(AssertionError):
        StopFinder(StopTable(("",)))


def test_a_text_made_to_fool_the_finder_costs_linear_time() -> None:
    stop = "a" * 20_000 + "b"
    finder = StopFinder(StopTable((stop,)))
    start = time.process_time()
    for _ in range(100):
        assert finder.push("a" * 1000)[1] is False
    assert time.process_time() - start < 5
