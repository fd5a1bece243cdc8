"""A server of router streams."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.server.router_streams import Server


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with Server() as made:
        yield made
