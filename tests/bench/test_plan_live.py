"""`disagg plan --http`: step times from what a router says of a running cluster; and how the line of recorded steps is found."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from msgspec import to_builtins

from disagg.bench.plan.learn import medians
from disagg.bench.plan.live import running
from disagg.cli import terminal
from disagg.cli.main import cli
from disagg.messages.legs import StepCosts
from disagg.scheduler.step_times import KEPT, LEAST_TOLD, TOLD_EVERY, ToldTimes, fit
from disagg.types.errors import ConfigError

URL = "http://router:8000"


def server(role: str, tp: int = 1, costs: StepCosts | None = None, name: str = "x") -> dict[str, Any]:
    return {"name": name, "role": role, "tp": tp, "steps": to_builtins(costs)}


def costs(token_s: float, **more: Any) -> StepCosts:
    fields = {
        "fixed_s": 0.002,
        "attended_s": 1e-9,
        "steps": 20,
        "chunk_tokens": 512,
        "kv_tokens": 9000,
        "max_running": 8,
    }
    return StepCosts(token_s=token_s, **(fields | more))


def test_servers_of_one_role_and_size_count_as_one_with_what_they_cost_on_average() -> None:
    status = {
        "servers": [
            server("prefill", 2, costs(1e-4)),
            server("prefill", 2, costs(3e-4, chunk_tokens=256)),
            server("prefill", 4, None),
            server("decode", 1, costs(1e-5)),
        ]
    }
    found = running(status, URL)
    assert list(found.prefill) == [2] and list(found.decode) == [1] and not found.mixed and not found.assumed
    facts = found.prefill[2]
    assert facts.cost.seconds(100, 0) == pytest.approx(0.002 + 100 * 2e-4)
    assert (facts.cost.steps, facts.chunk_tokens, facts.kv_tokens, facts.max_running) == (40, 256, 9000, 8)


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ({"servers": [server("prefill", costs=costs(1e-4)), server("decode", name="d-7")]}, "nothing yet of d-7"),
        ({"servers": []}, "put load on it first"),
        ({"servers": [{"name": "x", "role": "mixed", "tp": 1}]}, "nothing yet of x"),
        ({"servers": [{"name": "x", "role": "mixed", "tp": 1, "steps": {"a": 1}}]}, "another version"),
        ({"servers": "none"}, "not that of a router"),
        ([], "not that of a router"),
    ],
)
def test_what_says_too_little_is_refused_with_what_is_missing(status: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        running(status, URL)


def test_the_command_plans_with_what_the_router_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = {"servers": [server("prefill", costs=costs(1e-4)), server("decode", costs=costs(1e-5))]}
    asked: list[str] = []
    monkeypatch.setattr(terminal, "get_http", lambda url, path: asked.append(url + path) or status)
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 100.0 * n, "input_length": 200, "output_length": 10} for n in range(20)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    plan = [
        "plan",
        "--trace",
        str(trace),
        "--slo",
        "ttft=2s,itl=200ms",
        "--http",
        URL,
        "--prefill",
        "1",
        "--decode",
        "1",
    ]
    done = CliRunner().invoke(cli, [*plan, "--json"])
    assert done.exit_code == 0, done.output
    assert asked == [URL + "/status"]
    kept = json.loads(done.stdout)
    assert kept["within"] and "WARNING: no step times" not in done.stderr
    refused = CliRunner().invoke(cli, [*plan, "--prefill-step", "token=1us"])
    assert refused.exit_code == 2 and "--http is a source of step times" in refused.stderr


# ---- what servers learn


@given(st.lists(st.tuples(st.integers(1, 600), st.integers(0, 5000)), min_size=1, max_size=400))
def test_servers_tell_what_their_steps_cost_from_some_of_them(steps: list[tuple[int, int]]) -> None:
    told, observed = ToldTimes(), 0
    for tokens, start in steps:
        if told.wants_one():
            observed += 1
            told.observe([(start, tokens)], 0.002 + 1e-4 * tokens + 1e-8 * tokens * (start + tokens / 2))
    assert observed == len(steps) // TOLD_EVERY
    line = told.line
    assert (line is None) == (observed < LEAST_TOLD)
    if line is not None:
        fixed_s, token_s, attended_s, count = line
        assert LEAST_TOLD <= count <= 2 * KEPT
        assert fixed_s >= 0 and token_s > 0 and attended_s >= 0


# ---- the line of recorded steps


def test_a_few_steps_that_were_held_up_or_took_next_to_no_time_bend_no_line() -> None:
    rng = random.Random(3)
    rows = []
    for _ in range(2000):
        tokens = rng.choice([64, 128, 256, 512])
        seconds = (0.002 + 1e-4 * tokens) * rng.uniform(0.97, 1.03)
        if rng.random() < 0.1:
            seconds *= rng.choice([0.02, 8])
        rows.append((float(tokens), tokens * 300.0, seconds))
    alike = np.asarray(rows)

    def off(found: tuple[float, float, float]) -> float:
        return max(abs((found[0] + found[1] * t + found[2] * t * 300) / (0.002 + 1e-4 * t) - 1) for t in (64, 512))

    assert off(fit((t, a, s) for t, a, s in medians(alike).tolist())) < 0.1 < off(fit(rows))


@given(
    st.lists(st.tuples(st.floats(1, 1e5), st.floats(0, 1e9), st.floats(1e-5, 100)), min_size=1, max_size=60),
)
def test_medians_lie_among_what_they_stand_for(drawn: list[tuple[float, float, float]]) -> None:
    rows = np.asarray(drawn)
    out = medians(rows)
    assert out.shape == rows.shape
    for column in range(3):
        assert rows[:, column].min() <= out[:, column].min() and out[:, column].max() <= rows[:, column].max()
