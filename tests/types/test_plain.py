"""Text that others wrote, as it is shown."""

from __future__ import annotations

import unicodedata
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.types.plain import clip, fit_for_header, fit_for_status, one_line, printable, printable_text, quoted

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=300)  # surrogates too


@settings(derandomize=True, deadline=None, max_examples=500)
@given(ANY_TEXT)
def test_what_is_shown_is_one_line_without_controls_and_can_be_encoded(text: str) -> None:
    for shown in (printable(text), one_line(text, 50), quoted(text, 50)):
        shown.encode()
        assert len(shown.splitlines()) <= 1
        assert not [char for char in shown if unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp")]
        assert not [char for char in shown if unicodedata.bidirectional(char) in BIDI_CONTROLS]


BIDI_CONTROLS = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


@settings(derandomize=True, deadline=None, max_examples=500)
@given(ANY_TEXT, st.integers(8, 400))
def test_what_goes_into_headers_fits(text: str, most_bytes: int) -> None:
    status = fit_for_status(text, most_bytes)
    assert len(quote(status, safe=SAFE_IN_STATUS)) <= most_bytes
    header = fit_for_header(text, 10)
    assert header.isascii() and (header.isprintable() or not header)
    assert len(header) <= 100


SAFE_IN_STATUS = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")


def test_ordinary_text_stays_as_it_is() -> None:
    for text in ("smollm2-135m", "Zürich, 北京, שלום, 👩‍🚀", ""):
        assert printable(text) == text == fit_for_status(text, 200)
        assert clip(text) == text


def test_long_text_is_clipped_and_says_by_how_much() -> None:
    assert clip("x" * 1000, 10) == "x" * 10 + "... (990 more characters)"
    assert quoted("x" * 1000, 10) == "'" + "x" * 10 + "'... (1000 characters)"
    assert len(quoted("\x00" * (8 << 20))) < 1000
    assert len(one_line("\U000e0041" * (8 << 20), 100)) < 1100


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a\nb", "a\\nb"), ("\x1b[31m", "\\x1b[31m"), ("\u202e", "\\u202e"), ("\ud800", "\\ud800"), ("\x9b", "\\x9b")],
)
def test_controls_are_written_as_in_source(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_text_of_several_lines_keeps_its_lines() -> None:
    assert printable_text("a\n\tb\r\x1b") == "a\n\tb\\r\\x1b"
