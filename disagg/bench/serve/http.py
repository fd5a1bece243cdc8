"""A client of HTTP/1.1 that costs little for each chunk it reads: httptools on bare asyncio protocols, connections kept.

A client library takes some 0.1 ms for a chunk of a stream, so that beyond some ten thousand chunks a second the client is
what is measured. Here a chunk costs a few microseconds, and its time is taken when the loop reads it from its socket. Knows
one server; no redirects, proxies, cookies or compression. Deadlines are the caller's: cancel, and the connection is closed.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

from disagg.auth.tls import trusting
from disagg.types.errors import ConfigError

CONNECT_S = 10.0
HEAD_BYTES = 64 << 10
Heard = Callable[[bytes, float], None]  # (a part of the body, when it came); what it raises ends the exchange


class ExchangeLost(Exception):
    """The connection failed. unheard: nothing of the answer had come, on a connection that had been used before."""

    def __init__(self, why: str, unheard: bool = False) -> None:
        super().__init__(why)
        self.unheard = unheard


class Origin:
    """Scheme, host, port and path of a URL such as http://127.0.0.1:8000 or https://host/v1. Raises ConfigError."""

    def __init__(self, url: str, ca: Path | None = None) -> None:
        """ca: see `trusting`."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"--url {url}: {error}") from error
        fits = url.isascii() and url.isprintable() and " " not in url and not parts.query and not parts.fragment
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None or not fits:
            raise ConfigError(f"--url {url}: it must be like http://127.0.0.1:8000")
        self.tls = trusting(ca) if parts.scheme == "https" else None
        self.host = parts.hostname
        self.port = port or (443 if self.tls else 80)
        self.authority = parts.netloc
        path = parts.path.rstrip("/").removesuffix("/completions")
        self.path = path if path.endswith("/v1") else f"{path}/v1"  # also of URLs that name the API's root
        self.url = f"{parts.scheme}://{parts.netloc}{self.path}"


class _Exchange:
    """One request's answer, as far as it is here."""

    def __init__(self, heard: Heard) -> None:
        self.heard = heard
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.began = False
        self.head_whole = False
        self.length_said = False
        self.head_bytes = 0

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def end(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


class Connection(asyncio.Protocol):
    """One exchange after the other."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.used = False
        self.status = 0
        self.content_type = b""
        self._keep = False
        self._exchange: _Exchange | None = None
        self._parser: Any = None
        self._now_s = 0.0

    # ---- asyncio's

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:  # nobody asked
            self.close()
            return
        self._now_s = time.perf_counter()
        exchange.began = True
        if not exchange.head_whole:
            exchange.head_bytes += len(data)
            if exchange.head_bytes > HEAD_BYTES + len(data):
                exchange.fail(ExchangeLost(f"a head of more than {HEAD_BYTES} bytes"))
                self.close()
                return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            cause = error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else None
            exchange.fail(cause if isinstance(cause, Exception) else ExchangeLost(f"no HTTP: {error}"))
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        exchange, self._exchange = self._exchange, None
        self.transport = None
        if exchange is None:
            return
        if exchange.head_whole and not exchange.length_said and error is None:
            exchange.end()  # the end of the connection is the end of the body
        else:
            why = f"the connection was lost: {error}" if error else "the server closed the connection"
            exchange.fail(ExchangeLost(why, unheard=self.used and not exchange.began))

    # ---- httptools'

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-type":
            self.content_type = value.lower()
        elif name in (b"content-length", b"transfer-encoding") and self._exchange is not None:
            self._exchange.length_said = True

    def on_headers_complete(self) -> None:
        assert self._exchange is not None
        self.status = self._parser.get_status_code()
        self._exchange.head_whole = self.status >= 200

    def on_body(self, body: bytes) -> None:
        assert self._exchange is not None
        self._exchange.heard(body, self._now_s)

    def on_message_complete(self) -> None:
        if self.status < 200 or self._exchange is None:
            return
        exchange, self._exchange = self._exchange, None
        self._keep = self._parser.should_keep_alive()
        exchange.end()

    # ---- the client's

    @property
    def reusable(self) -> bool:
        return self._keep and self._exchange is None and self.transport is not None and not self.transport.is_closing()

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    async def ask(self, request: bytes, heard: Heard) -> None:
        """Until the whole answer is here. Raises ExchangeLost, or what `heard` raises."""
        if self.transport is None:
            raise ExchangeLost("the server closed the connection", unheard=self.used)
        self._exchange = exchange = _Exchange(heard)
        self._parser = httptools.HttpResponseParser(self)
        self.status, self.content_type, self._keep = 0, b"", False
        self.transport.write(request)
        try:
            await exchange.done
        except BaseException:
            self._exchange = None
            self.close()
            raise
        finally:
            self.used = True


class Client:
    """Of one server. Connections are made as they are needed, and kept for who comes next."""

    def __init__(self, origin: Origin, api_key: str = "") -> None:
        self.origin = origin
        self._idle: list[Connection] = []
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError("the API key must be printable ASCII")
        headers = [f"host: {origin.authority}", "accept: text/event-stream, application/json"]
        if api_key:
            headers.append(f"authorization: Bearer {api_key}")
        self._headers = "\r\n".join(headers)

    async def post(self, path: str, body: bytes, heard: Heard) -> Connection:
        """heard: of the body, whatever the status. The connection says status and content type."""
        head = f"POST {self.origin.path}{path} HTTP/1.1\r\n{self._headers}\r\ncontent-type: application/json\r\n"
        return await self._exchange(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body, heard)

    async def get(self, path: str, heard: Heard) -> Connection:
        return await self._exchange(f"GET {self.origin.path}{path} HTTP/1.1\r\n{self._headers}\r\n\r\n".encode(), heard)

    async def _exchange(self, request: bytes, heard: Heard) -> Connection:
        """A kept connection that the server closed before it heard of the request is replaced by a new one."""
        while True:
            connection = self._kept() or await self._connect()
            try:
                await connection.ask(request, heard)
            except ExchangeLost as lost:
                if lost.unheard:
                    continue
                raise
            if connection.reusable:
                self._idle.append(connection)
            else:
                connection.close()
            return connection

    def _kept(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        return None

    async def _connect(self) -> Connection:
        origin = self.origin
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, connection = await loop.create_connection(Connection, origin.host, origin.port, ssl=origin.tls)
        except TimeoutError as error:
            raise ExchangeLost(f"no connection in {CONNECT_S:g} s") from error
        except ssl.SSLCertVerificationError as error:
            said = f"its certificate is not taken ({error.verify_message})"
            raise ExchangeLost(f"no connection: {said}; --ca FILE must name who signed it") from error
        except OSError as error:  # of TLS, too
            raise ExchangeLost(f"no connection: {error.strerror or error}") from error
        return connection

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
