"""Clusters shared by a whole test session, so that the suite starts as few as it can."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from disagg.convert.model_dir import resolve
from tests.cluster.cluster import Cluster
from tests.cluster.stored import flags
from tests.cluster.talks import Talk, make_talks
from tests.models.tiny import make_tiny
from tests.small_disk import small_disk_at


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


@pytest.fixture(scope="session")
def talking_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="session")
def talks(talking_model: Path) -> list[Talk]:
    return make_talks(talking_model, "storage", prompts=(40, 57, 75), turns=3, outputs=32, said=8)


@pytest.fixture(scope="session")
def kept_on_disk(talking_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Path]]:
    """A cluster that stores in `kv` of that directory: on a small file system of its own, if one can be mounted."""
    parent = tmp_path_factory.mktemp("kept")
    with ExitStack() as stack:
        directory = parent
        try:
            directory = stack.enter_context(small_disk_at(parent / "small", "16m"))
        except pytest.skip.Exception:
            print("no small disk can be mounted here")
        cluster = stack.enter_context(Cluster(parent / "run", *flags(talking_model, f"file://{directory}/kv")))
        yield cluster, directory
