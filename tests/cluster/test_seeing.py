"""What operators see of a real cluster: metrics under names that others know, transfers by pair, requests, and no alarm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster.cluster import ANSWER_S, Cluster
from tests.models.tiny import make_tiny

PAGE = 4
PROMPT = list(range(5, 5 + 64))
KNOWN_PAGES = len(PROMPT) // PAGE - 1  # of PROMPT; its last token is computed in any case
TRACE, SPAN, WHOLE = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", "text_completion llama"


@pytest.fixture(scope="module", name="seen")
def make_seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("seeing")
    model = make_tiny("llama", directory / "llama")
    with Cluster(directory / "run", "--model", str(model), "--page-tokens", str(PAGE)) as cluster:
        cluster.complete(PROMPT, max_tokens=8)
        # Both servers have the prompt now. While the router knows it of the decode server alone, that would compute it again
        # by itself, and nothing would be found at the prefill server, nor move.
        cluster.wait(lambda: cached_pages(cluster, "prefill-0") >= KNOWN_PAGES, 60, "what the router knows")
        cluster.complete(PROMPT, max_tokens=8)
        yield cluster


def cached_pages(cluster: Cluster, name: str) -> int:
    return max(cluster.server(name)["cached_pages"], default=0)


def scraped(text: str) -> dict[str, float]:
    """Values of families under vLLM's names, summed over labels but `le`, as the official parser reads them."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("vllm:") and "le" not in sample.labels:
                assert sample.labels["model_name"] == "llama"
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
                if sample.name == "vllm:cache_config_info":
                    found["block_size"] = float(sample.labels["block_size"])
                    found["num_gpu_blocks"] = float(sample.labels["num_gpu_blocks"])
    return found


@pytest.mark.timeout(400)
def test_a_router_and_its_servers_speak_under_vllms_names(seen: Cluster) -> None:
    of_router = scraped(httpx.get(f"{seen.http}/metrics", timeout=ANSWER_S).text)
    assert of_router["vllm:prompt_tokens_total"] == 2 * len(PROMPT)
    assert of_router["vllm:generation_tokens_total"] == 16
    assert of_router["vllm:request_success_total"] == 2
    assert (
        of_router["vllm:time_to_first_token_seconds_count"] == of_router["vllm:e2e_request_latency_seconds_count"] == 2
    )
    assert of_router["vllm:num_requests_waiting"] == 0
    assert of_router["block_size"] == 4 and of_router["num_gpu_blocks"] > 0
    assert 0 <= of_router["vllm:kv_cache_usage_perc"] <= 1
    for name in seen.servers("prefill") + seen.servers("decode"):
        # Servers export by a beat: of an answer that has come just now some may not be in it yet.
        of_server = seen.wait(lambda name=name: hits_of(seen, name), 30, f"what {name} found in its cache")
        assert of_server["block_size"] == 4
        assert of_server["vllm:prefix_cache_queries_total"] >= of_server["vllm:prefix_cache_hits_total"] > 0
        assert of_server["vllm:num_preemptions_total"] == 0


def hits_of(cluster: Cluster, name: str) -> dict[str, float]:
    """What a server says under vLLM's names, once it has found something in its prefix cache; empty before."""
    of_server = scraped(cluster.said_by(name, "/metrics"))
    return of_server if of_server.get("vllm:prefix_cache_hits_total", 0) > 0 else {}


@pytest.mark.timeout(400)
def test_status_says_what_moved_between_pairs_and_that_nothing_is_wrong(seen: Cluster) -> None:
    [decode] = seen.servers("decode")
    [prefill] = seen.servers("prefill")

    def received() -> list[dict[str, object]]:
        return [each for each in seen.server(decode)["received"] if each["transfers"] == 2]

    [moved] = seen.wait(received, 30, "what the decode server says of its transfers")
    assert moved["peer"] == prefill and moved["bytes"] > 0 and moved["failures"] == 0 and moved["seconds"] > 0
    assert seen.server(decode)["arena"]["quarantined"] == 0 and seen.server(prefill)["received"] == []
    status = seen.status()
    assert status["ended_last_minute"].keys() <= {"ok"}
    quiet = lambda: all("event loop" in each["text"] for each in seen.status()["alarms"])  # noqa: E731
    seen.wait(quiet, 60, "an end of alarms")  # a machine that stood still has some for a moment


@pytest.mark.timeout(400)
def test_requests_are_listed_with_the_ids_that_timelines_have(seen: Cluster) -> None:
    listed = httpx.get(f"{seen.http}/debug/requests", timeout=ANSWER_S).json()
    assert listed["running"] == [] and len(listed["ended"]) == 2
    for each in listed["ended"]:
        assert each["detail"].endswith("done") and each["took_s"] > 0
        assert seen.timeline(each["request_id"])


@pytest.mark.timeout(400)
@pytest.mark.parametrize("way", ["over_http", "over_grpc"])
def test_spans_of_all_three_processes_arrive_in_one_trace(tmp_path: Path, way: str) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="the extra `tracing` is not installed")
    from tests.telemetry import otlp_receiver

    model = make_tiny("llama", tmp_path / "llama")
    with getattr(otlp_receiver, way)() as receiver:
        sets = (f"tracing.otlp_endpoint={receiver.endpoint}", "tracing.sample_ratio=0")
        with Cluster(tmp_path / "run", "--model", str(model), "--page-tokens", "4", sets=sets) as cluster:
            cluster.complete(PROMPT, max_tokens=4)  # of a client that says nothing
            body = {"model": "llama", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
            headers = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
            answer = httpx.post(f"{cluster.http}/v1/completions", json=body, headers=headers, timeout=ANSWER_S)
            assert answer.status_code == 200
            spans = receiver.wait(lambda got: {"prefill", "decode", WHOLE} <= {span.name for span in got})
            traced = scraped(httpx.get(f"{cluster.http}/metrics", timeout=ANSWER_S).text)
            assert traced["vllm:generation_tokens_total"] == 12
    assert {span.trace_id for span in spans} == {TRACE}
    [whole] = [span for span in spans if span.name == WHOLE]
    assert whole.parent_id == SPAN and whole.kind == 2 and not whole.failed
    assert whole.attributes["gen_ai.operation.name"] == "text_completion"
    assert whole.attributes["gen_ai.usage.input_tokens"] == len(PROMPT)
    assert whole.attributes["gen_ai.usage.output_tokens"] == 8
    assert whole.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert whole.attributes["gen_ai.response.id"] in answer.json()["id"]
    by_id = {span.span_id: span for span in spans}
    for role in ("prefill", "decode"):
        [leg] = [span for span in spans if span.name == role and span.parent_id == whole.span_id]
        assert leg.process == f"{role}-0" and leg.attributes["disagg.outcome"] == "done"
    parents = {(span.name, by_id[span.parent_id].name) for span in spans if span is not whole}
    assert {("queue", WHOLE), ("attempt 1", WHOLE), ("queue", "prefill"), ("transfer", "decode")} <= parents
    assert {("chunk", "prefill"), ("decode", "decode")} <= parents
    assert len({span.process for span in spans}) == 3
