"""The keys file: what is in it, what is refused, and that no key is ever repeated."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.auth.keys import ApiKeys, parse_keys, read_keys
from disagg.types.errors import ConfigError

FILE = Path("keys")
KEYS = st.text("abcXYZ0123456789!~#-_./", min_size=1, max_size=20).filter(lambda key: not key.startswith("#"))
TENANTS = st.text("abcXYZ019._@:/+=-", min_size=1, max_size=20)


@given(
    tenants=st.dictionaries(KEYS, TENANTS, min_size=1), gaps=st.lists(st.sampled_from(["", "  ", "# a comment", "#x"]))
)
def test_what_was_written_is_read(tenants: dict[str, str], gaps: list[str]) -> None:
    lines = [f" {key}\t {tenant} " for key, tenant in tenants.items()]
    for at, gap in enumerate(gaps):
        lines.insert(at % (len(lines) + 1), gap)
    keys = ApiKeys(parse_keys("\r\n".join(lines).encode(), FILE))
    assert len(keys) == len(tenants)
    for key, tenant in tenants.items():
        assert keys.tenant_of(key.encode()) == tenant
        if key + "x" not in tenants:
            assert keys.tenant_of(key.encode() + b"x") is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no key"),
        (b"\n# SECRET-KEY a\n", "no key"),
        (b"ok a\nSECRET-KEY\n", "line 2: it has 1 words"),
        (b"SECRET-KEY a b", "line 1: it has 3 words"),
        (b"SECRET-KEY a\n\nSECRET-KEY b", "line 3: this key stands in an earlier line"),
        (b"SECRET-KEY\xff a", "line 1: the key must be printable ASCII"),
        (b"SECRET-KEY a\x1bb", "line 1: the tenant must"),
        (b"SECRET-KEY " + b"t" * 129, "line 1: the tenant must"),
        (b"SECRET-KEY" * 500 + b" a", "line 1: the key must be"),
    ],
)
def test_nonsense_is_refused_with_its_line_and_without_the_key(content: bytes, said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_keys(content, FILE)
    assert said in str(refusal.value)
    assert "SECRET" not in str(refusal.value)


def test_a_file_that_is_not_there_or_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_keys(tmp_path / "keys")
    with pytest.raises(ConfigError, match=r"^auth.api_keys_file = .* is no regular file"):
        read_keys(tmp_path)


def test_keys_are_not_kept() -> None:
    keys = ApiKeys({b"SECRET-KEY": "a"})
    assert "SECRET" not in repr(vars(keys))
