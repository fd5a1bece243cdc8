"""What transformers itself answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

TIE = 1e-4


@dataclass(frozen=True)
class Answer:
    """outputs: greedy tokens; logits: [outputs, vocab]."""

    outputs: list[int]
    logits: torch.Tensor

    def first(self, count: int) -> Answer:
        """The first outputs alone."""
        return Answer(self.outputs[:count], self.logits[:count])

    def tied(self, index: int) -> bool:
        first, second = self.logits[index].topk(2).values.tolist()
        return first - second < TIE


def generate(model_dir: Path, prompts: Sequence[Sequence[int]], outputs: int, device: str = "cpu") -> list[Answer]:
    """Greedy `generate` of each prompt alone, in float32, never stopping at EOS."""
    # eager: the only implementation in transformers that honours every option (softcap, sinks) of every family
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager").eval()
    model = model.to(device)
    model.generation_config.eos_token_id = None
    answers = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)], device=device)
        result = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=outputs,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        answers.append(Answer(result.sequences[0, len(prompt) :].tolist(), torch.cat(result.logits).float().cpu()))
    return answers
