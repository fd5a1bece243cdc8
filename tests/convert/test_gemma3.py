from __future__ import annotations

import importlib.metadata
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from disagg.convert.catalog import KNOWN_MODELS
from disagg.convert.inspect import inspect_model
from disagg.convert.model_dir import resolve


def _installed(package: str) -> bool:
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(_installed(package) for package in KNOWN_MODELS["gemma3-270m"].packages),
        reason=f"needs: {KNOWN_MODELS['gemma3-270m'].install_command}",
    ),
]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    cache = tmp_path_factory.mktemp("models")
    yield resolve("gemma3-270m", cache)
    shutil.rmtree(cache)


def test_a_gguf_in_parts_leaves_only_the_model(gemma: Path) -> None:
    assert not list(gemma.glob("*.gguf*"))
    assert not list(gemma.parent.glob(".*.building"))


def test_transformers_loads_it_and_it_continues_sensibly(gemma: Path) -> None:
    torch.set_num_threads(1)
    model, info = AutoModelForCausalLM.from_pretrained(gemma, output_loading_info=True, dtype=torch.float32)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(gemma)
    prompt = tokenizer("One, two, three, four, five, six,", return_tensors="pt")
    output = model.generate(**prompt, do_sample=False, max_new_tokens=8)[0, prompt["input_ids"].shape[1] :]
    assert "seven, eight, nine" in tokenizer.decode(output)


def test_known_ids_come_out(gemma: Path) -> None:
    assert AutoTokenizer.from_pretrained(gemma)("Hello, world!")["input_ids"] == [2, 9259, 236764, 1902, 236888]


def test_facts_tell_sliding_from_full_layers(gemma: Path) -> None:
    facts = inspect_model(gemma)
    assert (facts.num_heads, facts.num_kv_heads, facts.head_dim, facts.sliding_window) == (4, 1, 256, 512)
    assert facts.layer_types == (("sliding_attention",) * 5 + ("full_attention",)) * 3
    assert facts.torch_dtype == "bfloat16"
