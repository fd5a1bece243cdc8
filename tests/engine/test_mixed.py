"""A mixed server's engine: what its steps compute under each policy, and that every request comes to its end under all."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from disagg.engine.facts import EngineFacts
from disagg.engine.instructions import Instruction
from disagg.engine.turns import FIRST_CHOICES_SHARE
from disagg.messages.layout import LayerGroup
from disagg.messages.legs import Outcome
from disagg.scheduler.policies import POLICIES
from tests.engine.lone_engine import FULL, PAGE_TOKENS, STATE, WINDOW, changed, facts, outcomes, plans, said
from tests.engine.lone_mixed import WIDE, Mixed, leg, one_token_pages
from tests.scheduler.mixed_policies import MIXED_POLICIES

# ---- as the documents tell it


def test_a_prompt_of_20_and_two_that_decode_share_a_batch() -> None:
    mixed = Mixed(one_token_pages(200, 64))
    mixed.decoding("B", "C")
    mixed.start(leg("A", 20, 4))
    while "A" not in (now := mixed.names(mixed.unreported[-1])):
        mixed.compute()
    assert now == {"B": 1, "C": 1, "A": 20}


@pytest.mark.parametrize("decodes", [1, 3, 7])
def test_every_decode_and_a_chunk_of_16_are_in_the_same_forward(decodes: int) -> None:
    mixed = Mixed(one_token_pages(400, 16 + decodes, max_running=decodes + 1))
    names = [f"d{i}" for i in range(decodes)]
    mixed.decoding(*names)
    mixed.start(leg("new", 100, 4))
    while "new" not in (now := mixed.names(mixed.unreported[-1])):
        mixed.compute()
    assert now == {**dict.fromkeys(names, 1), "new": 16}


def test_three_that_decode_lose_no_step_to_a_prompt_that_comes() -> None:
    mixed = Mixed(one_token_pages(400, 35))
    names = ["x", "y", "z"]
    mixed.decoding(*names)
    mixed.start(leg("new", 100, 4))
    chunks = []
    for _ in range(10):
        mixed.compute()
        step = mixed.names(mixed.unreported[-1])
        assert all(step[name] == 1 for name in names), "each decodes in each step"
        chunks.append(step.get("new", 0))
    assert [tokens for tokens in chunks if tokens > 1] in ([32, 32, 32, 4], [32, 32, 4]), "in chunks beside them"


def test_a_prompt_of_1000_is_five_chunks_of_200_in_pages_that_follow_each_other() -> None:
    mixed = Mixed(one_token_pages(300, 200))
    out = mixed.start(leg("long", 1000, 2))
    tables = list(plans(out)[0].starts[0].tables[0].pages)
    runs = [run for plan in plans(out) for run in plan.runs]
    tables += [page for run in runs for group in run.new_pages for page in group]
    while mixed.unreported:
        for plan in plans(mixed.compute()):
            runs += plan.runs
            tables += [page for run in plan.runs for group in run.new_pages for page in group]
    assert [run.num_tokens for run in runs if run.num_tokens > 1] == [200] * 5
    assert tables[:250] == list(range(tables[0], tables[0] + 250)), (
        "200 tokens are 50 pages, each chunk behind the last"
    )


def test_nothing_to_run_sends_nothing() -> None:
    mixed = Mixed(one_token_pages(20, 8))
    assert plans(mixed.do([])) == []


def test_prompts_of_vllm_hold_up_those_that_decode_and_those_of_sarathi_do_not() -> None:
    stalls = {}
    for policy in ("vllm", "sarathi"):
        chunk = 4096 if POLICIES[policy].whole_prompts else 32
        mixed = Mixed(one_token_pages(800, chunk, policy=policy))
        mixed.decoding("x")
        for number in range(4):
            mixed.start(leg(f"new{number}", 60, 4, first_token=5000 * (number + 1)))
        stalls[policy] = 0
        for _ in range(12):
            mixed.compute()
            stalls[policy] += "x" not in mixed.names(mixed.unreported[-1])
    assert stalls["sarathi"] == 0 < stalls["vllm"]


def test_simple_chunking_takes_turns_step_by_step() -> None:
    mixed = Mixed(one_token_pages(400, 16, policy="simple_chunking"))
    mixed.decoding("x")
    mixed.start(leg("new", 100, 4))
    kinds = []
    for _ in range(8):
        mixed.compute()
        kinds.append("".join(sorted(mixed.names(mixed.unreported[-1]))))
    assert kinds in (["new", "x"] * 4, ["x", "new"] * 4)


def test_orca_begins_nothing_whose_longest_answer_has_no_room() -> None:
    """20 pages of 4 tokens: 40 + 36 tokens are 19 of them, whatever of it is ever used."""
    reserves, looks = (
        Mixed(facts(num_large=20, policy=policy, **{**WIDE, "chunk_tokens": 100, "max_model_len": 100}))
        for policy in ("orca", "vllm")
    )
    for mixed in (reserves, looks):
        mixed.start(leg("first", 40, 36))
        mixed.start(leg("second", 4, 4, first_token=500))
        mixed.compute()
    assert reserves.used == 19 and len(reserves.engine.core.batch.running) == 1
    assert len(looks.engine.core.batch.running) == 2


def test_a_prompt_of_the_models_whole_length_is_one_chunk_of_orca_beside_those_that_decode() -> None:
    mixed = Mixed(facts(num_large=400, policy="orca", **{**WIDE, "chunk_tokens": 100, "max_model_len": 100}))
    mixed.decoding("x", "y", outputs=20)
    mixed.start(leg("longest", 99, 1, first_token=7000))
    while "longest" not in (now := mixed.names(mixed.unreported[-1])):
        mixed.compute()
    assert now == {"x": 1, "y": 1, "longest": 99}


def test_faster_transformer_begins_nothing_beside_a_batch_that_is_under_way() -> None:
    mixed = Mixed(one_token_pages(400, 4096, policy="faster_transformer"))
    mixed.start(leg("before", 20, 2, first_token=300))
    mixed.start(leg("a", 20, 3))
    mixed.start(leg("b", 20, 6, first_token=500))
    told = Counter[str]()
    for _ in range(50):
        mixed.start(leg(f"later{_}", 10, 2, first_token=9000 + 100 * _)) if _ == 2 else None
        if not mixed.unreported:
            break
        for name, *_rest in said(mixed.compute()):
            told[name] += 1
            assert name not in ("later2",) or told["b"] == 6, "b has come to its end"
    assert told == {"before": 2, "a": 3, "b": 6, "later2": 2}


@pytest.mark.parametrize("computed", range(4))
def test_faster_transformer_answers_a_batch_before_it_begins_what_came_meanwhile(computed: int) -> None:
    """However far the batch is; also when its prompts have just been computed and no answer has had a step."""
    mixed = Mixed(one_token_pages(400, 4096, policy="faster_transformer"))
    mixed.start(leg("a", 20, 6))
    for _ in range(computed):
        mixed.compute()
    mixed.start(leg("later", 10, 2, first_token=500))
    heard = []
    while mixed.unreported:
        heard += [name for name, *_ in said(mixed.compute())]
    assert heard == ["a"] * (6 - computed) + ["later"] * 2


def test_short_prompts_do_not_wait_for_a_long_one_which_does_not_wait_for_ever() -> None:
    mixed = Mixed(one_token_pages(2000, 40))
    mixed.start(leg("long", 2000, 1))
    mixed.compute()
    for number in range(20):
        mixed.start(leg(f"short{number}", 20, 1, first_token=10_000 + 100 * number))
    first: dict[str, int] = {}
    for step in range(80):
        for name, *_ in said(mixed.compute()):
            first.setdefault(name, step)
        if not mixed.unreported:
            break
    assert max(step for name, step in first.items() if name != "long") <= 20
    assert first["long"] >= 50


def test_a_long_prompt_is_computed_beside_short_ones_that_come_for_ever() -> None:
    mixed = Mixed(one_token_pages(2000, 40))
    mixed.start(leg("long", 400, 1))
    for step in range(200):
        mixed.start(leg(f"short{step}", 40, 1, first_token=10_000 + 100 * step))
        if any(name == "long" for name, *_ in said(mixed.compute())):
            break
    assert step < 30, "it lets as many tokens of others go first as it has itself"


@pytest.mark.parametrize("max_running", [4, 16, 64])
def test_choices_begin_beside_requests_of_one_choice_that_take_every_slot(max_running: int) -> None:
    """Of the slots that are kept for first choices none is ever left, since somebody always waits for one."""
    rng = random.Random(max_running)
    mixed = Mixed(one_token_pages(4000, 64, max_running=max_running, max_slots=max_running + 63, max_waiting=1000))
    others = Counter[str]()

    def crowd() -> None:
        while mixed.engine.stages[0].waiting < 5:
            mixed.start(leg(f"one{len(others)}", 3, rng.randint(3, 60), first_token=1000 + 10 * len(others)))
            others[f"one{len(others)}"] += 1

    crowd()
    mixed.start(leg("many", 3, 4, choices=4))
    heard: dict[int, int] = {}  # by choice: how many of the others had come
    for _ in range(2000):
        crowd()
        for name, choice, *_rest in said(mixed.compute()):
            if name == "many":
                heard.setdefault(choice, len(others))
        if len(heard) == 4:
            break
    assert len(heard) == 4, "none waits for ever"
    kept = max_running // FIRST_CHOICES_SHARE
    waited = [heard[choice] - heard[choice - 1] for choice in range(1, 4)]
    assert all(each <= 2 * (kept + 1 + 5) for each in waited), f"{waited} others came before the next choice"


# ---- whatever comes


@pytest.mark.parametrize("policy", MIXED_POLICIES)
@pytest.mark.parametrize("seed", range(12))
def test_every_request_comes_to_its_end_within_budget_and_pages(policy: str, seed: int) -> None:
    rng = random.Random(f"{policy} {seed}")
    chunk = 60 if POLICIES[policy].whole_prompts else rng.choice((5, 8, 16))
    some = facts(
        num_large=rng.choice((16, 24, 60)),
        policy=policy,
        max_model_len=60,
        chunk_tokens=chunk,
        max_slots=6 + 3,
        max_running=6,
        max_waiting=100,
        spare_tokens=rng.choice((0, 4)),
        lookahead_tokens=rng.choice((0, 8, 60)),
    )
    mixed = Mixed(some)
    beside = 6 + 4
    budget = chunk + beside if POLICIES[policy].whole_prompts else max(chunk, beside)
    legs = [
        leg(
            f"r{i}",
            rng.choice((1, 3, 4, 5, 8, 9, 17, 30)),
            rng.randint(1, 25),
            rng.randrange(2000),
            rng.choice((1, 1, 2, 3)),
        )
        for i in range(14)
    ]
    waiting, ended, told = list(legs), Counter[Outcome](), Counter[tuple[str, int]]()
    decoding: set[int] = set()
    sat_out = Counter[int]()

    def hear(out: list[Instruction]) -> None:
        ended.update(outcomes(out))
        told.update((name, choice) for name, choice, *_ in said(out))
        for plan in plans(out):
            assert sum(run.num_tokens for run in plan.runs) <= budget
            if policy == "sarathi" and plan.runs:
                ran = {run.seq_id for run in plan.runs}
                gone = mixed.engine.core.batch.running.keys()
                stood = {s for s in decoding & set(gone) - ran if mixed.engine.core.batch.running[s].remaining}
                sat_out.update(stood)
                assert sat_out.total() <= mixed.engine.counters.steps_sat_out, (
                    "for want of pages only, and it is counted"
                )

    for _ in range(2000):
        if waiting and (not mixed.unreported or rng.random() < 0.3):
            hear(mixed.start(waiting.pop(0)))
        elif mixed.unreported:
            hear(mixed.compute())
        elif not waiting:
            break
        decoding = {
            s for s, each in mixed.engine.core.batch.running.items() if not each.is_prompt and not each.recomputes
        }
        mixed.now_s += 0.05
        hear(mixed.do([]))
    assert ended == {Outcome.DONE: len(legs)} and mixed.used == 0 and mixed.engine.idle
    for each in legs:
        for choice in each.choices:
            assert told[each.key.request_id, choice] == each.params.max_tokens


def tight(*groups: LayerGroup, **changes: Any) -> EngineFacts:
    """Few pages under `sarathi`, so that some give way."""
    usual = {"policy": "sarathi", "max_model_len": 60, "chunk_tokens": 8, "spare_tokens": 4, "lookahead_tokens": 4}
    return facts(*groups, **{**usual, "max_slots": 80, "max_running": 64, **changes})


def begin_some(mixed: Mixed, rng: random.Random, count: int = 14, choices: tuple[int, ...] = (1,)) -> None:
    for i in range(count):
        tokens, outputs, first_token = rng.choice((1, 4, 9, 17)), rng.randint(1, 25), rng.randrange(2000)
        mixed.start(leg(f"r{i}", tokens, outputs, first_token, choices[i % len(choices)]))


@pytest.mark.parametrize("lookahead_tokens", [4, 8])
@pytest.mark.parametrize("preemption", ["latest", "fewest_tokens"])
def test_who_decodes_sits_out_no_step_because_another_gives_way_before(preemption: str, lookahead_tokens: int) -> None:
    gave_way = sat_out = steps = 0
    for seed in range(20):
        rng = random.Random(f"{preemption} {lookahead_tokens} {seed}")
        mixed = Mixed(
            tight(num_large=20, max_slots=9, max_running=6, lookahead_tokens=lookahead_tokens, preemption=preemption)
        )
        begin_some(mixed, rng)
        mixed.compute_all()
        assert mixed.engine.idle and mixed.used == 0
        steps += mixed.engine.counters.steps
        gave_way += sum(mixed.engine.counters.preemptions.values())
        sat_out += mixed.engine.counters.steps_sat_out
    assert gave_way > 10, "pages were short"
    assert sat_out <= steps / 500, "but for many that need pages at once"


@pytest.mark.parametrize(("choices", "num_large"), [(16, 60), (32, 120), (16, 40)])
def test_where_many_need_pages_at_once_as_many_give_way(choices: int, num_large: int) -> None:
    mixed = Mixed(tight(num_large=num_large, max_model_len=80, chunk_tokens=64))
    out = mixed.start(leg("together", 4, 40, choices=choices)) + mixed.compute_all()
    assert outcomes(out) == [Outcome.DONE] and len(said(out)) == 40 * choices
    assert mixed.engine.counters.preemptions["memory"] > choices / 2, "pages were short"
    assert mixed.engine.counters.steps_sat_out <= 1, "one at a time would make 8, 130 and 30"


def test_nobody_gives_way_for_a_page_that_a_window_is_about_to_let_go() -> None:
    """Its sequences hold as many pages again and again, and never more; one that gave way would fit, and give way again."""
    mixed = Mixed(tight(WINDOW, num_large=60, max_model_len=120, chunk_tokens=64, prefix_cache=False))
    out = mixed.start(leg("together", 4, 50, choices=16)) + mixed.start(leg("beside", 8, 40, 500, choices=4))
    out += mixed.compute_all()
    assert outcomes(out) == [Outcome.DONE] * 2
    assert mixed.engine.counters.preemptions == {}


def test_nobody_gives_way_for_pages_that_come_free_because_another_ends() -> None:
    """Five pages: whoever goes on needs a third one when the other has come to its end."""
    mixed = Mixed(facts(num_large=5, policy="sarathi", spare_tokens=0, lookahead_tokens=0, prefix_cache=False))
    out = mixed.start(leg("ends", 6, 3)) + mixed.start(leg("goes on", 6, 12, 500)) + mixed.compute_all()
    assert outcomes(out) == [Outcome.DONE] * 2
    assert mixed.engine.counters.preemptions == {}


@pytest.mark.parametrize("preemption", ["latest", "fewest_tokens"])
def test_who_is_about_to_end_gives_way_to_nobody(preemption: str) -> None:
    """`check_integrity` looks, after each call."""
    gave_way = 0
    for seed in range(40):
        rng = random.Random(seed)
        mixed = Mixed(tight(num_large=16, lookahead_tokens=0, prefix_cache=False, preemption=preemption))
        begin_some(mixed, rng, count=8, choices=(1, 1, 8))
        mixed.compute_all()
        gave_way += mixed.engine.counters.preemptions["memory"]
    assert gave_way > 100, "pages were short"


@pytest.mark.parametrize(
    ("groups", "choices", "pools"),
    [
        ((FULL,), (1, 1, 2), (20, 30, 40)),
        ((FULL, STATE), (1, 1, 2), (40,)),
        ((FULL, STATE), (1,), (20, 30, 40)),
        ((FULL, WINDOW), (1,), (20, 30, 40)),
    ],
)
def test_nobody_gives_way_where_all_that_begin_were_seen_to_go_on_together(
    groups: tuple[LayerGroup, ...], choices: tuple[int, ...], pools: tuple[int, ...]
) -> None:
    for seed in range(100):
        rng = random.Random(seed)
        changes = {"num_large": rng.choice(pools), "spare_tokens": rng.choice((0, 4)), "max_slots": 9}
        mixed = Mixed(tight(*groups, max_running=6, lookahead_tokens=512, prefix_cache=False, **changes))
        begin_some(mixed, rng, choices=choices)
        mixed.compute_all()
        assert mixed.engine.idle and mixed.engine.counters.preemptions == {}, f"seed {seed}"


def test_a_budget_is_never_said_to_be_less_than_what_a_step_computes() -> None:
    """A step that shall take no time has a token of each answer, and a page of a prompt, all the same."""
    mixed = Mixed(one_token_pages(400, 64, target_step_s=1e-9))
    mixed.decoding("a", "b", "c")
    for count in (8, 16) * 4:
        mixed.engine.core.batch._times.observe([(0, count)], 0.1 * count)
    mixed.start(leg("long", 40, 1))
    with_prompts = 0
    while "long" in {s.key.request_id for s in mixed.engine.core.batch.running.values()}:
        mixed.compute()
        if not mixed.unreported:
            break
        tokens = sum(run.num_tokens for run in mixed.unreported[-1].runs)
        assert tokens == mixed.engine.budget_tokens
        with_prompts += tokens > 3
    assert with_prompts >= 40 // PAGE_TOKENS


def test_what_cannot_fit_is_refused_by_what_this_server_has() -> None:
    mixed = Mixed(changed(facts(num_large=5, max_model_len=60), policy="orca"))
    out = mixed.start(leg("large", 10, 40))
    assert outcomes(out) == [Outcome.REFUSED]
