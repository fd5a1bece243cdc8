"""Cut for several ranks, every family gives the logits that it gives whole, and a rank keeps the KV of its own heads only."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING

from disagg.models.families import ATTENTION_FREE
from disagg.models.model import PagedModel
from disagg.models.ranks import Ranks
from disagg.models.sharding import RowParallelLinear, VocabParallelLinear
from disagg.types.errors import ConfigError
from tests.models.driver import Driver
from tests.models.ranks import RankPool
from tests.models.tiny import FAMILY_CONFIGS, VOCAB_SIZE, make_tiny

OUTPUTS = 4
SHAPES = ((9, 4), (37, 16), (3, 64))  # (prompt tokens, chunk)
PAGE_TOKENS = 4
# Families whose plan cuts attention and feed-forward layers plainly.
PLAIN = ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "mistral", "granite", "starcoder2", "gpt_neox")


@dataclass(frozen=True)
class Run:
    """What one rank computed. logits: of every output, of every prompt in turn; tokens: chosen by the logits."""

    tokens: list[list[int]]
    logits: torch.Tensor
    kv_heads: tuple[int, ...]  # of each group of attention layers
    sums: int  # linear layers that give a part of a sum
    joins: int  # layers whose attention cuts the heads itself


def compute(ranks: Ranks, model_dir: Path, spoil: Callable[[PagedModel], None] | None = None) -> Run:
    model = PagedModel.load(model_dir, "float32", "cpu", ranks)
    if spoil is not None:
        spoil(model)
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length, _ in SHAPES]
    driver = Driver(model, len(model.groups) * 40, PAGE_TOKENS)
    sequences = [driver.sequence(prompt, chunk) for prompt, (_, chunk) in zip(prompts, SHAPES, strict=True)]
    driver.run(sequences, OUTPUTS)
    places = model._loaded.places
    return Run(
        tokens=[sequence.outputs for sequence in sequences],
        logits=torch.stack([row for sequence in sequences for row in sequence.logits]),
        kv_heads=tuple(group.kv_heads for group in model.groups if not group.is_state),
        sums=sum(isinstance(part, RowParallelLinear) for part in model._loaded.module.modules()),
        joins=sum(place.cut is not None for place in places.attention.values()),
    )


def check(rank_pool: RankPool, tp: int, model_dir: Path) -> list[Run]:
    whole = compute(Ranks(), model_dir)
    runs = rank_pool.run(tp, compute, model_dir)
    for rank, run in enumerate(runs):
        error = ((run.logits - whole.logits).norm() / whole.logits.norm()).item()
        assert error < 1e-5, f"rank {rank} of {tp}: logits are off by {error:.1e}"
        assert run.tokens == whole.tokens
    return runs


# Of the families of the short part, one of each way in which a module is cut or stays whole.
SHORT_LIST = (
    "llama",
    "falcon_h1",
    "gpt_oss",
    "gemma3n_text",
    "gpt_neox",
    "lfm2",
    "mamba2",
    "mixtral",
    "phi3",
    "qwen3_next",
)


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name in SHORT_LIST else pytest.mark.long) for name in sorted(FAMILY_CONFIGS)],
)
def test_two_ranks_give_what_one_gives(rank_pool: RankPool, family: str, tmp_path: Path) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip("this transformers does not know the family")
    runs = check(rank_pool, 2, make_tiny(family, tmp_path))
    if family not in ATTENTION_FREE:
        kv_heads = 2 if FAMILY_CONFIGS[family].get("num_key_value_heads") == 4 else 1
        assert {heads for run in runs for heads in run.kv_heads} == {kv_heads}, "each rank keeps half of the KV heads"
    if family in PLAIN:
        assert all((run.sums, run.joins) == (6, 0) for run in runs), "two sums in each of three layers"


@pytest.mark.parametrize(
    ("family", "fields", "sums", "joins"),
    [
        ("phi3", {}, 0, 3),  # fused and gathered
        ("olmo2", {}, 3, 3),  # norms over all heads
        ("cohere", {"use_qk_norm": True}, 3, 3),  # a norm of its own for each head
        ("gpt_oss", {}, 0, 3),  # no plan, and attention sinks
        ("mixtral", {}, 3, 0),  # experts are spread, as whole ones
        ("jamba", {}, 0, 1),  # one attention layer, and recurrent ones
        (
            "gemma3n_text",
            {"activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0, 0.0]},
            8,
            0,
        ),  # two layers that look across
    ],
)
def test_what_a_plan_does_not_cut_plainly_stays_whole(
    rank_pool: RankPool, family: str, fields: dict, sums: int, joins: int, tmp_path: Path
) -> None:
    (run, _) = check(rank_pool, 2, make_tiny(family, tmp_path, **fields))
    assert (run.sums, run.joins) == (sums, joins)


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {"intermediate_size": 98}),  # parts of 24 and 25
        *(
            pytest.param(family, {}, marks=pytest.mark.long)
            for family in (
                "gemma3_text",
                "gpt_oss",
                "granite_swa",  # sinks that the plan cuts
                "qwen3_next",  # a gate for each query head
                "falcon_h1",
            )
        ),
    ],
)
def test_with_more_ranks_than_kv_heads_ranks_share_them(
    rank_pool: RankPool, family: str, fields: dict, kv_heads: int, tmp_path: Path
) -> None:
    runs = check(rank_pool, 4, make_tiny(family, tmp_path, num_key_value_heads=kv_heads, **fields))
    assert {heads for run in runs for heads in run.kv_heads} == {1}


def test_three_ranks_share_nine_query_heads_and_three_kv_heads(rank_pool: RankPool, tmp_path: Path) -> None:
    make_tiny("llama", tmp_path, num_attention_heads=9, num_key_value_heads=3, hidden_size=72)
    check(rank_pool, 3, tmp_path)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tp", [2, 3])
def test_each_rank_computes_its_part_of_the_vocabulary(
    rank_pool: RankPool, tp: int, tied: bool, tmp_path: Path
) -> None:
    """Of one that does not divide."""
    make_tiny(
        "llama",
        tmp_path,
        vocab_size=VOCAB_SIZE + 1,
        tie_word_embeddings=tied,
        num_attention_heads=6,
        num_key_value_heads=6,
        hidden_size=96,
    )
    check(rank_pool, tp, tmp_path)
    rows = rank_pool.run(tp, head_rows, tmp_path)
    assert sum(rows) == VOCAB_SIZE + 1 and max(rows) == -(-(VOCAB_SIZE + 1) // tp)


def head_rows(ranks: Ranks, model_dir: Path) -> int:
    head = PagedModel.load(model_dir, "float32", "cpu", ranks)._loaded.module.get_output_embeddings()
    assert isinstance(head, VocabParallelLinear)
    return head.weight.shape[0]


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_wrong_part_of_one_output_projection_shows(rank_pool: RankPool, name: str, tmp_path: Path) -> None:
    """The comparison has power: a part that is missing, or a bias that every rank adds to the sum, changes the logits."""
    make_tiny("starcoder2", tmp_path)
    whole = compute(Ranks(), tmp_path)
    (run, _) = rank_pool.run(2, compute_spoilt, tmp_path, name)
    assert ((run.logits - whole.logits).norm() / whole.logits.norm()).item() > 0.01


def compute_spoilt(ranks: Ranks, model_dir: Path, name: str) -> Run:
    def spoil(model: PagedModel) -> None:
        output = model._loaded.module.model.layers[1].self_attn.o_proj
        assert isinstance(output, RowParallelLinear)
        if name == "bias":
            output.bias.mul_(ranks.size)
        elif ranks.rank == 1:
            output.weight.zero_()

    return compute(ranks, model_dir, spoil)


@pytest.mark.parametrize(
    ("tp", "query_heads", "kv_heads", "sizes"), [(2, 9, 3, "1, 3, 9"), (3, 4, 2, "1, 2, 4"), (8, 4, 1, "1, 2, 4")]
)
def test_heads_that_ranks_cannot_share_are_refused_before_weights_are_read(
    tp: int, query_heads: int, kv_heads: int, sizes: str, tmp_path: Path
) -> None:
    make_tiny("llama", tmp_path, num_attention_heads=query_heads, num_key_value_heads=kv_heads, hidden_size=72)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=f"TP size {tp} cannot share {query_heads} query heads .* them: {sizes}$"):
        PagedModel.load(tmp_path, "float32", "cpu", Ranks(0, tp))


def test_a_layer_whose_own_heads_cannot_be_shared_is_refused_by_its_number(tmp_path: Path) -> None:
    make_tiny("laguna", tmp_path, num_attention_heads_per_layer=[4, 2, 4])
    with pytest.raises(ConfigError, match=r"layer 1: TP size 4 cannot share 2 query heads and 2 KV heads.*: 1, 2$"):
        PagedModel.load(tmp_path, "float32", "cpu", Ranks(0, 4))


def test_all_ranks_take_the_tokens_of_the_one_that_samples(rank_pool: RankPool) -> None:
    assert rank_pool.run(3, take) == [[7, 8]] * 3


def take(ranks: Ranks) -> list[int]:
    return ranks.take(torch.tensor([7, 8] if ranks.samples else [1, 2])).tolist()


def test_what_one_rank_lacks_all_do_without(rank_pool: RankPool) -> None:
    assert rank_pool.run(3, have) == [(True, False, False)] * 3


def have(ranks: Ranks) -> tuple[bool, ...]:
    cpu = torch.device("cpu")
    return tuple(ranks.all_have(mine, cpu) for mine in (True, ranks.rank != 1, ranks.rank == 0))


def test_a_rank_that_waits_in_vain_fails_instead_of_hanging(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        Ranks(0, 2).connect(tmp_path / "ranks", torch.device("cpu"), meet_s=0.2, collective_s=0.2)


def test_a_collective_that_a_rank_does_not_join_fails_on_the_others(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, sum_on_one, rank_pool.meeting()) == ["", "failed"]


def sum_on_one(together: Ranks, meeting: Path) -> str:
    """Rank 1 adds up with a rank 0 that does not; they meet again over their usual connection."""
    alone = Ranks(together.rank, together.size)
    alone.connect(meeting, torch.device("cpu"), 30.0, 2.0)  # they also connect within the 2 s
    outcome = ""
    if together.rank == 1:
        with pytest.raises(RuntimeError):
            alone.sum(torch.zeros(1))
        outcome = "failed"
    together.sum(torch.zeros(1))
    return outcome
