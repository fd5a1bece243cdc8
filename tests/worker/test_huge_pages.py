"""What workers ask torch for beside their own code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from disagg.worker.__main__ import HUGE_PAGES

_FLAGS = """
import torch

large = torch.zeros(16 << 20)
inside = False
for line in open("/proc/self/smaps"):
    name, _, rest = line.partition(" ")
    if "-" in name:
        first, end = (int(each, 16) for each in name.split("-"))
        inside = first <= large.data_ptr() + large.nbytes // 2 < end
    elif inside and name == "VmFlags:":
        print(rest)
"""


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has no transparent huge pages"
)
def test_torch_asks_for_huge_pages_under_the_name_that_workers_set() -> None:
    """It is in no documentation of torch, so that a new version may forget it: then workers would be slower, and nothing else."""

    def flags(**env: str) -> list[str]:
        others = {name: value for name, value in os.environ.items() if name != HUGE_PAGES}
        argv = (sys.executable, "-c", _FLAGS)
        return subprocess.run(
            argv, env=others | env, capture_output=True, check=True, text=True, timeout=120
        ).stdout.split()

    assert "hg" not in flags() and "hg" in flags(**{HUGE_PAGES: "1"})
