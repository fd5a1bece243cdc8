from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.types.errors import InvalidRequest
from disagg.types.sampling import REPETITION_PENALTIES, SamplingParams
from disagg.worker.sampler import Sampled, Sampler
from tests.sampler import reference

torch.set_num_threads(1)


def params(**kw) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 1000, **kw})


def noisy(rows: int, vocab: int, seed: int = 0, kind: str = "plain") -> torch.Tensor:
    x = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    if kind == "bf16":
        x = x.bfloat16().float()
    elif kind == "few":
        x = x.round().clamp(-2, 2)
    elif kind == "holes":
        x[:, 1::3] = -torch.inf
    elif kind == "flat":
        x = x * 0.01
    return x


def sampler_of(vocab: int, *each: SamplingParams, prompt=(), outputs=(), eos=(), choice: int = 0) -> Sampler:
    sampler = Sampler(vocab, len(each), "cpu")
    for slot, p in enumerate(each):
        sampler.add(slot, p, choice, prompt, outputs, eos)
    return sampler


def step(sampler: Sampler, logits: torch.Tensor, slots=None, rows=None) -> Sampled:
    slots = list(range(logits.shape[0])) if slots is None else slots
    rows = list(range(len(slots))) if rows is None else rows
    return sampler.sample(logits, torch.tensor(rows), slots)


def tokens(sampler: Sampler, logits: torch.Tensor, slots=None, rows=None) -> list[int]:
    return step(sampler, logits, slots, rows).token_ids.tolist()


@st.composite
def some_params(draw, vocab: int) -> SamplingParams:
    token = st.integers(0, vocab - 1)
    plain = draw(st.booleans())
    return params(
        temperature=draw(st.sampled_from([0.0, 0.3, 0.8, 1.0, 2.5])),
        top_k=draw(st.sampled_from([0, -1, 1, 2, 5, 40, vocab - 1, vocab, vocab + 7])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.01])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.0, 0.05, 0.9, 1.0])),
        repetition_penalty=1.0 if plain else draw(st.sampled_from([1.0, 0.5, 1.3])),
        presence_penalty=0.0 if plain else draw(st.sampled_from([0.0, -1.5, 0.7])),
        frequency_penalty=0.0 if plain else draw(st.sampled_from([0.0, -0.4, 1.1])),
        logit_bias=tuple(draw(st.lists(st.tuples(token, st.sampled_from([-100.0, -1.5, 2.25, 100.0])), max_size=4))),
        min_tokens=draw(st.sampled_from([0, 0, 1, 3])),
        stop_token_ids=tuple(draw(st.lists(token, max_size=3))),
        ignore_eos=draw(st.booleans()),
        seed=draw(st.integers(0, 2**64 - 1)),
        logprobs=draw(st.sampled_from([None, None, 0, 1, 4])),
    )


@pytest.mark.parametrize(
    "examples", [pytest.param(30, marks=pytest.mark.short), pytest.param(120, marks=pytest.mark.long)]
)
def test_every_row_of_a_random_batch_equals_the_reference_for_three_steps(examples):
    kinds = st.sampled_from(["plain", "bf16", "few", "holes", "flat"])
    drawn = given(st.data(), st.sampled_from([7, 50, 1024, 5000]), kinds)
    settings(derandomize=True, deadline=None, max_examples=examples)(drawn(check_three_steps))()


def check_three_steps(data, vocab, kind):
    count = data.draw(st.integers(1, 6))
    token = st.integers(0, vocab - 1)
    rows = [data.draw(st.integers(0, count - 1)) for _ in range(count)]
    slots = data.draw(st.permutations(range(count + 2)))[:count]
    sampler, choices = Sampler(vocab, count + 2, "cpu"), []
    for i, slot in enumerate(slots):
        p = data.draw(some_params(vocab))
        prompt, outputs = data.draw(st.lists(token, max_size=5)), data.draw(st.lists(token, max_size=3))
        eos = data.draw(st.lists(token, max_size=2))
        sampler.add(slot, p, i, prompt, outputs, eos)
        choices.append((p, i, prompt, list(outputs), eos))
    for number in range(3):
        logits = noisy(count, vocab, data.draw(st.integers(0, 10**6)), kind)
        before = logits.clone()
        sampled = step(sampler, logits, slots, rows)
        assert torch.equal(logits, before)
        expected = [
            reference.choose(logits[row].numpy(), p, choice, prompt, outputs, eos)
            for row, (p, choice, prompt, outputs, eos) in zip(rows, choices, strict=True)
        ]
        assert sampled.token_ids.tolist() == expected, number
        for chosen, (*_, outputs, _) in zip(expected, choices, strict=True):
            outputs.append(chosen)
        check_logprobs(sampled, logits[rows], [p.logprobs for p, *_ in choices])


def check_logprobs(sampled: Sampled, logits: torch.Tensor, asked: list[int | None]) -> None:
    raw = torch.log_softmax(logits, dim=-1)
    if all(k is None for k in asked):
        assert sampled.logprobs is None and sampled.top_ids is None and sampled.top_logprobs is None
    for i, (row, k) in enumerate(zip(sampled.rows(), asked, strict=True)):
        if k is None:
            assert row.logprob is None and row.top == ()
            continue
        assert row.logprob == pytest.approx(raw[i, row.token_id].item(), abs=1e-5)
        values = logits[i].tolist()
        order = sorted(range(len(values)), key=lambda t: (-values[t], t))[:k]
        assert [t for t, _ in row.top] == order
        assert [v for _, v in row.top] == pytest.approx([raw[i, t].item() for t in order], abs=1e-5)


def test_a_choice_draws_the_same_alone_and_in_any_batch():
    vocab, mix = (
        2048,
        [
            params(seed=1),
            params(seed=2, temperature=0.0, repetition_penalty=1.2),
            params(seed=3, temperature=0.7, top_k=40, top_p=0.9),
            params(seed=4, top_p=0.9, logprobs=3),
            params(seed=5, min_p=0.02, logit_bias=((3, 5.0),)),
            params(seed=6, temperature=3.0, top_p=0.99),
            params(seed=7, temperature=0.0),
        ],
    )
    logits = [noisy(len(mix), vocab, seed) for seed in range(4)]
    together = sampler_of(vocab, *mix, prompt=[1, 2, 3])
    batched = [tokens(together, x) for x in logits]
    backwards = sampler_of(vocab, *mix, prompt=[1, 2, 3])
    order = list(range(len(mix)))[::-1]
    assert [tokens(backwards, x, order, order)[::-1] for x in logits] == batched
    for i, p in enumerate(mix):
        alone = sampler_of(vocab, p, prompt=[1, 2, 3])
        assert [tokens(alone, x[i : i + 1])[0] for x in logits] == [step[i] for step in batched]


def test_a_replayed_slot_continues_as_if_never_interrupted():
    p = params(seed=11, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.2, min_tokens=5, top_k=20)
    logits = [noisy(1, 256, seed) for seed in range(10)]
    straight = sampler_of(256, p, prompt=[4, 5], eos=[7])
    whole = [tokens(straight, x)[0] for x in logits]
    for cut in (1, 4, 5, 9):
        replayed = sampler_of(256, p, prompt=[4, 5], outputs=whole[:cut], eos=[7])
        assert [tokens(replayed, x)[0] for x in logits[cut:]] == whole[cut:]


def test_choices_that_share_a_row_draw_independently():
    sampler, n = Sampler(64, 64, "cpu"), 64
    for slot in range(n):
        sampler.add(slot, params(seed=5, n=n), slot, [1], [], [])
    drawn = tokens(sampler, noisy(1, 64, kind="flat"), list(range(n)), [0] * n)
    assert drawn == [
        reference.choose(noisy(1, 64, kind="flat")[0].numpy(), params(seed=5), c, [1], [], []) for c in range(n)
    ]
    assert len(set(drawn)) > 20


def test_a_reused_slot_carries_nothing_over():
    fresh = params(seed=3)
    loaded = params(
        seed=9, repetition_penalty=5.0, frequency_penalty=2.0, logit_bias=((1, 100.0),), min_tokens=50, logprobs=5,
        top_k=3, top_p=0.5, min_p=0.5, temperature=0.0, stop_token_ids=(2, 3),
    )  # fmt: skip
    sampler = Sampler(128, 2, "cpu")
    for _ in range(20):  # more rounds than the tables have rows
        sampler.add(1, loaded, 3, [1, 2], [5, 6], [7])
        tokens(sampler, noisy(1, 128), [1])
        sampler.remove(1)
    for p in (fresh, params(seed=3, temperature=0.0, presence_penalty=1.0, logit_bias=((9, -3.0),), min_tokens=1)):
        sampler.add(1, p, 0, [], [], [8])
        clean = sampler_of(128, p, eos=[8])
        for seed in range(5):
            again, expected = step(sampler, noisy(1, 128, seed), [1]), step(clean, noisy(1, 128, seed))
            assert again.rows() == expected.rows()
        sampler.remove(1)
    with pytest.raises(AssertionError, match="free"):
        sampler.remove(1)
    with pytest.raises(AssertionError, match="free"):
        tokens(sampler, noisy(1, 128), [1])


def test_many_slots_with_edits_grow_the_tables_without_mixing_rows():
    vocab, count = 64, 30
    each = [
        params(temperature=0.0, frequency_penalty=1.0, logit_bias=tuple((t, 0.5 * t) for t in range(1 + i)))
        for i in range(count)
    ]
    sampler, histories = Sampler(vocab, count, "cpu"), [[i] for i in range(count)]
    for i, p in enumerate(each):
        sampler.add(i, p, 0, [], histories[i], [])
    for seed in range(6):
        x = noisy(count, vocab, seed)
        got = tokens(sampler, x)
        assert got == [reference.choose(x[i].numpy(), p, 0, [], histories[i], []) for i, p in enumerate(each)]
        for i, token in enumerate(got):
            histories[i].append(token)


def test_repetition_penalty_equals_transformers():
    processors = pytest.importorskip("transformers.generation.logits_process")
    x, prompt, outputs = noisy(1, 512), list(range(0, 300, 7)), [5, 5, 9, 400]
    for penalty in (0.4, 1.3, 4.0):
        theirs = processors.RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + outputs]), x.clone())
        p = params(temperature=0.0, repetition_penalty=penalty)
        assert tokens(sampler_of(512, p, prompt=prompt, outputs=outputs), x) == theirs.argmax(-1).tolist()
        ours = reference.edited(x[0].numpy(), p, prompt, outputs, [])
        assert torch.equal(torch.from_numpy(ours), theirs[0])


def test_the_strongest_repetition_penalties_that_are_allowed_leave_the_greatest_logit_the_greatest():
    x, prompt = noisy(1, 512) * 1e30, list(range(512))
    wanted = int(x[0].double().argmax())
    for penalty in REPETITION_PENALTIES:
        p = params(temperature=0.0, repetition_penalty=penalty)
        p.validate(512)
        assert tokens(sampler_of(512, p, prompt=prompt), x) == [wanted]
    for penalty in (REPETITION_PENALTIES[0] / 2, REPETITION_PENALTIES[1] * 2, 0.0, -1.0, 1e-38, math.nan, math.inf):
        with pytest.raises(InvalidRequest, match=r"repetition_penalty is .*; it must be between 0.001 and 100.0"):
            params(repetition_penalty=penalty).validate(512)


def test_filters_leave_what_transformers_leave():
    processors = pytest.importorskip("transformers.generation.logits_process")
    x = noisy(1, 300, 4)
    for p, warpers in (
        (params(top_k=7), [processors.TopKLogitsWarper(7)]),
        (params(top_p=0.8), [processors.TopPLogitsWarper(0.8)]),
        (params(min_p=0.1), [processors.MinPLogitsWarper(0.1)]),
        (params(top_k=20, top_p=0.7), [processors.TopKLogitsWarper(20), processors.TopPLogitsWarper(0.7)]),
    ):
        y = x.clone()
        for warper in warpers:
            y = warper(None, y)
        left = set(y[0].isfinite().nonzero()[:, 0].tolist())
        drawn = set()
        for seed in range(0, 3000, 500):
            sampler = Sampler(300, 500, "cpu")
            for slot in range(500):
                sampler.add(slot, SamplingParams(**{**fields(p), "seed": seed + slot}), 0, [], [], [])
            drawn |= set(tokens(sampler, x, list(range(500)), [0] * 500))
        assert drawn <= left and len(drawn) > 0.5 * len(left)
        assert set(reference.survivors(x[0].numpy(), p)[0]) == left


def fields(p: SamplingParams) -> dict:
    return {name: getattr(p, name) for name in p.__struct_fields__}


def test_presence_and_frequency_penalties_ignore_the_prompt():
    x = torch.zeros(1, 8)
    x[0, 3], x[0, 4] = 2.0, 1.9
    for p in (params(temperature=0.0, presence_penalty=0.5), params(temperature=0.0, frequency_penalty=0.08)):
        assert tokens(sampler_of(8, p, prompt=[3, 3, 3]), x) == [3]
        assert tokens(sampler_of(8, p, outputs=[3, 3]), x) == [4]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_eos_and_stop_tokens_are_masked_until_min_tokens_and_not_after(ignore_eos):
    x = torch.zeros(1, 64)
    x[0, 5], x[0, 6], x[0, 7], x[0, 8] = 40.0, 30.0, 20.0, 10.0
    p = params(temperature=0.0, min_tokens=3, stop_token_ids=(6,), ignore_eos=ignore_eos, logit_bias=((5, 100.0),))
    assert [tokens(s, x)[0] for s in [sampler_of(64, p, eos=[5, 7])] for _ in range(5)] == [8, 8, 8, 5, 5]
    assert tokens(sampler_of(64, p, outputs=[1, 1], eos=[5, 7]), x) == [8]
    assert tokens(sampler_of(64, p, outputs=[1, 1, 1], eos=[5, 7]), x) == [5]


def test_a_bias_of_a_hundred_forces_or_bans_a_token():
    x = noisy(1, 100, 2)
    best = int(x.argmax())
    assert tokens(sampler_of(100, params(logit_bias=((42, 100.0),))), x) == [42]
    banned = sampler_of(100, params(seed=1, logit_bias=((best, -100.0),)))
    assert best not in [tokens(banned, x)[0] for _ in range(200)]
    last_wins = sampler_of(100, params(temperature=0.0, logit_bias=((42, 100.0), (42, -100.0))))
    assert tokens(last_wins, x) == [best]


def test_greedy_and_top_k_of_one_take_the_lowest_of_equal_logits():
    x = torch.zeros(1, 4096)
    x[0, [900, 17, 4000]] = 3.0
    for p in (
        params(temperature=0.0), params(top_k=1), params(temperature=50.0, top_k=1, seed=8), params(temperature=0.0,
        logprobs=2), params(temperature=1e-300, top_k=1), params(min_p=1.0, top_p=0.01),
    ):  # fmt: skip
        assert tokens(sampler_of(4096, p), x) == [17]


def test_a_vanishing_temperature_draws_only_from_the_largest():
    x = torch.zeros(1, 4096)
    x[0, [900, 17, 4000]] = 3.0
    for p in (params(temperature=5e-324), params(temperature=1e-20, top_p=0.99), params(temperature=1e-9, min_p=0.01)):
        assert {tokens(s, x)[0] for s in [sampler_of(4096, p)] for _ in range(40)} == {17, 900, 4000}


def test_top_p_keeps_the_smallest_sufficient_set_and_at_least_one():
    x = torch.log(torch.tensor([[0.5, 0.25, 0.125, 0.125]]))
    for top_p, left in ((0.001, 1), (0.49, 1), (0.51, 2), (0.74, 2), (0.76, 3), (0.88, 4)):
        assert {tokens(s, x)[0] for s in [sampler_of(4, params(top_p=top_p))] for _ in range(300)} == set(range(left))
    equal = torch.zeros(1, 4)
    assert {tokens(s, equal)[0] for s in [sampler_of(4, params(top_p=0.5))] for _ in range(200)} == {0, 1}


def test_the_race_over_all_tokens_and_over_candidates_agree():
    vocab, rows = 4096, 200
    x = noisy(1, vocab, 3)
    x[0, 77] = -torch.inf  # so that the first vocab - 1 tokens are all that can be drawn
    free, listed = Sampler(vocab, rows, "cpu"), Sampler(vocab, rows, "cpu")
    for slot in range(rows):
        free.add(slot, params(seed=slot, temperature=1.5), 0, [], [], [])
        listed.add(slot, params(seed=slot, temperature=1.5, top_k=vocab - 1), 0, [], [], [])
    drawn = tokens(free, x, list(range(rows)), [0] * rows)
    assert drawn == tokens(listed, x, list(range(rows)), [0] * rows)
    assert len(set(drawn)) > 50


def test_a_nucleus_wider_than_the_first_candidates_is_found_whole():
    vocab = 6000
    for kind, temperature in (("plain", 1.0), ("plain", 2.0), ("flat", 1.0)):
        x = noisy(3, vocab, 1, kind)
        p = [params(seed=s, temperature=temperature, top_p=0.97) for s in range(3)]
        assert tokens(sampler_of(vocab, *p), x) == [
            reference.choose(x[i].numpy(), p[i], 0, [], [], []) for i in range(3)
        ]


def chi_square(drawn: list[int], expected: np.ndarray) -> float:
    """Standard deviations by which chi-square exceeds its mean."""
    wanted = expected * len(drawn)
    chi2 = ((np.bincount(drawn, minlength=len(expected)) - wanted) ** 2 / wanted).sum()
    freedom = len(expected) - 1
    return (chi2 - freedom) / math.sqrt(2 * freedom)


def test_draws_follow_the_distribution_and_successive_draws_are_independent():
    vocab, rows = 6, 20000
    x = torch.tensor([[1.0, 0.0, -1.0, 0.5, 2.0, -0.5]])
    for p in (params(temperature=0.8), params(temperature=0.8, top_k=5, top_p=0.9)):
        order, scaled = reference.survivors(x[0].numpy(), p)
        weight = np.array([math.exp(scaled[i]) if i in order else 0.0 for i in range(vocab)])
        probability = (weight / weight.sum())[sorted(order)]
        rank = {token: i for i, token in enumerate(sorted(order))}
        sampler = Sampler(vocab, rows, "cpu")
        for slot in range(rows):
            sampler.add(slot, SamplingParams(**{**fields(p), "seed": slot // 4}), slot % 4, [], [], [])
        first, second = ([rank[t] for t in tokens(sampler, x, list(range(rows)), [0] * rows)] for _ in range(2))
        pairs = np.outer(probability, probability).ravel()
        n = len(order)
        assert chi_square(first, probability) < 4
        assert chi_square(second, probability) < 4
        assert chi_square([a * n + b for a, b in zip(first, second, strict=True)], pairs) < 4  # output index
        assert chi_square([first[i] * n + first[i + 1] for i in range(0, rows, 2)], pairs) < 4  # choice
        assert chi_square([first[i] * n + first[i + 4] for i in range(0, rows - 4, 8)], pairs) < 4  # seed


def test_logprobs_are_the_models_own_whatever_was_done_to_choose():
    x = noisy(2, 300, 6)
    heavy = params(
        temperature=0.2, top_k=2, repetition_penalty=3.0, presence_penalty=2.0, logit_bias=((7, 50.0),), logprobs=20
    )
    sampled = step(sampler_of(300, heavy, params(temperature=0.0), prompt=[1, 2], outputs=[3]), x)
    check_logprobs(sampled, x, [20, None])
    assert sampled.rows()[0].token_id == 7
    assert sampled.top_ids is not None and sampled.top_ids.shape == (2, 20)


def test_batches_report_only_what_was_asked():
    x = noisy(2, 50)
    none = step(sampler_of(50, params(), params()), x)
    assert none.logprobs is None and none.top_ids is None and none.top_logprobs is None
    chosen_only = step(sampler_of(50, params(logprobs=0), params()), x)
    assert chosen_only.logprobs is not None and chosen_only.top_ids is None
    assert chosen_only.asked == (0, None) and math.isnan(chosen_only.logprobs[1].item())
    mixed = step(sampler_of(50, params(logprobs=2), params(logprobs=4)), x)
    assert [len(row.top) for row in mixed.rows()] == [2, 4]


def test_an_empty_batch_samples_nothing():
    sampled = Sampler(16, 2, "cpu").sample(torch.zeros(0, 16), torch.zeros(0, dtype=torch.int64), [])
    assert sampled.token_ids.shape == (0,) and sampled.rows() == []


def test_logits_of_any_dtype_are_chosen_from_as_their_float32() -> None:
    logits = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    mix = (
        params(temperature=0.0),
        params(temperature=0.7, seed=3, logprobs=2),
        params(top_k=5, repetition_penalty=1.3),
    )
    got, right = step(sampler_of(64, *mix), logits), step(sampler_of(64, *mix), logits.float())
    assert got.rows()[1:] == right.rows()[1:] and got.token_ids.tolist() == right.token_ids.tolist()


def test_greedy_rows_take_the_first_maximum_that_is_known() -> None:
    here = sampler_of(64, params(temperature=0.0), params(temperature=0.0))
    known = torch.tensor([7, 5])  # of each sample's row
    assert here.sample(torch.zeros(3, 64), torch.tensor([2, 0]), [0, 1], known).token_ids.tolist() == [7, 5]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_chooses_as_the_cpu_does_and_never_waits():
    vocab, mix = 8192, [
        params(seed=1), params(seed=2, temperature=0.0, repetition_penalty=1.2), params(seed=3, top_k=40, top_p=0.9),
        params(seed=4, top_p=0.9, logprobs=3), params(seed=5, min_p=0.02, logit_bias=((3, 5.0),)),
        params(seed=6, temperature=0.0), params(seed=7, min_tokens=9, stop_token_ids=(3, 4)),
    ]  # fmt: skip
    here, there = sampler_of(vocab, *mix, prompt=[1, 2]), Sampler(vocab, len(mix), "cuda")
    for slot, p in enumerate(mix):
        there.add(slot, p, 0, [1, 2], [], [])
    rows = torch.arange(len(mix), device="cuda")
    for seed in range(8):
        x = noisy(len(mix), vocab, seed, "bf16")
        moved = x.cuda()
        torch.cuda.set_sync_debug_mode("error")
        try:
            sampled = there.sample(moved, rows, range(len(mix)))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert sampled.token_ids.tolist() == tokens(here, x)


def test_a_reused_slot_forgets_what_its_predecessor_saw():
    x = torch.zeros(1, 64)
    x[0, 5] = 1.0
    sampler = Sampler(64, 1, "cpu")
    for p in (params(temperature=0.0, presence_penalty=1.5), params(temperature=0.0, repetition_penalty=50.0)):
        sampler.add(0, p, 0, [5], [5, 5], [])
        sampler.remove(0)
        sampler.add(0, p, 0, [], [], [])
        assert tokens(sampler, x) == [5]
        sampler.remove(0)


# ---- logits that are no numbers


@settings(max_examples=300)
@given(st.data())
def test_a_row_of_logits_that_are_no_numbers_has_no_token_and_the_others_do_not_notice(data: st.DataObject) -> None:
    vocab = data.draw(st.sampled_from([64, 4200, 5000]))
    each = [data.draw(some_params(vocab)) for _ in range(4)]
    logits = noisy(
        4, vocab, seed=data.draw(st.integers(0, 99)), kind=data.draw(st.sampled_from(["plain", "few", "holes"]))
    )
    right = step(sampler_of(vocab, *each), logits).rows()
    bad = data.draw(st.sets(st.integers(0, 3), min_size=1))
    spoiled = logits.clone()
    for row in bad:
        match data.draw(st.sampled_from(["nan", "inf", "all nan", "none"])):
            case "nan":
                spoiled[row, data.draw(st.integers(0, vocab - 1))] = torch.nan
            case "inf":
                spoiled[row, data.draw(st.integers(0, vocab - 1))] = torch.inf
            case "all nan":
                spoiled[row] = torch.nan
            case "none":
                spoiled[row] = -torch.inf
    sampler = sampler_of(vocab, *each)
    got = step(sampler, spoiled).rows()
    assert [row.token_id for row in got] == [-1 if i in bad else row.token_id for i, row in enumerate(right)]
    assert [got[i] for i in range(4) if i not in bad] == [right[i] for i in range(4) if i not in bad]
    for slot in range(4):
        sampler.remove(slot)


@pytest.mark.parametrize("each", [{}, {"temperature": 0.0}, {"temperature": 0.0, "presence_penalty": 1.0}], ids=str)
def test_where_a_graph_says_that_there_is_no_first_there_is_no_token(each: dict[str, float]) -> None:
    logits = noisy(2, 100)
    logits[1, 3] = torch.nan
    first = torch.tensor([int(logits[0].argmax()), -1])
    chosen = (
        sampler_of(100, params(**each), params(**each))
        .sample(logits, torch.tensor([0, 1]), [0, 1], first)
        .token_ids.tolist()
    )
    assert chosen[1] == -1 and 0 <= chosen[0] < 100
