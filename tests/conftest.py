"""For all tests. CI has no GPU, so Triton's kernels run in its interpreter; `TRITON_INTERPRET=0` runs them on a CUDA device.

Triton reads the variable when a kernel is defined, so it is set before any test module is imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests import campaigns

if TYPE_CHECKING:
    from tests.models.ranks import RankPool


os.environ.setdefault("TRITON_INTERPRET", "1")
if "PYTEST_XDIST_WORKER" in os.environ:  # each of those that run side by side computes on one core
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes, or is drawn (too_slow), says what else the machine does, not whether it is right. Which tests meet
# too_slow changes with that, too, so it is off for all and not where it was met. What is drawn is the same each time, so that a
# change is judged by what it changes; `--hypothesis-profile explore` draws anew, which is how those that nobody thought of are
# found.
settings.register_profile("untimed", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", deadline=None, derandomize=False, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu-tests-on",
        choices=("cuda", "cpu"),
        default="cuda",
        help="where tests/cluster/test_gpu.py runs: on two GPUs, or it is skipped; cpu tries it out without any",
    )
    parser.addoption("--campaign", type=int, help="at most so many examples in each campaign of tests/campaigns")
    parser.addoption("--soak-minutes", type=float, default=30.0, help="how long tests/cluster/test_soak.py goes on")


def pytest_configure(config: pytest.Config) -> None:
    campaigns.limit(config.getoption("--campaign"))


@pytest.fixture(scope="session")
def rank_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Four processes that compute models together, for all tests that need some: they take seconds to start."""
    from tests.models.ranks import RankPool  # imports torch, which most tests do without

    pool = RankPool(4, tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()
