"""The router's metrics, on the registry that it is given. Names and labels only; who counts what is the service's business."""

from __future__ import annotations

import contextlib

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from disagg.router.view import Work
from disagg.telemetry.plain import PlainCounter, PlainCounts, PlainHistogram

_TTFT_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_ITL_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_SILENCE_BUCKETS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0)
_WHOLE_BUCKETS_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class RouterMetrics:
    """One router's counters, gauges and histograms."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._time(registry)
        self._count(registry)
        self._count_failures(registry)

    def _time(self, registry: CollectorRegistry) -> None:
        self.ttft_s = Histogram(
            "disagg_router_ttft_seconds",
            "From a request's arrival to its first token",
            buckets=_TTFT_BUCKETS_S,
            registry=registry,
        )
        self.itl_s = PlainHistogram(
            "disagg_router_itl_seconds",
            "Between two messages with tokens of one choice, per token",
            _ITL_BUCKETS_S,
            registry,
        )
        self.longest_silence_s = Histogram(
            "disagg_router_longest_silence_seconds",
            "Of each request that began to answer, the longest time from tokens of a choice to its next ones",
            buckets=_SILENCE_BUCKETS_S,
            registry=registry,
        )
        self.silence_s = Gauge(
            "disagg_router_silence_seconds",
            "How long the most silent of all choices that have begun and not finished has now been silent",
            registry=registry,
        )
        self.queue_s = Histogram(
            "disagg_router_queue_seconds",
            "From a request's arrival to its first dispatch",
            buckets=_TTFT_BUCKETS_S,
            registry=registry,
        )
        self.whole_s = Histogram(
            "disagg_router_request_seconds",
            "From a request's arrival to its end",
            buckets=_WHOLE_BUCKETS_S,
            registry=registry,
        )

    def _count(self, registry: CollectorRegistry) -> None:
        self.expected_hits = Counter(
            "disagg_router_expected_cached_tokens_total",
            "Prompt tokens that servers were expected to have cached when requests were sent there to be computed",
            registry=registry,
        )
        self.local_prefills = Counter(
            "disagg_router_local_prefills",
            "Attempts for which a decode server computed the rest of the prompt itself, without prefill",
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "disagg_router_prompt_tokens", "Prompt tokens of accepted requests", registry=registry
        )
        self.completion_tokens = PlainCounter(
            "disagg_router_completion_tokens", "Output tokens accepted from servers", registry
        )
        self.running = Gauge("disagg_router_running", "Requests dispatched and not finished", registry=registry)
        self.waiting = Gauge("disagg_router_waiting", "Requests waiting for a place or a server", registry=registry)
        self.mismatched = Gauge(
            "disagg_router_servers_mismatched", "Servers whose model files are not this router's", registry=registry
        )
        self.attempts = Counter(
            "disagg_router_attempts", "Dispatches, by what made them necessary", ["cause"], registry=registry
        )
        self.replayed_tokens = Counter(
            "disagg_router_replayed_tokens",
            "Tokens that prefill servers were given once more because a request was run again; what moves is not among them",
            registry=registry,
        )
        self.requests = Counter("disagg_router_requests", "Requests that ended, by how", ["outcome"], registry=registry)
        self.choices = Counter(
            "disagg_router_choices", "Choices of accepted requests that ended, by why", ["reason"], registry=registry
        )
        for reason in ("stop", "length", "abort", "error"):
            self.choices.labels(reason)
        self.messages = PlainCounts(
            "disagg_router_server_messages", "Messages about legs from servers", "server", registry
        )

    def _count_failures(self, registry: CollectorRegistry) -> None:
        self.duplicates = Counter(
            "disagg_router_duplicate_tokens", "Tokens dropped because they were there already", registry=registry
        )
        self.stale = Counter(
            "disagg_router_stale_tokens", "Tokens dropped because their attempt or request is over", registry=registry
        )
        self.contradictions = Counter(
            "disagg_router_contradictions", "Messages that contradicted an accepted token", registry=registry
        )
        self.servers_lost = Counter(
            "disagg_router_servers_lost", "Servers, or their incarnations, given up", ["server"], registry=registry
        )
        self.circuits_open = Gauge(
            "disagg_router_circuit_open",
            "1 from when a server fails too much of what it is sent until it succeeds again",
            ["server", "leg"],
            registry=registry,
        )
        self.circuits_opened = Counter(
            "disagg_router_circuits_opened", "Times that circuits opened", ["server", "leg"], registry=registry
        )

    def message_came(self, server: str) -> None:
        values = self.messages.values
        values[server] = values.get(server, 0) + 1

    def forget(self, server: str) -> None:
        """Series of a server that is not there any more."""
        self.messages.values.pop(server, None)
        with contextlib.suppress(KeyError):
            self.servers_lost.remove(server)
        self.forget_circuits(server)

    def forget_circuits(self, server: str) -> None:
        """What it is sent is other work now."""
        for circuits in (self.circuits_open, self.circuits_opened):
            for work in Work:
                with contextlib.suppress(KeyError):
                    circuits.remove(server, work.value)


class GrpcMetrics:
    """Calls of the gRPC face."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.calls = Gauge(
            "disagg_router_grpc_calls", "Open gRPC calls, also of health and reflection", registry=registry
        )
        self.ended = Counter(
            "disagg_router_grpc_ended",
            "Calls that ended before or outside of their method, by why",
            ["reason"],
            registry=registry,
        )
