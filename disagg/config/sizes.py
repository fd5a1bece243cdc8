"""Reads and writes sizes ("512MiB"), durations ("500ms") and switches ("on"). Pure; knows no setting by name.

Every parser takes what a file, a flag or an environment variable may hold and raises ValueError with what is allowed.
"""

from __future__ import annotations

import math
import re

SIZE_ALLOWED = (
    "a number of bytes, or a number with B, KiB, MiB, GiB, TiB, kB, MB, GB or TB (or as Kubernetes writes them: "
    'Ki, Mi, Gi, Ti, k, M, G, T), such as "512MiB"'
)
DURATION_ALLOWED = 'a number of seconds, or a number with us, ms, s, m or h, such as "500ms"'
SWITCH_ALLOWED = "on, off, true or false"

_SIZE_UNITS = {
    "": 1,
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_SIZE_UNITS |= {unit.removesuffix("b"): scale for unit, scale in _SIZE_UNITS.items()}  # as Kubernetes writes them
_BINARY_UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_DURATION_UNITS = {"us": 1e-6, "ms": 1e-3, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_QUANTITY = re.compile(r"([+-]?\d+(?:_\d+)*(?:\.\d+)?(?:e[+-]?\d+)?)\s*([a-z]*)", re.IGNORECASE)
_SWITCHES = {"on": True, "true": True, "yes": True, "1": True, "off": False, "false": False, "no": False, "0": False}


def parse_size(value: object) -> int:
    """Bytes. Fractions are fine as long as they come to whole bytes ("1.5GiB")."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(SIZE_ALLOWED)
    if isinstance(value, int):
        return value
    number, unit = _quantity(str(value), SIZE_ALLOWED)
    if unit not in _SIZE_UNITS or (unit == "m" and "m" in str(value)):  # a small m is a thousandth there
        raise ValueError(SIZE_ALLOWED)
    scale = _SIZE_UNITS[unit]
    if re.fullmatch(r"[+-]?[\d_]+", number):
        return int(number) * scale  # exact, however large
    size = float(number) * scale
    if not math.isfinite(size) or size != int(size):
        raise ValueError(SIZE_ALLOWED + "; it must come to whole bytes")
    return int(size)


def format_size(num_bytes: int) -> int | str:
    """The shortest exact way to write it: "512MiB" where a binary unit divides it, else the plain number."""
    for unit, scale in _BINARY_UNITS:
        if num_bytes and num_bytes % scale == 0:
            return f"{num_bytes // scale}{unit}"
    return num_bytes


def show_bytes(num_bytes: int) -> str:
    """For people: "0 B", "250 KiB", "1.25 GiB"."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1023.5:
            break
        size, unit = size / 1024, larger
    digits = 0 if unit == "B" or size >= 99.95 else 1 if size >= 9.995 else 2
    number = f"{size:.{digits}f}"
    return f"{number.rstrip('0').rstrip('.') if digits else number} {unit}"


def parse_duration(value: object) -> float:
    """Seconds."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(DURATION_ALLOWED)
    if isinstance(value, int | float):
        seconds = float(value)
    else:
        number, unit = _quantity(value, DURATION_ALLOWED)
        if unit not in _DURATION_UNITS:
            raise ValueError(DURATION_ALLOWED)
        seconds = float(number) * _DURATION_UNITS[unit]
    if not math.isfinite(seconds):
        raise ValueError(DURATION_ALLOWED)
    return seconds


def parse_switch(value: object) -> bool:
    """True or False."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in _SWITCHES:
        return _SWITCHES[value.strip().lower()]
    raise ValueError(SWITCH_ALLOWED)


def _quantity(text: str, allowed: str) -> tuple[str, str]:
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        raise ValueError(allowed)
    return match.group(1), match.group(2).lower()
