"""Bound launches and compiled kernels, which the interpreter has not.

Triton's own launcher gets from a bound launch what it gets from a call, and kernels whose launches overlap wait for each
other before they touch what launches share.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.long  # all kernels are compiled


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """See tests/staging/recorded_launches."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.staging.recorded_launches"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["overlapping", "apart"])
def test_a_bound_launch_tells_the_driver_what_a_call_of_the_kernel_tells_it(recorded: dict[str, Any], how: str) -> None:
    pairs = recorded[how]["pairs"]
    assert len(pairs) == 6
    for called, bound in pairs:
        assert bound == called
        assert called[1] == (how == "overlapping")
    assert {called[0] for called, _ in pairs} == {"_move_stretches", "_move_words"}


def test_overlapping_launches_wait_for_each_other_before_they_touch_what_they_share(recorded: dict[str, Any]) -> None:
    assert len(recorded["overlapping"]["steps"]) == 6
    for steps in recorded["overlapping"]["steps"]:
        moves = steps[: steps.index("atom")]
        assert steps[:2] == ["wait", "launch_dependents"]  # the first wait is that of an ordered launch
        assert moves[-1] == "wait", "sums are added to before the launch before this one is done"
        assert set(moves[2:-1]) == {"ld", "st"}
        assert not {"wait", "launch_dependents"} & set(steps[len(moves) :])


def test_launches_that_do_not_overlap_wait_for_nothing(recorded: dict[str, Any]) -> None:
    for steps in recorded["apart"]["steps"]:
        assert set(steps) == {"ld", "st", "atom"}
