"""What is chosen for a device and a model, where nothing is set."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from disagg.config.steps import LEAST_CHUNK_TOKENS, MIXED_CHUNK_TOKENS, MOST_CHUNK_TOKENS, STEP_PARAMETERS, size_steps
from disagg.config.tree import EngineConfig
from disagg.models import mixed_graphs


def test_a_gpu_has_large_steps_and_a_cpu_small_ones() -> None:
    gpu, why = size_steps(EngineConfig(), "cuda", 8_030_000_000)
    assert (gpu.page_tokens, gpu.chunk_tokens, gpu.max_running) == (64, 8192, 256)
    assert why == (
        "engine.page_tokens = 64, engine.chunk_tokens = 8192 and engine.max_running = 256, chosen for a GPU with 8.0e9 "
        "parameters on each rank"
    )
    cpu, why = size_steps(EngineConfig(), "cpu", 135_000_000)
    assert (cpu.page_tokens, cpu.chunk_tokens, cpu.max_running) == (16, 256, 64)
    assert why.endswith("chosen for a CPU")


def test_prompts_that_are_computed_beside_decodes_come_in_small_chunks() -> None:
    gpu, why = size_steps(EngineConfig(), "cuda", 8_030_000_000, mixed=True)
    assert (gpu.chunk_tokens, gpu.max_running) == (MIXED_CHUNK_TOKENS, 256) and "engine.chunk_tokens = 512" in why
    assert gpu.chunk_tokens + gpu.max_running <= mixed_graphs.SIZES[-1], "its steps are captured"
    assert size_steps(EngineConfig(), "cpu", 135_000_000, mixed=True) == size_steps(EngineConfig(), "cpu", 135_000_000)
    given_one, _ = size_steps(EngineConfig(chunk_tokens=4096), "cuda", 10**9, mixed=True)
    assert given_one.chunk_tokens == 4096


def test_what_is_set_stays() -> None:
    given_all = EngineConfig(page_tokens=32, chunk_tokens=100, max_running=7)
    assert size_steps(given_all, "cuda", 10**9) == (given_all, "")
    one, why = size_steps(EngineConfig(max_running=7), "cuda", 10**9)
    assert (one.chunk_tokens, one.max_running) == (8192, 7) and "max_running" not in why


def test_pages_are_whole_between_checkpoints() -> None:
    short, _ = size_steps(EngineConfig(checkpoint_tokens=96), "cuda", 10**9)
    assert short.page_tokens == 16
    long, _ = size_steps(EngineConfig(checkpoint_tokens=128), "cuda", 10**9)
    assert long.page_tokens == 64


@given(st.integers(1, 10**13))
def test_a_larger_model_has_smaller_steps_but_never_tiny_ones(parameters: int) -> None:
    tokens = size_steps(EngineConfig(), "cuda", parameters)[0].chunk_tokens
    assert LEAST_CHUNK_TOKENS <= tokens <= MOST_CHUNK_TOKENS and tokens & (tokens - 1) == 0
    most = MOST_CHUNK_TOKENS * STEP_PARAMETERS
    assert tokens == LEAST_CHUNK_TOKENS or tokens * parameters <= most
    assert tokens == MOST_CHUNK_TOKENS or 2 * tokens * parameters > most
    assert tokens >= size_steps(EngineConfig(), "cuda", 2 * parameters)[0].chunk_tokens
