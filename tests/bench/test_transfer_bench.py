"""`disagg bench transfer`: real processes and NIXL on CPU, small; and what is refused."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from disagg.cli.main import cli

needs_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl_cu13") is None, reason="nixl-cu13 is not installed")


@needs_nixl
@pytest.mark.long
def test_kv_crosses_between_different_tp_sizes_and_is_compared(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "figures.json"
    command = (
        "bench transfer --device cpu --tp 1:2 --tokens 70 --shape 3x4x16xfloat32 --page-tokens 8 --piece 20KiB "
        f"--arena 56KiB --repeat 2 --unstaged --no-curve --json {kept}"
    )
    with pytest.raises(SystemExit) as ended:
        cli.main(command.split(), standalone_mode=False)
    assert ended.value.code == 0
    shown = capfd.readouterr().out
    figures = msgspec.json.decode(kept.read_bytes())
    contact, staged, unstaged = figures["measurements"]
    assert [measured["what"] for measured in figures["measurements"]] == ["first contact", "staged", "unstaged"]
    assert all(measured["what"] in shown for measured in figures["measurements"])
    assert contact["payload_bytes"] == 8 * 3 * 2 * 4 * 16 * 4
    assert staged["payload_bytes"] == 70 * 3 * 2 * 4 * 16 * 4
    assert staged["piece_bytes"] <= 20 << 10
    assert staged["pieces"] == 2 * 3, "more than the two that each rank's arena has room for: the rings go round"
    assert unstaged["pieces"] == 2 * 9 * 3 * 2, "a descriptor per page, layer, plane and rank"
    spent = staged["spent"]
    assert 0 <= spent["waiting_s"] < spent["total_s"] == staged["seconds"]
    assert min(spent["gather_s"], spent["wire_s"], spent["scatter_s"]) > 0
    assert len(staged["all_seconds"]) == 2 and staged["copy_s"] > 0


@needs_nixl
@pytest.mark.long
def test_tp_sizes_that_cannot_hold_the_heads_are_left_out_with_the_reason(capfd: pytest.CaptureFixture[str]) -> None:
    result = CliRunner().invoke(
        cli, ["bench", "transfer", "--device", "cpu", "--tp", "1:2", "--shape", "1x3x8xfloat32", "--no-curve"]
    )
    assert result.exit_code == 2
    assert "no pair of TP sizes" in result.output
    assert "TP 1:2 is left out: TP size 2 cannot hold 3 KV heads" in result.output + capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ("--tp 1-2", 2, "it must be PREFILL:DECODE"),
        ("--piece 3parsecs", 2, "--piece"),
        ("--in-flight 1", 2, "--in-flight"),
        ("--kernels cuda", 2, "--kernels"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_anything_is_started(
    arguments: str, code: int, said: str
) -> None:
    result = CliRunner().invoke(cli, ["bench", "transfer", *arguments.split()])
    assert result.exit_code == code
    assert said in result.output


@needs_nixl
@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ("--kernels triton", 2, 'prefill rank 0: transfer.kernels = "triton"'),
        ("--ucx-tls bogus", 1, "prefill rank 0: NIXL agent 'P/0' cannot start"),
    ],
)
def test_what_only_a_rank_finds_out_is_said_in_its_words(
    arguments: str, code: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["--device", "cpu", "--tp", "1:1", "--shape", "1x2x8xfloat32", "--no-curve", *arguments.split()]
    result = CliRunner().invoke(cli, ["bench", "transfer", *options])
    assert result.exit_code == code
    everything = result.output + capfd.readouterr().err
    assert said in everything
    assert "Error:" not in everything and "Traceback" not in everything
