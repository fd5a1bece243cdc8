"""A model's identity: every weight counts, the path does not, and what was loaded stays as it was loaded."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from disagg.models import identity, loader
from disagg.models.model import PagedModel
from disagg.models.ranks import Ranks
from disagg.types.errors import ConfigError, FilesChanged
from tests.models.tiny import make_tiny


@pytest.fixture
def llama_dir(tmp_path: Path) -> Path:
    return make_tiny("llama", tmp_path / "llama")


def hash_of(model_dir: Path, dtype: str = "float32", ranks: Ranks | None = None) -> str:
    return PagedModel.load(model_dir, dtype, "cpu", ranks).weights_hash


def data_start(weights: Path) -> int:
    return 8 + int.from_bytes(weights.read_bytes()[:8], "little")


def test_equal_files_have_one_hash_wherever_they_are_and_on_every_rank(llama_dir: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(llama_dir, tmp_path / "elsewhere"))
    assert hash_of(copy) == hash_of(llama_dir)
    assert {hash_of(llama_dir, ranks=Ranks(rank, 2)) for rank in range(2)} == {hash_of(llama_dir)}


def test_the_dtype_that_is_computed_in_is_part_of_it(llama_dir: Path) -> None:
    assert hash_of(llama_dir, "bfloat16") != hash_of(llama_dir)


def test_one_bit_of_any_tensor_changes_it(llama_dir: Path) -> None:
    """Wherever it is: each tensor in turn, at a place that no sample of ends would look at."""
    weights = llama_dir / "model.safetensors"
    original, rng = weights.read_bytes(), random.Random(3)
    header = json.loads(original[8 : data_start(weights)])
    seen = {hash_of(llama_dir)}
    names = [name for name in header if name != "__metadata__"]
    for name in names:
        first, end = header[name]["data_offsets"]
        at = data_start(weights) + (first + (end - first) // 2) // 4 * 4 + rng.randrange(2)  # low bits of a float
        spoilt = bytearray(original)
        spoilt[at] ^= 1
        weights.write_bytes(spoilt)
        seen.add(hash_of(llama_dir))
    assert len(seen) == len(names) + 1


def edit(name: str, **fields: object) -> Callable[[Path], None]:
    def apply(model_dir: Path) -> None:
        path = model_dir / name
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return apply


@pytest.mark.parametrize(
    "change",
    [edit("config.json", rms_norm_eps=0.1), edit("generation_config.json", eos_token_id=[3, 4])],
    ids=["config", "eos"],
)
def test_what_else_decides_the_answer_is_part_of_it(llama_dir: Path, change: Callable[[Path], None]) -> None:
    before = hash_of(llama_dir)
    change(llama_dir)
    assert hash_of(llama_dir) != before


def test_two_tensors_that_change_places_change_it(llama_dir: Path) -> None:
    before = hash_of(llama_dir)
    tensors = load_file(llama_dir / "model.safetensors")
    first, second = [name for name in sorted(tensors) if name.endswith("up_proj.weight")][:2]
    tensors[first], tensors[second] = tensors[second], tensors[first]
    save_file(tensors, llama_dir / "model.safetensors", metadata={"format": "pt"})
    assert hash_of(llama_dir) != before


def test_a_tensor_longer_than_a_segment_counts_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "SEGMENT_BYTES", 64)
    module = torch.nn.Linear(100, 3, bias=False)
    seen = set()
    for at in (0, 17, 150, 299):
        with torch.no_grad():
            module.weight.view(-1)[at] += 1
        seen.add(identity.weights_hash(module, "", (), threads=4))
    assert len(seen) == 4
    assert identity.weights_hash(module, "", (), threads=1) in seen


def test_files_that_are_overwritten_do_not_reach_what_was_loaded(llama_dir: Path) -> None:
    """float32 on CPU, as safetensors loads it, is a map of the file."""
    weights = llama_dir / "model.safetensors"
    model = PagedModel.load(llama_dir, "float32", "cpu")
    before = {name: each.clone() for name, each in model._loaded.module.state_dict().items()}
    with weights.open("r+b") as file:
        file.seek(data_start(weights))
        file.write(b"\0" * (weights.stat().st_size - data_start(weights)))
        file.truncate(data_start(weights))  # reading a map past this would kill the process
    after = model._loaded.module.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert str(weights) not in Path("/proc/self/maps").read_text()


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    model = PagedModel.load(make_tiny("gemma", tmp_path, tie_word_embeddings=True), "float32", "cpu")
    module = model._loaded.module
    assert module.get_input_embeddings().weight.data_ptr() == module.get_output_embeddings().weight.data_ptr()


@pytest.mark.parametrize("how", ["rename", "in place", "link"])
def test_files_that_change_while_they_are_loaded_are_not_served(
    llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    other = make_tiny("llama", tmp_path / "other", seed=1)
    load_weights = loader._from_pretrained

    def load_and_swap(model_dir: Path, dtype: str) -> object:
        loaded = load_weights(model_dir, dtype)
        if how == "rename":
            (other / "model.safetensors").rename(model_dir / "model.safetensors")
        elif how == "in place":
            (model_dir / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
        else:
            link.unlink()
            link.symlink_to(other)
        return loaded

    link = tmp_path / "current"
    link.symlink_to(llama_dir)
    monkeypatch.setattr(loader, "_from_pretrained", load_and_swap)
    with pytest.raises(FilesChanged, match="current were written or replaced while they were loaded"):
        PagedModel.load(link, "float32", "cpu")


def test_a_failure_while_files_change_is_not_the_configurations(
    llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server gives up for good on a ConfigError at its first start; a copy under way passes."""

    def half_copied(model_dir: Path, dtype: str) -> object:
        (model_dir / "model.safetensors").write_bytes(b"half")
        raise ConfigError("no weights")

    monkeypatch.setattr(loader, "_from_pretrained", half_copied)
    with pytest.raises(FilesChanged, match="no weights"):
        PagedModel.load(llama_dir, "float32", "cpu")
