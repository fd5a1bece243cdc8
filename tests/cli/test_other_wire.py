"""A port that speaks TLS to who does not, or the other way round: the message names the option."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from disagg.cli.generate import GenerateOptions, ask
from disagg.cli.terminal import get_http
from disagg.types.errors import DisaggError

TLS_ALERT = b"\x15\x03\x03\x00\x02\x02\x46"  # fatal, protocol_version: what a TLS port says to plain text
PLAIN = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


@contextmanager
def port_that_says(words: bytes) -> Iterator[str]:
    """Its address. It answers whatever comes with these words, and closes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.settimeout(5)
                    connection.recv(1)
                    connection.sendall(words)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("scheme", "words", "hint"),
    [
        ("http", TLS_ALERT, "If it speaks TLS, say --http https://"),
        ("https", PLAIN, "If it speaks no TLS, say --http http://"),
    ],
)
def test_http_to_a_port_of_the_other_kind_names_tls(scheme: str, words: bytes, hint: str) -> None:
    with port_that_says(words) as address, pytest.raises(DisaggError, match="no router answers") as caught:
        get_http(f"{scheme}://{address}", "/status")
    assert hint in str(caught.value)


def test_nobody_is_no_matter_of_tls() -> None:
    with pytest.raises(DisaggError, match="no router answers") as caught:
        get_http("http://127.0.0.1:1", "/status")
    assert "TLS" not in str(caught.value)


async def test_grpc_to_a_port_that_speaks_tls_names_it() -> None:
    with port_that_says(TLS_ALERT) as address, pytest.raises(DisaggError, match=r"If it speaks TLS, say --ca FILE"):
        await ask("hello", GenerateOptions(address=address, model="m", chat=False), echo=False)
