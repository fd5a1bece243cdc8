"""The decoders of tokenizer.json as machines that take one token at a time and give text as soon as it is final.

    token ── stage ── stage ── ... ── text        e.g. Replace("▁", " "), ByteFallback, Fuse, Strip(" ", 1, 0)

`tokenizers` decodes whole lists only. Here each stage keeps the little it must remember: an unfinished character,
whether the text has begun. Decoders that look further back or ahead (WordPiece's clean-up, CTC) are not served.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from disagg.types.errors import ConfigError
from disagg.types.plain import clip

REPLACEMENT: Final = "�"
_SHOWN_CHARS: Final = 200  # of a decoder that is refused
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Stage(Protocol):
    """Pieces in, pieces out. A stage that sees a piece may keep some of it until it knows how it ends."""

    def feed(self, piece: str) -> Sequence[str]: ...

    def flush(self) -> Sequence[str]:
        """What was kept, given that nothing follows."""
        ...


class StagedDecoder:
    """A chain of stages, fresh for one text."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages

    def feed(self, token: str) -> str:
        return self._through(0, [token])

    def flush(self) -> str:
        out = ""
        for at, stage in enumerate(self._stages):
            out += self._through(at + 1, stage.flush())
        return out

    def _through(self, first: int, pieces: Sequence[str]) -> str:
        for stage in self._stages[first:]:
            pieces = [out for piece in pieces for out in stage.feed(piece)]
        return "".join(pieces)


def staged_decoder(spec: Mapping[str, Any]) -> StagedDecoder:
    """`spec`: the "decoder" object of tokenizer.json. Raises ConfigError for a decoder that is not served."""
    stages: list[Stage] = []
    fused = False  # from here on, stages see one long piece that arrives in parts
    for part in _flat(spec):
        kind = part.get("type")
        if kind == "ByteLevel":
            stages.append(_ByteLevel())
            fused = True
        elif kind == "ByteFallback":
            stages.append(_ByteFallback())
        elif kind == "Fuse":
            fused = True
        elif kind == "Replace" and isinstance(part.get("pattern"), dict) and "String" in part["pattern"] and not fused:
            stages.append(_Replace(part["pattern"]["String"], part["content"]))
        elif kind == "Strip":
            stages.append(_StripText(part) if fused else _StripPieces(part))
        elif kind == "Metaspace" and not fused:
            stages.append(_Metaspace(part["replacement"], part.get("prepend_scheme", "always") != "never"))
        else:
            raise ConfigError(
                f"tokenizer.json has a decoder that is not served: {clip(str(part), _SHOWN_CHARS)}; served are "
                "ByteLevel, ByteFallback, Fuse, Strip, and before Fuse also Metaspace and Replace of a fixed string"
            )
    return StagedDecoder(stages)


def byte_of(token: str) -> int | None:
    """The byte that a SentencePiece byte-fallback token such as <0x0A> stands for."""
    match = _BYTE_TOKEN.fullmatch(token)
    return int(match[1], 16) if match else None


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a byte-level token. An added token may hold characters that stand for no byte: those are text."""
    try:
        return bytes([BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token.encode("utf-8")


def _flat(spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if spec.get("type") != "Sequence":
        return [spec]
    return [part for inner in spec["decoders"] for part in _flat(inner)]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: printable Latin-1 bytes stand for themselves, the rest follow from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


BYTE_OF_CHAR: Final = _byte_alphabet()


class _ByteLevel:
    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, piece: str) -> Sequence[str]:
        text = self._utf8.decode(byte_level_bytes(piece))
        return (text,) if text else ()

    def flush(self) -> Sequence[str]:
        text = self._utf8.decode(b"", final=True)
        return (text,) if text else ()


class _ByteFallback:
    """Byte tokens become characters when complete; bytes that form none become one U+FFFD each.

    `tokenizers` spoils a whole run of byte tokens if any of it is invalid; characters that were complete before stay
    here, because they have been shown.
    """

    def __init__(self) -> None:
        self._kept = bytearray()

    def feed(self, piece: str) -> Sequence[str]:
        byte = byte_of(piece)
        if byte is None:
            return (*self.flush(), piece)
        out: list[str] = []
        self._kept.append(byte)
        while self._kept:
            try:
                out.append(self._kept.decode("utf-8"))
            except UnicodeDecodeError as error:
                if error.reason == "unexpected end of data":
                    break
                # A valid part of `_kept` would have been given out before, so its first `end` bytes form nothing.
                out.append(REPLACEMENT * error.end)
                del self._kept[: error.end]
            else:
                self._kept.clear()
        return out

    def flush(self) -> Sequence[str]:
        text = REPLACEMENT * len(self._kept)
        self._kept.clear()
        return (text,) if text else ()


class _Replace:
    def __init__(self, pattern: str, content: str) -> None:
        self._pattern, self._content = pattern, content

    def feed(self, piece: str) -> Sequence[str]:
        return (piece.replace(self._pattern, self._content),)

    def flush(self) -> Sequence[str]:
        return ()


class _Metaspace:
    """The first token loses its visible space, others show it as a space."""

    def __init__(self, replacement: str, drop_first: bool) -> None:
        self._replacement = replacement
        self._drop = drop_first

    def feed(self, piece: str) -> Sequence[str]:
        text = piece.replace(self._replacement, "" if self._drop else " ")
        self._drop = False
        return (text,)

    def flush(self) -> Sequence[str]:
        return ()


class _StripPieces:
    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._content, self._start, self._stop = spec["content"], spec["start"], spec["stop"]

    def feed(self, piece: str) -> Sequence[str]:
        start = _leading(piece, self._content, self._start)
        stop = _leading(piece[::-1], self._content, self._stop)
        return (piece[start : max(start, len(piece) - stop)],)

    def flush(self) -> Sequence[str]:
        return ()


class _StripText:
    """Strips the ends of the whole text, so it remembers whether the text has begun and keeps back what may be its end."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._content, self._to_strip, self._stop = spec["content"], spec["start"], spec["stop"]
        self._kept = ""

    def feed(self, piece: str) -> Sequence[str]:
        if not piece:
            return ()
        stripped = _leading(piece, self._content, self._to_strip)
        # Anything after the stripped characters ends the beginning.
        self._to_strip = self._to_strip - stripped if stripped == len(piece) else 0
        text = self._kept + piece[stripped:]
        end = len(text) - _leading(text[::-1], self._content, self._stop)
        self._kept = text[end:]
        return (text[:end],) if end else ()

    def flush(self) -> Sequence[str]:
        self._kept = ""
        return ()


def _leading(text: str, content: str, most: int) -> int:
    count = 0
    while count < min(most, len(text)) and text[count] == content:
        count += 1
    return count
