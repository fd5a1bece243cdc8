"""Carries an engine's counters into Prometheus, across incarnations. Knows names of metrics; decides nothing."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from disagg.engine.data_parallel import AnyEngine
from disagg.engine.instructions import Counters
from disagg.messages.legs import LoadReport, StorageState
from disagg.server.offloading import Offloading
from disagg.telemetry.metrics import EngineMetrics

OBSERVED = {
    "step": "step_seconds",
    "queue": "queue_seconds",
    "ttft": "ttft_seconds",
    "grant_wait": "grant_wait_seconds",
    "parked": "parked_seconds",
    "transfer": "transfer_seconds",
    "run_pages": "kv_run_pages",
    "prefill_delay_passes": "prefill_delay_passes",
    "prefill_delay_seconds": "prefill_delay_seconds",
}


class Exporter:
    """`export` often; `retire` counters when their engine ends, so that metrics never go back."""

    def __init__(self, metrics: EngineMetrics, registry: CollectorRegistry) -> None:
        self.metrics = metrics
        self._seen: dict[str, float] = {}
        self._steps_after_abort = Gauge(
            "disagg_steps_after_abort",
            "Most steps in which an aborted leg was still computed; at most 2, or server.pp if that is more",
            registry=registry,
        )

    def export(
        self,
        engine: AnyEngine | None,
        load: LoadReport,
        token_frames: int,
        router_expiries: int,
        link_expiries: int,
        now_s: float = 0.0,
    ) -> None:
        metrics = self.metrics
        metrics.requests_running.set(load.running)
        metrics.requests_waiting.set(load.waiting)
        metrics.set_memory(load.memory)
        free, leased, quarantined = engine.arena_bytes() if engine is not None else (0, 0, 0)
        metrics.set_arena(free_bytes=free, leased_bytes=leased, quarantined_bytes=quarantined)
        parked, parked_s = engine.parked(now_s) if engine is not None else (0, 0.0)
        metrics.parked.set(parked)
        metrics.parked_longest_seconds.set(parked_s)
        self._up(metrics.router_messages, "router_messages", token_frames)
        self._up(metrics.lease_expiries.labels("router"), "router_expiries", router_expiries)
        self._up(metrics.lease_expiries.labels("link"), "link_expiries", link_expiries)
        if engine is not None:
            self._count(*(rank.counters for rank in engine.ranks))

    def export_tiers(self, offloading: Offloading) -> None:
        """Its sums go on over incarnations by themselves."""
        metrics, sums = self.metrics, offloading.sums
        metrics.store_up.set(offloading.state is not StorageState.DEGRADED)
        self._up(metrics.store_published_pages, "store pages", sums.published_pages)
        self._up(metrics.store_duplicate_pages, "store duplicates", sums.duplicate_pages)
        self._up(metrics.store_failures, "store failures", offloading.failures)
        self._up(metrics.store_removed_bytes, "store removed", offloading.removed_bytes)
        for cause, count in sums.misses.items():
            self._up(metrics.store_misses.labels(cause.value), f"store miss {cause}", count)
        for way, seconds in sums.seconds.items():
            self._up(metrics.tier_bytes.labels(*way), f"tier bytes {way}", sums.nbytes[way])
            self._up(metrics.tier_seconds.labels(*way), f"tier seconds {way}", seconds)

    def retire(self, *counters: Counters) -> None:
        """Export what is left of them, of each data-parallel rank; the next ones begin at zero."""
        self._count(*counters)
        for name in [name for name in self._seen if name.startswith("engine ")]:
            del self._seen[name]

    def _count(self, *counters: Counters) -> None:
        for rank, each in enumerate(counters):
            self._count_rank(f"engine {rank}", each)
        self._steps_after_abort.set(max(each.max_steps_after_abort for each in counters))

    def _count_rank(self, rank: str, counters: Counters) -> None:
        metrics = self.metrics
        for counter, name, value in (
            (metrics.engine_steps, "steps", counters.steps),
            (metrics.prefill_tokens, "prefill", counters.prefill_tokens),
            (metrics.decode_tokens, "decode", counters.decode_tokens),
            (metrics.discarded_tokens, "discarded", counters.discarded_tokens),
            (metrics.transfer_bytes.labels("sent"), "sent", counters.payload_bytes_sent),
            (metrics.transfer_bytes.labels("received"), "received", counters.payload_bytes_received),
            (metrics.transfer_pieces.labels("sent"), "pieces sent", counters.pieces_sent),
            (metrics.transfer_pieces.labels("received"), "pieces landed", counters.pieces_landed),
            (metrics.checksum_failures, "checksum", counters.checksum_failures),
            (metrics.lost_notifications, "lost notifications", counters.lost_notifications),
            (metrics.aborts, "aborts", counters.aborts),
            (metrics.bad_logits, "bad logits", counters.bad_logits),
            (metrics.prefix_query_tokens, "query tokens", counters.query_tokens),
            (
                metrics.prefix_hit_tokens.labels("gpu"),
                "hit tokens",
                counters.hit_tokens - sum(counters.brought_tokens.values()),
            ),
            (metrics.steps_sat_out, "steps sat out", counters.steps_sat_out),
            (metrics.recomputed_tokens, "recomputed", counters.recomputed_tokens),
            (metrics.handed_over_tokens, "handed over", counters.handed_over_tokens),
        ):
            self._up(counter, f"{rank} {name}", value)
        for tier, count in counters.brought_tokens.items():
            self._up(metrics.prefix_hit_tokens.labels(tier), f"{rank} hit tokens {tier}", count)
        for tier, count in counters.loaded_tokens.items():
            self._up(metrics.loaded_tokens.labels(tier), f"{rank} loaded tokens {tier}", count)
        for why, count in counters.loads_left.items():
            self._up(metrics.loads_left.labels(why), f"{rank} loads left {why}", count)
        for outcome, count in counters.legs.items():
            self._up(metrics.legs.labels(outcome), f"{rank} leg {outcome}", count)
        for reason, count in counters.transfer_failures.items():
            self._up(metrics.transfer_failures.labels(reason), f"{rank} failure {reason}", count)
        for group, count in counters.evictions.items():
            self._up(metrics.kv_evictions.labels(group), f"{rank} evictions {group}", count)
        for reason, count in counters.preemptions.items():
            self._up(metrics.preemptions.labels(reason), f"{rank} preemption {reason}", count)
        for (kind, stage), seconds in counters.stage_seconds.items():
            self._up(metrics.pipeline_seconds[kind].labels(str(stage)), f"engine stage {stage} {kind}", seconds)
        for (estimate, allow, reason, executed), count in counters.prefill_delays.items():
            labels = (estimate, str(allow).lower(), reason, str(executed).lower())
            self._up(metrics.prefill_delay_outcomes.labels(*labels), f"{rank} prompts {' '.join(labels)}", count)
        for name, observed in counters.observations:
            getattr(metrics, OBSERVED[name]).observe(observed)
        counters.observations.clear()

    def _up(self, counter: Counter, name: str, value: float) -> None:
        """Raise a counter to a sum that only grows."""
        before = self._seen.get(name, 0.0)
        if value > before:
            counter.inc(value - before)
            self._seen[name] = value
