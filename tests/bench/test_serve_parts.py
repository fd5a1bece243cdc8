"""The arithmetic of `disagg bench serve`, and what it reads: no clock, no sockets."""

from __future__ import annotations

import codecs
import contextlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.bench.charts import MOST_POINTS, Axis, binned, cdf, ticks
from disagg.bench.serve.arrivals import random_arrivals, trace_arrivals
from disagg.bench.serve.figures import Answered, ClientLoad, Failed, figures, percentile, spread, times_of
from disagg.bench.serve.goodput import RateSearch, Slo, parse_seconds
from disagg.bench.serve.sse import EventParser, MalformedStream, decode_event
from disagg.bench.serve.trace import LINE_BYTES, Traced, parse_line, read_trace
from disagg.bench.serve.workload import Lengths, Part, PromptIds, PromptWords, Synthetic, from_trace
from disagg.types.errors import ConfigError
from tests.bench.fake_endpoint import token, usage

TIMES = st.lists(st.floats(0, 1e4), min_size=1, max_size=60)


# ---- figures


@given(TIMES, st.floats(0, 1))
def test_percentiles_are_numpys(values: list[float], share: float) -> None:
    assert percentile(values, share) == pytest.approx(float(np.percentile(values, 100 * share)), rel=1e-9, abs=1e-9)


def test_figures_of_known_moments_are_those_that_one_computes_by_hand() -> None:
    answers = [
        Answered(10.0, 10.5, 11.5, [0.25, 0.75], 100, 3),
        Answered(10.0, 11.5, 11.5, [], 50, 1),  # one token: no TPOT
        Answered(12.0, 12.25, 14.25, [1.0, 1.0], 10, 5),  # two tokens in two of its chunks
    ]
    found = figures([*answers, Failed(10.0, 20.0, "status 500"), Failed(10.0, 11.0, "status 500")], 5.0)
    assert (found["completed"], found["failed"], found["failures"]) == (3, 2, {"status 500": 2})
    assert (found["input_tokens"], found["output_tokens"]) == (160, 9)
    assert (found["requests_per_s"], found["output_tokens_per_s"]) == pytest.approx((3 / 5, 9 / 5))
    assert found["ttft_s"] == pytest.approx({"mean": 0.75, "p50": 0.5, "p90": 1.3, "p99": 1.48, "max": 1.5})
    assert found["itl_s"] == pytest.approx({"mean": 0.75, "p50": 0.875, "p90": 1.0, "p99": 1.0, "max": 1.0})
    assert found["tpot_s"]["mean"] == pytest.approx(0.5)
    assert found["tokens_per_chunk"] == pytest.approx(9 / 7)
    assert spread([])["p99"] is None and figures([], 0.0)["requests_per_s"] == 0.0


def test_a_client_that_is_late_or_busy_is_named_and_one_that_is_not_is_not() -> None:
    calm, late = spread([0.0001] * 100), spread([0.0] * 90 + [0.2] * 10)
    assert ClientLoad(calm, calm, 0.2).warnings(0.5, 0.02) == []
    assert "sent 200.0 ms" in ClientLoad(late, calm, 0.2).warnings(0.5, 0.02)[0]
    assert "loop was 200.0 ms" in ClientLoad(calm, late, 0.2).warnings(0.5, 0.02)[0]
    assert "95% of a core" in ClientLoad(calm, calm, 0.95).warnings(0.5, 0.02)[0]
    assert ClientLoad(late, calm, 0.2).warnings(3.0, 0.02) == [], "against a TTFT of 3 s it does not matter"


# ---- arrivals


@given(st.integers(0, 200), st.floats(0.01, 1e3), st.floats(0.05, 50), st.integers(0, 99))
def test_arrivals_begin_at_0_are_in_order_and_come_at_the_rate(
    count: int, rate: float, burstiness: float, seed: int
) -> None:
    moments = random_arrivals(count, rate, burstiness, np.random.default_rng(seed))
    assert len(moments) == count and moments == sorted(moments)
    if count:
        assert moments[0] == 0.0 and moments[-1] == pytest.approx((count - 1) / rate)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_vary_as_a_gamma_distribution_of_that_shape_does(burstiness: float) -> None:
    gaps = np.diff(random_arrivals(200_000, 5.0, burstiness, np.random.default_rng(1)))
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.02)


def test_an_infinite_rate_is_all_at_once_and_a_trace_may_be_sped_up() -> None:
    assert random_arrivals(3, math.inf, 1.0, np.random.default_rng(0)) == [0.0] * 3
    assert trace_arrivals([12.0, 10.0, 14.0], 2.0) == [0.0, 1.0, 2.0]


# ---- traces and workloads

MOONCAKE = {"timestamp": 27482, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 48]}


def test_a_line_of_mooncakes_trace_is_read() -> None:
    assert parse_line(json.dumps(MOONCAKE).encode()) == Traced(27.482, 1100, 52, (46, 47, 48))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{", "truncated"),
        (b"[]", "object"),
        (b'{"input_length": 5}', "output_length"),
        (json.dumps({**MOONCAKE, "input_length": 0}).encode(), "input_length"),
        (json.dumps({**MOONCAKE, "input_length": 1 << 40}).encode(), "input_length"),
        (json.dumps({**MOONCAKE, "timestamp": -1}).encode(), "timestamp"),
        (json.dumps({**MOONCAKE, "timestamp": float("nan")}).encode(), "JSON"),
        (json.dumps({**MOONCAKE, "hash_ids": [1, 2, 3, 4]}).encode(), "4 hash_ids"),
        (b'{"input_length": ' + b"[" * 50_000, "Expected"),
        (b" " * 10 + b'{"x": "' + b"x" * LINE_BYTES + b'"}', "bytes"),
        (b"\xff\xfe", "JSON"),
    ],
)
def test_what_is_no_line_of_a_trace_is_refused_with_file_and_line(tmp_path: Path, line: bytes, why: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_bytes(json.dumps(MOONCAKE).encode() + b"\n\n" + line + b"\n")
    with pytest.raises(ConfigError, match=why) as refused:
        read_trace(file)
    assert str(refused.value).startswith(f"{file}, line 3: ") and len(str(refused.value)) < 2000
    assert read_trace(file, most=1) == (parse_line(json.dumps(MOONCAKE).encode()),), "the rest is not looked at"


@given(st.binary(max_size=200) | st.text(max_size=80).map(str.encode))
def test_any_bytes_are_a_request_or_refused(line: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert parse_line(line).input_tokens > 0


def test_a_byte_order_mark_before_the_first_line_is_no_part_of_it(tmp_path: Path) -> None:
    line = json.dumps(MOONCAKE).encode()
    (tmp_path / "marked").write_bytes(codecs.BOM_UTF8 + line + b"\n" + line)
    assert read_trace(tmp_path / "marked") == (parse_line(line),) * 2
    too_long = line + b" " * LINE_BYTES + line
    (tmp_path / "marked").write_bytes(codecs.BOM_UTF8 + too_long)
    with pytest.raises(ConfigError, match="line 1: it has more than"):
        read_trace(tmp_path / "marked")
    (tmp_path / "marked").write_bytes(line + b"\n" + codecs.BOM_UTF8 + line)
    with pytest.raises(ConfigError, match="line 2"):
        read_trace(tmp_path / "marked")


def test_files_that_are_none_or_say_too_little_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "mixed").write_text('{"input_length":1,"output_length":1}\n' + json.dumps(MOONCAKE))
    for name, why in (
        ("none", "No such file"),
        ("empty", "no request"),
        ("mixed", "line 2: some lines"),
        (".", "regular"),
    ):
        with pytest.raises(ConfigError, match=why):
            read_trace(tmp_path / name)


def test_equal_hash_ids_are_equal_tokens_and_prompts_have_their_length() -> None:
    lines = [Traced(0.0, 1100, 5, (46, 47, 48)), Traced(0.0, 1500, 5, (46, 47, 49)), Traced(0.0, 700, 5, (50,))]
    prompts = [PromptIds(10, 5000, 7).parts(c.turns[0].parts) for c in from_trace(lines, 512)]
    assert [len(prompt) for prompt in prompts] == [1100, 1500, 700]
    assert prompts[0][:1024] == prompts[1][:1024] and prompts[0][1024:] != prompts[1][1024:1100]
    assert prompts[2][:20] != prompts[0][:20]
    other = PromptIds(10, 5000, 8).parts(from_trace(lines, 512)[0].turns[0].parts)
    assert other[:1024] != prompts[0][:1024], "another run must not find the last one's tokens in a cache"


@given(st.integers(1, 60), st.integers(1, 7), st.integers(0, 40), st.integers(1, 5), st.integers(0, 9))
def test_synthetic_requests_are_as_many_as_asked_for(
    requests: int, turns: int, prefix: int, groups: int, seed: int
) -> None:
    drawn = Synthetic(requests, Lengths(3, 9), Lengths(2, 2), turns, prefix, groups).draw(np.random.default_rng(seed))
    every = [turn for conversation in drawn for turn in conversation.turns]
    assert len(every) == requests and all(len(c.turns) == turns for c in drawn[:-1])
    assert all(3 <= turn.parts[-1].tokens <= 9 and turn.output_tokens == 2 for turn in every)
    first = [conversation.turns[0].parts[0] for conversation in drawn]
    assert all(part.kind == "prefix" and part.key < groups for part in first) == bool(prefix)
    assert len({turn.parts[-1].key for turn in every}) == requests, "no two requests have tokens of their own in common"


@pytest.mark.parametrize("text", ["0", "-5", "5-", "9-3", "1e3", "99999999999", ""])
def test_lengths_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Lengths.parse(text, 1 << 20)


def test_words_are_as_many_as_the_tokenizer_makes_tokens_of() -> None:
    assert PromptWords(1.25, 3).part(Part("own", 1, 100)).count(" ") == 80


# ---- goodput


@given(st.floats(0.01, 1e4), st.floats(0.01, 1e4), st.floats(0.01, 0.5))
def test_the_search_finds_the_highest_good_rate(limit: float, first: float, tolerance: float) -> None:
    search = RateSearch(first, tolerance, 1e-3, 1e5)
    while (rate := search.rate) is not None:
        search.judged(rate <= limit)
    assert search.good is not None and search.good <= limit
    assert search.bad is not None and limit < search.bad <= search.good * (1 + tolerance)


def test_a_search_ends_where_every_rate_is_good_and_where_none_is() -> None:
    for within, good, bad in ((True, 64.0, None), (False, None, 1.0)):
        search = RateSearch(8.0, 0.1, 1.0, 64.0)
        while search.rate is not None:
            search.judged(within)
        assert (search.good, search.bad) == (good, bad)


def test_an_slo_is_met_by_its_share_and_failures_are_late() -> None:
    slo = Slo.parse("ttft=2s, itl=100ms", 0.9)
    assert slo.limits_s == {"ttft": 2.0, "itl": 0.1}
    late = Answered(0.0, 3.0, 3.05, [0.05], 1, 2)
    on_time = Answered(0.0, 1.0, 1.05, [0.05], 1, 2)
    assert slo.excess(times_of([on_time] * 20 + [late])) == {}
    assert set(slo.excess(times_of([on_time] * 7 + [late] * 3))) == {"ttft"}
    assert set(slo.excess(times_of([on_time] * 7), failed=3)) == {"ttft"}
    assert set(slo.excess(times_of([Answered(0.0, 1.0, 2.0, [0.5, 0.5], 1, 3)]))) == {"itl"}
    assert "failed" in Slo({"itl": 1.0}, 0.9).excess(times_of([on_time] * 7), failed=3)
    assert slo.good(on_time) and not slo.good(late)


@given(st.integers(1, 60), st.integers(0, 60), st.floats(0.5, 1.0))
def test_a_run_is_given_up_only_when_nothing_can_save_it(requests: int, late: int, share: float) -> None:
    slo, late = Slo({"ttft": 1.0}, share), min(late, requests)
    best = {"ttft": [1.0 + 1e-9] * late + [0.0] * (requests - late)}
    if slo.hopeless(late, requests):
        assert slo.excess(best)


@pytest.mark.parametrize("text", ["ttft", "ttft=0", "ttft=-1s", "ttft=2x", "speed=1s", "ttft=1s,ttft=2s", ""])
def test_an_slo_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Slo.parse(text, 0.99)


def test_times_have_units() -> None:
    found = [parse_seconds(text) for text in ("2s", "100ms", "1.5", "50us", "1m")]
    assert found == pytest.approx([2.0, 0.1, 1.5, 5e-5, 60.0])


# ---- streams


@given(st.lists(st.integers(1, 40), max_size=60))
def test_a_stream_says_the_same_however_it_is_cut(cuts: list[int]) -> None:
    whole = (
        b": ping\n\n" + token("a\u2028") + b"event: x\r\ndata: 1\r\ndata:2\r\n\r\n" + usage(3, 4) + b"data: [DONE]\n\n"
    )
    parser, found = EventParser(), []
    for cut in [*cuts, len(whole)]:
        part, whole = whole[:cut], whole[cut:]
        found += parser.feed(part)
    assert not parser.partial
    assert found[1:2] + found[3:] == [b"1\n2", b"[DONE]"]
    assert decode_event(found[0]).choices[0].text == "a\u2028"
    assert decode_event(found[2]).usage.completion_tokens == 4  # type: ignore[union-attr]


def test_lines_without_end_and_events_that_are_no_completion_are_malformed() -> None:
    with pytest.raises(MalformedStream):
        EventParser().feed(b"data: " + b"x" * (1 << 20))
    for data in (b"{", b"[]", b'{"choices": 3}', b"\xff", b'{"choices": [{"text": 5}]}', b"[" * 100_000):
        with pytest.raises(MalformedStream):
            decode_event(data)


# ---- charts


@given(TIMES)
def test_a_cdf_ends_at_the_largest_value_and_never_falls(values: list[float]) -> None:
    x, y = cdf(values)
    assert x == sorted(x) and y == sorted(y) and x[-1] == max(values) and y[-1] == 1.0 and len(x) <= MOST_POINTS


@given(st.lists(st.tuples(st.floats(0, 9.99), st.floats(0, 100)), min_size=1, max_size=50))
def test_bins_lose_nothing(points: list[tuple[float, float]]) -> None:
    times, values = zip(*points, strict=True)
    assert sum(binned(times, values, 10.0, 7, "sum")[1]) == pytest.approx(sum(values))
    assert max(binned(times, values, 10.0, 7, "max")[1]) == max(values)


@given(st.floats(1e-6, 1e6), st.floats(1.001, 1e4), st.booleans())
def test_ticks_are_few_and_within(low: float, factor: float, log: bool) -> None:
    axis = Axis("", low, low * factor, log=log)
    found = ticks(axis, 5)
    slack = 1e-6 * low * factor
    assert len(found) <= 16 and all(low - slack <= value <= low * factor + slack for value in found)
