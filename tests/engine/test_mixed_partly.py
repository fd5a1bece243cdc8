"""A prompt on a mixed server that does not fit whole: it begins with part of its pages."""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec.structs import replace

from disagg.engine import lookahead
from disagg.engine.prompts import Prompts
from disagg.engine.sequences import Sequence
from disagg.memory.groups import spec_of
from disagg.memory.layout import PageSizing, pool_layout
from tests.engine.lone_engine import FULL, said
from tests.engine.lone_mixed import Mixed, leg, one_token_pages


def beside_those_that_decode(*outputs: int, prompt: int, choices: int = 1, **changes: object) -> Mixed:
    """40 pages of 4 tokens, and a prompt for which they are too few beside what those that decode have or will need."""
    mixed = Mixed(one_token_pages(40, 16, spare_tokens=0, max_model_len=200, **changes))
    mixed.decoding(*(f"x{at}" for at in range(len(outputs))), outputs=outputs[0])
    mixed.start(leg("new", prompt, 3, first_token=7000, choices=choices))
    return mixed


def of(mixed: Mixed, name: str) -> Sequence | None:
    """The one that runs."""
    found = [s for s in mixed.engine.core.batch.running.values() if s.key.request_id == name]
    return found[0] if found else None


def test_a_prompt_that_does_not_fit_whole_begins_with_what_is_free_and_ends_when_the_rest_is() -> None:
    mixed = beside_those_that_decode(110, prompt=156, lookahead_tokens=200)
    told, computed = Counter[str](), 0
    while told["x0"] < 108:
        new = of(mixed, "new")
        computed = max(computed, new.computed if new is not None else 0)
        step = mixed.names(mixed.unreported[-1])
        told.update(name for name, *_ in said(mixed.compute()))
        assert step.get("x0") == 1, "who decodes misses no step"
        assert not told["new"]
    assert 40 <= computed <= 48, "all but the 28 pages that x0 comes to have"
    told.update(name for name, *_ in said(mixed.compute_all()))
    assert told["new"] == 3 and mixed.used == 0 and mixed.engine.idle
    assert mixed.engine.counters.prefill_tokens == 3 + 156 and not mixed.engine.counters.preemptions["memory"]


def test_a_prompt_with_part_of_its_pages_gives_them_back_to_whoever_decodes_and_begins_again_behind_them() -> None:
    """Nothing is looked ahead, so it takes all, and those that decode lack a page soon."""
    mixed = beside_those_that_decode(50, 50, prompt=150, lookahead_tokens=0)
    new = of(mixed, "new")
    assert new is not None and new.partly
    told = Counter(name for name, *_ in said(mixed.compute_all()))
    counters = mixed.engine.counters
    assert told["new"] == 3 and mixed.used == 0 and mixed.engine.idle
    assert counters.preemptions["memory"] == 1 and counters.recomputed_tokens == 0, "no answer gave way"
    assert 150 < counters.prefill_tokens < 150 + 2 * 3 + 100, "part of it was in the cache still"


@pytest.mark.parametrize("policy", ["sarathi", "simple_chunking"])
def test_a_chunk_of_600_becomes_500_where_500_pages_are_free(policy: str) -> None:
    """Pages of one token; x decodes, for which pages stay free, and then the prompt gets the rest."""
    layout = pool_layout([spec_of(FULL, 1)], 1, 8, PageSizing.MAX)
    few = one_token_pages(200 + 50 + 500, 1000, layout=layout, policy=policy, spare_tokens=0, lookahead_tokens=200)
    mixed = Mixed(few)
    mixed.start(leg("x", 200, 51))  # the KV of its last token is never written
    mixed.compute()
    assert mixed.engine.core.lookahead.spare_large == 500
    mixed.start(leg("new", 600, 3, first_token=7000))
    chunks: list[int] = []
    told = Counter[str]()
    while mixed.unreported:
        chunks += [tokens for name, tokens in mixed.names(mixed.unreported[0]).items() if name == "new"]
        told.update(name for name, *_ in said(mixed.compute()))
    assert chunks == [500, 100, 1, 1] and told == {"x": 50, "new": 3}
    assert mixed.used == 0 and mixed.engine.idle and not mixed.engine.counters.preemptions["memory"]


@pytest.mark.parametrize("cached", [0, 16])
def test_a_prompt_with_part_of_its_pages_looks_ahead_once_a_pass_and_gives_back_what_it_computed(
    cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has computed itself comes free when its answer ends: nobody has to wait for room that it leaves."""
    mixed = Mixed(one_token_pages(40, 16, spare_tokens=0, max_model_len=200, lookahead_tokens=200))
    if cached:
        mixed.start(leg("before", cached + 1, 1, first_token=7000))
        mixed.compute_all()
    mixed.decoding("x", outputs=60)
    core = mixed.engine.core
    looked, tried = [], []
    real_peak, real_extend = lookahead.peak_growth, Prompts._extend
    monkeypatch.setattr(lookahead, "peak_growth", lambda *args: looked.append(args) or real_peak(*args))
    monkeypatch.setattr(Prompts, "_extend", lambda self, prompt: tried.append(prompt) or real_extend(self, prompt))
    new = leg("new", 80, 60, first_token=7000)
    mixed.start(new)
    looked.clear()
    while new.key not in core.lookahead.granted:
        assert mixed.unreported, "it waits for ever"
        mixed.compute()
    assert len(tried) > 40 and len(looked) <= len(tried) + 1
    (growing,) = core.lookahead.granted[new.key].growing
    assert growing.own_tokens == 80 + 60 - 1 - cached
    mixed.compute_all()
    assert mixed.engine.idle and mixed.used == 0


@pytest.mark.parametrize("choices", [1, 15])
def test_a_prompt_with_part_of_its_pages_and_all_slots_that_are_left_comes_to_its_end(choices: int) -> None:
    mixed = beside_those_that_decode(110, prompt=156, choices=choices, lookahead_tokens=200, max_slots=16)
    new = of(mixed, "new")
    assert new is not None and new.partly and mixed.engine.core.batch.slots.free == 15 - choices
    told = Counter(name for name, *_ in said(mixed.compute_all()))
    assert told["new"] == 3 * choices and mixed.used == 0 and mixed.engine.idle


def test_a_prompt_with_part_of_its_pages_leaves_nothing_behind_when_its_client_goes() -> None:
    mixed = beside_those_that_decode(110, prompt=156, lookahead_tokens=200)
    mixed.compute()
    mixed.abort(leg("new", 156, 3, first_token=7000))
    mixed.start(leg("later", 4, 2, first_token=9000))
    told = Counter(name for name, *_ in said(mixed.compute_all()))
    assert told["later"] == 2 and not told["new"] and mixed.used == 0 and mixed.engine.idle


def test_who_comes_before_a_prompt_with_part_of_its_pages_takes_them() -> None:
    """It is more urgent."""
    mixed = beside_those_that_decode(110, prompt=156, lookahead_tokens=200)
    new = of(mixed, "new")
    assert new is not None and new.partly
    mixed.start(replace(leg("before", 40, 3, first_token=9000), priority=-1))
    told = Counter[str]()
    while told["x0"] < 20:
        told.update(name for name, *_ in said(mixed.compute()))
    assert told["before"] == 3 and not told["new"]
    told.update(name for name, *_ in said(mixed.compute_all()))
    assert told["new"] == 3 and mixed.used == 0 and mixed.engine.idle


def test_a_prompt_that_waits_with_much_of_it_cached_is_not_tried_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = Mixed(one_token_pages(40, 16, spare_tokens=0, max_model_len=200, lookahead_tokens=200))
    mixed.start(leg("first", 130, 1, first_token=7000))
    mixed.compute_all()
    mixed.decoding("x", outputs=110)
    kv, tried = mixed.engine.core.pool.kv, []
    real = kv.open
    monkeypatch.setattr(kv, "open", lambda *args: tried.append(args) or real(*args))
    mixed.start(leg("again", 156, 3, first_token=7000))
    for _ in range(20):
        mixed.compute()
    assert len(tried) == 1 and of(mixed, "again") is None
    mixed.compute_all()
    assert mixed.engine.idle and mixed.used == 0


@pytest.mark.parametrize(
    ("policy", "begins"), [("sarathi", True), ("simple_chunking", True), ("vllm", False), ("orca", False)]
)
def test_policies_that_compute_prompts_whole_begin_none_with_part_of_its_pages(policy: str, begins: bool) -> None:
    mixed = beside_those_that_decode(110, prompt=156, lookahead_tokens=200, policy=policy)
    assert (of(mixed, "new") is not None) == begins
    mixed.compute_all()
    assert mixed.engine.idle and mixed.used == 0
