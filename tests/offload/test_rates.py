"""What took how long lately decides whether KV is loaded or computed again."""

from __future__ import annotations

import pytest

from disagg.offload.rates import ALWAYS_WAIT_S, HALF_S, LEAST_WAIT_S, MOST_WAIT_S, PATIENCE, TRY_EVERY, Rate, Rates


def test_nothing_is_known_at_first_and_an_even_rate_is_what_it_is() -> None:
    rate = Rate()
    assert rate.seconds(100) is None
    for _ in range(50):
        rate.add(1000, 0.5)
    assert rate.seconds(100) == pytest.approx(0.05)


@pytest.mark.parametrize(("amount", "seconds"), [(0, 1.0), (1.0, 0.0), (-1, 1.0), (1, -1.0)])
def test_what_took_no_time_or_was_nothing_teaches_nothing(amount: float, seconds: float) -> None:
    rate = Rate()
    rate.add(amount, seconds)
    assert rate.seconds(1) is None


def test_what_is_new_soon_outweighs_what_is_old() -> None:
    rate = Rate()
    rate.add(100.0, 1.0)
    for _ in range(10):
        rate.add(HALF_S, HALF_S)
    assert rate.seconds(1) == pytest.approx(1.0, rel=0.02)


def known(tokens_s: float, host_s: float, storage_s: float, *, load_always: bool = False) -> Rates:
    """Per second: tokens computed, bytes from the host, bytes from storage."""
    rates = Rates(load_always=load_always)
    rates.computed((int(tokens_s), 1), 1.0)
    rates.from_host.add(host_s, 1.0)
    rates.from_storage.add(storage_s, 1.0)
    return rates


def test_what_has_not_been_measured_is_tried() -> None:
    assert Rates().worth_loading(1, 1 << 40, 1 << 40)
    rates = Rates()
    rates.computed((1000,), 1.0)
    rates.from_host.add(1e9, 1.0)
    assert rates.worth_loading(1, 1000, 1 << 40), "storage has not been measured"
    assert not rates.worth_loading(1, 1 << 40, 0), "the host has"


def test_a_load_that_takes_longer_is_not_begun_but_tried_now_and_then() -> None:
    rates = known(1000, 1e6, 1e5)
    assert rates.worth_loading(1000, 100_000, 50_000)  # 0.6 s instead of 1
    assert [rates.worth_loading(100, 100_000, 50_000) for _ in range(2 * TRY_EVERY)].count(True) == 2


def test_patience_is_what_computing_would_take_within_bounds() -> None:
    assert Rates().patience_s(1) == MOST_WAIT_S
    rates = known(1000, 1e6, 1e5)
    assert rates.patience_s(1000) == pytest.approx(PATIENCE)
    assert rates.patience_s(1) == LEAST_WAIT_S
    assert rates.patience_s(1_000_000) == MOST_WAIT_S


def test_loads_that_are_always_wanted_are_not_weighed() -> None:
    rates = known(1000, 1e6, 1e5)
    assert not rates.worth_loading(1, 1 << 40, 1 << 40) and rates.patience_s(1) == LEAST_WAIT_S
    always = known(1000, 1e6, 1e5, load_always=True)
    assert always.worth_loading(1, 1 << 40, 1 << 40) and always.patience_s(1) == ALWAYS_WAIT_S


@pytest.mark.parametrize("runs", [(1,) * 64, (15,), (16, *(1,) * 20)])
def test_steps_that_mostly_decode_say_nothing_of_prompts(runs: tuple[int, ...]) -> None:
    rates = Rates()
    rates.computed(runs, 1.0)
    assert rates.computing.seconds(1) is None
