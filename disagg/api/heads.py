"""What HTTP itself says is wrong with the head of a request, and the refusal for it. Pure.

The parser takes more than HTTP allows: any Host, codings that nobody undoes, expectations that nobody meets. Whoever reads
the same bytes in another way, a proxy for one, would see other requests in them; so what is not plain is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from disagg.api.errors import Fault
from disagg.types.plain import quoted

Refusal = tuple[Fault, str]  # what the client is told, and the reason under which it is counted

_HOST = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=%:\[\]-]*")  # of a name, an address in brackets, and a port
_WHOLE_URL = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*://([^/?#]*)")  # as a target, and the host that it names
_VERSION_REASONS = frozenset({"Invalid HTTP version", "Expected dot", "Pause on PRI/Upgrade"})  # in the parser's words


def fault_of_protocol(status: int, message: str, code: str, retry_after_s: int | None = None) -> Fault:
    kind = "service_unavailable_error" if status == 503 else "invalid_request_error"
    return Fault(status, kind, message, code=code, retry_after_s=retry_after_s)


def fault_of_head(version: str, headers: Sequence[tuple[bytes, bytes]]) -> Refusal | None:
    """headers: names in lower case. None: the head is in order."""
    if version not in ("1.0", "1.1"):
        return _bad_version(f"HTTP/{version}")
    return _fault_of_host(version, headers) or _fault_of_length(version, headers) or _fault_of_expect(headers)


def host_of_target(target: bytes) -> bytes | None:
    """The host and port that a request for a whole URL names, as proxies are sent them, or None. It counts, and the Host header
    does not (RFC 9112, 3.2.2): a check of that alone would be of another host than the one that was asked.
    """
    whole = _WHOLE_URL.match(target)
    return None if whole is None else whole[1]


def fault_of_target_host(host: bytes) -> Refusal | None:
    """The refusal of a request target's host (from `host_of_target`); None if it is a host without a user name."""
    if host and _HOST.fullmatch(host):
        return None
    why = f"the request's target names {_shown(host)}, which is no host"
    return fault_of_protocol(400, why, "malformed_request"), "host"


def unreadable(why: str) -> Refusal:
    """why: the parser's words for what it stopped at."""
    if why in _VERSION_REASONS:
        return _bad_version("this version")
    return fault_of_protocol(
        400, f"this is not an HTTP/1.1 request that can be read: {why}", "malformed_request"
    ), "malformed"


def _bad_version(what: str) -> Refusal:
    message = f"{what} is not spoken here; HTTP/1.1 and HTTP/1.0 are"
    return fault_of_protocol(505, message, "unsupported_http_version"), "version"


def _fault_of_host(version: str, headers: Sequence[tuple[bytes, bytes]]) -> Refusal | None:
    hosts = _values(headers, b"host")
    if version == "1.1" and not hosts:
        why = "the request has no Host header; HTTP/1.1 asks for one"
    elif len(hosts) > 1:
        why = f"the request has {len(hosts)} Host headers; it may have one"
    elif hosts and not _HOST.fullmatch(hosts[0]):
        why = f"the Host header is {_shown(hosts[0])}, which is no host"
    else:
        return None
    return fault_of_protocol(400, why, "malformed_request"), "host"


def _fault_of_length(version: str, headers: Sequence[tuple[bytes, bytes]]) -> Refusal | None:
    codings = _listed(headers, b"transfer-encoding")
    if not codings:
        return None
    if version == "1.0":
        status, why = 400, "the request has a Transfer-Encoding, which HTTP/1.0 does not know"
    elif _values(headers, b"content-length"):
        status, why = 400, "the request has both a Content-Length and a Transfer-Encoding; it may have one of them"
    elif other := [coding for coding in codings if coding.lower() != b"chunked"]:
        status, why = 501, f"Transfer-Encoding {_shown(other[0])} is not served; chunked is, alone"
    elif len(codings) > 1:
        status, why = 400, "the request's Transfer-Encoding is chunked more than once; it may be so once"
    else:
        return None
    code = "unsupported_transfer_encoding" if status == 501 else "malformed_request"
    return fault_of_protocol(status, why, code), "transfer_encoding"


def _fault_of_expect(headers: Sequence[tuple[bytes, bytes]]) -> Refusal | None:
    other = [each for each in _listed(headers, b"expect") if each.lower() != b"100-continue"]
    if not other:
        return None
    why = f"Expect: {_shown(other[0])} cannot be met; 100-continue can"
    return fault_of_protocol(417, why, "expectation_failed"), "expectation"


def _values(headers: Sequence[tuple[bytes, bytes]], name: bytes) -> list[bytes]:
    return [value.strip() for each, value in headers if each == name]


def _listed(headers: Sequence[tuple[bytes, bytes]], name: bytes) -> list[bytes]:
    """The elements of a header that is a list, of all its lines."""
    return [part for value in _values(headers, name) for each in value.split(b",") if (part := each.strip())]


def _shown(value: bytes) -> str:
    return quoted(value.decode("latin-1"))
