"""Bound launches, which the interpreter has not: Triton's own launcher gets from them what it gets from a call."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def test_a_bound_launch_tells_the_driver_what_a_call_of_the_kernel_tells_it(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.staging.recorded_launches"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    pairs = json.loads(ran.stdout)
    assert len(pairs) == 6
    for called, bound in pairs:
        assert bound == called
    assert {called[0] for called, _ in pairs} == {"_move_runs", "_move_words"}
