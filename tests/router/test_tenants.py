"""Who is told apart from whom."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from disagg.router.tenants import MAX_CREDENTIAL_CHARS, salt_of, tenant_of
from disagg.types.sampling import MAX_CACHE_SALT_CHARS


def test_clients_are_told_apart_by_address_and_credentials() -> None:
    clients = [
        tenant_of("10.0.0.1"),
        tenant_of("10.0.0.2"),
        tenant_of("10.0.0.1", "Bearer a"),
        tenant_of("10.0.0.1", "Bearer b"),
        tenant_of("10.0.0.2", "Bearer a"),
        tenant_of("10.0.0.1", connection="ipv4:10.0.0.1:5000"),
        tenant_of("10.0.0.1", connection="ipv4:10.0.0.1:5001"),
    ]
    assert len(set(clients)) == len(clients)


def test_a_client_that_shows_credentials_is_one_over_all_its_connections() -> None:
    assert tenant_of("10.0.0.1", "Bearer a", "ipv4:10.0.0.1:5000") == tenant_of("10.0.0.1", "Bearer a")


def test_a_tenant_is_short_and_shows_no_credentials() -> None:
    named = tenant_of("10.0.0.1", "Bearer secret" * 10_000)
    assert len(named) == 24 and "secret" not in named
    assert named == tenant_of("10.0.0.1", ("Bearer secret" * 10_000)[:MAX_CREDENTIAL_CHARS])
    assert tenant_of("", "half of a surrogate pair: \ud800")


def test_whoever_names_itself_is_one_tenant_wherever_it_comes_from() -> None:
    assert tenant_of("10.0.0.1", "Bearer a", name="team") == tenant_of("10.0.0.2", connection="x", name="team")
    assert tenant_of("10.0.0.1", name="team") != tenant_of("10.0.0.1", name="other")
    assert len({tenant_of("team"), tenant_of("team", "team"), tenant_of("team", name="team")}) == 3


OWNERS = st.text(min_size=1)


@given(st.lists(st.tuples(OWNERS, st.text()), unique=True, min_size=2, max_size=8))
def test_no_two_owners_share_a_salt_whatever_they_ask_for(asked: list[tuple[str, str]]) -> None:
    assert len({salt_of(owner, salt) for owner, salt in asked}) == len(asked)
    assert all(len(salt_of(owner, salt)) <= MAX_CACHE_SALT_CHARS for owner, salt in asked)


@given(st.text())
def test_where_no_keys_are_asked_for_a_salt_stays_what_it_was(salt: str) -> None:
    assert salt_of("", salt) == salt
