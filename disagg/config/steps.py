"""How much a step may compute, and how long pages are, where the configuration leaves it open. Pure.

A GPU reads all weights in every step, so steps should be large: products of 8192 tokens reach what the chip can do, and those
of 512 tokens five sixths of it (docs/benchmarks.md). Other prompts wait for a step that has begun, so it should be short, too:
8192 tokens of a model of 8e9 parameters take a fifth of a second. A CPU is busy with few tokens.

Where prompts are computed beside sequences that decode, these wait for every such step, so it has no more than 512 tokens: of
8e9 parameters they take 17 ms instead of a fifth of a second, and a captured step has them beside all that decode.

A GPU reads pages of 64 tokens faster than shorter ones: steps of decode take 1 to 2% less. Longer ones bring little more, and
what is cached of a prompt ends at whole pages.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from disagg.config.staging import Device
from disagg.config.tree import EngineConfig

MOST_CHUNK_TOKENS = 8192
LEAST_CHUNK_TOKENS = 1024
MIXED_CHUNK_TOKENS = 512
STEP_PARAMETERS = 9_000_000_000  # of a rank, whose MOST_CHUNK_TOKENS take as long as a step may


class _Steps(Struct, frozen=True):
    page_tokens: int
    chunk_tokens: int
    max_running: int


CPU_PAGE_TOKENS = 16
GPU_PAGE_TOKENS = 64
_CPU = _Steps(CPU_PAGE_TOKENS, chunk_tokens=256, max_running=64)
_GPU_MAX_RUNNING = 256  # more sequences bring little: products of so many rows take as long as reading their weights


def size_steps(
    engine: EngineConfig, device: Device, rank_parameters: int, *, mixed: bool = False
) -> tuple[EngineConfig, str]:
    """The same, with sizes for the device and the model where they are 0; and what was chosen, for the log: maybe nothing.

    rank_parameters: weights of one rank. mixed: prompts are computed beside sequences that decode.
    """
    steps = _CPU
    if device != "cpu":
        pages = GPU_PAGE_TOKENS if engine.checkpoint_tokens % GPU_PAGE_TOKENS == 0 else CPU_PAGE_TOKENS
        chunk_tokens = MIXED_CHUNK_TOKENS if mixed else _gpu_chunk_tokens(rank_parameters)
        steps = _Steps(pages, chunk_tokens, _GPU_MAX_RUNNING)
    open_ones: Mapping[str, int] = {
        name: getattr(steps, name) for name in steps.__struct_fields__ if not getattr(engine, name)
    }
    if not open_ones:
        return engine, ""
    *others, last = (f"engine.{name} = {value}" for name, value in open_ones.items())
    said = f"{', '.join(others)} and {last}" if others else last
    where = "a CPU" if device == "cpu" else f"a GPU with {rank_parameters / 1e9:.1f}e9 parameters on each rank"
    return replace(engine, **open_ones), f"{said}, chosen for {where}"


def mixed_step_tokens(chunk_tokens: int, max_running: int, page_tokens: int, *, whole_prompts: bool) -> int:
    """Most tokens of a mixed server's step: beside as many sequences that decode as there can be, it has room for a page's worth
    of a prompt, or for the longest one. chunk_tokens: as long as that one where prompts are whole."""
    beside = max_running + page_tokens
    return chunk_tokens + beside if whole_prompts else max(chunk_tokens, beside)


def _gpu_chunk_tokens(rank_parameters: int) -> int:
    """A power of 2, by the time that the products of so many tokens take."""
    tokens = MOST_CHUNK_TOKENS
    while tokens > LEAST_CHUNK_TOKENS and tokens * rank_parameters > MOST_CHUNK_TOKENS * STEP_PARAMETERS:
        tokens //= 2
    return tokens
