"""What tenants may ask for: the file and the buckets."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.auth import quotas
from disagg.auth.quotas import Limits, Quotas, ReloadedQuotas, Use, parse_limits, read_limits
from disagg.config.check import check_config
from disagg.config.tree import AuthConfig, Config
from disagg.types.errors import (
    ConfigError,
    DisaggError,
    InvalidRequest,
    QuotaExceeded,
    RequestFailed,
    Shed,
    Unavailable,
)

FILE = Path("limits")
NUMBERS = st.one_of(st.none(), st.integers(1, 10**12))
LIMITS = st.builds(Limits, requests_per_minute=NUMBERS, tokens_per_minute=NUMBERS, concurrent=NUMBERS).filter(
    lambda limits: limits != Limits()
)
COUNTED: tuple[BaseException | None, ...] = (None, InvalidRequest("x"), RequestFailed("x"), asyncio.CancelledError())
NOT_COUNTED: tuple[BaseException, ...] = (Shed("x", 1.0), QuotaExceeded("x", 1.0), Unavailable("x"))
TENANTS = st.text("abcXYZ019._@:/+=-", min_size=1, max_size=20)


def begun(found: Quotas, owner: str, now_s: float, count: int = 1) -> Use:
    use = Use(owner)
    found.ask(use, count, now_s)
    return use


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
    begun(found, "a", 0.0)
    for content in ("a concurrent=x", "a concurrent=2"):
        with pytest.raises(QuotaExceeded, match="1 requests of a are under way; 1 at once"):
            begun(found, "a", 0.0)
        file.write_text(content)
        assert found._file is not None and found._file.look() == (content == "a concurrent=2")
    begun(found, "a", 0.0)


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
    began = used = largest = 0
    for after_s, what, count in events:
        now_s += after_s
        if what == "end" and running:
            running.pop().end()
            continue
        try:
            use = begun(found, "a", now_s)
        except QuotaExceeded as refused:
            if len(running) == concurrent:
                continue
            now_s += refused.retry_after_s + 1e-6
            try:
                use = begun(found, "a", now_s)
            except QuotaExceeded as again:  # the other rate was used up, too
                now_s += again.retry_after_s + 1e-6
                use = begun(found, "a", now_s)
        use.tokens(count)
        running.append(use)
        began, used, largest = began + 1, used + count, max(largest, count)
        assert len(running) <= concurrent
        assert began <= requests * (1 + now_s / 60) + 1e-3
        assert used <= tokens * (1 + now_s / 60) + largest + 1e-3, (
            "no more than one request overdraws that ended at once"
        )


def test_whoever_has_no_line_has_the_limits_of_everybody_each_its_own() -> None:
    found = Quotas(lambda: {"*": Limits(concurrent=1), "a": Limits(concurrent=2)})
    for tenant in ("a", "a", "b", "c"):
        begun(found, tenant, 0.0)
    for tenant in ("a", "b", "c"):
        with pytest.raises(QuotaExceeded):
            begun(found, tenant, 0.0)
    for _ in range(5):
        begun(found, "", 0.0)  # nobody's key was asked for
        begun(Quotas(lambda: {"a": Limits(concurrent=2)}), "b", 0.0)


def test_who_runs_nothing_is_forgotten_before_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "MAX_TENANTS", 10)
    found = Quotas(lambda: {"*": Limits(concurrent=1)})
    kept = begun(found, "runs", 0.0)
    for number in range(50):
        begun(found, f"t{number}", 0.0).end()
    assert len(found._tenants) <= 11
    with pytest.raises(QuotaExceeded):
        begun(found, "runs", 0.0)
    kept.end()
    kept.end()
    begun(found, "runs", 0.0)


def test_a_call_that_alone_exceeds_a_limit_is_told_so_and_one_that_must_wait_is_let_in_whole() -> None:
    found = Quotas(lambda: {"a": Limits(concurrent=4, requests_per_minute=3), "b": Limits(concurrent=2)})
    with pytest.raises(InvalidRequest) as refused:
        begun(found, "b", 0.0, 3)
    assert str(refused.value) == (
        "the call has 3 prompts, each of which is a request; at most 2 requests of b may be under way at once (concurrent=2 in "
        "auth.limits_file): send fewer at a time"
    )
    assert refused.value.param == "prompt"
    with pytest.raises(
        InvalidRequest, match=r"has 4 prompts.*at most 3 requests of a .*\(requests_per_minute=3 in auth\."
    ):
        begun(found, "a", 0.0, 4)
    first = begun(found, "b", 0.0)
    with pytest.raises(QuotaExceeded, match="1 requests of b are under way, and the call has 2 more; 2 at once"):
        begun(found, "b", 0.0, 2)
    first.end()
    begun(found, "b", 0.0, 2)
    begun(found, "a", 0.0, 1).end()
    with pytest.raises(QuotaExceeded) as waits:
        begun(found, "a", 0.0, 3)
    assert waits.value.retry_after_s == pytest.approx(20.0)
    begun(found, "a", 20.0, 3)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask again", "leave", "end"]),
        st.integers(1, 6),
        st.sampled_from((*COUNTED, *NOT_COUNTED)),
    ),
    max_size=60,
)


@given(STEPS, st.integers(1, 6), st.integers(1, 8))
def test_what_was_taken_is_returned_exactly_once_on_every_path(
    steps: list[tuple[str, int, BaseException | None]], concurrent: int, per_minute: int
) -> None:
    """Time stands still, so that what is left of the rate is what has not been counted."""
    limits = Limits(concurrent=concurrent, requests_per_minute=per_minute)
    found = Quotas(lambda: {"a": limits})
    calls: list[tuple[Use, int, int]] = []  # with what they took, and the places that they have still
    counted = 0
    for what, number, error in steps:
        at = number % len(calls) if calls else None
        if what == "ask" or at is None:
            use, taken, places = Use("a"), 0, 0
        else:
            use, taken, places = calls.pop(at)
        if what in ("ask", "ask again") or at is None:
            held = counted + sum(each[1] for each in calls)
            fits = sum(each[2] for each in calls) + number <= concurrent and held + number <= per_minute
            possible = number <= min(concurrent, per_minute)
            refusal: DisaggError | None = None
            try:
                found.ask(use, number, 0.0)
            except DisaggError as refused:
                refusal = refused
            assert (type(refusal) if refusal else None) is (
                None if fits else QuotaExceeded if possible else InvalidRequest
            )
            if fits:
                calls.append((use, number, number))
            else:
                use.leave()
                use.end(refusal)
        elif what == "leave":
            use.leave()
            calls.append((use, taken, max(0, places - 1)))
        else:
            use.end(error)
            for again in (*NOT_COUNTED, None):
                use.end(again)
                use.leave()
            counted += 0 if error in NOT_COUNTED else taken
        tenant = found._tenants.get("a")
        if tenant is not None:
            assert tenant.running == sum(each[2] for each in calls)
            if tenant.requests is not None:
                assert tenant.requests.level == per_minute - counted - sum(each[1] for each in calls)
