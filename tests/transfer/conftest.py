"""Fixtures of the transfer driver's tests."""

from __future__ import annotations

import pytest

from disagg.worker import transfer_driver
from tests.transfer.slow_mover import SlowMover
from tests.transfer_backends.loopback import Hub, LoopbackBackend


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Joins the agents of every driver made in the test."""
    hub = Hub()
    monkeypatch.setattr(transfer_driver, "create", lambda backend, *, name, **options: LoopbackBackend(name, hub))
    return hub


@pytest.fixture
def movers(monkeypatch: pytest.MonkeyPatch) -> list[SlowMover]:
    """The movers of the drivers made in the test, in the order in which these are made."""
    made: list[SlowMover] = []

    def create_mover(kernels: str, device: object) -> SlowMover:
        made.append(SlowMover())
        return made[-1]

    monkeypatch.setattr(transfer_driver, "create_mover", create_mover)
    return made
