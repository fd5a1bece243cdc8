"""What the log says of who was let in."""

from __future__ import annotations

import logging

import pytest
from prometheus_client import CollectorRegistry

from disagg.auth.audit import REFUSALS_PER_S, Audit


def test_a_flood_of_refusals_leaves_the_log_to_others_and_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    now_s, registry = 7.0, CollectorRegistry()
    audit = Audit(registry, lambda: now_s)
    with caplog.at_level(logging.INFO):
        for _ in range(REFUSALS_PER_S + 30):
            audit.refused("unknown_key", "http", "GET /status", "10.0.0.1")
        audit.admitted("team-a", "http", "GET /status", "10.0.0.2")
        assert len(caplog.records) == REFUSALS_PER_S + 1
        now_s = 8.0
        audit.refused("missing", "http", "GET /status", "10.0.0.1")
        audit.refused("missing", "http", "GET /status", "10.0.0.1")
    *_, admitted, first, second = (vars(record) for record in caplog.records)
    assert (admitted["tenant"], admitted["client"]) == ("team-a", "10.0.0.2")
    assert first["refused_unsaid"] == 30 and "refused_unsaid" not in second
    counted = registry.get_sample_value("disagg_router_callers_total", {"outcome": "unknown_key"})
    assert counted == REFUSALS_PER_S + 30
