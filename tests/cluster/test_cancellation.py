"""A client that disconnects in prefill, in transfer or in decode: both servers stop computing for it at once."""

from __future__ import annotations

import http.client
import json
from urllib.parse import urlsplit

import pytest

from tests.cluster.cluster import Cluster

PROMPT = range(1000, 8000)
PREFILLED = ("prefill-0", "disagg_prefill_tokens_total")
SENT = ("prefill-0", 'disagg_transfer_pieces_total{direction="sent"}')
DECODED = ("decode-0", "disagg_decode_tokens_total")
MAX_TOKENS = 1000


def ask(cluster: Cluster, prompt: list[int]) -> http.client.HTTPConnection:
    """Sends a request and leaves the answer unread; closing the connection hangs up."""
    body = {
        "model": cluster.model,
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    connection = http.client.HTTPConnection(urlsplit(cluster.http).netloc)
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    return connection


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("phase", "tokens", "begun"),
    [("prefill", 7000, PREFILLED), ("transfer", 300, SENT), ("decode", 20, DECODED)],
)
def test_a_disconnect_stops_both_servers_within_two_steps(
    cluster: Cluster, phase: str, tokens: int, begun: tuple[str, str]
) -> None:
    """It hangs up as soon as the server's counter has grown. Prompts share no prefix, so that none is cached. What is asked
    for takes far longer than this, so that a client that stands still for seconds is not too late."""
    prompt = [len(phase), *PROMPT][:tokens]
    server, counter = begun
    before = {name: cluster.metrics(name) for name in ("prefill-0", "decode-0")}
    connection = ask(cluster, prompt)
    cluster.wait(lambda: cluster.metrics(server).get(counter, 0.0) > before[server].get(counter, 0.0), 60, phase)
    connection.close()
    cluster.check_adds_up()
    after = {name: cluster.metrics(name) for name in before}
    prefilled = after["prefill-0"]["disagg_prefill_tokens_total"] - before["prefill-0"]["disagg_prefill_tokens_total"]
    decoded = after["decode-0"]["disagg_decode_tokens_total"] - before["decode-0"]["disagg_decode_tokens_total"]
    if phase == "prefill":
        assert prefilled < len(prompt), "the whole prompt was computed although its client had left"
    assert decoded < MAX_TOKENS - 1
    for name in before:
        assert after[name]["disagg_steps_after_abort"] <= 2
    aborts = [after[name]["disagg_aborts_total"] - before[name]["disagg_aborts_total"] for name in before]
    assert max(aborts) == 1
