"""Prometheus metrics of a prefill or decode server, on a registry of its own. Knows names and units; decides nothing.

A router's own are in `router`; both kinds of process make their registry here.
Every name starts with `disagg_`; which process it is, the scrape's target labels say. Metrics are attributes: whoever
measures calls `metrics.decode_tokens.inc(3)`, and sets the gauges of a step at the step's end.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, PlatformCollector, ProcessCollector

# From one CPU step of a tiny model to a prompt of 100k tokens.
STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TRANSFER_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
WAIT_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

PAGE_STATES = ("free", "used", "evictable", "quarantined")
ARENA_STATES = ("free", "leased", "quarantined")


def new_registry() -> CollectorRegistry:
    """A registry with what Prometheus shows of every process (memory, CPU, open files). One per process."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    return registry


class EngineMetrics:
    """What one prefill or decode server counts. Labels are written after the name."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests_running = Gauge("disagg_requests_running", "Sequences that are in the batch", registry=registry)
        self.requests_waiting = Gauge("disagg_requests_waiting", "Legs that are queued", registry=registry)
        self.prefill_tokens = Counter("disagg_prefill_tokens", "Prompt tokens computed", registry=registry)
        self.decode_tokens = Counter("disagg_decode_tokens", "Tokens decoded and sent", registry=registry)
        self.discarded_tokens = Counter(
            "disagg_discarded_tokens",
            "Tokens computed past a stop by the overlapped step, and discarded",
            registry=registry,
        )
        self.engine_steps = Counter("disagg_engine_steps", "Steps run by the engine", registry=registry)
        self.step_seconds = Histogram(
            "disagg_step_seconds", "From sending a plan to its result", buckets=STEP_SECONDS, registry=registry
        )
        self.router_messages = Counter("disagg_router_messages", "Data frames sent to routers", registry=registry)
        self.kv_pages = Gauge("disagg_kv_pages", "Pages of the KV pool by state", ["state"], registry=registry)
        self.arena_bytes = Gauge(
            "disagg_arena_bytes", "Bytes of the staging arena by state", ["state"], registry=registry
        )
        self.transfer_bytes = Counter(
            "disagg_transfer_payload_bytes",
            "KV bytes moved, by direction (sent, received)",
            ["direction"],
            registry=registry,
        )
        self.transfer_pieces = Counter(
            "disagg_transfer_pieces", "Pieces moved, by direction (sent, received)", ["direction"], registry=registry
        )
        self.transfer_seconds = Histogram(
            "disagg_transfer_seconds",
            "From the grant to the last piece of one request",
            buckets=TRANSFER_SECONDS,
            registry=registry,
        )
        self.transfer_failures = Counter(
            "disagg_transfer_failures", "Transfers given up, by reason", ["reason"], registry=registry
        )
        self.checksum_failures = Counter(
            "disagg_checksum_failures", "Pieces that landed and did not match their checksum", registry=registry
        )
        self.grant_wait_seconds = Histogram(
            "disagg_grant_wait_seconds", "From the announcement to the grant", buckets=WAIT_SECONDS, registry=registry
        )
        self.lease_expiries = Counter(
            "disagg_lease_expiries",
            "Streams and links lost to silence, by kind (router, link)",
            ["kind"],
            registry=registry,
        )
        self.aborts = Counter("disagg_aborts", "Legs aborted at the router's request", registry=registry)
        self.legs = Counter("disagg_legs", "Legs ended, by outcome", ["outcome"], registry=registry)
        self.ttft_seconds = Histogram(
            "disagg_prefill_ttft_seconds",
            "From a leg's arrival at the prefill server to its first token",
            buckets=WAIT_SECONDS,
            registry=registry,
        )
        self.queue_seconds = Histogram(
            "disagg_queue_seconds", "From a leg's arrival to its first step", buckets=WAIT_SECONDS, registry=registry
        )
        for state in PAGE_STATES:
            self.kv_pages.labels(state)
        for state in ARENA_STATES:
            self.arena_bytes.labels(state)
        for direction in ("sent", "received"):
            self.transfer_bytes.labels(direction)
            self.transfer_pieces.labels(direction)

    def set_pages(self, *, free: int, used: int, evictable: int, quarantined: int) -> None:
        """Pages by state, all at once, so that what a scrape sees adds up."""
        for state, pages in zip(PAGE_STATES, (free, used, evictable, quarantined), strict=True):
            self.kv_pages.labels(state).set(pages)

    def set_arena(self, *, free_bytes: int, leased_bytes: int, quarantined_bytes: int) -> None:
        """Arena bytes by state, all at once."""
        for state, held in zip(ARENA_STATES, (free_bytes, leased_bytes, quarantined_bytes), strict=True):
            self.arena_bytes.labels(state).set(held)
