"""The slow campaigns, part by part: `make test-slow`, or `python -m tests.slow --part NAME`.

Each part is one pytest selection. Its result is kept by commit under .slow-results/, so that a part which passed on this
commit is not run again, and a long campaign can be spread over several sittings. `--list` shows what is there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / ".slow-results"
TAIL_CHARS = 4000

LONG = "tests/cluster/test_exactness.py::test_long_prompts_come_out_as_transformers_says"
PARTS: dict[str, tuple[str, ...]] = {
    **{f"exact-chunk{chunk}-page{page}": (f"{LONG}[{chunk}-{page}]",) for chunk in (16, 64, 512) for page in (1, 16)},
    "tensor-parallelism": ("-m", "slow", "tests/cluster/test_tp.py"),
    "families": ("-m", "slow", "tests/cluster/test_tiny_models.py"),
    "prefix-cache": ("-m", "slow", "tests/cluster/test_prefix_cache.py", "-k", "tiny"),
    "gemma3": ("-m", "slow", "tests/cluster/test_prefix_cache.py", "-k", "gemma_3"),
    "memory": ("-m", "slow", "tests/memory"),
    "bad-wire": ("-m", "slow", "tests/cluster/test_wire_faults.py", "-k", "bad_wire and ten_thousand or write"),
    "bad-wire-offload": ("-m", "slow", "tests/cluster/test_wire_faults.py", "-k", "failing_store"),
    "bad-wire-smollm2": ("-m", "slow", "tests/cluster/test_wire_faults.py", "-k", "smollm2"),
    "soak": ("-m", "slow", "tests/cluster/test_soak.py"),
    "swapped-checkpoint": ("-m", "slow", "tests/cluster/test_swapped_checkpoint.py"),
    "tokenizer-files": ("-m", "slow", "tests/text"),
    "rolling": ("-m", "slow", "tests/cluster/test_rolling.py", "tests/cluster/test_drain.py"),
    "upgrade": ("-m", "slow", "tests/cluster/test_upgrade.py"),
    "partition": ("-m", "slow", "tests/cluster/test_partition.py", "tests/cluster/test_namespaces.py"),
    "offload": ("-m", "slow", "tests/offload", "tests/cluster/test_offload_store.py", "tests/cluster/test_offload.py"),
    "offload-parked": ("-m", "slow", "tests/cluster/test_offload_parked.py"),
    "offload-turns": ("-m", "slow", "tests/cluster/test_offload_turns.py"),
    "mixed": ("-m", "slow", "tests/cluster/test_mixed.py", "-k", "not trained"),
    "mixed-smollm2": ("-m", "slow", "tests/cluster/test_mixed.py", "-k", "trained and smollm2"),
    "mixed-gemma3": ("-m", "slow", "tests/cluster/test_mixed.py", "-k", "trained and gemma3"),
    "mixed-faults": ("-m", "slow", "tests/cluster/test_mixed_faults.py"),
    "data-parallel": ("-m", "slow", "tests/cluster/test_data_parallel.py"),
    "stages": ("-m", "slow", "tests/cluster/test_stages.py"),
    "properties": (
        "-m",
        "slow and not cluster",
        "tests/engine",
        "tests/transfer",
        "tests/messages",
        "tests/staging",
        "tests/transfer_backends",
    ),
    "wire": ("-m", "slow", "tests/wire"),
    "hostile-streams": ("-m", "slow", "tests/server"),
    "models": ("-m", "slow", "tests/models", "tests/convert"),
    "command-line": ("-m", "slow", "tests/cli"),
    "faces": ("-m", "slow", "tests/api"),
}
NO_TESTS = 5  # pytest's status when a selection is empty


def commit() -> str:
    """The commit, and whether the tree differs from it."""
    head = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    status = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True)
    return head.stdout.strip() + ("-changed" if status.stdout.strip() else "")


def kept(directory: Path, part: str) -> dict[str, object] | None:
    file = directory / f"{part}.json"
    return json.loads(file.read_text()) if file.exists() else None


def run(directory: Path, part: str, console: Console, examples: int | None) -> bool:
    """examples: of each campaign, at most. Such a result is not kept."""
    console.rule(part)
    started = time.monotonic()
    lines: list[str] = []
    limit = () if examples is None else ("--campaign", str(examples))
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", *limit, *PARTS[part]],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        print(line, end="", flush=True)
    status = process.wait()
    if examples is not None:
        return status in (0, NO_TESTS)
    result = {
        "part": part,
        "passed": status == 0,
        "empty": status == NO_TESTS,
        "seconds": round(time.monotonic() - started, 1),
        "summary": lines[-1].strip() if lines else "",
        "tail": "".join(lines)[-TAIL_CHARS:],
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{part}.json").write_text(json.dumps(result, indent=1) + "\n")
    return status in (0, NO_TESTS)


def show(directory: Path, console: Console) -> bool:
    """True when every part has passed on this commit."""
    table = Table(title=f"slow campaigns at {directory.name}")
    for header in ("part", "result", "seconds", "summary"):
        table.add_column(header)
    complete = True
    for part in PARTS:
        result = kept(directory, part)
        word = (
            "not run" if result is None else "passed" if result["passed"] else "empty" if result["empty"] else "FAILED"
        )
        complete &= word in ("passed", "empty")
        table.add_row(part, word, str(result["seconds"]) if result else "", str(result["summary"]) if result else "")
    console.print(table)
    return complete


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.slow", description=__doc__)
    parser.add_argument("--part", action="append", choices=tuple(PARTS), help="only this part; may be repeated")
    parser.add_argument("--again", action="store_true", help="also what has passed on this commit")
    parser.add_argument(
        "--examples", type=int, metavar="N", help="try the parts out with campaigns of so many examples"
    )
    parser.add_argument("--list", action="store_true", help="show results and run nothing")
    args = parser.parse_args()
    console = Console()
    directory = RESULTS / commit()
    if args.list:
        return 0 if show(directory, console) else 1
    if args.examples is not None:
        passed = [run(directory, part, console, args.examples) for part in args.part or PARTS]
        return 0 if all(passed) else 1
    for part in args.part or PARTS:
        before = kept(directory, part)
        if args.again or before is None or not (before["passed"] or before["empty"]):
            run(directory, part, console, None)
    show(directory, console)
    chosen = [kept(directory, part) for part in args.part or PARTS]
    return 0 if all(result and (result["passed"] or result["empty"]) for result in chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
