"""The memory benchmark measures what it says: its peer is PagedAttention, its requests are what they are drawn to be, and both
sides do the same work."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec
import pytest

from bench import memory, memory_cost
from bench.memory_baseline import OneSizeMemory, OneSizePool
from bench.memory_engine import DecodeEngine, Memory, Outcome, PrefillEngine
from bench.memory_models import MODELS, PAGE_TOKENS, BenchModel, gemma2, jamba, llama_vision, ministral, pyramid_kv
from bench.memory_trace import IMAGE_TOKENS, BenchRequest, articles, pictures, shared
from disagg.messages.layout import GroupKind

VISION_REQUEST = BenchRequest(0, 16, 0, 27, outputs=2, image_tokens=IMAGE_TOKENS)  # 43 tokens of text


def small_pool(model: BenchModel, one_size_pages: int) -> BenchModel:
    return msgspec.structs.replace(model, pool_bytes=one_size_pages * model.one_size_page_bytes)


def decode(side: Memory, requests: Sequence[BenchRequest]) -> Outcome:
    return DecodeEngine(side, requests, max_running=16).run()


def prefill(side: Memory, requests: Sequence[BenchRequest]) -> Outcome:
    return PrefillEngine(side, requests, max_running=1, chunk_tokens=512, measure=False).run()


def sides(model: BenchModel, *, caching: bool) -> tuple[Memory, Memory]:
    ours = memory.our_memory(model, caching=caching, prefills=caching)
    return memory.peer_memory(model, 16, caching=caching), ours


# ---- models and requests


def test_a_token_takes_what_the_published_configurations_say() -> None:
    assert ministral().one_size_token_bytes == 36 * 2 * 8 * 128 * 2
    assert gemma2().one_size_token_bytes == 46 * 2 * 16 * 128 * 2
    assert llama_vision().one_size_token_bytes == 40 * 2 * 8 * 128 * 2
    assert jamba().state_bytes == 28 * (8192 * 4 * 2 + 8192 * 16 * 4)


def test_budgets_of_pyramid_kv_fall_from_layer_to_layer_and_are_2048_on_average() -> None:
    budgets = [group.budget_tokens for group in pyramid_kv().groups]
    assert budgets == sorted(budgets, reverse=True)
    assert sum(budgets) / len(budgets) == pytest.approx(2048, rel=0.01)


def test_a_window_needs_what_it_attends_to_and_what_a_run_writes() -> None:
    model = ministral()
    window = [group.kind for group in model.groups].index(GroupKind.WINDOW)
    assert model.needed_rows(window, 100, 101, image_tokens=0) == 101
    assert model.needed_rows(window, 50_000, 50_001, image_tokens=0) == 32_768
    assert model.needed_rows(window, 50_000, 50_512, image_tokens=0) == 32_767 + 512


def test_articles_are_drawn_alike_every_time_and_fit_their_context() -> None:
    assert articles(30, 8192) == articles(30, 8192)
    assert all(request.total_tokens <= 8192 for request in articles(30, 8192))
    mean = sum(request.document_tokens for request in articles(400, 131_072)) / 400
    assert mean == pytest.approx(67_000, rel=0.03)


def test_shared_documents_have_as_many_questions_each_and_no_question_twice() -> None:
    requests = shared(articles(3, 8192), questions=4, grid_tokens=512)
    assert len(requests) == 12
    assert sorted(request.document for request in requests) == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert len({request.question for request in requests}) == 12
    assert all(request.document_tokens % 512 == 0 for request in requests)


# ---- the peer


def test_one_size_pages_waste_79_6_percent_of_43_text_and_6193_image_tokens() -> None:
    peer, ours = (decode(side, [VISION_REQUEST]) for side in sides(llama_vision(), caching=False))
    assert peer.waste == pytest.approx(0.796, abs=0.002)
    assert ours.waste < 0.01


def test_one_size_pages_waste_38_percent_of_a_ministral_request_of_67k_tokens() -> None:
    peer, ours = (decode(side, [BenchRequest(0, 67_000, 0, 0, 3)]) for side in sides(ministral(), caching=False))
    assert peer.waste == pytest.approx(0.75 * (1 - 32_768 / 67_000), abs=0.001)
    assert ours.waste < 0.001


def one_size_pool(num_pages: int) -> OneSizePool:
    return OneSizePool(small_pool(ministral(), num_pages), slots=1, caching=True)


def cached(pool: OneSizePool, names: Sequence[bytes]) -> list[int]:
    """A sequence of full pages that has come and gone."""
    pages = pool.allocate([], len(names))
    assert pages is not None
    for name, page in zip(names, pages, strict=True):
        pool.publish(name, page)
    pool.release(pages)
    return pages


def test_the_peer_evicts_the_longest_prefix_of_the_oldest_sequence_first() -> None:
    pool = one_size_pool(4)
    cached(pool, [b"a", b"ab"])
    cached(pool, [b"x", b"xy"])
    assert pool.allocate([], 1) is not None
    assert len(pool.lookup([b"a", b"ab"], 2)) == 1
    assert len(pool.lookup([b"x", b"xy"], 2)) == 2


def test_the_peer_hits_full_prefixes_only() -> None:
    pool = one_size_pool(4)
    first, second = cached(pool, [b"a", b"ab"])
    assert pool.lookup([b"a", b"ab", b"abc"], 3) == [first, second]
    assert pool.lookup([b"?", b"ab"], 2) == []


def test_the_peer_gives_all_pages_or_none_and_counts_those_of_a_hit_as_taken() -> None:
    pool = one_size_pool(3)
    cached(pool, [b"a", b"ab"])
    hit = pool.lookup([b"a", b"ab"], 2)
    assert pool.allocate(hit, 2) is None
    assert pool.used_bytes() == 0
    pages = pool.allocate(hit, 1)
    assert pages is not None and pages[:2] == hit
    assert pool.used_bytes() == 3 * pool.page_bytes
    assert pool.allocate([], 1) is None


def test_the_peer_sets_state_slots_aside_and_runs_no_more_requests_than_it_has() -> None:
    side = OneSizeMemory(jamba(), slots=2, caching=True)
    assert side.used_bytes() == 2 * jamba().state_bytes
    assert not side.caching, "a recurrent state cannot be looked up by the hash of a page"
    requests = [BenchRequest(n, 100, n, 20, 4) for n in range(3)]
    assert DecodeEngine(side, requests, max_running=16).fill() == 2


# ---- both sides


@pytest.mark.parametrize("name", MODELS)
def test_both_sides_give_every_request_its_tokens(name: str) -> None:
    model = MODELS[name]()
    requests = pictures(6, 0) if GroupKind.IMAGE in model.kinds else [BenchRequest(n, 3000, n, 40, 5) for n in range(6)]
    for side in sides(model, caching=False):
        outcome = decode(side, requests)
        assert sum(outcome.batches) == sum(request.outputs - 1 for request in requests)
        assert 0 <= outcome.waste < 1


def test_who_came_last_gives_way_when_pages_run_out_and_everybody_ends() -> None:
    # Two of these fill the pool with their prompts; each wants three pages more.
    requests = [BenchRequest(n, 10 * PAGE_TOKENS - 1, n, 1, 3 * PAGE_TOKENS) for n in range(2)]
    for side in sides(small_pool(gemma2(), 22), caching=False):
        outcome = decode(side, requests)
        assert outcome.preemptions > 0
        assert sum(outcome.batches) == sum(request.outputs - 1 for request in requests)


@pytest.mark.parametrize("name", ["vision", "gemma2", "ministral", "character", "pyramid", "draft"])
def test_a_second_question_about_a_document_computes_the_question_only(name: str) -> None:
    model = MODELS[name]()
    image_tokens = IMAGE_TOKENS if GroupKind.IMAGE in model.kinds else 0
    questions = [BenchRequest(7, 4608, n, 40, 2, image_tokens) for n in range(2)]
    for side in sides(model, caching=True):
        outcome = prefill(side, questions)
        assert outcome.hit_tokens == pytest.approx(4608 + image_tokens, abs=PAGE_TOKENS)
        assert outcome.computed_tokens == 2 * (4648 + image_tokens) - outcome.hit_tokens


def test_a_document_of_a_model_with_states_is_found_by_us_and_not_by_the_peer() -> None:
    peer, ours = (
        prefill(side, [BenchRequest(7, 4608, n, 40, 2) for n in range(2)]) for side in sides(jamba(), caching=True)
    )
    assert (peer.hit_tokens, ours.hit_tokens) == (0, 4608)


def test_twenty_long_requests_take_us_about_half_the_steps() -> None:
    pair = memory.decode(ministral(), memory.long_articles(20))
    assert pair.ours.steps / pair.peer.steps < 0.55


# ---- the commands


def test_the_benchmark_prints_what_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["memory", "--models", "vision", "--parts", "decode", "prefill"])
    memory.main()
    printed = capsys.readouterr().out
    assert "Llama-3.2-11B-Vision" in printed
    assert "goal: below 1%" in printed
    assert "rag" not in printed


def test_the_cost_benchmark_has_a_row_for_each_goal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory_cost, "PROMPT_TOKENS", 2048)
    monkeypatch.setattr(memory_cost, "EXTENSION_CONTEXTS", (1024,))
    monkeypatch.setattr(memory_cost, "RUNNING", 16)
    monkeypatch.setattr(sys, "argv", ["memory_cost", "--rounds", "1"])
    memory_cost.main()
    printed = capsys.readouterr().out
    assert printed.count("hash, lookup, allocate") == 3
    assert "decode step of 16" in printed
