"""`disagg plan`: what a simulated cluster does, what is learned from records, and what is recommended."""

from __future__ import annotations

import json
import math
from array import array
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.bench.plan import run, show
from disagg.bench.plan.cluster import Asked, Caches
from disagg.bench.plan.costs import Handoff, Measured, ServerFacts, StepCost, parse_step, parse_time
from disagg.bench.plan.report import RouterRates, overheads
from disagg.bench.plan.search import Limits, Search, judge, missed
from disagg.bench.plan.simulate import TOO_LARGE, Cluster, Simulated, Simulation
from disagg.bench.serve.figures import Answered, Failed, times_of
from disagg.bench.serve.goodput import Slo
from disagg.cli.main import cli
from disagg.messages.legs import MemoryReport

PREFILL, DECODE = StepCost(0.002, 1e-4, 1e-9), StepCost(0.004, 1e-4, 1e-8)
SLOW_PREFILL = StepCost(0.01, 5e-4, 0.0)


def measured(kv_tokens: int = 1 << 40, max_running: int = 256, chunk: int = 512, **changes: object) -> Measured:
    facts = [ServerFacts(1, cost, chunk, kv_tokens, max_running) for cost in (PREFILL, DECODE)]
    fields = {
        "prefill": {1: facts[0]},
        "decode": {1: facts[1]},
        "mixed": {},
        "handoff": Handoff(0.003),
        "source": "test",
    }
    return Measured(**(fields | changes))  # type: ignore[arg-type]


def answered(result: Simulated) -> list[Answered]:
    return [each for each in result.outcomes if isinstance(each, Answered)]


REQUESTS = st.lists(
    st.tuples(
        st.floats(0, 2), st.integers(1, 2000), st.integers(1, 40), st.lists(st.integers(0, 5), max_size=3).map(tuple)
    ),
    min_size=1,
    max_size=40,
)
CLUSTERS = st.one_of(
    st.builds(Cluster, prefill=st.integers(1, 4), decode=st.integers(0, 4)), st.builds(Cluster, mixed=st.integers(1, 4))
)


def asked_of(drawn: list[tuple[float, int, int, tuple[int, ...]]]) -> list[Asked]:
    ordered = sorted(drawn)
    return [Asked(n, *fields) for n, fields in enumerate(ordered)]


# ---- what a simulated cluster does


@settings(max_examples=150, deadline=None)
@given(REQUESTS, CLUSTERS, st.integers(64, 4000), st.integers(1, 8), st.integers(16, 600), st.booleans())
def test_every_request_ends_once_and_no_server_is_busier_than_time(
    drawn: list[tuple[float, int, int, tuple[int, ...]]],
    cluster: Cluster,
    kv_tokens: int,
    max_running: int,
    chunk: int,
    caches: bool,
) -> None:
    asked = asked_of(drawn)
    simulation = Simulation(cluster, measured(kv_tokens, max_running, chunk), 512, caches)
    result = simulation.run(asked)
    assert len(result.outcomes) == len(asked)
    whole = cluster.decode > 0 or cluster.mixed > 0
    for each in asked:
        fits = (each.kv_tokens if whole else each.input_tokens) <= kv_tokens
        same = [o for o in result.outcomes if o.sent_s == each.at_s]
        assert any(isinstance(o, Answered) == fits for o in same)
    for each in answered(result):
        assert each.sent_s < each.first_s <= each.last_s
        if whole:
            assert len(each.gaps_s) == each.output_tokens - 1
            assert sum(each.gaps_s) == pytest.approx(each.last_s - each.first_s)
            assert all(gap >= 0 for gap in each.gaps_s)
    for pool in result.pools.values():
        assert 0 <= pool.busy <= pool.busiest <= 1 + 1e-9
    for pool in simulation._pools.values():
        for server in pool.servers:
            assert server.kv_used == 0 and not server.in_flight and server._held == 0 and server._granted == 0
            assert server._attended == pytest.approx(0.0, abs=1e-6)
        assert not pool.sequences.any() and pool.queued_s == pytest.approx(0.0, abs=1e-9)
    if not caches:
        computed = sum(pool.prompt_tokens for pool in result.pools.values())
        assert computed == sum(each.input_tokens for each in answered(result))


@settings(max_examples=40, deadline=None)
@given(REQUESTS, st.integers(1, 3), st.integers(1, 3))
def test_more_servers_are_not_much_worse(
    drawn: list[tuple[float, int, int, tuple[int, ...]]], prefill: int, decode: int
) -> None:
    asked = asked_of(drawn)
    few = Simulation(Cluster(prefill, decode), measured(), caches=False).run(asked)
    many = Simulation(Cluster(4 * prefill, 4 * decode), measured(), caches=False).run(asked)
    for name in ("ttft", "e2e"):
        mean = [sum(times_of(answered(each))[name]) / len(asked) for each in (few, many)]
        assert mean[1] <= 1.1 * mean[0] + 0.01
    assert many.duration_s <= 1.1 * few.duration_s + 0.02


def test_one_request_alone_takes_what_one_computes_by_hand() -> None:
    result = Simulation(Cluster(1, 1), measured()).run([Asked(0, 1.0, 600, 3)])
    [only] = answered(result)
    chunks_s = 2 * 0.002 + 600 * 1e-4 + 600 * 300 * 1e-9
    assert only.ttft_s == pytest.approx(chunks_s)
    steps = [0.004 + 1e-4 + 1e-8 * context for context in (601, 602)]
    assert only.gaps_s == pytest.approx([0.003 + steps[0], steps[1]])
    mixed = Simulation(Cluster(mixed=1), measured()).run([Asked(0, 1.0, 600, 3)])
    assert answered(mixed)[0].gaps_s == pytest.approx(steps), "nothing is handed on"


def test_a_request_that_decode_has_no_room_for_has_no_first_token_until_there_is() -> None:
    asked = [Asked(0, 0.0, 500, 50), Asked(1, 0.0, 500, 50)]
    one, other = answered(Simulation(Cluster(2, 1), measured(kv_tokens=600)).run(asked))
    assert other.first_s >= one.last_s - 1e-9
    assert [e.first_s < 0.2 for e in answered(Simulation(Cluster(2, 1), measured(kv_tokens=1200)).run(asked))] == [
        True,
        True,
    ]


def test_what_fits_no_server_fails_and_the_rest_goes_on() -> None:
    result = Simulation(Cluster(1, 1), measured(kv_tokens=1000)).run([Asked(0, 0.0, 990, 20), Asked(1, 0.1, 100, 5)])
    assert [type(each) for each in result.outcomes] == [Failed, Answered]
    assert result.outcomes[0].cause == TOO_LARGE  # type: ignore[union-attr]


def test_a_prompt_whose_beginning_is_cached_goes_there_and_computes_the_rest() -> None:
    asked = [Asked(n, 1.0 * n, 1024, 2, (7, 8)) for n in range(3)]
    simulation = Simulation(Cluster(3, 1), measured())
    simulation.run(asked)
    assert [server.prompt_tokens for server in simulation._pools["prefill"].servers] == [1024 + 1 + 1, 0, 0]
    again = Simulation(Cluster(3, 1), measured(), caches=False)
    again.run(asked)
    assert [server.prompt_tokens for server in again._pools["prefill"].servers] == [1024] * 3


def test_a_cache_lets_go_of_ends_before_beginnings() -> None:
    caches = Caches(2, 3)
    caches.keep(0, (1, 2))
    caches.keep(1, (1, 2, 3))
    assert caches.hits((1, 2, 3)) == {0: 2, 1: 3}
    caches.keep(0, (4, 5))
    assert caches.hits((1, 2, 3)) == {0: 1, 1: 3} and caches.hits((4, 5)) == {0: 2} and caches.hits((9,)) == {}


def test_measured_noise_moves_percentiles_and_not_the_mean() -> None:
    noisy = StepCost(0.004, 1e-4, 0.0, (0.5,) * 9 + (5.5,))
    facts = {1: ServerFacts(1, noisy)}
    asked = [Asked(n, 0.1 * n, 10, 400) for n in range(20)]
    calm = Simulation(Cluster(1, 1), measured()).run(asked)
    wild = Simulation(Cluster(1, 1), measured(decode=facts)).run(asked)
    gaps = [sorted(times_of(answered(each))["itl"]) for each in (calm, wild)]
    assert gaps[1][int(0.99 * len(gaps[1]))] > 3 * gaps[0][int(0.99 * len(gaps[0]))]
    assert sum(gaps[1]) / len(gaps[1]) == pytest.approx(sum(gaps[0]) / len(gaps[0]), rel=0.25)


# ---- what is recommended

BURSTY = [Asked(n, 0.02 * n, 400, 60) for n in range(300)]


def search(slo: Slo, known: Measured, limits: Limits | None = None) -> Search:
    return Search(lambda cluster, within: Simulation(cluster, known).run(BURSTY, within), slo, limits or Limits())


def test_the_smallest_cluster_that_is_within_is_found() -> None:
    slo = Slo.parse("ttft=500ms,itl=20ms", 0.99)
    known = measured()
    [found] = search(slo, known).pools([1], [1])
    assert found.within and found.cluster.prefill > 1
    for fewer in (
        Cluster(found.cluster.prefill - 1, found.cluster.decode),
        Cluster(found.cluster.prefill, found.cluster.decode - 1),
    ):
        if fewer.decode:
            assert not judge(fewer, Simulation(fewer, known).run(BURSTY), slo).within


def test_what_cannot_be_met_is_said_with_the_best_that_was_reached() -> None:
    slo = Slo.parse("ttft=2s,itl=1ms", 0.99)
    [nearest] = search(slo, measured(), Limits(4, 4)).pools([1], [1])
    assert not nearest.within and set(nearest.over) == {"itl"}
    words = missed([nearest])
    assert "itl comes to" in words and "1 ms are allowed" in words and str(nearest.cluster) in words


def test_routers_and_links_of_a_large_cluster_cost_what_one_computes() -> None:
    found = overheads(Cluster(64, 256), 100.0, 50_000.0, RouterRates(400.0, 20_000.0))
    assert (
        found["links"] == 64 * 256 and found["router_cores"] == pytest.approx(2.75) and found["router_processes"] == 4
    )


# ---- the command


def write_trace(path: Path, requests: int = 60, **more: object) -> Path:
    lines = [{"timestamp": 100 * n, "input_length": 300, "output_length": 20, **more} for n in range(requests)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


STEPS = ("--prefill-step", "fixed=2ms,token=100us", "--decode-step", "fixed=4ms,token=100us,attended=10ns")


def test_the_command_prints_what_scripts_read_and_draws_a_plot(tmp_path: Path) -> None:
    plot = tmp_path / "plan.svg"
    trace = write_trace(tmp_path / "trace.jsonl", 120)
    arguments = ["plan", "--trace", str(trace), "--slo", "ttft=2s,itl=200ms", *STEPS, "--json", "--plot", str(plot)]
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["prefill"], found["decode"], found["prefill_tp"], found["decode_tp"]) == (1, 1, 1, 1)
    assert (found["gpus"], found["mixed"]["mixed"], found["recommended"]) == (2, 1, "mixed")
    assert found["ttft_s"]["p99"] < 2 and found["itl_s"]["p99"] < 0.2 and 10 < found["goodput_requests_per_s"] < 100
    assert 0 < found["utilization"]["decode"]["busy"] <= 1 and found["overheads"]["64x256"]["links"] == 16384
    assert not found["times"]["assumed"] and plot.read_text().startswith("<svg")
    shown = CliRunner().invoke(cli, arguments[:-3])
    assert shown.exit_code == 0 and "recommended" in shown.stdout and "goodput" in shown.stdout


def test_a_pool_that_is_always_in_a_step_is_not_shown_as_full_where_it_could_take_many_times_as_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(show, "FILE_COLUMNS", 200)
    path = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 250 * n, "input_length": 50, "output_length": 100} for n in range(60)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = [
        "plan",
        "--trace",
        str(path),
        "--slo",
        "ttft=100ms,itl=200ms",
        *STEPS,
        "--prefill",
        "1",
        "--decode",
        "1",
    ]
    found = json.loads(CliRunner().invoke(cli, [*arguments, "--json"]).stdout)
    assert found["utilization"]["decode"]["busy"] > 0.9
    assert found["goodput_requests_per_s"] > 5 * found["trace"]["requests_per_s"]
    shown = CliRunner().invoke(cli, arguments).stdout
    assert "busy" not in shown and "in steps" in shown.splitlines()[3]
    assert "so 100% does not say that they are full" in shown


def planned(tmp_path: Path, *flags: str, requests: int = 60) -> tuple[int, dict[str, object], str]:
    """The exit status, what `--json` prints, and what is said beside it."""
    trace = write_trace(tmp_path / "trace.jsonl", requests)
    few = ("--most-prefill", "2", "--most-decode", "2")
    done = CliRunner().invoke(cli, ["plan", "--trace", str(trace), "--json", *STEPS, *few, *flags])
    assert "Traceback" not in done.output
    return done.exit_code, json.loads(done.stdout), done.stderr


def test_nothing_within_the_slo_is_said_in_json_too(tmp_path: Path) -> None:
    status, found, said = planned(tmp_path, "--slo", "ttft=2s,itl=1ms")
    assert (status, found["within"], found["complete"]) == (1, False, True) and "itl comes to" in said
    assert isinstance(found["tried"], list) and len(found["tried"]) == 2, "pools and mixed"
    assert all(not each["within"] and each["over"]["itl"] > 0.001 for each in found["tried"])


@pytest.mark.parametrize(("simulations", "within"), [(0, None), (1, None), (2, True)])
def test_when_time_runs_out_the_best_so_far_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, simulations: int, within: bool | None
) -> None:
    """Of prefill alone, of both, and of mixed servers, in this order."""
    check = run._Planner._check_time

    def impatient(self: run._Planner) -> None:
        if self.progress._tried > simulations:
            self._until_s = -math.inf
        check(self)

    monkeypatch.setattr(run._Planner, "_check_time", impatient)
    status, found, said = planned(tmp_path, "--slo", "ttft=2s,itl=200ms")
    assert (found["within"], found["complete"], status) == (within, False, 0 if within else 1)
    assert "was not done after" in said and "--limit" in said
    if within:
        assert (found["prefill"], found["decode"], found["recommended"]) == (1, 1, "pools")
        assert found["goodput_requests_per_s"] is None and "best so far" in said


def test_a_trace_that_is_within_the_slo_at_any_speed_tells_no_goodput(tmp_path: Path) -> None:
    status, found, said = planned(tmp_path, "--slo", "ttft=60s,itl=60s")
    assert status == 0 and found["goodput_requests_per_s"] is None and "too short to tell the goodput" in said


def test_a_trace_of_few_requests_is_warned_of(tmp_path: Path) -> None:
    slo = ("--slo", "ttft=2s,itl=200ms")
    for requests, enough in ((3, False), (100, True)):
        _, found, said = planned(tmp_path, *slo, requests=requests)
        assert isinstance(found["trace"], dict) and found["trace"]["enough_requests"] is enough
        assert ("WARNING: the trace has 3 requests" in said) is not enough


@pytest.mark.parametrize(("share", "least"), [(0.99, 100), (0.5, 30), (0.999, 1000), (0.9999, 1000), (1.0, 100)])
def test_a_percentile_needs_requests_beyond_it(share: float, least: int) -> None:
    assert Slo({"ttft": 1.0}, share).least_requests == least


def test_without_measured_times_it_says_whose_it_takes(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", 5)
    done = CliRunner().invoke(cli, ["plan", "--trace", str(trace), "--slo", "ttft=2s,itl=200ms", "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["times"]["assumed"]
    assert "WARNING: no step times of yours" in done.stderr


@pytest.mark.parametrize(
    ("content", "flags", "status", "said"),
    [
        ("", (), 2, "there is no request in it"),
        ("{}\n", (), 2, "line 1"),
        ('{"input_length": 5, "output_length": 5}\n', (), 2, "--rate is needed"),
        (None, ("--slo", "ttft=fast"), 2, "--slo"),
        (None, ("--slo", "ttft=2s,ttft=3s"), 2, '"ttft" is given twice'),
        (None, ("--plot", "/no/such/directory/plan.svg", "--slo", "itl=1ms"), 2, "/no/such/directory"),
        (None, ("--slo", "itl=1ms"), 1, "itl comes to"),
        (None, ("--slo", "ttft=1ms"), 1, "ttft comes to"),
        (None, ("--kv-tokens", "100"), 1, "60 requests do not fit the KV"),
        (None, ("--prefill", "2"), 2, "go together"),
        (None, ("--mixed", "2", "--decode", "1", "--prefill", "1"), 2, "alone"),
        (None, ("--prefill-step", "token=1us"), 2, "given twice"),
        (None, ("--record", "."), 2, "two sources"),
    ],
)
def test_what_cannot_be_planned_is_one_clear_message(
    tmp_path: Path, content: str | None, flags: tuple[str, ...], status: int, said: str
) -> None:
    trace = tmp_path / "trace.jsonl"
    write_trace(trace) if content is None else trace.write_text(content)
    slo = () if "--slo" in flags else ("--slo", "ttft=2s,itl=200ms")
    few = ("--most-prefill", "4", "--most-decode", "4")
    done = CliRunner().invoke(cli, ["plan", "--trace", str(trace), *slo, *STEPS, *few, *flags])
    assert done.exit_code == status and said in done.stderr, done.output
    assert done.stderr.count("error:") == 1 and "Traceback" not in done.output


def test_steps_by_hand_are_read_or_refused() -> None:
    assert parse_step("tp=2,fixed=4ms,token=15us,attended=29ns") == (
        2,
        StepCost(4e-3, pytest.approx(15e-6), pytest.approx(29e-9)),
    )
    assert parse_time("0") == 0.0 and parse_time("1.5s") == 1.5
    for wrong in (
        "fixed=1ms",
        "token=0",
        "token=1",
        "token=1us,token=2us",
        "tp=0,token=1us",
        "seconds=1",
        "token=9999999s",
    ):
        with pytest.raises(ValueError, match=r"."):
            parse_step(wrong)


# ---- what is learned


def record(directory: Path) -> None:
    """Steps of known cost of a prefill and a decode server, with a pause between those of one request."""
    parquet = pytest.importorskip("pyarrow.parquet")
    from disagg.server.record_columns import Origin, RequestColumns, Runs, StepColumns, StepRow
    from tests.bench.test_report import request

    memory, began_s, host_s = MemoryReport("lcm", 64, 10, 20, 30, 0, ()), 1_800_000_000.0, 0.001
    for role, tp in (("prefill", 1), ("decode", 2)):
        origin = Origin(f"{role}-0", role, "aa", tp, 5000, 7)
        steps, requests = StepColumns(origin), RequestColumns(origin)
        at_s, number, names = began_s, 0, []
        for size in range(12):
            names.append(f"r{size}")
            row, times = request(f"{role}-0", size, [0.1], prompt_tokens=100 * (size + 1), cached_tokens=0)
            requests.add(row, times)
            position = 0 if role == "prefill" else 100 * (size + 1)
            for _ in range(4):
                tokens = 25 * (size + 1) if role == "prefill" else 1
                cost = (0.002 + 1e-4 * tokens + 1e-7 * tokens * (position + tokens / 2)) * (
                    1 if role == "prefill" else 2
                )
                runs = Runs(array("i", [size]), array("i", [0]), array("b", [role == "decode"]), array("i", [tokens]))
                kinds = (tokens, 0) if role == "prefill" else (0, tokens)
                steps.add(StepRow(at_s, cost - host_s, number, *kinds, 512, 1, 0), memory, runs)
                at_s, number, position = at_s + cost, number + 1, position + tokens
            at_s += 1.0
        parquet.write_table(steps.table(names), directory / f"steps-{role}.parquet")
        parquet.write_table(requests.table(), directory / f"requests-{role}.parquet")


def test_what_is_learned_from_records_is_what_made_them(tmp_path: Path) -> None:
    """The line that they are on."""
    record(tmp_path)
    from disagg.bench.plan.learn import learn

    found = learn(tmp_path)
    assert list(found.prefill) == [1] and list(found.decode) == [2] and not found.mixed
    facts = found.prefill[1]
    assert (facts.chunk_tokens, facts.kv_tokens, facts.max_running) == (512, 5000, 7)
    assert facts.cost.seconds(200, 200 * 500) == pytest.approx(0.002 + 0.02 + 0.01, rel=0.01)
    assert found.decode[2].cost.seconds(1, 700) == pytest.approx(2 * (0.002 + 1e-4 + 7e-5), rel=0.02)
    assert all(math.isclose(ratio, 1.0, rel_tol=0.05) for ratio in facts.cost.ratios)


def test_steps_much_larger_than_any_that_was_measured_are_warned_of(tmp_path: Path) -> None:
    """As of a goodput far above the load under which was recorded."""
    record(tmp_path)
    trace = write_trace(tmp_path / "trace.jsonl", 120)
    flags = ("--slo", "ttft=2s,itl=200ms", "--record", str(tmp_path), "--prefill", "1", "--decode", "1")
    done = CliRunner().invoke(cli, ["plan", "--trace", str(trace), *flags])
    assert done.exit_code == 0, done.output
    assert "WARNING: the largest step that was measured had 1 sequence, and up to 7 are simulated in one" in done.stderr
    assert "is a guess" not in planned(tmp_path, "--slo", "ttft=2s,itl=200ms", requests=120)[2], "nothing was measured"


def test_of_very_many_steps_the_last_of_every_server_are_learned_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are read by the names of servers: what comes last in them is all of one server."""
    record(tmp_path)
    from disagg.bench.plan import learn

    monkeypatch.setattr(learn, "MOST_STEPS", 40)  # of 48 on each server
    found = learn.learn(tmp_path)
    assert found.prefill[1].cost.steps + found.decode[2].cost.steps == 40
    assert min(found.prefill[1].cost.steps, found.decode[2].cost.steps) > 10


def test_records_of_too_little_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    from tests.bench.test_report import make_records

    make_records(tmp_path)
    done = CliRunner().invoke(
        cli, ["plan", "--trace", str(write_trace(tmp_path / "t")), "--slo", "ttft=1s", "--record", str(tmp_path)]
    )
    assert done.exit_code == 2 and "a plan needs at least" in done.stderr
