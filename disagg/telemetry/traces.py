"""Spans on their way to an OpenTelemetry collector, beside whoever made them.

    loop ── Span (values) ──> bounded queue ── thread: batches, the official SDK's spans and exporters ──> OTLP over gRPC or HTTP

Spans are made of timelines when a request or a leg has ended, so nothing here happens per token. A collector that is slow or dead
costs nobody time: what the queue has no room for, and what could not be delivered, is dropped and counted.
Needs the extra `tracing`, where `tracing.otlp_endpoint` is set.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

from msgspec import Struct
from prometheus_client import CollectorRegistry, Counter

from disagg.messages.legs import TimelineEvent
from disagg.types.addresses import join, split
from disagg.types.errors import ConfigError
from disagg.types.trace_context import TraceContext, begun
from disagg.types.version import version

logger = logging.getLogger(__name__)

MAX_QUEUED = 8192  # spans; a few kilobytes each at most
MAX_BATCH = 512
GATHER_S = 0.5  # for a batch to come together
DELIVER_S = 10.0  # for one batch, with what is tried again
CLOSE_S = 2.0  # for what is left when a process ends
SAY_EVERY_S = 60.0
MANY = 16  # events of one name in a timeline, such as the pieces of a transfer
MAX_TEXT = 1024  # characters of one attribute
HTTP_PATH, GRPC_PORT = "/v1/traces", 4317

Value = str | int | float | bool | tuple[str, ...]
Kind = Literal["server", "internal"]


class Span(Struct, frozen=True, kw_only=True):
    """One span that has ended. context: its own ids. parent_span_id: empty for a trace's first. error: empty if it went well."""

    name: str
    context: TraceContext
    parent_span_id: str
    start_unix_s: float
    end_unix_s: float
    kind: Kind = "internal"
    attributes: Mapping[str, Value] = {}
    error: str = ""


def spans_of(events: Iterable[TimelineEvent], parent: TraceContext, names: Mapping[str, str]) -> list[Span]:
    """What a timeline says, as children of `parent`: one for each event, or for all of a name if there are more than MANY, from
    the first to the last. names: of events that have another one as spans.
    """
    by_name: dict[str, list[TimelineEvent]] = {}
    for event in events:
        by_name.setdefault(event.name, []).append(event)
    groups: list[list[TimelineEvent]] = []
    for same in by_name.values():
        groups += [same] if len(same) > MANY else [[event] for event in same]
    return [_span_of(group, parent, names) for group in groups]


def _span_of(same: Sequence[TimelineEvent], parent: TraceContext, names: Mapping[str, str]) -> Span:
    attributes: dict[str, Value] = {"disagg.detail": same[0].detail} if same[0].detail else {}
    if len(same) > 1:
        attributes["disagg.count"] = len(same)
    return Span(
        name=names.get(same[0].name, same[0].name),
        context=TraceContext(parent.trace_id, secrets.token_hex(8), True),
        parent_span_id=parent.span_id,
        start_unix_s=min(event.start_unix_s for event in same),
        end_unix_s=max(max(event.start_unix_s, event.end_unix_s) for event in same),
        attributes=attributes,
    )


class Traces:
    """Where nothing is traced: takes spans and forgets them."""

    def begin(self, traceparent: str) -> TraceContext | None:
        """Of a new request, by what its client says; None: it is not traced."""
        return None

    def put(self, spans: Sequence[Span]) -> None:
        """Never waits."""

    def close(self) -> None:
        """Delivers what is left, for CLOSE_S at most. Blocks."""


class TraceMetrics:
    """What has become of spans."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.spans = Counter(
            "disagg_trace_spans",
            "Spans, by what became of them: delivered, dropped (no room), failed (the collector did not take them)",
            ["outcome"],
            registry=registry,
        )


class OtlpTraces(Traces):
    """To one collector. export: delivers a batch, and says whether it went well; runs in a thread of its own."""

    def __init__(
        self,
        sample_ratio: float,
        metrics: TraceMetrics,
        export: Callable[[Sequence[Span]], bool],
        shut: Callable[[], None] = lambda: None,
        max_queued: int = MAX_QUEUED,
    ) -> None:
        self._ratio = sample_ratio
        self._metrics = metrics
        self._export = export
        self._shut = shut
        self._queue: queue.Queue[Span | None] = queue.Queue(max_queued)
        self._said_s = -SAY_EVERY_S
        for outcome in ("delivered", "dropped", "failed"):
            metrics.spans.labels(outcome)
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def begin(self, traceparent: str) -> TraceContext | None:
        return begun(traceparent, self._ratio, secrets.token_bytes)

    def put(self, spans: Sequence[Span]) -> None:
        for number, span in enumerate(spans):
            try:
                self._queue.put_nowait(span)
            except queue.Full:
                self._metrics.spans.labels("dropped").inc(len(spans) - number)
                return

    def close(self) -> None:
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        self._thread.join(CLOSE_S)
        self._shut()  # also ends what the exporter still tries again

    def _run(self) -> None:
        over = False
        while not over:
            batch, over = self._gather()
            if batch:
                self._deliver(batch)

    def _gather(self) -> tuple[list[Span], bool]:
        """Waits for the first; and whether there will be no more."""
        batch: list[Span] = []
        until_s = float("inf")
        while len(batch) < MAX_BATCH:
            left_s = None if until_s == float("inf") else until_s - time.monotonic()
            try:
                span = self._queue.get(timeout=left_s) if left_s is None or left_s > 0 else self._queue.get_nowait()
            except queue.Empty:
                break
            if span is None:
                return batch, True
            until_s = min(until_s, time.monotonic() + GATHER_S)
            batch.append(span)
        return batch, False

    def _deliver(self, batch: Sequence[Span]) -> None:
        try:
            done, why = self._export(batch), "the collector did not take them"
        except Exception as error:  # noqa: BLE001 - whatever libraries raise, requests are served without traces
            done, why = False, repr(error)
        self._metrics.spans.labels("delivered" if done else "failed").inc(len(batch))
        if not done and time.monotonic() - self._said_s >= SAY_EVERY_S:
            self._said_s = time.monotonic()
            logger.warning("%d spans were not delivered: %s", len(batch), why)


def open_traces(endpoint: str, sample_ratio: float, registry: CollectorRegistry, process: str) -> Traces:
    """endpoint, sample_ratio: as in `tracing`. process: as spans name it.

    Raises ConfigError for an endpoint that is none, and without the extra.
    """
    metrics = TraceMetrics(registry)
    if not endpoint:
        return Traces()
    try:
        exporter, to_sdk = _exporter(endpoint), _to_sdk(process)
        from opentelemetry.sdk.trace.export import SpanExportResult
    except ImportError as error:
        why = f"tracing.otlp_endpoint = {endpoint!r} needs the extra `tracing` (disagg[tracing]): {error}"
        raise ConfigError(why) from error

    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # what fails is said here, once a minute

    def export(batch: Sequence[Span]) -> bool:
        return bool(exporter.export([to_sdk(span) for span in batch]) is SpanExportResult.SUCCESS)

    return OtlpTraces(sample_ratio, metrics, export, exporter.shutdown)


def _exporter(endpoint: str) -> Any:
    """Raises ConfigError and ImportError."""
    kind, address, secure = read_endpoint(endpoint)
    if kind == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

        return Grpc(endpoint=address, insecure=not secure, timeout=DELIVER_S)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

    return Http(endpoint=address, timeout=DELIVER_S)


def read_endpoint(endpoint: str) -> tuple[Literal["grpc", "http"], str, bool]:
    """What is spoken there, the address as its exporter wants it, and whether over TLS. Raises ConfigError.

    HOST:PORT, grpc:// and grpcs:// are gRPC, the latter two at port 4317 if they name none;
    http:// and https:// are HTTP, but at port 4317, which is OTLP's own for gRPC.
    """
    text = endpoint if "://" in endpoint else f"grpc://{endpoint}"
    try:
        parts = urlsplit(text)
        port, host = parts.port, parts.hostname
        split(join(host or "", port or GRPC_PORT) if "://" in endpoint else endpoint)  # with a host that can be dialled
    except ValueError:
        port, host = None, None
    if not host or parts.scheme not in ("grpc", "grpcs", "http", "https") or parts.username or parts.query:
        forms = "HOST:PORT, grpc://HOST:PORT, grpcs://HOST:PORT, http://HOST:PORT or https://HOST:PORT"
        shown = endpoint.rpartition("@")[2].partition("?")[0]  # the rest may be a secret
        raise ConfigError(f"tracing.otlp_endpoint = {shown!r}: it must be {forms}")
    secure = parts.scheme in ("grpcs", "https")
    if parts.scheme.startswith("grpc") or port == GRPC_PORT:
        return "grpc", join(host, port or GRPC_PORT), secure
    path = parts.path if parts.path.strip("/") else HTTP_PATH
    return "http", f"{parts.scheme}://{parts.netloc}{path}", secure


def _to_sdk(process: str) -> Callable[[Span], Any]:
    """Spans as the official exporters take them. Raises ImportError."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
    from opentelemetry.trace.status import Status, StatusCode

    resource = Resource.create({"service.name": "disagg", "service.instance.id": process, "service.version": version()})
    scope = InstrumentationScope("disagg", version())
    kinds = {"server": SpanKind.SERVER, "internal": SpanKind.INTERNAL}
    sampled = TraceFlags(TraceFlags.SAMPLED)

    def context_of(trace_id: str, span_id: str) -> Any:
        return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=False, trace_flags=sampled)

    def convert(span: Span) -> Any:
        trace_id, parent = span.context.trace_id, span.parent_span_id
        return ReadableSpan(
            name=span.name,
            context=context_of(trace_id, span.context.span_id),
            parent=context_of(trace_id, parent) if parent else None,
            resource=resource,
            attributes={
                name: value[:MAX_TEXT] if isinstance(value, str) else value for name, value in span.attributes.items()
            },
            kind=kinds[span.kind],
            status=Status(StatusCode.ERROR, span.error[:MAX_TEXT]) if span.error else Status(StatusCode.UNSET),
            start_time=int(span.start_unix_s * 1e9),
            end_time=int(span.end_unix_s * 1e9),
            instrumentation_scope=scope,
        )

    return convert
