"""Clusters shared by a whole test session, so that the suite starts as few as it can."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from disagg.convert.model_dir import resolve
from tests.cluster.cluster import Cluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "cluster" in Path(item.fspath).parts:
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return resolve("smollm2-135m", Path("~/.cache/disagg/models").expanduser())


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """SmolLM2, one prefill and one decode server, small chunks so that a prompt takes several."""
    with Cluster(tmp_path_factory.mktemp("cluster"), "--chunk-tokens", "64") as cluster:
        yield cluster
