"""A whole cluster that asks for keys and certificates: it serves who shows them, and keeps tenants' caches apart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from disagg.auth.tls import trusting
from tests.auth.certs import Authority
from tests.cluster.cluster import Cluster
from tests.models.tiny import make_tiny

A, B = {"authorization": "Bearer key-a"}, {"authorization": "Bearer key-b"}
PROMPT = list(range(5, 5 + 64))


@pytest.fixture(scope="module", name="secured")
def make_secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    directory = tmp_path_factory.mktemp("secured")
    (directory / "keys").write_text("key-a team-a\nkey-b team-b\n")
    tls = Authority().write(directory)
    sets = (
        f"auth.api_keys_file={directory / 'keys'}",
        f"tls.cert={tls.cert}",
        f"tls.key={tls.key}",
        f"tls.ca={tls.ca}",
        "debug.remote=true",
    )
    model = make_tiny("llama", directory / "llama")
    with (
        Cluster(directory / "run", "--model", str(model), "--page-tokens", "4", sets=sets) as cluster,
        httpx.Client(base_url=cluster.http, verify=trusting(Path(tls.ca)), trust_env=False, timeout=60.0) as client,
    ):
        yield client


def cached(client: httpx.Client, headers: dict[str, str], salt: str = "") -> int:
    """Tokens of PROMPT that were found in a cache."""
    body = {"model": "llama", "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "cache_salt": salt}
    answer = client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.timeout(400)
def test_a_tenant_finds_what_it_has_cached_itself_and_nothing_else(secured: httpx.Client) -> None:
    assert cached(secured, A) == 0
    assert cached(secured, A) > 0
    for salt in ("", "team-a", "owned:"):
        assert cached(secured, {**B, "x-tenant": "team-a"}, salt) == 0
    assert cached(secured, B) > 0
    assert cached(secured, A, "mine") == 0
    assert cached(secured, A, "mine") > 0


@pytest.mark.timeout(400)
def test_the_router_of_a_cluster_asks_for_keys_and_hears_its_servers_through_tls(secured: httpx.Client) -> None:
    for path in ("/status", "/metrics", "/debug/dump", "/v1/models"):
        assert secured.get(path).status_code == 401
        assert secured.get(path, headers=A).status_code == 200
    dump = secured.get("/debug/dump", headers=A).json()["servers"]
    assert len(dump) == 2 and not any(text.startswith("no dump") for text in dump.values())
