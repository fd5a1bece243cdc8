"""A load on a real cluster that records it, one of whose servers is killed, and the report of what it had recorded."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from disagg.bench.report.merge import merge
from disagg.bench.report.read import read_records
from tests.cluster.cluster import CLI, Cluster
from tests.models.tiny import make_tiny

REQUESTS, OUTPUTS = 12, 9


@pytest.mark.timeout(300)
def test_a_load_is_measured_recorded_and_reported(tmp_path: Path) -> None:
    model, records, kept = make_tiny("llama", tmp_path / "llama"), tmp_path / "records", tmp_path / "out.json"
    flags = ("--page-tokens", "4", "--chunk-tokens", "16", "--kv-memory", "1MiB", "--record", str(records))
    with Cluster(tmp_path / "run", "--model", str(model), "--dtype", "float32", *flags) as cluster:
        load = ("--rate", "20", "--requests", str(REQUESTS), "--input-tokens", "40", "--output-tokens", str(OUTPUTS))
        command = (*CLI, "bench", "serve", "--url", cluster.http, *load, "--json", str(kept), "--warmup", "2")
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        for role in ("prefill", "decode"):
            rows = lambda role=role: sum(_rows(path) for path in records.glob(f"requests-{role}*"))  # noqa: E731
            cluster.wait(lambda rows=rows: rows() >= REQUESTS + 2, 60, f"the records of the {role} server")
        cluster.kill(cluster.server("decode-0")["pid"])
    found = json.loads(kept.read_text())
    assert (found["completed"], found["failed"], found["output_tokens"]) == (REQUESTS, 0, REQUESTS * OUTPUTS)
    assert found["input_tokens"] == REQUESTS * 40 and found["target"]["prompts"].startswith("token ids")
    assert all(found["ttft_s"][share] > 0 for share in ("mean", "p50", "p90", "p99"))
    assert found["itl_s"]["mean"] > 0 and found["itl_s"]["p99"] > 0  # tokens that wait for their client come together

    answers = [a for a in merge(read_records(records).requests.to_pylist()) if a.prompt_tokens == 40]
    assert len(answers) == REQUESTS + 2 and all(a.completed and len(a.token_s) == OUTPUTS for a in answers)
    ttft_s = [a.ttft_s for a in answers[2:]]
    assert max(t for t in ttft_s if t is not None) <= found["ttft_s"]["max"], (
        "a server hears of a request after its client"
    )
    steps = read_records(records).steps.to_pylist()
    computed = sum(s["prefill_tokens"] for s in steps if s["role"] == "prefill")
    assert computed >= 40 * len(answers) and all(s["prefill_tokens"] <= 16 for s in steps if s["role"] == "prefill")
    done = subprocess.run((*CLI, "report", str(records)), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and (records / "report.html").stat().st_size > 20_000, done.stderr


def _rows(path: Path) -> int:
    from pyarrow.parquet import read_metadata

    return int(read_metadata(path).num_rows)
