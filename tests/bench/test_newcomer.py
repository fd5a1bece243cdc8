"""What a newcomer adds to silences is read off times of tokens."""

from __future__ import annotations

import pytest

from bench.newcomer import Silences, Visit, longest_ms, silences, undisturbed
from bench.streams import Stream


def stream(*times: float) -> Stream:
    made = Stream(arrived_s=times[0] - 1.0)
    made.heard_s[0] = list(times)
    made.ended_s = times[-1]
    return made


def test_the_longest_silence_of_any_sequence_counts_where_it_ends() -> None:
    streams = [[0.0, 1.0, 2.0, 3.5, 4.0], [0.5, 1.5, 2.5, 3.0, 4.0]]
    assert longest_ms(streams, 0.0, 3.0) == pytest.approx(1000)
    assert longest_ms(streams, 3.0, 4.0) == pytest.approx(1500), "it began before"
    assert longest_ms(streams, 4.0, 9.0) == 0.0


def test_what_is_added_is_beside_as_long_a_time_before() -> None:
    times = [0.0, 1.0, 2.0, 3.0, 4.25, 5.25]
    found = silences([times], Visit(3.0, 4.5, 6.0))
    assert found == Silences(*(pytest.approx(ms) for ms in (1250, 1000, 1000)))
    assert found.with_it_ms == pytest.approx(1250)
    assert found.added_ms == pytest.approx(250)


def test_only_who_came_while_all_decoded_and_nobody_else_was_there_counts() -> None:
    streams = [stream(0.0, 100.0), stream(5.0, 90.0)]
    early, first, close, last, late = (
        Visit(5.6, 5.8, 6.0),
        Visit(20.0, 21.0, 22.0),
        Visit(23.0, 24.0, 25.0),
        Visit(40.0, 41.0, 42.0),
        Visit(89.0, 90.5, 91.0),
    )
    assert undisturbed(streams, [early, first, close, last, late]) == [first, last]
