"""Who attends for which layers: by what backends can do and what layers ask."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch

from disagg.config.tree import ModelConfig
from disagg.messages.control import Computation
from disagg.models.attention.backend import Ask, Phase
from disagg.models.attention.calls import shares
from disagg.models.attention.choice import AUTO, OFFERS, choose
from disagg.models.batch import PrefillRun
from disagg.models.model import PagedModel
from disagg.types.errors import ConfigError
from tests.models.tiny import make_tiny

LLAMA = Ask(Phase.PREFILL, "cuda", torch.bfloat16, 128)
ON_HOPPER = replace(LLAMA, hopper=True)


def both(ask: Ask) -> tuple[Ask, Ask]:
    return replace(ask, phase=Phase.PREFILL), replace(ask, phase=Phase.DECODE)


@pytest.mark.parametrize(
    ("ask", "described"),
    [
        (LLAMA, "prefill cudnn (from 1024 tokens), triton; decode triton"),
        (ON_HOPPER, "prefill hopper; decode triton"),
        (replace(ON_HOPPER, head_dim=96), "prefill cudnn (from 1024 tokens), triton; decode triton"),
        (replace(ON_HOPPER, window=True), "prefill triton; decode triton"),
        (replace(LLAMA, dtype=torch.float32), "prefill triton; decode triton"),
        (replace(LLAMA, window=True), "prefill triton; decode triton"),
        (replace(LLAMA, softcap=True, head_dim=256), "prefill triton; decode triton"),
        (replace(LLAMA, head_dim=512), "prefill torch; decode torch"),
        (replace(LLAMA, device="cpu"), "prefill torch; decode torch"),
    ],
)
def test_what_is_asked_decides(ask: Ask, described: str) -> None:
    assert choose(both(ask)).describe() == described


def test_a_backend_that_is_wanted_by_name_comes_first() -> None:
    assert choose(both(LLAMA), "torch", "torch").describe() == "prefill torch; decode torch"
    assert choose(both(LLAMA), "triton").describe() == "prefill triton; decode triton"


@pytest.mark.parametrize(
    ("ask", "prefill", "decode", "message"),
    [
        (
            LLAMA,
            "flash",
            AUTO,
            'model.prefill_attention = "flash": it must be one of auto, hopper, cudnn, triton, torch',
        ),
        (LLAMA, AUTO, "cudnn", 'model.decode_attention = "cudnn": it must be one of auto, triton, torch'),
        (
            LLAMA,
            "hopper",
            AUTO,
            r'"hopper": it cannot do what this model asks here \(kernels for other chips than Hopper.s\)',
        ),
        (
            replace(LLAMA, window=True, sinks=True),
            "cudnn",
            AUTO,
            r'"cudnn": it cannot do what this model asks here \(windows, sinks\); it must be one of auto, triton, torch',
        ),
        (
            replace(LLAMA, device="cpu", head_dim=512),
            AUTO,
            "triton",
            r'"triton": .* \(device cpu, head_dim 512\); it must be one of auto, torch',
        ),
    ],
)
def test_a_backend_that_cannot_do_it_is_refused(ask: Ask, prefill: str, decode: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose(both(ask), prefill, decode)


@pytest.mark.parametrize("phase", Phase)
def test_settings_name_every_backend(phase: Phase) -> None:
    setting = get_type_hints(ModelConfig)[f"{phase}_attention"]
    assert get_args(setting) == (AUTO, *(offer.name for offer in OFFERS if offer.capabilities.phase is phase))


def test_the_last_offer_of_a_phase_takes_everything() -> None:
    for phase in Phase:
        last = [offer for offer in OFFERS if offer.capabilities.phase is phase][-1]
        assert not last.capabilities.lacks(Ask(phase, "cpu", torch.float32, 512, True, True, True))
        assert last.capabilities.least_tokens == last.capabilities.step_tokens == 1


@pytest.mark.parametrize(
    ("context", "tokens", "taken"),
    [
        (0, 1023, (0, 0)),
        (0, 1024, (0, 1024)),
        (0, 1535, (0, 1024)),
        (0, 1536, (0, 1536)),
        (16, 1024, (0, 0)),  # 496 and then 512, which are too few
        (16, 1520, (496, 1024)),
        (512, 1024, (0, 1024)),
        (1536, 512, (0, 0)),
        (2048, 512, (0, 512)),
        (2000, 560, (48, 512)),
        (2000, 559, (0, 0)),
        (8192, 1, (0, 0)),
    ],
)
def test_a_backend_of_few_lengths_takes_a_part_of_a_run(context: int, tokens: int, taken: tuple[int, int]) -> None:
    (cudnn,) = (offer for offer in OFFERS if offer.name == "cudnn")
    assert cudnn.capabilities.share(PrefillRun(7, tokens, context, True)) == taken


def test_shares_of_runs_are_all_of_their_rows_once() -> None:
    (cudnn,) = (offer for offer in OFFERS if offer.name == "cudnn")
    runs = [
        (0, PrefillRun(0, 300, 0, True)),
        (1, PrefillRun(300, 1700, 100, False)),
        (2, PrefillRun(2000, 1024, 0, True)),
    ]
    taken, left = shares(runs, cudnn.capabilities)
    assert taken == [(1, PrefillRun(712, 1024, 512, False)), (2, PrefillRun(2000, 1024, 0, True))]
    assert left == [(0, runs[0][1]), (1, PrefillRun(300, 412, 100, False)), (1, PrefillRun(1736, 264, 1536, False))]


def test_a_model_says_who_attends_for_each_of_its_layer_groups(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model_dir = make_tiny("gemma2", tmp_path)
    with caplog.at_level("INFO", logger="disagg.models.model"):
        PagedModel.load(model_dir, "float32", "cpu")
    assert [record.getMessage() for record in caplog.records] == [
        "attention of layer group window-16: prefill torch; decode torch",
        "attention of layer group full: prefill torch; decode torch",
    ]
    with pytest.raises(ConfigError, match=r"cannot do what this model asks here \(device cpu"):
        PagedModel.load(model_dir, "float32", "cpu", computation=Computation(decode_attention="triton"))


def test_a_model_on_a_cpu_never_loads_triton(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    code = (
        "import sys, pathlib\n"
        "from disagg.models.model import PagedModel\n"
        f"PagedModel.load(pathlib.Path({str(tmp_path)!r}), 'float32', 'cpu')\n"
        "assert not any(name.startswith('disagg.models.attention.triton') for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
