"""Recurrent layers give the same however a prompt is cut, and each state is read from and written to its own page."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from disagg.messages.layout import LayerGroup, StatePart
from disagg.messages.plan import PageCopy
from disagg.models import layers, mamba1, states
from disagg.models.attention.calls import LayerPlace
from disagg.models.batch import DecodeBatch, ForwardBatch, PrefillRun, StateTables
from disagg.models.families import FAMILIES
from disagg.models.model import PagedModel
from disagg.models.state_cache import LayerStates
from disagg.models.states import PagedStates, StateProbe, active_states, attach
from disagg.types.errors import ConfigError
from tests.models.driver import STALE, Driver
from tests.models.pools import make_pool
from tests.models.tiny import VOCAB_SIZE, make_tiny, tiny_config

RECURRENT = sorted(
    family
    for family in FAMILIES & set(CONFIG_MAPPING)
    if {"linear_attention", "conv", "hybrid"} & set(getattr(tiny_config(family), "layer_types", None) or ())
)
TOKENS = 37
CUTS = ((TOKENS,), (1, 36), (16, 16, 5), (2, 1, 1, 30, 3), (1,) * TOKENS)
CLOSE = {"atol": 1e-5, "rtol": 1e-4}


class OneLayer:
    """A recurrent module of a tiny model, with a pool for its states."""

    def __init__(self, family: str, directory: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(make_tiny(family, directory)).eval()
        name = next(name for name, part in model.named_modules() if type(part).__name__ in states.STATE_MODULES)
        self.plain = AutoModelForCausalLM.from_pretrained(directory).eval().get_submodule(name)
        self.module = model.get_submodule(name)
        attach(self.module)
        probe = StateProbe()
        with torch.inference_mode(), active_states(probe):
            self.module(torch.zeros(1, 2, 64))
        ((self.layer, parts),) = probe.parts.items()
        self.group = LayerGroup.of_states("states", (self.layer,), parts)
        self.pool = make_pool((self.group,), 32, 4)
        self.pool.bytes.fill_(255)  # NaN in every dtype

    def run(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """hidden: [1, N, 64]."""
        paged = PagedStates(batch, self.pool, {self.layer: LayerPlace(0, 0)})
        with active_states(paged):
            output: torch.Tensor = self.module(hidden)
        paged.assert_every_layer_ran_once()
        return output

    def in_chunks(self, hidden: torch.Tensor, cuts: tuple[int, ...], pages: list[int]) -> torch.Tensor:
        """One sequence; chunk i reads pages[i - 1] and writes pages[i]."""
        outputs, done = [], 0
        for index, num_tokens in enumerate(cuts):
            run = (done, num_tokens, pages[index - 1] if done else -1, pages[index])
            outputs.append(self.run(hidden[:, done : done + num_tokens], batch_of([run])))
            done += num_tokens
        return torch.cat(outputs, dim=1)

    def states(self, page: int) -> list[torch.Tensor]:
        return [part[page].clone() for part in self.pool.states(0).parts(0)]


def batch_of(runs: list[tuple[int, int, int, int]]) -> ForwardBatch:
    """runs: (tokens before, tokens, page to read, page to write), those of single tokens after a context last."""
    prefills, row = [], 0
    lengths = [before + 1 for before, num_tokens, _, _ in runs if before and num_tokens == 1]
    for before, num_tokens, _, _ in runs[: len(runs) - len(lengths)]:
        prefills.append(PrefillRun(row, num_tokens, before, False))
        row += num_tokens
    decodes = DecodeBatch(row, torch.tensor(lengths), max(lengths), sum(lengths)) if lengths else None
    rows = torch.zeros(row + len(lengths), dtype=torch.int64)
    tables = StateTables(*(torch.tensor(pages) for pages in list(zip(*runs, strict=True))[2:]))
    batch = ForwardBatch(rows, rows, rows, tuple(prefills), decodes, rows[:0], (tables,))
    batch.check()
    return batch


@pytest.fixture(scope="module", params=RECURRENT)
def layer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OneLayer:
    return OneLayer(request.param, tmp_path_factory.mktemp(request.param))


@torch.inference_mode()
def test_chunks_of_any_sizes_give_what_transformers_gives_at_once(layer: OneLayer) -> None:
    hidden = torch.randn(1, TOKENS, 64, generator=torch.Generator().manual_seed(0))
    expected = layer.plain(hidden)
    last = None
    for cuts in CUTS:
        in_place, moving = [3] * len(cuts), random.Random(1).choices(range(32), k=len(cuts))
        for pages in (in_place, moving):
            torch.testing.assert_close(layer.in_chunks(hidden, cuts, pages), expected, **CLOSE)
            last = last or layer.states(pages[-1])
            torch.testing.assert_close(layer.states(pages[-1]), last, **CLOSE)


@torch.inference_mode()
def test_runs_of_one_batch_do_not_see_each_other(layer: OneLayer) -> None:
    """Two sequences go on from one state: one in its page, the other elsewhere, beside sequences of their own."""
    hidden = torch.randn(5, TOKENS, 64, generator=torch.Generator().manual_seed(1))
    shared = torch.cat((hidden[0:1, :20], hidden[1:2, 20:]), dim=1)
    sequences = [hidden[0:1], shared, hidden[2:3], hidden[3:4], hidden[4:5]]
    expected = [layer.plain(sequence) for sequence in sequences]
    for page, sequence in ((10, sequences[0]), (12, sequences[2])):
        layer.in_chunks(sequence[:, :20], (20,), [page])
    layer.in_chunks(sequences[3][:, :36], (36,), [13])
    runs = [(20, 17, 10, 11), (20, 17, 10, 10), (0, 7, -1, 14), (20, 1, 12, 15), (36, 1, 13, 13)]
    order = [1, 0, 4, 2, 3]  # of the sequences among the runs
    cut = [sequences[s][:, start : start + n] for s, (start, n, _, _) in zip(order, runs, strict=True)]
    output = layer.run(torch.cat(cut, dim=1), batch_of(runs))
    row = 0
    for s, (start, n, _, _) in zip(order, runs, strict=True):
        torch.testing.assert_close(
            output[:, row : row + n], expected[s][:, start : start + n], **CLOSE, msg=f"sequence {s}"
        )
        row += n
    # and each state is where its run wrote it
    for page, s, done in ((11, 1, 37), (10, 0, 37), (14, 4, 7), (15, 2, 21), (13, 3, 37)):
        layer.in_chunks(sequences[s][:, :done], (done,), [20])
        torch.testing.assert_close(layer.states(page), layer.states(20), **CLOSE)


@torch.inference_mode()
def test_many_rows_decode_in_one_call(layer: OneLayer) -> None:
    hidden = torch.randn(8, 6, 64, generator=torch.Generator().manual_seed(2))
    for page, sequence in enumerate(hidden):
        layer.in_chunks(sequence[None, :5], (5,), [page])
    output = layer.run(hidden[:, 5].unsqueeze(0), batch_of([(5, 1, page, page + 8) for page in range(8)]))
    torch.testing.assert_close(output[0], layer.plain(hidden)[:, 5], **CLOSE)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]


@pytest.mark.parametrize("family", ["jamba", "falcon_h1", "lfm3", "mamba2", "qwen3_next"])
def test_a_copied_state_goes_on_as_the_original_does(family: str, tmp_path: Path) -> None:
    """A fork: the second sequence shares nothing with the first but copies of its pages."""
    model = PagedModel.load(make_tiny(family, tmp_path), "float32", "cpu")
    driver = Driver(model, num_large=200, page_tokens=4)
    prompt = prompt_of(30)
    original, copy = driver.sequence(prompt, chunk=12), driver.sequence(prompt, chunk=12)
    driver.run([original], outputs=1)
    copy.known.tokens.append(original.outputs[0])
    copy.known.computed, copy.released = original.known.computed, list(original.released)
    for group, table in enumerate(original.known.tables):
        pages = [STALE if page == STALE else driver.take_page(group) for page in table]
        copy.known.tables[group].extend(pages)
        live = [pair for pair in zip(table, pages, strict=True) if STALE not in pair]
        driver.pool.copy_pages([PageCopy(group, *pair) for pair in live])
    driver.run([original, copy], outputs=12)
    alone = driver.sequence(prompt, chunk=30)
    driver.run([alone], outputs=12)
    assert original.outputs == copy.outputs == alone.outputs


def test_the_groups_of_a_hybrid_say_what_each_layer_keeps(tmp_path: Path) -> None:
    model = PagedModel.load(make_tiny("jamba", tmp_path), "bfloat16", "cpu")
    full = LayerGroup("full", (1,), kv_heads=2, head_dim=16, dtype="bfloat16")
    parts = (StatePart("conv", (128, 4), "bfloat16"), StatePart("recurrent", (128, 8), "float32"))
    assert model.groups == (full, LayerGroup.of_states("states", (0, 2), parts))
    assert model._loaded.places.attention == {1: LayerPlace(0, 0)}
    assert model._loaded.places.states == {0: LayerPlace(1, 0), 2: LayerPlace(1, 1)}


def test_a_layer_that_attends_and_recurs_is_in_two_groups(tmp_path: Path) -> None:
    model = PagedModel.load(make_tiny("falcon_h1", tmp_path), "float32", "cpu")
    assert [(group.name, group.layers) for group in model.groups] == [("full", (0, 1, 2)), ("states", (0, 1, 2))]


def test_a_model_without_attention_has_states_only(tmp_path: Path) -> None:
    model = PagedModel.load(make_tiny("mamba", tmp_path), "float32", "cpu")
    assert [(group.name, group.layers) for group in model.groups] == [("states", (0, 1, 2))]
    assert model.max_model_len == layers.LONGEST_RECURRENCE


@pytest.mark.parametrize("family", ["jamba", "falcon_h1", "qwen3_next"])
def test_half_precision_in_a_pool_full_of_nan_is_near_float32(family: str, tmp_path: Path) -> None:
    make_tiny(family, tmp_path, weight_scale=0.3)
    rows = []
    for precision in ("float32", "bfloat16"):
        model = PagedModel.load(tmp_path, precision, "cpu")
        driver = Driver(model, 40, 4)
        sequence = driver.sequence(range(40), chunk=16)
        driver.run([sequence], 1)
        rows.append(sequence.logits[0])
    assert ((rows[1] - rows[0]).norm() / rows[0].norm()).item() < 0.05


def test_a_recurrent_layer_that_does_not_run_is_noticed(tmp_path: Path) -> None:
    model = PagedModel.load(make_tiny("jamba", tmp_path), "float32", "cpu")
    driver = Driver(model, 8, 4)
    model._loaded.module.model.layers[2].mamba.forward = lambda hidden_states, **_: hidden_states
    with pytest.raises(AssertionError, match=r"recurrent layers, where not one: \{2: 0\}"):
        driver.step([driver.sequence([1, 2, 3], chunk=8)])


def test_a_recurrent_layer_outside_a_forward_is_a_bug(layer: OneLayer) -> None:
    with pytest.raises(AssertionError, match="outside"):
        layer.module(torch.zeros(1, 2, 64))


def test_a_recurrent_module_that_is_not_known_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "STATE_MODULES", frozenset())
    with pytest.raises(
        ConfigError, match="layer 0 is linear_attention, and for it attention ran 0 times and a recurrent"
    ):
        PagedModel.load(make_tiny("bamba", tmp_path), "float32", "cpu")


def test_a_limit_that_single_tokens_escape_is_refused(tmp_path: Path) -> None:
    make_tiny("bamba", tmp_path, time_step_limit=(0.0, 0.5))
    with pytest.raises(ConfigError, match=r"layer 0 limits its time steps to 0\.0 and 0\.5"):
        PagedModel.load(tmp_path, "float32", "cpu")


def test_time_steps_of_nemotron_h_are_limited_as_its_publisher_does(tmp_path: Path) -> None:
    """Not by what its initial values were made of, which transformers does, and only where it computes several tokens."""
    make_tiny("nemotron_h", tmp_path, time_step_min=0.3, time_step_limit=(0.0, float("inf")))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    rng = random.Random(3)
    prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(24)]
    with torch.inference_mode():
        limited = plain(torch.tensor([prompt])).logits[0, -1]
        for part in plain.modules():
            if hasattr(part, "time_step_limit"):
                part.time_step_limit = (0.0, float("inf"))
        expected = plain(torch.tensor([prompt])).logits[0, -1]
    assert not torch.allclose(limited, expected, **CLOSE), "the limit makes no difference"
    driver = Driver(PagedModel.load(tmp_path, "float32", "cpu"), 64, 4)
    cut = [driver.sequence(prompt, chunk) for chunk in (len(prompt), 7, 1)]
    driver.run(cut, 1)
    for sequence in cut:
        torch.testing.assert_close(sequence.logits[0], expected, **CLOSE)


def test_older_and_newer_transformers_find_the_same_tensors() -> None:
    """5.17 looks into the cache's layers, 5.23 calls its methods. What is written into a state must reach the page."""
    conv, recurrent = torch.zeros(2, 3, 4), torch.zeros(2, 5)
    begun = LayerStates({"conv": conv, "recurrent": recurrent})
    assert begun.has_previous_state() and begun.has_previous_state(7, state_idx=0)
    assert begun.layers[7].conv_states[0] is begun.get_conv_state(7) is conv
    assert begun.layers[7].recurrent_states[0] is begun.get_recurrent_state(7) is recurrent
    assert not begun.layers[7].record_past and not begun.is_recording_past(7)
    begins = LayerStates()
    assert not begins.has_previous_state(7)
    assert begins.get_conv_state(7) is None and begins.get_recurrent_state(7) is None


class Unknown(torch.nn.Module):
    """As a version of transformers might have it that this one does not know."""

    layer_idx = 3

    def forward(self, hidden_states, cache_params=None, window=None):
        return cache_params.take_state(self.layer_idx)


class Positioned(Unknown):
    def forward(self, hidden_states, position_ids, cache_params=None):
        return hidden_states


def test_a_module_that_this_version_does_not_understand_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "STATE_MODULES", {"Unknown", "Positioned"})
    module = Unknown()
    attach(module)
    hidden = torch.zeros(1, 2, 64)
    with active_states(StateProbe()), pytest.raises(ConfigError, match=r"does not keep the states .* 'take_state'"):
        module(hidden)
    with active_states(StateProbe()), pytest.raises(AssertionError, match="Unknown is given window"):
        module(hidden, window=hidden)
    with pytest.raises(ConfigError, match="Positioned needs position_ids"):
        attach(Positioned())


@pytest.mark.parametrize("block_tokens", [1, 4, 64])
def test_the_selective_scan_is_its_recurrence(block_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mamba1, "BLOCK_TOKENS", block_tokens)
    generator = torch.Generator().manual_seed(0)
    inputs, b, c = (torch.randn(9, size, generator=generator) for size in (6, 3, 3))
    time_step = torch.rand(9, 6, generator=generator)
    a, begin = -torch.rand(6, 3, generator=generator), torch.randn(6, 3, generator=generator)
    state, outputs = begin.clone(), []
    for t in range(9):
        state = torch.exp(time_step[t, :, None] * a) * state + time_step[t, :, None] * b[t] * inputs[t, :, None]
        outputs.append(state @ c[t])
    given, end = mamba1.selective_scan(inputs, time_step, a, b, c, begin.clone())
    torch.testing.assert_close(given, torch.stack(outputs))
    torch.testing.assert_close(end, state)
    from_zero, _ = mamba1.selective_scan(inputs, time_step, a, b, c, None)
    given, _ = mamba1.selective_scan(inputs, time_step, a, b, c, torch.zeros(6, 3))
    assert torch.equal(from_zero, given)
