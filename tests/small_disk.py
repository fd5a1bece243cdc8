"""Small file systems, for tests of full disks. They need root, or the tests are skipped."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk_at(directory: Path, size: str) -> Iterator[Path]:
    """A file system of that size (as `mount` writes it), mounted on a new directory."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small disk")
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """64 KiB."""
    with small_disk_at(tmp_path / "small", "64k") as directory:
        yield directory
