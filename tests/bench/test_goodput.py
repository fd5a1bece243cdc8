"""Goodput of a ladder of rates: which one is next, what lies between two of them, who serves more, and that time is kept."""

from __future__ import annotations

import itertools
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.goodput import CONFIGURATIONS, DEFAULT, Offer, gpu_names, parse
from bench.goodput_table import PAIRS, Configuration, Found, packed, pair_table, report, winners
from bench.ladder import Clock, Goodput, Ladder, Rung, Search, goodput, ratio, rung_of
from disagg.bench.serve.figures import Answered, ClientLoad, Failed, spread
from disagg.bench.serve.goodput import Slo
from disagg.bench.serve.load import LoadResult
from disagg.bench.serve.workload import Lengths

TIGHT, LOOSE = Slo({"ttft": 1.0, "itl": 0.02}), Slo({"ttft": 2.0, "itl": 0.2})
CALM = ClientLoad(spread([0.0]), spread([0.0]), 0.1)
RATES = st.floats(1, 32)


def rung(rate: float, ttft_s: float, itl_s: float) -> Rung:
    p99_s = {"ttft": ttft_s, "itl": itl_s, "tpot": itl_s, "e2e": ttft_s}
    return Rung(rate, 10, {}, 0, p99_s, p99_s, rate, 100.0, 1.0, CALM, [])


def server(capacity: float, stall_rate: float, rate: float) -> Rung:
    """Nobody waits long below its capacity, and few gaps are long below another rate."""
    return rung(rate, 0.1 if rate < capacity else 9.0, 0.01 if rate < stall_rate else 0.1)


def found(name: str, *rungs: Rung, gpus: int = 1) -> Found:
    return Found(Configuration(name, gpus, (), "a cluster"), (), list(rungs))


# ---- rungs


def test_a_rung_has_percentiles_and_who_got_no_answer_waited_for_ever() -> None:
    answered = [Answered(0.0, 0.5, 0.52, [0.01, 0.01], 100, 3)] * 98
    calm = rung_of(4.0, LoadResult([*answered], 0.0, CALM, 0, 0, 1))
    assert calm.p99_s["ttft"] == pytest.approx(0.5) and calm.p50_s["itl"] == pytest.approx(0.01)
    assert (calm.requests, calm.unfinished, calm.failed) == (98, 0, {})
    lost = rung_of(4.0, LoadResult([*answered, Failed(0.0, 1.0, "status 500")], 0.0, CALM, 1, 0, 1))
    assert (lost.requests, lost.unfinished, lost.failed) == (100, 1, {"status 500": 1})
    assert math.isinf(lost.p99_s["ttft"]) and lost.p99_s["itl"] == pytest.approx(0.01)
    nobody = rung_of(4.0, LoadResult([Failed(0.0, 1.0, "status 500")], 0.0, CALM, 0, 0, 1))
    assert math.isinf(nobody.p99_s["itl"]) and not nobody.within(TIGHT)


# ---- goodput


def test_goodput_is_where_the_line_between_two_rungs_meets_the_limit() -> None:
    rungs = [rung(4, 0.1, 0.010), rung(8, 0.5, 0.015), rung(12, 0.6, 0.035)]  # .75 and 1.75 of the ITL
    assert goodput(rungs, TIGHT) == Goodput(8, 12, 9.0)
    assert goodput(rungs, LOOSE) == Goodput(12, None, 12)
    assert goodput(rungs, Slo({"itl": 0.005})) == Goodput(None, 4, None)
    assert goodput([], TIGHT) == Goodput(None, None, None)


def test_each_time_has_a_line_of_its_own() -> None:
    rungs = [rung(4, 0.9, 0.002), rung(8, 0.5, 0.038)]  # .1 and 1.9 of the ITL, and a TTFT that was no better before
    assert goodput(rungs, TIGHT).rate == pytest.approx(6.0)
    both = [rung(4, 0.5, 0.01), rung(8, 2.5, 0.03)]  # .5 and 2.5 of the TTFT, .5 and 1.5 of the ITL
    assert goodput(both, TIGHT).rate == pytest.approx(5.0)


def test_the_first_rate_that_does_not_hold_ends_it_whatever_came_above() -> None:
    rungs = [rung(16, 0.1, 0.01), rung(8, 0.1, 0.03), rung(4, 0.1, 0.01)]
    assert goodput(rungs, TIGHT) == Goodput(4, 8, pytest.approx(6.0))


def test_of_a_rung_that_was_given_up_only_that_it_does_not_hold_is_known() -> None:
    assert goodput([rung(4, 0.1, 0.01), rung(8, math.inf, 0.01)], TIGHT) == Goodput(4, 8, 4)


@given(st.lists(st.tuples(RATES, st.floats(0.01, 5), st.floats(0.001, 1)), max_size=8, unique_by=lambda each: each[0]))
def test_a_goodput_lies_between_what_holds_and_what_does_not(measured: list[tuple[float, float, float]]) -> None:
    rungs = [rung(*each) for each in measured]
    found = goodput(rungs, TIGHT)
    if found.good is not None and found.bad is not None:
        assert found.rate is not None and found.good <= found.rate <= found.bad
        assert not any(found.good < each.rate < found.bad for each in rungs)
    assert (found.rate is None) == (found.good is None)


def test_ratios_say_what_brackets_leave_open() -> None:
    one, other = Goodput(8, 12, 9), Goodput(4, 5, 4.5)
    assert str(ratio(one, other)) == "2.00 (1.60 to 3.00)"
    assert str(ratio(Goodput(8, None, 8), other)) == "1.78 (at least 1.60)"
    assert str(ratio(one, Goodput(None, 2, None))) == "at least 4.00"
    assert str(ratio(Goodput(None, 2, None), one)) == "at most 0.25"
    assert str(ratio(Goodput(None, 2, None), Goodput(None, 2, None))) == "unknown"
    assert str(ratio(one, Goodput(None, None, None))) == "unknown"
    assert one.per(2) == Goodput(4, 6, 4.5) and Goodput(None, 2, None).per(2) == Goodput(None, 1, None)


# ---- which rate is next


@given(RATES, RATES)
def test_a_search_ends_soon_and_knows_every_goodput(capacity: float, stall_rate: float) -> None:
    search = Search((TIGHT, LOOSE), 1.0, 32.0, 0.1)
    rungs: list[Rung] = []
    while (rate := search.next_rate(rungs)) is not None:
        assert 1.0 < rate < 32.0 and rate not in {each.rate for each in rungs}
        rungs.append(server(capacity, stall_rate, rate))
        assert len(rungs) <= 14
    for slo, true in ((TIGHT, min(capacity, stall_rate)), (LOOSE, capacity)):
        ends = goodput(rungs, slo)
        low, high = ends.good or 1.0, ends.bad or 32.0
        assert low <= true <= high and high <= 1.11 * low


def test_the_first_rungs_tell_most_of_all_slos() -> None:
    search = Search((TIGHT, LOOSE), 1.0, 32.0, 0.1)
    rungs: list[Rung] = []
    for _ in range(5):
        rate = search.next_rate(rungs)
        assert rate is not None
        rungs.append(server(capacity=14.0, stall_rate=3.0, rate=rate))
    assert [each.rate for each in rungs] == [5.66, 2.38, 13.5, 3.67, 20.8]
    assert (goodput(rungs, TIGHT), goodput(rungs, LOOSE)) == (
        Goodput(2.38, 3.67, pytest.approx(2.5, abs=0.1)),
        Goodput(13.5, 20.8, pytest.approx(15.1, abs=0.1)),
    )


def test_given_rates_are_climbed_until_no_slo_holds() -> None:
    ladder = Ladder((TIGHT, LOOSE), (8.0, 2.0, 4.0, 16.0))
    rungs: list[Rung] = []
    while (rate := ladder.next_rate(rungs)) is not None:
        rungs.append(server(capacity=8.0, stall_rate=4.0, rate=rate))
    assert [each.rate for each in rungs] == [2.0, 4.0, 8.0], "16 was not needed"


@given(st.floats(0, 600), st.integers(1, 6))
def test_stages_share_the_time_and_none_runs_over_it(end_s: float, stages: int) -> None:
    clock, now_s = Clock(end_s, 30.0, 8.0), 20.0
    shares = []
    for left in range(stages, 0, -1):
        until_s = clock.until_s(now_s, left)
        shares.append(until_s - now_s)
        now_s = until_s + clock.stop_s + (clock.start_s if left > 1 else 0.0)
    needed_s = 20.0 + stages * clock.stop_s + (stages - 1) * clock.start_s
    assert now_s <= max(end_s, needed_s) + 1e-6
    assert all(a == pytest.approx(b, abs=1e-6) for a, b in itertools.pairwise(shares))


# ---- who runs beside whom, and what is said


def test_clusters_that_fit_run_side_by_side() -> None:
    chosen = [CONFIGURATIONS[name] for name in DEFAULT]
    names = [[each.name for each in stage] for stage in packed(chosen, 2)]
    assert names == [["sarathi", "vllm"], ["orca", "sarathi-8192"], ["1p1d"], ["2mixed"]]
    assert [len(stage) for stage in packed(chosen, 4)] == [4, 2] and [len(stage) for stage in packed(chosen, 8)] == [6]
    assert [each.name for stage in packed(chosen, 1) for each in stage] == list(DEFAULT[:4])
    assert {each.one for each in PAIRS} | {each.other for each in PAIRS} <= set(CONFIGURATIONS)


def test_a_report_has_every_rung_and_compares_gpus_not_clusters() -> None:
    slos = (TIGHT, LOOSE)
    ladders = (
        found("sarathi", rung(4, 0.1, 0.01), rung(8, 0.1, 0.1), rung(16, 9.0, 0.1)),
        found("orca", rung(2, 0.1, 0.01), rung(4, 0.1, 0.03)),
        found("1p1d", rung(12, 0.1, 0.01), rung(16, 9.0, 0.01), gpus=2),
        found("2mixed", rung(8, 0.1, 0.015), rung(12, 0.1, 0.03), rung(24, 9.0, 0.3), gpus=2),
        found("vllm"),
    )
    ladders[-1].trouble = "it did not start"
    said = report(ladders, slos)
    assert said.count("| sarathi | 1 |") == 3 and "TROUBLE: it did not start" in said
    assert "WARNING" not in said
    slow = [msgspec.structs.replace(each, warnings=["it was busy"]) for each in ladders[0].rungs[:2]]
    assert "WARNING: sarathi at 4, 8/s: the client" in report([found("sarathi", *slow)], slos)
    tables = pair_table(ladders, slos)
    assert not any("vllm" in line for line in tables), "it has no rungs"
    (line,) = (line for line in tables if line.startswith("| 1p1d / 2mixed |"))
    assert "| 1.33 (1.00 to 2.00) | 0.88 (0.50 to 1.33) | 1.3 where the ITL is tight |" in line
    tight, loose = winners(ladders, slos)
    assert tight.startswith("- TTFT 1000 ms, ITL 20 ms: 1p1d 6.2 (6 to 8), 2mixed 4.67 (4 to 6), sarathi 4.44 (4 to 8)")
    assert loose.startswith("- TTFT 2000 ms, ITL 200 ms: sarathi 9.71 (8 to 16), 2mixed")


def test_all_see_the_same_moments_and_lengths_and_other_tokens() -> None:
    def offered(rate: float, prompts: int) -> Offer:
        return Offer(
            url="",
            model="",
            vocab=512,
            inputs=Lengths(16, 64),
            outputs=Lengths(2, 8),
            seed=3,
            prompts=prompts,
            rate=rate,
            window_s=10.0,
            patience_s=1.0,
            slos=(),
        )

    assert offered(4.0, 1).load() == offered(4.0, 2).load()
    few, many = offered(2.0, 1).load(), offered(4.0, 1).load()
    assert (few.requests, many.requests) == (20, 40)
    assert few.conversations == many.conversations[:20]
    assert few.moments_s is not None and many.moments_s is not None
    assert few.moments_s[-1] == pytest.approx(19 / 2) and many.moments_s[-1] == pytest.approx(39 / 4)


def test_defaults_are_what_they_would_be_if_they_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = parse([])
    assert arguments.between == (1.5, 24.0) and str(arguments.input_tokens) == "256 to 2048"
    assert len(arguments.slo) == 5 and arguments.slo[0] == Slo({"ttft": 1.0, "itl": 0.015})
    assert parse(["--slo", "itl=15ms", "--only", "orca"]).slo == (Slo({"itl": 0.015}),)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_names(2) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7,9")
    assert gpu_names(2) == ["4", "7"]
