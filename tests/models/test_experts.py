"""Experts over several ranks: each rank gets for its own rows what the whole model gives, whoever has rows in which step."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch

from disagg.models.experts import ExpertsCall, Spread, SpreadExperts
from disagg.models.loader import load
from disagg.models.model import PagedModel
from disagg.models.ranks import Ranks
from tests.models.driver import Driver, Sequence
from tests.models.ranks import COLLECTIVE_S, RankPool
from tests.models.tiny import VOCAB_SIZE, make_tiny

STEPS = 30
FAMILIES = ("mixtral", "gpt_oss", "nemotron_h")  # gated, with biases and transposed, not gated
MORE = ("qwen3_next", "jamba", "gemma4_text", "phimoe", "granitemoehybrid")


def schedule(rank: int, seed: int) -> tuple[list[tuple[list[int], int, int]], list[list[int]]]:
    """(prompts of a rank with their chunks and outputs; by step, which of them run). In some steps none does."""
    rng = random.Random(f"{seed} {rank}")
    prompts = [
        (
            [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.choice((1, 4, 9, 30)))],
            rng.choice((4, 16)),
            rng.randint(1, 6),
        )
        for _ in range(3)
    ]
    steps = [[which for which in range(3) if rng.random() < 0.4] for _ in range(STEPS)]
    return prompts, steps


def due(sequences: list[Sequence], outputs: list[int], step: list[int]) -> list[Sequence]:
    return [sequences[which] for which in step if len(sequences[which].outputs) < outputs[which]]


def compute(
    ranks: Ranks, model_dir: Path, seed: int, rank: int | None = None
) -> tuple[list[list[int]], torch.Tensor, int]:
    """What the sequences of a rank come to, their logits, and how many experts it has of a layer; rank: alone, of one model."""
    alone = rank is not None
    spread = None if alone else Spread(ranks, ranks)
    model = PagedModel.load(model_dir, "float32", "cpu", Ranks(), spread=spread)
    own = rank if rank is not None else ranks.rank
    planned = [schedule(each, seed) for each in range(ranks.size if not alone else own + 1)]
    prompts, steps = planned[own]
    driver = Driver(model, len(model.groups) * 40, 4)
    sequences = [driver.sequence(prompt, chunk) for prompt, chunk, _ in prompts]
    outputs = [count for _, _, count in prompts]
    # All ranks know how many rows each has, as plans say: what a sequence runs next depends on its lengths alone.
    rows = [Progress(each[0]) for each in planned]
    for at in range(STEPS):
        counts = tuple(progress.step(each[1][at]) for progress, each in zip(rows, planned, strict=True))
        mine = due(sequences, outputs, steps[at])
        if spread is not None:
            spread.rows = counts
        if mine:
            driver.step(mine)
        elif spread is not None:
            spread.join()
    said = [sequence.outputs for sequence in sequences]
    logits = [row for sequence in sequences for row in sequence.logits]
    kept = spread.parts[0].count if spread is not None else 0
    return said, torch.stack(logits) if logits else torch.empty(0), kept


class Progress:
    """How far a rank's sequences are."""

    def __init__(self, prompts: list[tuple[list[int], int, int]]) -> None:
        self._prompts = prompts
        self._computed = [0] * len(prompts)
        self._outputs = [0] * len(prompts)

    def step(self, which: list[int]) -> int:
        """Rows of the step in which these run."""
        rows = 0
        for each in which:
            prompt, chunk, outputs = self._prompts[each]
            if self._outputs[each] >= outputs:
                continue
            left = len(prompt) - self._computed[each]
            tokens = min(chunk, left) if left > 0 else 1
            self._computed[each] += tokens
            self._outputs[each] += self._computed[each] >= len(prompt)
            rows += tokens
        return rows


@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.long) for name in MORE)])
@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_gets_for_its_rows_what_the_whole_model_gives(
    rank_pool: RankPool, family: str, size: int, tmp_path: Path
) -> None:
    model_dir = make_tiny(family, tmp_path / family)
    runs = rank_pool.run(size, compute, model_dir, size)
    assert sum(kept for _, _, kept in runs) == 4 and max(kept for _, _, kept in runs) < 4, (
        "of four experts, each is somewhere"
    )
    for rank, (said, logits, _) in enumerate(runs):
        whole_said, whole, _ = compute(Ranks(), model_dir, size, rank)
        assert said == whole_said and any(said)
        error = ((logits - whole).norm() / whole.norm()).item()
        assert error < 1e-5, f"rank {rank} of {size}: logits are off by {error:.1e}"


def test_a_rank_may_have_no_expert_at_all(rank_pool: RankPool, tmp_path: Path) -> None:
    model_dir = make_tiny("mixtral", tmp_path / "mixtral", num_local_experts=2)
    runs = rank_pool.run(3, compute, model_dir, 1)
    assert sorted(kept for _, _, kept in runs) == [0, 1, 1]
    assert [said for said, _, _ in runs] == [compute(Ranks(), model_dir, 1, rank)[0] for rank in range(3)]


def test_a_dense_model_has_nothing_to_spread(tmp_path: Path) -> None:
    ranks = Ranks(0, 2)
    model = PagedModel.load(make_tiny("llama", tmp_path), "float32", "cpu", Ranks(), spread=Spread(ranks, ranks))
    assert model.spread is None


class OneOfTwo(Ranks):
    """A rank whose peer has nothing to add: sums are this one's part."""

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        return part


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_parts_add_up_however_transformers_computes_experts(family: str, implementation: str, tmp_path: Path) -> None:
    """Which of them it takes depends on its version, on torch's and on the device."""
    model_dir = make_tiny(family, tmp_path / family)
    parts = []
    for rank in (0, 1):
        module = load(model_dir, "float32", "cpu").module
        module.set_experts_implementation(implementation)
        experts = next(part for name, part in module.named_modules() if name.endswith(".experts"))
        torch.manual_seed(1)
        hidden, weights = torch.randn(9, module.config.hidden_size), torch.rand(9, 2)
        index = torch.stack([torch.randperm(4)[:2] for _ in range(9)])
        whole = experts(hidden, index, weights).clone()
        call = ExpertsCall(experts, hidden.shape[1], 2, hidden.dtype, weights.dtype)
        parts.append(SpreadExperts(call, Spread(OneOfTwo(rank, 2), Ranks()))(hidden, index, weights))
    assert all(part.any() for part in parts)
    torch.testing.assert_close(sum(parts), whole, rtol=1e-5, atol=1e-6)


def stays_away(ranks: Ranks, model_dir: Path, meeting: Path) -> str:
    """Rank 1 meets the others and is never heard again. What the others find."""
    meeting_s = 60.0
    group = Ranks(ranks.rank, ranks.size)
    group.connect(meeting, torch.device("cpu"), meeting_s, 1.0)
    if ranks.rank == 1:
        time.sleep(3.0)
        return ""
    model = PagedModel.load(model_dir, "float32", "cpu", Ranks(), spread=(spread := Spread(group, group)))
    driver = Driver(model, 40, 4)
    spread.rows = (3, 2)
    try:
        driver.step([driver.sequence([5, 6, 7], 16)])
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_step_waits_for_a_rank_no_longer_than_it_is_told(rank_pool: RankPool, tmp_path: Path) -> None:
    assert COLLECTIVE_S > 10
    model_dir = make_tiny("mixtral", tmp_path / "mixtral")
    began_s = time.monotonic()
    found, _ = rank_pool.run(2, stays_away, model_dir, tmp_path / "meeting")
    assert found and found != "no error" and time.monotonic() - began_s < 30
