"""A real OTLP receiver, over HTTP and over gRPC, by OpenTelemetry's own protobuf package. Keeps every span that comes."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from msgspec import Struct
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)


class Got(Struct, frozen=True):
    """A span, as a collector has it. process: the resource's `service.instance.id`."""

    process: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    failed: bool


class Receiver:
    def __init__(self) -> None:
        self.endpoint = ""
        self.spans: list[Got] = []

    def take(self, request: Any) -> None:
        for of_resource in request.resource_spans:
            process = _attributes(of_resource.resource.attributes)["service.instance.id"]
            for scope in of_resource.scope_spans:
                self.spans += [
                    Got(
                        process,
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        span.kind,
                        span.start_time_unix_nano,
                        span.end_time_unix_nano,
                        _attributes(span.attributes),
                        span.status.code == 2,
                    )
                    for span in scope.spans
                ]

    def wait(self, done: Callable[[list[Got]], bool], timeout_s: float = 60.0) -> list[Got]:
        deadline_s = time.monotonic() + timeout_s
        while not done(list(self.spans)):
            assert time.monotonic() < deadline_s, (
                f"there came only {[(span.process, span.name) for span in self.spans]}"
            )
            time.sleep(0.05)
        return list(self.spans)


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@contextmanager
def over_http() -> Iterator[Receiver]:
    receiver = Receiver()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces" and self.headers.get("content-encoding") is None
            receiver.take(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.end_headers()
            self.wfile.write(ExportTraceServiceResponse().SerializeToString())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    receiver.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def over_grpc() -> Iterator[Receiver]:
    receiver = Receiver()

    class Service(TraceServiceServicer):  # type: ignore[misc]
        def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - as the protocol names it
            receiver.take(request)
            return ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(Service(), server)
    receiver.endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(0)
