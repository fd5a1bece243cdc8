"""`disagg bench engine`: floors against sums by hand, real workers with tiny models, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from disagg.bench.engine.report import Measured, roofline, table_of
from disagg.bench.engine.work import Ceilings, Rows, Shape, Weights, weights_of
from disagg.cli.main import cli
from disagg.messages.layout import GroupKind, LayerGroup, StatePart
from tests.models.tiny import make_tiny

CEILINGS = Ceilings(copy=100.0, burst=2000.0, sustained=1000.0, device="one that is slow", product="8^3 float32")
FULL = LayerGroup("full", (0, 1, 2), 2, 8, "float32")


def shape(weights: Weights, *groups: LayerGroup, tp: int = 1) -> Shape:
    return Shape(weights, groups, query_heads=4, dtype_bytes=4, tp=tp)


# ---- work


def test_weights_are_told_apart_by_their_names_and_shapes() -> None:
    tensors = {
        "model.embed_tokens.weight": (100, 8),
        "model.layers.0.self_attn.q_proj.weight": (8, 8),
        "model.layers.0.self_attn.q_proj.bias": (8,),
        "model.layers.0.mlp.experts.0.up_proj.weight": (16, 8),
        "model.layers.0.mlp.experts.1.up_proj.weight": (16, 8),
        "model.layers.0.mlp.shared_experts.up_proj.weight": (4, 8),
        "lm_head.weight": (100, 8),
    }
    config = {"num_experts": 2, "num_experts_per_tok": 1}
    assert weights_of(tensors, config, 100) == Weights(64 + 32, 800, 256, 2, 1)
    del tensors["lm_head.weight"]
    assert weights_of(tensors, {}, 100).output == 800, "tied"


def test_a_decode_step_reads_weights_once_and_the_kv_of_each_sequence() -> None:
    work = shape(Weights(1000, 500), FULL).step([Rows(9, 1, True), Rows(19, 1, True)])
    kv = FULL.bytes_per_token * (10 + 20)
    assert work.nbytes == 4 * 1500 + kv
    assert work.flops == 2 * 2 * 1500 + 4 * 3 * 4 * 8 * (10 + 20)
    parts = ((4000, 4000), (2000, 2000), (kv, 4 * 3 * 4 * 8 * 30))
    assert work.floor_s(CEILINGS) == pytest.approx(sum(max(b / 100, f / 1000) for b, f in parts))
    assert work.floor_s(CEILINGS, sharing=2) == pytest.approx(2 * work.floor_s(CEILINGS))


def test_ranks_share_layers_and_heads_and_the_output_layer() -> None:
    one = shape(Weights(1000, 500), FULL).step([Rows(9, 1, True)])
    two = shape(Weights(1000, 500), FULL, tp=2).step([Rows(9, 1, True)])
    assert two.nbytes == one.nbytes / 2
    assert two.flops == one.flops / 2


def test_of_experts_those_are_read_that_some_token_takes() -> None:
    weights = Weights(0, 0, experts=800, num_experts=8, chosen=2)
    one, many = (shape(weights).step([Rows(0, count, False)]) for count in (1, 1000))
    assert one.nbytes == pytest.approx(4 * 200) and one.flops == 2 * 200
    assert many.nbytes == pytest.approx(4 * 800) and many.flops == 2 * 200 * 1000


def test_a_state_is_read_and_written_whatever_came_before() -> None:
    state = LayerGroup.of_states("state", (0, 1), (StatePart("ssm", (8,), "float32"),))
    assert shape(Weights(0, 0), state).step([Rows(5000, 1, False)] * 3).nbytes == 3 * 2 * state.bytes_per_token


@given(st.integers(0, 60), st.integers(1, 60), st.integers(1, 40))
def test_what_a_window_sees_is_what_counting_says(start: int, count: int, window: int) -> None:
    group = LayerGroup("window", (0,), 1, 4, "float32", GroupKind.WINDOW, window=window)
    work = shape(Weights(0, 0), group).step([Rows(start, count, False)])
    seen = [set(range(max(0, row + 1 - window), row + 1)) for row in range(start, start + count)]
    assert work.nbytes == len(set().union(*seen)) * group.bytes_per_token
    assert work.flops == 4 * 4 * 4 * sum(map(len, seen))


# ---- what is shown


def test_the_roofline_has_every_row_that_ran() -> None:
    ran = Measured(1, "decode", 4, 10, seconds=2.0, compute_s=1.0, floor_s=1.0, tokens_out=4, nbytes=100, flops=400)
    other = Measured(
        1, "prefill", 1, 50, seconds=2.0, compute_s=1.0, floor_s=1.5, tokens_out=50, nbytes=100, flops=1500
    )
    drawn = roofline([ran, other, Measured(1, "decode", 9, 9, why_not="no room")], CEILINGS)
    assert drawn.startswith("<svg") and drawn.count("<circle") == 2 and "one that is slow" in drawn
    assert ran.share == 0.5 and table_of([ran, other]).row_count == 2


def test_a_roofline_of_nothing_is_drawn() -> None:
    assert roofline([Measured(1, "decode", 9, 9, why_not="no room")], CEILINGS).startswith("<svg")


# ---- real workers


@pytest.mark.long
@pytest.mark.timeout(600)
def test_an_engine_is_swept_with_one_rank_and_with_two(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = make_tiny("jamba", tmp_path / "jamba")
    kept, plot = tmp_path / "figures.json", tmp_path / "roofline.svg"
    command = (
        f"bench engine --model {model} --tp 1 --tp 2 --decode 3x20 --decode 2x90000 --prefill 70 --steps 3 --rounds 1 "
        f"--set engine.kv_memory_bytes=16MiB --set engine.chunk_tokens=32 --json {kept} --plot {plot}"
    )
    with pytest.raises(SystemExit) as ended:
        cli.main(command.split(), standalone_mode=False)
    assert ended.value.code == 0
    figures = msgspec.json.decode(kept.read_bytes())
    rows = figures["measured"]
    assert [(row["tp"], row["what"], row["sequences"]) for row in rows] == [
        (tp, *each) for tp in (1, 2) for each in (("decode", 3), ("decode", 2), ("prefill", 1))
    ]
    for decode, refused, prefill in (rows[:3], rows[3:]):
        assert "90000" in refused["why_not"] and not refused["seconds"]
        for row in (decode, prefill):
            assert row["seconds"] >= row["floor_s"] > 0 and row["compute_s"] > 0 and not row["why_not"]
        assert 20 <= decode["tokens"] < 90
        assert prefill["tokens_out"] == 70
    assert rows[0]["flops"] > rows[3]["flops"], "each of two ranks has less to do"
    assert plot.read_text().count("<circle") == 4
    shown = capfd.readouterr().out
    assert re.search(r"1 +│ decode +│ +3", shown) and "measured in this run" in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--decode 32", "not of the form NxTOKENS"),
        ("--decode 0x10", "1 to 4096 sequences"),
        ("--decode 99999999999999x1", "1 to 4096 sequences"),
        ("--tp 0", "--tp"),
        ("--prefill x", "--prefill"),
        ("--set server.dp=2", "it must be 1 here"),
        ("--decode 9x9 --set engine.max_running=4", "engine.max_running = 4: 9 sequences are to run at once"),
        ("--tp 3", "server.tp = 3"),
        ("--model /nowhere", "'/nowhere' is neither"),
        ("--json /nowhere/at/all.json", "/nowhere/at/all.json"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(arguments: str, said: str, tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "llama")
    result = CliRunner().invoke(cli, ["bench", "engine", "--model", str(model), *arguments.split()])
    assert result.exit_code == 2, result.output
    assert said in result.output.replace("\n", " "), result.output
