"""W3C trace context: which trace a request belongs to, as it is passed on in `traceparent`. Pure; randomness is an argument."""

from __future__ import annotations

import re
from collections.abc import Callable

from msgspec import Struct

MAX_CHARS = 512  # of what is looked at: newer versions may say more than the 55 characters that count
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1


class TraceContext(Struct, frozen=True):
    """trace_id: 16 bytes, span_id: 8 bytes, of which neither is 0, in lower-case hexadecimal."""

    trace_id: str
    span_id: str
    sampled: bool

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{_SAMPLED if self.sampled else 0:02x}"


def read_traceparent(text: str) -> TraceContext | None:
    """None for what is none: as the specification wants it, whoever says nonsense begins a new trace."""
    found = _FORM.fullmatch(text.strip()) if len(text) <= MAX_CHARS else None
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))


def begun(traceparent: str, sample_ratio: float, draw: Callable[[int], bytes]) -> TraceContext | None:
    """Of a new request: within the trace that its client names, which also says whether it is sampled; else one of its own, of
    which `sample_ratio` are. None: it is not traced.

    draw: so many random bytes.
    """
    parent = read_traceparent(traceparent)
    if parent is not None:
        return TraceContext(parent.trace_id, _id(draw, 8), True) if parent.sampled else None
    trace_id = _id(draw, 16)
    # By the last 8 bytes, as OpenTelemetry's own sampler decides.
    if int(trace_id[16:], 16) >= round(sample_ratio * (1 << 64)):
        return None
    return TraceContext(trace_id, _id(draw, 8), True)


def _id(draw: Callable[[int], bytes], size: int) -> str:
    drawn = draw(size)
    return (drawn if any(drawn) else b"\x01" * size).hex()
