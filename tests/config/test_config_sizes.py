"""How sizes, durations and switches may be written."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.config.sizes import format_size, parse_duration, parse_size, parse_switch


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("512MiB", 512 << 20),
        ("64 MiB", 64 << 20),
        ("1GiB", 1 << 30),
        ("1.5 GiB", 3 << 29),
        ("2gib", 2 << 30),
        ("1MB", 1_000_000),
        ("4096", 4096),
        ("4_096 B", 4096),
        (4096, 4096),
        (4096.0, 4096),
        ("2Gi", 2 << 30),
        ("1.5Ti", 3 << 39),
        ("512 mi", 512 << 20),
        ("64Ki", 64 << 10),
        ("2G", 2 * 10**9),
        ("3M", 3_000_000),
        ("8k", 8000),
        ("1T", 10**12),
    ],
)
def test_a_size_may_be_written_with_or_without_a_unit(text: object, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "MiB", "512 MiBs", "5 12", True, None, "0.3B", "1e400", [1], "400m", "5 m", "2i", "1Pi"]
)
def test_what_is_not_a_size_is_refused_with_what_is_allowed(text: object) -> None:
    with pytest.raises(ValueError, match="a number of bytes"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("10s", 10.0), ("500ms", 0.5), ("2 m", 120.0), ("1h", 3600.0), ("1.5", 1.5), (3, 3.0), ("250us", 0.00025)],
)
def test_a_duration_may_be_written_with_or_without_a_unit(text: object, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "10 seconds", True, None, "nan", "inf", float("inf")])
def test_what_is_not_a_duration_is_refused_with_what_is_allowed(text: object) -> None:
    with pytest.raises(ValueError, match="a number of seconds"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "value"), [("on", True), ("OFF", False), ("true", True), ("false", False), (True, True)]
)
def test_a_switch_is_on_or_off(text: object, value: bool) -> None:
    assert parse_switch(text) is value


@pytest.mark.parametrize("text", ["", "maybe", 1, None])
def test_what_is_not_a_switch_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="on, off"):
        parse_switch(text)


@settings(derandomize=True, deadline=None)
@given(st.integers(min_value=0, max_value=1 << 70))
def test_every_size_reads_back_as_it_was_written(num_bytes: int) -> None:
    assert parse_size(format_size(num_bytes)) == num_bytes
    assert parse_size(str(format_size(num_bytes))) == num_bytes
