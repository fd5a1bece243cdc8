"""Prometheus metrics of a prefill or decode server, on a registry of its own. Knows names and units; decides nothing.

A router's own are in `router`; both kinds of process make their registry here.
Every name starts with `disagg_`; which process it is, the scrape's target labels say. Metrics are attributes: whoever
measures calls `metrics.decode_tokens.inc(3)`, and sets the gauges of a step at the step's end.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, PlatformCollector, ProcessCollector

from disagg.messages.legs import MemoryReport

# From one CPU step of a tiny model to a prompt of 100k tokens.
STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TRANSFER_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
WAIT_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
DELAY_PASSES = (1, 2, 4, 8, 16, 24, 32, 64, 128, 256, 512, 1024)
RUN_PAGES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

LARGE_PAGE_STATES = ("free", "evictable", "used")
PAGE_STATES = ("empty", "evictable", "used")
NO_MEMORY = MemoryReport("", 0, 0, 0, 0, 0, ())
HOST_STATES = ("used", "empty")
TIER_WAYS = (("host", "out"), ("host", "in"), ("storage", "out"), ("storage", "in"))
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
        self._requests(registry)
        self._steps(registry)
        self._memory(registry)
        self._transfer(registry)
        self._tiers(registry)
        self._streams(registry)

    def _requests(self, registry: CollectorRegistry) -> None:
        """Legs and sequences, and how long they wait."""
        self.requests_running = Gauge("disagg_requests_running", "Sequences that are in the batch", registry=registry)
        self.requests_waiting = Gauge("disagg_requests_waiting", "Legs that are queued", registry=registry)
        self.legs = Counter("disagg_legs", "Legs ended, by outcome", ["outcome"], registry=registry)
        self.aborts = Counter("disagg_aborts", "Legs aborted at the router's request", registry=registry)
        self.bad_logits = Counter(
            "disagg_bad_logits",
            "Output tokens that could not be chosen: their logits were NaN or infinite",
            registry=registry,
        )
        self.preemptions = Counter(
            "disagg_preemptions",
            "Running sequences that gave way: for want of pages (memory), or to an older one that had waited (age)",
            ["reason"],
            registry=registry,
        )
        self.steps_sat_out = Counter(
            "disagg_steps_sat_out", "Steps that sequences which decode sat out, for want of a page", registry=registry
        )
        self.recomputed_tokens = Counter(
            "disagg_recomputed_tokens", "Tokens computed again after a preemption", registry=registry
        )
        self.handed_over_tokens = Counter(
            "disagg_handed_over_tokens",
            "Tokens whose KV was kept for another decode server to go on with",
            registry=registry,
        )
        self.parked = Gauge("disagg_parked", "Sequences that gave way and have not gone on", registry=registry)
        self.parked_seconds = Histogram(
            "disagg_parked_seconds",
            "From when a sequence gave way to when it went on",
            buckets=WAIT_SECONDS,
            registry=registry,
        )
        self.parked_longest_seconds = Gauge(
            "disagg_parked_longest_seconds", "How long the one parked longest has now been parked", registry=registry
        )
        self.ttft_seconds = Histogram(
            "disagg_prefill_ttft_seconds",
            "From a leg's arrival at the prefill server to its first token",
            buckets=WAIT_SECONDS,
            registry=registry,
        )
        self.queue_seconds = Histogram(
            "disagg_queue_seconds", "From a leg's arrival to its first step", buckets=WAIT_SECONDS, registry=registry
        )
        self.grant_wait_seconds = Histogram(
            "disagg_grant_wait_seconds", "From the announcement to the grant", buckets=WAIT_SECONDS, registry=registry
        )
        for reason in ("memory", "age"):
            self.preemptions.labels(reason)

    def _steps(self, registry: CollectorRegistry) -> None:
        """What is computed, and by which model."""
        self.prefill_tokens = Counter("disagg_prefill_tokens", "Prompt tokens computed", registry=registry)
        self.decode_tokens = Counter("disagg_decode_tokens", "Tokens decoded and sent", registry=registry)
        self.discarded_tokens = Counter(
            "disagg_discarded_tokens",
            "Tokens computed past a stop by the overlapped step, and discarded",
            registry=registry,
        )
        self.engine_steps = Counter("disagg_engine_steps", "Steps run by the engine", registry=registry)
        self.step_seconds = Histogram(
            "disagg_step_seconds",
            "Computing one step, on the rank that samples",
            buckets=STEP_SECONDS,
            registry=registry,
        )
        self.pipeline_seconds = {
            "busy": Counter(
                "disagg_pipeline_busy_seconds", "Time in which a pipeline stage computed", ["stage"], registry=registry
            ),
            "bubble": Counter(
                "disagg_pipeline_bubble_seconds",
                "Time in which a pipeline stage computed nothing while a plan was in flight",
                ["stage"],
                registry=registry,
            ),
        }
        self.model_changes = Counter(
            "disagg_model_changes", "Times that workers came up with another model than those before", registry=registry
        )

        self.prefill_delay_passes = Histogram(
            "disagg_prefill_delay_passes",
            "Passes of a delay that ended, of each rank of a mixed server whose prompts it held up",
            buckets=DELAY_PASSES,
            registry=registry,
        )
        self.prefill_delay_seconds = Histogram(
            "disagg_prefill_delay_seconds",
            "How long a delay lasted that ended, of each rank of a mixed server whose prompts it held up",
            buckets=WAIT_SECONDS,
            registry=registry,
        )
        self.prefill_delay_outcomes = Counter(
            "disagg_prefill_delay_outcomes",
            "Passes of a mixed server, by where prompts could begin, if they might and why, and if this rank computed any",
            ["estimate", "allow", "reason", "executed"],
            registry=registry,
        )

    def _memory(self, registry: CollectorRegistry) -> None:
        """The KV pool and its prefix cache."""
        self.kv_large_pages = Gauge(
            "disagg_kv_large_pages",
            "Large pages of each rank's KV pool by state (free, evictable, used)",
            ["state"],
            registry=registry,
        )
        self.kv_pages = Gauge(
            "disagg_kv_pages",
            "Small pages in the large pages that a layer group has, by state (empty, evictable, used)",
            ["group", "state"],
            registry=registry,
        )
        self.kv_bytes = Gauge("disagg_kv_bytes", "The bytes of disagg_kv_pages", ["group", "state"], registry=registry)
        self.kv_fragmentation_bytes = Gauge(
            "disagg_kv_fragmentation_bytes",
            "Bytes of large pages that layer groups have, in which no KV can be: empty small pages, and padding",
            registry=registry,
        )
        self.kv_run_pages = Histogram(
            "disagg_kv_run_pages",
            "Mean length, in small pages, of the runs of adjacent pages that one allocation got",
            buckets=RUN_PAGES,
            registry=registry,
        )
        self.kv_evictions = Counter(
            "disagg_kv_evictions",
            "Cached small pages given up for others, by layer group",
            ["group"],
            registry=registry,
        )
        self.prefix_query_tokens = Counter(
            "disagg_prefix_query_tokens", "Tokens that were looked up in the prefix cache", registry=registry
        )
        self.prefix_hit_tokens = Counter(
            "disagg_prefix_hit_tokens", "Tokens that were in the prefix cache, by tier", ["tier"], registry=registry
        )
        self.loaded_tokens = Counter(
            "disagg_prefix_loaded_tokens",
            "Tokens whose KV was brought back into the pool, found then or not, by tier",
            ["tier"],
            registry=registry,
        )
        self.loads_left = Counter(
            "disagg_prefix_loads_left",
            "Prompts for which KV was not brought back because it is slower than computing, or was late, by which",
            ["why"],
            registry=registry,
        )
        for state in LARGE_PAGE_STATES:
            self.kv_large_pages.labels(state)
        self.prefix_hit_tokens.labels("gpu")

    def _transfer(self, registry: CollectorRegistry) -> None:
        """KV on its way, and the arena that it goes through."""
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
            "disagg_transfer_pieces",
            "Rank slices of pieces moved, by direction (sent, received)",
            ["direction"],
            registry=registry,
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
        self.transfer_turn_s = Gauge(
            "disagg_transfer_longest_turn_seconds",
            "Longest time for which a worker's transfer thread looked at nothing new, in the last one to two minutes",
            ["rank"],
            registry=registry,
        )
        self.checksum_failures = Counter(
            "disagg_checksum_failures",
            "Rank slices of pieces that landed, did not match their checksum, and were not copied",
            registry=registry,
        )
        self.lost_notifications = Counter(
            "disagg_lost_notifications",
            "Rank slices of pieces that prefill had written, of which nothing was heard, and that were asked for again",
            registry=registry,
        )
        for state in ARENA_STATES:
            self.arena_bytes.labels(state)
        for direction in ("sent", "received"):
            self.transfer_bytes.labels(direction)
            self.transfer_pieces.labels(direction)

    def _tiers(self, registry: CollectorRegistry) -> None:
        """KV beside the GPU."""
        self.host_pages = Gauge(
            "disagg_host_pages",
            "Large pages of each rank's host pool by state (used, empty)",
            ["state"],
            registry=registry,
        )
        self.store_up = Gauge(
            "disagg_store_up",
            "0 while storage fails and is left alone; else, and where there is none, 1",
            registry=registry,
        )
        self.store_misses = Counter(
            "disagg_store_misses",
            "What was looked for in storage and could not be had, by cause; what is simply not there is not counted",
            ["cause"],
            registry=registry,
        )
        self.store_published_pages = Counter(
            "disagg_store_published_pages",
            "Pages that this server has stored; one covers all heads, and counts once per layer group",
            registry=registry,
        )
        self.store_duplicate_pages = Counter(
            "disagg_store_duplicate_pages",
            "Pages that it wrote and that others had stored just before, so that theirs were kept",
            registry=registry,
        )
        self.store_failures = Counter(
            "disagg_store_failures",
            "Calls of the store that failed in the server, and writes and reads that failed in its workers",
            registry=registry,
        )
        self.store_removed_bytes = Counter(
            "disagg_store_removed_bytes",
            "What this server has removed from storage to keep it to storage.budget_bytes",
            registry=registry,
        )
        self.tier_bytes = Counter(
            "disagg_tier_bytes",
            "KV bytes moved by all ranks, by tier (host, storage) and direction (out: away from the GPU; in)",
            ["tier", "direction"],
            registry=registry,
        )
        self.tier_seconds = Counter(
            "disagg_tier_seconds",
            "What moving disagg_tier_bytes took, summed over ranks",
            ["tier", "direction"],
            registry=registry,
        )
        for state in HOST_STATES:
            self.host_pages.labels(state)
        for way in TIER_WAYS:
            self.tier_bytes.labels(*way)
            self.tier_seconds.labels(*way)
        self.store_up.set(1)

    def _streams(self, registry: CollectorRegistry) -> None:
        """Streams to routers, and links."""
        self.router_messages = Counter(
            "disagg_router_messages", "Frames with tokens sent to routers", registry=registry
        )
        self.lease_expiries = Counter(
            "disagg_lease_expiries",
            "Streams and links lost to silence, by kind (router, link)",
            ["kind"],
            registry=registry,
        )

    def set_memory(self, memory: MemoryReport | None) -> None:
        """The pool, all at once, so that what a scrape sees adds up. None: there is no pool now."""
        if memory is None:
            memory = NO_MEMORY
            self.kv_pages.clear()
            self.kv_bytes.clear()
        large = (memory.large_free, memory.large_evictable, memory.large_used)
        for state, count in zip(LARGE_PAGE_STATES, large, strict=True):
            self.kv_large_pages.labels(state).set(count)
        for group in memory.groups:
            pages = (group.empty_pages, group.evictable_pages, group.used_pages)
            for state, count in zip(PAGE_STATES, pages, strict=True):
                self.kv_pages.labels(group.name, state).set(count)
                self.kv_bytes.labels(group.name, state).set(count * group.page_bytes)
        self.kv_fragmentation_bytes.set(memory.fragmentation_bytes)
        used, total = (memory.host.pages_used, memory.host.pages_total) if memory.host is not None else (0, 0)
        for state, count in zip(HOST_STATES, (used, total - used), strict=True):
            self.host_pages.labels(state).set(count)

    def set_arena(self, *, free_bytes: int, leased_bytes: int, quarantined_bytes: int) -> None:
        """Arena bytes by state, all at once."""
        for state, held in zip(ARENA_STATES, (free_bytes, leased_bytes, quarantined_bytes), strict=True):
            self.arena_bytes.labels(state).set(held)
