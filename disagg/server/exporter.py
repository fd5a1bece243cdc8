"""Carries an engine's tally into Prometheus, across incarnations. Knows names of metrics; decides nothing."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from disagg.engine.decode import DecodeEngine
from disagg.engine.instructions import Tally
from disagg.engine.prefill import PrefillEngine
from disagg.messages.legs import LoadReport
from disagg.telemetry.metrics import EngineMetrics

OBSERVED = {
    "step": "step_seconds",
    "queue": "queue_seconds",
    "ttft": "ttft_seconds",
    "grant_wait": "grant_wait_seconds",
    "parked": "parked_seconds",
    "transfer": "transfer_seconds",
    "run_pages": "kv_run_pages",
}


class Exporter:
    """`export` often; `retire` a tally when its engine ends, so that counters never go back."""

    def __init__(self, metrics: EngineMetrics, registry: CollectorRegistry) -> None:
        self.metrics = metrics
        self._seen: dict[str, float] = {}
        self._steps_after_abort = Gauge(
            "disagg_steps_after_abort", "Most steps in which an aborted leg was still computed", registry=registry
        )

    def export(
        self,
        engine: PrefillEngine | DecodeEngine | None,
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
        parked, parked_s = engine.parked(now_s) if isinstance(engine, DecodeEngine) else (0, 0.0)
        metrics.parked.set(parked)
        metrics.parked_longest_seconds.set(parked_s)
        self._up(metrics.router_messages, "router_messages", token_frames)
        self._up(metrics.lease_expiries.labels("router"), "router_expiries", router_expiries)
        self._up(metrics.lease_expiries.labels("link"), "link_expiries", link_expiries)
        if engine is not None:
            self._tally(engine.tally)

    def retire(self, tally: Tally) -> None:
        """Count what is left of it; the next tally begins at zero."""
        self._tally(tally)
        for name in [name for name in self._seen if name.startswith("tally ")]:
            del self._seen[name]

    def _tally(self, tally: Tally) -> None:
        metrics = self.metrics
        for counter, name, value in (
            (metrics.engine_steps, "steps", tally.steps),
            (metrics.prefill_tokens, "prefill", tally.prefill_tokens),
            (metrics.decode_tokens, "decode", tally.decode_tokens),
            (metrics.discarded_tokens, "discarded", tally.discarded_tokens),
            (metrics.transfer_bytes.labels("sent"), "sent", tally.payload_bytes_sent),
            (metrics.transfer_bytes.labels("received"), "received", tally.payload_bytes_received),
            (metrics.transfer_pieces.labels("sent"), "pieces sent", tally.pieces_sent),
            (metrics.transfer_pieces.labels("received"), "pieces landed", tally.pieces_landed),
            (metrics.checksum_failures, "checksum", tally.checksum_failures),
            (metrics.lost_notifications, "lost notifications", tally.lost_notifications),
            (metrics.aborts, "aborts", tally.aborts),
            (metrics.prefix_query_tokens, "query tokens", tally.query_tokens),
            (metrics.prefix_hit_tokens.labels("gpu"), "hit tokens", tally.hit_tokens),
            (metrics.recomputed_tokens, "recomputed", tally.recomputed_tokens),
        ):
            self._up(counter, f"tally {name}", value)
        for outcome, count in tally.legs.items():
            self._up(metrics.legs.labels(outcome), f"tally leg {outcome}", count)
        for reason, count in tally.transfer_failures.items():
            self._up(metrics.transfer_failures.labels(reason), f"tally failure {reason}", count)
        for group, count in tally.evictions.items():
            self._up(metrics.kv_evictions.labels(group), f"tally evictions {group}", count)
        for reason, count in tally.preemptions.items():
            self._up(metrics.preemptions.labels(reason), f"tally preemption {reason}", count)
        self._steps_after_abort.set(tally.max_steps_after_abort)
        for name, observed in tally.observations:
            getattr(metrics, OBSERVED[name]).observe(observed)
        tally.observations.clear()

    def _up(self, counter: Counter, name: str, value: float) -> None:
        """Raise a counter to a sum that only grows."""
        before = self._seen.get(name, 0.0)
        if value > before:
            counter.inc(value - before)
            self._seen[name] = value
