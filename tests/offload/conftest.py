from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.offload.s3_server import S3Server, s3_server
from tests.small_disk import small_disk_at


@pytest.fixture
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory on a file system of 256 KiB."""
    with small_disk_at(tmp_path / "small", "256k") as directory:
        yield directory
