"""A whole cluster that asks for keys and certificates: it serves who shows them, and keeps tenants' caches apart."""

from __future__ import annotations

import random
import string
import time
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


def timed(client: httpx.Client, headers: dict[str, str], prompt: str) -> float:
    """Seconds until a prompt of text has its one token."""
    body = {"model": "llama", "prompt": prompt, "max_tokens": 1, "temperature": 0}
    began = time.perf_counter()
    answer = client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return time.perf_counter() - began


def share_faster(these: list[float], those: list[float]) -> float:
    """How often one of these is less than one of those (Mann and Whitney's U as a share): a half, if nothing tells them apart."""
    return sum((a < b) + 0.5 * (a == b) for a in these for b in those) / (len(these) * len(those))


@pytest.mark.timeout(400)
def test_time_does_not_tell_what_another_tenant_has_asked(secured: httpx.Client) -> None:
    rng = random.Random(7)
    again, probed, fresh = [], [], []
    for trial in range(60):
        asked, unasked = ("".join(rng.choices(string.ascii_lowercase, k=1800)) for _ in range(2))
        timed(secured, A, asked)
        # Whatever comes first after a pause may be slower: each kind does equally often.
        turns = [(again, A, asked), (probed, B, asked), (fresh, B, unasked)]
        for times, whose, prompt in turns[trial % 3 :] + turns[: trial % 3]:
            times.append(timed(secured, whose, prompt))
    # Of 60 and 60 that are alike, the share is 0.5 with a standard deviation of sqrt(121 / 43200) = 0.053: 0.27 away from it
    # is seen once in three million runs. One's own cache is seen in nearly every pair, so the clock is good enough.
    assert share_faster(again, fresh) > 0.9
    assert 0.23 < share_faster(probed, fresh) < 0.77


@pytest.mark.timeout(400)
def test_the_router_of_a_cluster_asks_for_keys_and_hears_its_servers_through_tls(secured: httpx.Client) -> None:
    for path in ("/status", "/metrics", "/debug/dump", "/v1/models"):
        assert secured.get(path).status_code == 401
        assert secured.get(path, headers=A).status_code == 200
    dump = secured.get("/debug/dump", headers=A).json()["servers"]
    assert len(dump) == 2 and not any(text.startswith("no dump") for text in dump.values())
