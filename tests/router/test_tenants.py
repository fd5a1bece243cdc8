"""Who is told apart from whom."""

from __future__ import annotations

from disagg.router.tenants import MAX_CREDENTIAL_CHARS, tenant_of


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
