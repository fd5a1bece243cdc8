"""What tenants may ask for: the file and the buckets."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.auth import quotas
from disagg.auth.quotas import Limits, Quotas, ReloadedQuotas, Use, parse_limits, read_limits
from disagg.config.check import check_config
from disagg.config.tree import AuthConfig, Config
from disagg.types.errors import ConfigError, QuotaExceeded

FILE = Path("limits")
NUMBERS = st.one_of(st.none(), st.integers(1, 10**12))
LIMITS = st.builds(Limits, requests_per_minute=NUMBERS, tokens_per_minute=NUMBERS, concurrent=NUMBERS).filter(
    lambda limits: limits != Limits()
)
TENANTS = st.text("abcXYZ019._@:/+=-", min_size=1, max_size=20)


@given(st.dictionaries(st.one_of(TENANTS, st.just("*")), LIMITS, min_size=1))
def test_what_was_written_is_read(limits: dict[str, Limits]) -> None:
    lines = ["# a comment", ""]
    for tenant, each in limits.items():
        said = [f"{key}={getattr(each, key)}" for key in quotas.KEYS if getattr(each, key) is not None]
        lines.append(" ".join([tenant, *said]))
    assert parse_limits("\r\n".join(lines).encode(), FILE) == limits


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no limit in it"),
        (b"a", "line 1: it says no limit"),
        (b"\na concurrent", "line 2: 'concurrent': it must be LIMIT=NUMBER"),
        (b"a concurrent=1 concurrent=2", "each LIMIT once"),
        (
            b"a requests_per_hour=1",
            "'requests_per_hour=1': it must be LIMIT=NUMBER, each LIMIT once, of requests_per_minute,",
        ),
        *((b"a concurrent=" + value, "a whole number from 1") for value in (b"0", b"-1", b"1.5", b"", b"1" * 99)),
        ("a concurrent=٣".encode(), "a whole number from 1"),
        (b"a concurrent=1\na concurrent=2", "line 2: a stands in an earlier line"),
        (b"a\x1bb concurrent=1", "line 1: the tenant must"),
        (b"** concurrent=1", "line 1: the tenant must"),
    ],
)
def test_nonsense_is_refused_with_its_line(content: bytes, said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_limits(content, FILE)
    assert said in str(refusal.value) and "auth.limits_file" in str(refusal.value)


def test_a_file_that_cannot_be_used_keeps_a_router_from_starting_and_changes_nothing_later(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_limits(tmp_path / "limits")
    with pytest.raises(ConfigError, match=r"auth\.limits_file = .*it needs auth\.api_keys_file"):
        check_config(Config(auth=AuthConfig(limits_file="limits")))
    file = tmp_path / "limits"
    file.write_text("a concurrent=1")
    found = ReloadedQuotas(AuthConfig(limits_file=str(file)))
    found.begin("a", 0.0)
    for content in ("a concurrent=x", "a concurrent=2"):
        with pytest.raises(QuotaExceeded, match="1 requests of a are under way; 1 at once"):
            found.begin("a", 0.0)
        file.write_text(content)
        assert found._file is not None and found._file.look() == (content == "a concurrent=2")
    found.begin("a", 0.0)


EVENTS = st.lists(
    st.tuples(st.floats(0.0, 40.0), st.sampled_from(["begin", "end"]), st.integers(0, 500)), min_size=1, max_size=120
)


@given(EVENTS, st.integers(1, 30), st.integers(1, 1000), st.integers(1, 4))
def test_nobody_has_more_than_its_rate_and_who_waits_as_told_is_let_in(
    events: list[tuple[float, str, int]], requests: int, tokens: int, concurrent: int
) -> None:
    limits = Limits(requests_per_minute=requests, tokens_per_minute=tokens, concurrent=concurrent)
    found, now_s = Quotas(lambda: {"a": limits}), 0.0
    running: list[Use] = []
    begun = used = largest = 0
    for after_s, what, count in events:
        now_s += after_s
        if what == "end" and running:
            running.pop().end()
            continue
        try:
            use = found.begin("a", now_s)
        except QuotaExceeded as refused:
            if len(running) == concurrent:
                continue
            now_s += refused.retry_after_s + 1e-6
            try:
                use = found.begin("a", now_s)
            except QuotaExceeded as again:  # the other rate was used up, too
                now_s += again.retry_after_s + 1e-6
                use = found.begin("a", now_s)
        use.tokens(count)
        running.append(use)
        begun, used, largest = begun + 1, used + count, max(largest, count)
        assert len(running) <= concurrent
        assert begun <= requests * (1 + now_s / 60) + 1e-3
        assert used <= tokens * (1 + now_s / 60) + largest + 1e-3, (
            "no more than one request overdraws that ended at once"
        )


def test_whoever_has_no_line_has_the_limits_of_everybody_each_its_own() -> None:
    found = Quotas(lambda: {"*": Limits(concurrent=1), "a": Limits(concurrent=2)})
    for tenant in ("a", "a", "b", "c"):
        found.begin(tenant, 0.0)
    for tenant in ("a", "b", "c"):
        with pytest.raises(QuotaExceeded):
            found.begin(tenant, 0.0)
    assert found.begin("", 0.0) is Use.nothing, "nobody's key was asked for"
    assert Quotas(lambda: {"a": Limits(concurrent=2)}).begin("b", 0.0) is Use.nothing


def test_who_runs_nothing_is_forgotten_before_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "MAX_TENANTS", 10)
    found = Quotas(lambda: {"*": Limits(concurrent=1)})
    kept = found.begin("runs", 0.0)
    for number in range(50):
        found.begin(f"t{number}", 0.0).end()
    assert len(found._tenants) <= 11
    with pytest.raises(QuotaExceeded):
        found.begin("runs", 0.0)
    kept.end()
    kept.end()
    found.begin("runs", 0.0)
