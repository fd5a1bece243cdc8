"""A leak makes a process rise, and what comes and goes does not."""

from __future__ import annotations

from tests.cluster.soak.census import ALLOWED, AT_ONCE, Ledger, Series, too_steep


def ledger_of(amounts: list[float]) -> Ledger:
    ledger = Ledger()
    for index, amount in enumerate(amounts):
        ledger.add(5.0 * index, "router", {"descriptors": amount})
    return ledger


def steep(amounts: list[float]) -> bool:
    return bool(too_steep(ledger_of(amounts).rises(50.0, 100.0)))


def test_what_a_flood_holds_while_it_lasts_is_no_rise() -> None:
    amounts = [35.0] * 300
    for index in range(200, 300, 2 * AT_ONCE):
        amounts[index] = 236.0
    assert not steep(amounts)


def test_what_is_lost_a_little_at_a_time_is_a_rise_also_beside_floods() -> None:
    leaking = [35.0 + index // 40 for index in range(300)]  # 7 in all
    assert leaking[-1] - leaking[0] > ALLOWED["descriptors"] and steep(leaking)
    for index in range(0, 300, 2 * AT_ONCE):
        leaking[index] = 236.0
    assert steep(leaking)


def test_few_samples_say_nothing() -> None:
    assert Series([1.0, 2.0], [1.0, 9.0]).least(AT_ONCE).rise() == 0.0
