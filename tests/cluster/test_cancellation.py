"""A client that disconnects in prefill, in transfer or in decode: both servers stop computing for it at once."""

from __future__ import annotations

import contextlib
import time

import httpx
import pytest

from tests.cluster.cluster import Cluster

LONG = list(range(1000, 1900))


def ask_and_hang_up(cluster: Cluster, prompt: list[int], after_s: float, max_tokens: int = 400) -> None:
    body = {
        "model": cluster.model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    asked = httpx.stream("POST", f"{cluster.http}/v1/completions", json=body, timeout=after_s)
    with contextlib.suppress(httpx.ReadTimeout), asked as reply:
        deadline = time.monotonic() + after_s
        for _ in reply.iter_lines():
            if time.monotonic() > deadline:
                return


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("phase", "prompt", "after_s"),
    [("prefill", LONG, 0.4), ("transfer", LONG[:300], 0.6), ("decode", LONG[:20], 2.0)],
)
def test_a_disconnect_stops_both_servers_within_two_steps(
    cluster: Cluster, phase: str, prompt: list[int], after_s: float
) -> None:
    before = {name: cluster.metrics(name) for name in ("prefill-0", "decode-0")}
    ask_and_hang_up(cluster, prompt, after_s)
    cluster.check_adds_up(timeout_s=20)
    after = {name: cluster.metrics(name) for name in before}
    prefilled = after["prefill-0"]["disagg_prefill_tokens_total"] - before["prefill-0"]["disagg_prefill_tokens_total"]
    decoded = after["decode-0"]["disagg_decode_tokens_total"] - before["decode-0"]["disagg_decode_tokens_total"]
    if phase == "prefill":
        assert prefilled < len(prompt), "the whole prompt was computed although its client had left"
    assert decoded < 399
    for name in before:
        assert after[name]["disagg_steps_after_abort"] <= 2
    aborts = [after[name]["disagg_aborts_total"] - before[name]["disagg_aborts_total"] for name in before]
    assert max(aborts) == 1
