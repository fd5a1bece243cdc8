"""Text that others wrote (clients, peers, files), made fit to be shown: short, on one line, without control characters.

Such text goes into logs, errors, trailers and terminals. There a line feed forges a line, an escape sequence drives a
terminal, a bidi override reorders what is read, and a megabyte is a megabyte in every copy. Pure.
"""

from __future__ import annotations

import re
from typing import Final

NAME_CHARS: Final = 128  # of a name or value that an error repeats
MESSAGE_CHARS: Final = 2000  # of a whole message

# Controls (C0, DEL, C1), line and paragraph separators, bidi overrides and isolates, halves of surrogate pairs, tags.
_UNFIT: Final = "\x00-\x1f\x7f-\x9f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f"
_UNFIT_IN_LINE: Final = re.compile(f"[{_UNFIT}]")
_UNFIT_IN_TEXT: Final = re.compile(f"(?![\n\t])[{_UNFIT}]")
_SHORT: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def printable(text: str) -> str:
    """One line: what is unfit is written as in Python's source (\\n, \\x1b, \\u2028). Up to ten times as long."""
    return _UNFIT_IN_LINE.sub(_escaped, text)


def printable_text(text: str) -> str:
    """The same for text of several lines: line feeds and tabs stay."""
    return _UNFIT_IN_TEXT.sub(_escaped, text)


def clip(text: str, most_chars: int = MESSAGE_CHARS) -> str:
    """The beginning, and how much was cut off."""
    if len(text) <= most_chars:
        return text
    return f"{text[:most_chars]}... ({len(text) - most_chars} more characters)"


def quoted(text: str, most_chars: int = NAME_CHARS) -> str:
    """In quotes, clipped and escaped: for a name or value that an error repeats."""
    if len(text) <= most_chars:
        return repr(text)
    return f"{text[:most_chars]!r}... ({len(text)} characters)"


def one_line(text: str, most_chars: int = MESSAGE_CHARS) -> str:
    """Clipped, then escaped: the work is bounded whatever came."""
    return printable(clip(text, most_chars))


def fit_for_status(text: str, most_bytes: int) -> str:
    """One line whose percent-encoding has at most so many bytes: for the details of a gRPC status.

    They travel as an HTTP/2 header, and beyond 8 KiB of headers together the stream is reset instead.
    """
    line = printable(text[:most_bytes])
    size = 0
    for at, char in enumerate(line):
        size += 1 if " " <= char <= "~" and char != "%" else 3 * len(char.encode())
        if size > most_bytes - 3:
            return line[:at] + "..."
    return line if len(text) <= most_bytes else line + "..."


def fit_for_header(text: str, most_chars: int = NAME_CHARS) -> str:
    """Printable ASCII, clipped: for trailing metadata and HTTP headers, which may hold nothing else."""
    return printable(text[:most_chars]).encode("ascii", "backslashreplace").decode("ascii")


def _escaped(found: re.Match[str]) -> str:
    char = found[0]
    if char in _SHORT:
        return _SHORT[char]
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
