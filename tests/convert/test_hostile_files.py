"""Model directories that make no sense: whatever their bytes are, one clear error of ours, at once, within a bounded memory.

config.json, generation_config.json, safetensors headers and indices are spoilt in every place by values of every kind.
"""

from __future__ import annotations

import json
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from disagg.convert.inspect import ModelFacts, inspect_model
from disagg.convert.safetensors_file import find_weight_files, read_header
from disagg.types.errors import ConfigError
from tests.campaigns import Campaign, sizes

CONFIG: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "sliding_window": 16,
    "sliding_window_pattern": 3,
    "max_window_layers": 2,
    "use_sliding_window": True,
    "layer_types": ["full_attention"] * 6,
    "eos_token_id": [2, 3],
    "bos_token_id": 1,
    "tie_word_embeddings": False,
    "text_config": {"num_hidden_layers": 6},
}
HEADER: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]},
    "b": {"dtype": "BF16", "shape": [8], "data_offsets": [64, 80]},
}
DATA_BYTES = 80
INDEX = {"metadata": {"total_size": 80}, "weight_map": {"a": "model-1.safetensors", "b": "model-1.safetensors"}}

# Memory beyond the file that reading it may take: Python's objects for its JSON, and what always is.
MOST_PER_BYTE, MOST_BYTES = 64, 4 << 20

numbers = st.sampled_from([0, -1, 1, 2, 3, 7, 64, 2**31, 2**32, 2**40, 2**63, 2**64, 10**30, 10**400])
leaves = st.one_of(
    st.none(),
    st.booleans(),
    numbers,
    st.integers(),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(["F32", "BF16", "F4", "U8", "x" * 5000, "../a", "/etc/passwd", "a\0b", "\ud800", "."]),
)
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)


@st.composite
def spoilt_values(draw: st.DrawFn, base: dict[str, Any]) -> dict[str, Any]:
    """The value with one to three places replaced, taken away, or added to."""
    made = json.loads(json.dumps(base))
    for _ in range(draw(st.integers(1, 3))):
        where = made
        key = draw(st.sampled_from(sorted(where)))
        while isinstance(where.get(key), dict) and where[key] and draw(st.booleans()):
            where = where[key]
            key = draw(st.sampled_from(sorted(where)))
        how = draw(st.sampled_from(["replace", "replace", "element", "remove", "add"]))
        if how == "element" and isinstance(where.get(key), list) and where[key]:
            where[key][draw(st.integers(0, len(where[key]) - 1))] = draw(values)
        elif how == "remove":
            where.pop(key, None)
            if not made:
                break
        elif how == "add":
            where[draw(st.text(max_size=8))] = draw(values)
        else:
            where[key] = draw(values)
        if not made:
            break
    return made


@st.composite
def spoilt_texts(draw: st.DrawFn, base: dict[str, Any]) -> bytes:
    """Mostly JSON of spoilt values; sometimes bytes that are spoilt themselves."""
    content = bytearray(json.dumps(draw(spoilt_values(base))).encode())
    how = draw(st.sampled_from(["json"] * 6 + ["flip", "cut", "raw", "deep", "repeat"]))
    if how == "flip":
        for at in draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=4)):
            content[at] = draw(st.integers(0, 255))
    elif how == "cut":
        del content[draw(st.integers(0, len(content))) :]
    elif how == "raw":
        content = bytearray(draw(st.binary(max_size=64)))
    elif how == "deep":
        depth = draw(st.sampled_from([10, 100, 3000]))
        content = bytearray(b'{"text_config":' * depth + content + b"}" * depth)
    elif how == "repeat":
        content = bytearray(b'{"a":[' + b"{}," * draw(st.sampled_from([10, 20_000])) + b"0]}")
    return bytes(content)


def write_model(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(weights_of(json.dumps(HEADER).encode()))


def weights_of(header: bytes, said: int | None = None, data_bytes: int = DATA_BYTES) -> bytes:
    return struct.pack("<Q", len(header) if said is None else said) + header + bytes(data_bytes)


def check(read: Callable[[], object], file_bytes: int, folder: Path) -> object:
    """What it gives, or None for the one error that it may raise."""
    found, said = None, str(folder)
    tracemalloc.start()
    try:
        found = read()
    except ConfigError as error:
        said = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert str(folder) in said and len(said) < 2000
    assert peak < MOST_PER_BYTE * file_bytes + MOST_BYTES, f"{peak} bytes for a file of {file_bytes}"
    return found


def fuzz(campaign: Campaign) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        limits = settings(
            max_examples=campaign.examples,
            deadline=None,
            derandomize=False,
            database=None,
            phases=(Phase.explicit, Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        return seed(20260729)(limits(test))

    return decorate


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("hostile")
    write_model(made)
    assert isinstance(inspect_model(made), ModelFacts)
    return made


def try_config(folder: Path, content: bytes, name: str) -> None:
    path = folder / name
    path.write_bytes(content)
    try:
        facts = check(lambda: inspect_model(folder), len(content), folder)
    finally:
        write_model(folder)
        if name != "config.json":
            path.unlink()
    if facts is not None:
        assert isinstance(facts, ModelFacts)
        assert facts.head_dim > 0 and facts.num_heads > 0 and facts.num_kv_heads > 0 and facts.vocab_size > 0
        assert len(facts.layer_types) == facts.num_layers
        assert all(isinstance(each, int) for each in facts.eos_token_ids)


def try_header(folder: Path, header: bytes, said: int | None, data_bytes: int) -> None:
    content = weights_of(header, said, data_bytes)
    path = folder / "model.safetensors"
    path.write_bytes(content)
    try:
        file = check(lambda: read_header(path), len(content), folder)
        check(lambda: inspect_model(folder), len(content), folder)
    finally:
        write_model(folder)
    if file is not None:  # whatever is taken lies within the file, and is as large as it says
        for tensor in file.tensors.values():  # type: ignore[attr-defined]
            assert 0 <= tensor.data_offsets[0] <= tensor.data_offsets[1] <= data_bytes + len(header)


def try_index(folder: Path, content: bytes) -> None:
    """In place of the one file, beside which an index is not read."""
    path = folder / "model.safetensors.index.json"
    path.write_bytes(content)
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    try:
        files = check(lambda: find_weight_files(folder), len(content), folder)
    finally:
        path.unlink()
        (folder / "model-1.safetensors").rename(folder / "model.safetensors")
    for file in files or ():  # type: ignore[attr-defined]
        assert folder in file.parents and ".." not in file.parts


configs = spoilt_texts(CONFIG)
generation_configs = spoilt_texts({"eos_token_id": [1, 2], "do_sample": True})
indices = spoilt_texts(INDEX)
headers = spoilt_texts(HEADER)
lengths = st.none() | numbers.filter(lambda number: 0 <= number < 2**64)
data_sizes = st.sampled_from([DATA_BYTES, DATA_BYTES, 0, 79, 81, 1000])


def test_the_readers_take_what_is_not_spoilt(folder: Path) -> None:
    assert set(read_header(folder / "model.safetensors").tensors) == {"a", "b"}


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@sizes()
def test_a_spoilt_configuration_is_one_error(folder: Path, name: str, examples: int) -> None:
    campaign = Campaign(examples)

    @fuzz(campaign)
    @given(content=configs if name == "config.json" else generation_configs)
    def run(content: bytes) -> None:
        campaign.begin()
        try_config(folder, content, name)

    run()
    campaign.check()


@sizes()
def test_a_spoilt_safetensors_header_is_one_error(folder: Path, examples: int) -> None:
    campaign = Campaign(examples)

    @fuzz(campaign)
    @given(header=headers, said=lengths, data_bytes=data_sizes)
    def run(header: bytes, said: int | None, data_bytes: int) -> None:
        campaign.begin()
        try_header(folder, header, said, data_bytes)

    run()
    campaign.check()


@sizes()
def test_a_spoilt_index_is_one_error(folder: Path, examples: int) -> None:
    campaign = Campaign(examples)

    @fuzz(campaign)
    @given(content=indices)
    def run(content: bytes) -> None:
        campaign.begin()
        try_index(folder, content)

    run()
    campaign.check()


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 80]}}, "80 bytes for a shape"),
        ({"a": {"dtype": "F32", "shape": [-4, -5], "data_offsets": [0, 80]}}, "no shape"),
        ({"a": {"dtype": "F32", "shape": [20], "data_offsets": [80, 0]}}, "0 bytes|-80 bytes"),
        ({"a": {"dtype": "F32", "shape": [0], "data_offsets": [-8, -8]}}, "'a' begins at byte -8"),
        ({"a": {"dtype": "X9", "shape": [20], "data_offsets": [0, 80]}}, "dtype 'X9'"),
        ({"a": {"dtype": "F32", "shape": [1] * 100, "data_offsets": [0, 4]}}, "no shape"),
        (
            {
                "a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
                "b": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]},
            },
            "'a' and 'b' share bytes",
        ),
        (
            {
                "a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
                "b": {"dtype": "F32", "shape": [4], "data_offsets": [20, 36]},
            },
            "4 bytes before tensor 'b' are no tensor's",
        ),
        ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [64, 80]}}, "64 bytes before tensor 'a'"),
    ],
)
def test_a_tensor_that_cannot_be_is_named(tmp_path: Path, rows: dict[str, Any], said: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(weights_of(json.dumps(rows).encode()))
    with pytest.raises(ConfigError, match=said):
        read_header(path)


def test_a_configuration_that_would_keep_transformers_busy_for_ever_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path)
    for name in ("num_hidden_layers", "num_experts", "num_local_experts", "num_attention_heads"):
        (tmp_path / "config.json").write_text(json.dumps({**CONFIG, name: 10**9}))
        with pytest.raises(ConfigError, match=f"{name} is 1000000000; at most 65536"):
            inspect_model(tmp_path)


def test_a_header_that_is_longer_than_its_file_costs_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 99_000_000) + b"{}")
    assert check(lambda: read_header(path), 10, tmp_path) is None
    shutil.rmtree(tmp_path)
    assert check(lambda: read_header(path), 10, tmp_path) is None  # gone meanwhile
