"""A real S3 endpoint on loopback (moto's), and faults that it is told to have."""

from __future__ import annotations

import http.client
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

BUCKET = "kv-of-tests"
_SIGNED = "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
Fault = Callable[[dict[str, Any], Callable[..., Any], Callable[..., Iterable[bytes]]], Iterable[bytes]]


class _Quiet(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log(self, type: str, message: str, *args: Any) -> None:
        pass


class S3Server:
    """fault: what happens to each request instead; None: nothing. requests: how many came.

    spoiled: how many met a fault, by method and by what of: "GET spans", "PUT parts".
    """

    def __init__(self) -> None:
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._one_at_a_time = threading.Lock()  # moto fails where two replace one object at once
        self.fault: Fault | None = None
        self.requests = 0
        self.spoiled: Counter[str] = Counter()
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = make_server("127.0.0.1", 0, self._serve, threaded=True, request_handler=_Quiet)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.lose_bucket()
        self.make_bucket()

    def _serve(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        self.requests += 1
        fault = self.fault
        if fault is not None and not environ["PATH_INFO"].startswith("/moto-api"):
            kind = next((kind for kind in ("spans", "parts", "reads") if f"/{kind}/" in environ["PATH_INFO"]), "else")
            self.spoiled[f"{environ['REQUEST_METHOD']} {kind}"] += 1
            return fault(environ, start_response, self._backend)
        return self._backend(environ, start_response)

    def _backend(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        with self._one_at_a_time:
            return [b"".join(self._moto(environ, start_response))]

    def ask(self, method: str, path: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=30)
        connection.request(method, path, headers={"Authorization": _SIGNED})
        status = connection.getresponse().status
        connection.close()
        return status

    def lose_bucket(self) -> None:
        """With all that is in it."""
        self.ask("POST", "/moto-api/reset")

    def make_bucket(self) -> None:
        assert self.ask("PUT", f"/{BUCKET}") == 200

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}/folder"

    @property
    def options(self) -> dict[str, bool | int | float | str]:
        return {
            "endpoint": f"http://127.0.0.1:{self._server.port}",
            "allow_http": True,
            "access_key_id": "a",
            "secret_access_key": "b",
            "region": "us-east-1",
            "max_retries": 0,
        }

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextmanager
def s3_server() -> Iterator[S3Server]:
    server = S3Server()
    try:
        yield server
    finally:
        server.fault = None
        server.close()


# ---- faults


def says_500(environ: dict[str, Any], start_response: Callable[..., Any], _: Any) -> Iterable[bytes]:
    start_response("500 Internal Server Error", [("Content-Length", "0")])
    return [b""]


def says_nothing_for(seconds: float) -> Fault:
    def fault(environ: dict[str, Any], start_response: Callable[..., Any], backend: Any) -> Iterable[bytes]:
        time.sleep(seconds)
        return says_500(environ, start_response, backend)

    return fault


def says_nothing_until(released: threading.Event) -> Fault:
    def fault(environ: dict[str, Any], start_response: Callable[..., Any], backend: Any) -> Iterable[bytes]:
        released.wait(300)
        return says_500(environ, start_response, backend)

    return fault


def _body_of(environ: dict[str, Any], start_response: Callable[..., Any], backend: Any) -> bytes:
    """The true answer's body; its head has been sent."""
    return b"".join(backend(environ, start_response))


def ends_early(environ: dict[str, Any], start_response: Callable[..., Any], backend: Any) -> Iterable[bytes]:
    """The head tells the whole length, and half of it comes before the connection ends."""
    body = _body_of(environ, start_response, backend)
    return [body[: len(body) // 2]]


def cuts_bodies(environ: dict[str, Any], start_response: Callable[..., Any], backend: Any) -> Iterable[bytes]:
    """Half of each body, with a head that fits it."""

    def shorter(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
        kept = [each for each in headers if each[0].lower() not in ("content-length", "content-range")]
        sent.append((status, kept, rest))

    sent: list[Any] = []
    body = b"".join(backend(environ, shorter))
    [(status, headers, rest)] = sent
    half = (
        body if environ["REQUEST_METHOD"] != "GET" or "list-type" in environ["QUERY_STRING"] else body[: len(body) // 2]
    )
    start_response(status, [*headers, ("Content-Length", str(len(half)))], *rest)
    return [half]


def only(kind: str, fault: Fault) -> Fault:
    """Of objects of one kind: spans, parts or reads."""

    def chosen(environ: dict[str, Any], start_response: Callable[..., Any], backend: Any) -> Iterable[bytes]:
        if f"/{kind}/" in environ["PATH_INFO"]:
            return fault(environ, start_response, backend)
        answer: Iterable[bytes] = backend(environ, start_response)
        return answer

    return chosen


def drips(environ: dict[str, Any], start_response: Callable[..., Any], backend: Any) -> Iterable[bytes]:
    """A body that comes a few bytes at a time."""
    body = _body_of(environ, start_response, backend)
    for first in range(0, len(body), 16):
        yield body[first : first + 16]
        time.sleep(0.05)
