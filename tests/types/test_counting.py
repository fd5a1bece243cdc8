"""What packages count and remember with."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.types.arithmetic import ceil_div, round_up
from disagg.types.bounded import forget_oldest


@settings(derandomize=True, deadline=None)
@given(number=st.integers(0, 1 << 70), by=st.integers(1, 1 << 40))
def test_so_many_are_enough_and_one_less_is_not(number: int, by: int) -> None:
    count = ceil_div(number, by)
    assert count * by >= number and (count == 0 or (count - 1) * by < number)
    assert round_up(number, by) == count * by


@settings(derandomize=True, deadline=None)
@given(keys=st.lists(st.integers(0, 20), unique=True), most=st.integers(0, 25))
def test_what_was_put_in_last_is_kept(keys: list[int], most: int) -> None:
    remembered = OrderedDict.fromkeys(keys)
    forget_oldest(remembered, most)
    assert list(remembered) == keys[max(0, len(keys) - most) :]
