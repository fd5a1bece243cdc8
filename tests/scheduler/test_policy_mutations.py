"""The tests of the policies notice what they are there for: each of these changes to them makes the named test fail.

A mutated copy of the policies stands in for them wherever they are used: in the tests, and in the engine that some of them run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from disagg.engine import batch
from disagg.scheduler import policies
from tests.engine import test_mixed, test_mixed_partly
from tests.scheduler import test_budget, test_policies
from tests.scheduler.mutated import mutated

USERS = (batch, test_mixed, test_budget, test_policies)

in_one_batch = test_mixed.test_every_decode_and_a_chunk_of_16_are_in_the_same_forward
orca_reserves = test_mixed.test_orca_begins_nothing_whose_longest_answer_has_no_room
alone = test_mixed.test_faster_transformer_begins_nothing_beside_a_batch_that_is_under_way
begins_partly = partial(test_mixed_partly.test_policies_that_compute_prompts_whole_begin_none_with_part_of_its_pages)
holds_up = test_mixed.test_prompts_of_vllm_hold_up_those_that_decode_and_those_of_sarathi_do_not
whole = test_budget.test_a_whole_prompt_that_does_not_fit_beside_others_waits_and_one_alone_does_not
least = test_budget.test_decodes_that_cost_more_than_there_is_all_run_and_leave_a_prompt_its_least_part
cut = test_policies.test_a_long_prompt_is_cut_where_the_budget_ends

# what is wrong: what stands there, what then would, and the test that notices
MUTATIONS: dict[str, tuple[str, str, Callable[[], None]]] = {
    "chunks go before decodes": (
        "(*decodes, *state.chunks(_of(candidates, Phase.PREFILL), left))",
        "(*state.chunks(_of(candidates, Phase.PREFILL)), *decodes)",
        test_policies.test_the_last_token_of_a_prompt_is_no_decode,
    ),
    "chunks have the budget of decodes, too": (
        "state.chunks(_of(candidates, Phase.PREFILL), left)",
        "state.chunks(_of(candidates, Phase.PREFILL))",
        test_policies.test_decode_gives_one_token_to_each_that_decodes_before_anything_is_computed_again,
    ),
    "one token that is left is a decode": (
        "if candidate.phase is phase",
        "if (candidate.remaining == 1) == (phase is Phase.DECODE)",
        test_policies.test_the_last_token_of_a_prompt_is_no_decode,
    ),
    "a chunk is as long as there are tokens, not pages": (
        "max(0, min(self.remaining, tokens, self.most))",
        "max(0, min(self.remaining, tokens))",
        test_budget.test_a_chunk_of_600_that_has_500_pages_becomes_500_and_others_have_their_own,
    ),
    "a chunk may be negative": (
        "max(0, min(self.remaining, tokens, self.most))",
        "min(self.remaining, tokens, self.most) or 1",
        partial(test_budget.test_no_chunk_is_ever_negative, 0),
    ),
    "the part that pages limit is charged whole": (
        "budget = budget.less(budget.cost_of(candidate.start, tokens), tokens)",
        "budget = budget.less(budget.cost_of(candidate.start, candidate.remaining), candidate.remaining)",
        test_policies.test_a_run_that_stops_at_a_checkpoint_leaves_the_rest_of_the_budget_to_the_next,
    ),
    "nothing is charged": ("budget = budget.less(budget.cost_of(candidate.start, tokens), tokens)", "pass", cut),
    "every chunk samples": ("sample=tokens == candidate.remaining", "sample=True", cut),
    "no chunk samples": ("sample=tokens == candidate.remaining", "sample=False", cut),
    "prompts stand still beside decodes that cost too much": ("min(least, budget.most_tokens)", "0", least),
    "the least part goes beyond the most tokens": (
        "min(least, budget.most_tokens)",
        "least",
        test_budget.test_the_least_part_is_no_more_than_decodes_leave_of_the_most_tokens,
    ),
    "each prompt gets the least part": (
        "least -= tokens",
        "least -= 0",
        test_budget.test_the_least_part_is_one_for_all_prompts,
    ),
    "what decodes cost keeps some out": (
        "[: self.budget.most_tokens]",
        "[: int(self.budget.cost / 4)]",
        least,
    ),
    "a whole prompt is cut": ("if self.whole and runs and tokens", "if False and runs and tokens", whole),
    "a whole prompt that never fits never runs": (
        "if self.whole and runs and tokens",
        "if self.whole and tokens",
        whole,
    ),
    "others go past a whole prompt that waits": (
        "                break\n",
        "                continue\n",
        whole,
    ),
    "vllm decodes beside prompts": (
        "tuple(prompts or state.decodes(candidates)[0])",
        "(*prompts, *state.decodes(candidates)[0])",
        holds_up,
    ),
    "sarathi is vllm": ('"sarathi": Policy(decodes_first', '"sarathi": Policy(prompts_first', partial(in_one_batch, 3)),
    "sarathi computes chunks when nobody decodes": (
        '"sarathi": Policy(decodes_first',
        '"sarathi": Policy(in_turns',
        partial(in_one_batch, 3),
    ),
    "turns are not taken": (
        "if state.last is Phase.PREFILL else",
        "if state.last is None else",
        test_mixed.test_simple_chunking_takes_turns_step_by_step,
    ),
    "orca reserves nothing": (
        '"orca": Policy(decodes_first, whole_prompts=True, reserves=True)',
        '"orca": Policy(decodes_first, whole_prompts=True)',
        orca_reserves,
    ),
    "faster_transformer begins beside others": ("reserves=True, alone=True)", "reserves=True)", alone),
    "sarathi waits until all pages are free": (
        '"sarathi": Policy(decodes_first, partly=True)',
        '"sarathi": Policy(decodes_first)',
        partial(begins_partly, "sarathi", True),
    ),
    "vllm begins with part of its pages": (
        '"vllm": Policy(prompts_first, whole_prompts=True)',
        '"vllm": Policy(prompts_first, whole_prompts=True, partly=True)',
        partial(begins_partly, "vllm", False),
    ),
    "whoever came first gives way": (
        "key=lambda each: (each.priority, each.arrival)",
        "key=lambda each: (each.priority, -each.arrival)",
        test_policies.test_whoever_came_first_never_gives_way_to_one_who_came_later,
    ),
    "whoever loses most gives way": (
        "(-each.priority, each.tokens, -each.arrival)",
        "(-each.priority, -each.tokens, -each.arrival)",
        test_policies.test_whoever_loses_least_gives_way_and_of_equals_the_latest,
    ),
    "the most urgent gives way": (
        "key=lambda each: (each.priority, each.arrival)",
        "key=lambda each: (-each.priority, each.arrival)",
        test_policies.test_the_least_urgent_gives_way,
    ),
}


def put_in(monkeypatch: pytest.MonkeyPatch, old: str = "", new: str = "") -> None:
    copy = mutated(policies, old, new)
    copy.__dict__["Phase"] = policies.Phase  # which everybody compares with
    for user in USERS:
        for name, value in policies.__dict__.items():
            if not name.startswith("_") and user.__dict__.get(name) is value and value is not policies.Phase:
                monkeypatch.setattr(user, name, copy.__dict__[name])


@pytest.mark.parametrize("name", MUTATIONS)
def test_it_is_noticed_that(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, notices = MUTATIONS[name]
    put_in(monkeypatch, old, new)
    with pytest.raises((AssertionError, ExceptionGroup)) as raised:
        notices()
    if isinstance(raised.value, ExceptionGroup):  # hypothesis has found several ways
        assert raised.value.split(AssertionError)[1] is None


def test_a_copy_without_a_mutation_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    put_in(monkeypatch)
    assert batch.POLICIES is not policies.POLICIES and test_policies.latest is not policies.latest
    for _, _, notices in MUTATIONS.values():
        notices()
