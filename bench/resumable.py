"""How many long conversations can go on without being computed again, with a host beside the pool and without one:
`python -m bench.resumable`.

A real cluster (one prefill, one decode server) with a random model, whose KV pools hold some two conversations. First turns are
asked one after the other, then each conversation's second turn, the youngest first; once without offload, once with host memory
of four times the pool. A conversation was resumable if at least 95% of its first turn's whole pages were cached. The time to the
first token is that of a whole request with max_tokens 1. What is loaded and what is computed is of one run. `--large` is for a
GPU: a model of Llama-3.1-8B's shape in bfloat16.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bench.gpu_cluster import add_shape, kv_bytes, make_model_apart
from tests.cluster.cluster import Cluster
from tests.models.tiny import VOCAB_SIZE, make_tiny

LAYERS, KV_HEADS, HEAD_DIM, HEADS = 4, 4, 32, 8
TOKEN_BYTES = 2 * LAYERS * KV_HEADS * HEAD_DIM * 4
SHAPE = {
    "num_hidden_layers": LAYERS,
    "hidden_size": HEADS * HEAD_DIM,
    "intermediate_size": 3 * HEADS * HEAD_DIM,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
}
OUTPUTS, PAGE_TOKENS = 16, 16
LARGE_VOCAB, LARGE_PAGE_TOKENS = 128256, 64
RESUMABLE = 0.95


@dataclass(frozen=True)
class Turn:
    """A second turn. cached: of the whole pages of the first one, the share."""

    cached: float
    first_token_s: float


class Model(NamedTuple):
    directory: Path
    dtype: str
    token_bytes: int  # of KV
    page_tokens: int


def second_turns(
    model: Model, run_dir: Path, tokens: int, conversations: int, pool: float, offload: bool
) -> list[Turn]:
    """The youngest conversation's first."""
    draw = random.Random(tokens)
    pool_bytes = int(pool * (tokens + 2 * OUTPUTS) * model.token_bytes)
    flags = (
        "--model",
        str(model.directory),
        "--dtype",
        model.dtype,
        "--kv-memory",
        str(pool_bytes),
        "--page-tokens",
        str(model.page_tokens),
    )
    tiers = ("--offload", "on") if offload else ()
    sets = ("offload.host_ratio=4", f"model.max_model_len={tokens + 256}")
    with Cluster(run_dir, *flags, *tiers, sets=sets) as cluster:
        talks = []
        for number in range(conversations):
            prompt = [draw.randrange(3, VOCAB_SIZE) for _ in range(tokens - OUTPUTS)]
            got = cluster.complete(prompt, max_tokens=OUTPUTS, ignore_eos=True, timeout_s=600)
            talks.append([*prompt, *got.token_ids[0]])
            print(f"  first turn {number + 1} of {conversations}", flush=True)
        turns = []
        for talk in reversed(talks):
            started_s = time.perf_counter()
            got = cluster.complete([*talk, 5, 7, 11], max_tokens=1, timeout_s=600)
            took_s = time.perf_counter() - started_s
            cached = got.usage["prompt_tokens_details"]["cached_tokens"]
            turns.append(Turn(cached / ((len(talk) - 1) // model.page_tokens * model.page_tokens), took_s))
        return turns


def say(name: str, turns: list[Turn]) -> None:
    groups = {
        "resumed": [turn.first_token_s for turn in turns if turn.cached >= RESUMABLE],
        "computed again": [turn.first_token_s for turn in turns if turn.cached < RESUMABLE],
    }
    said = [
        f"{len(times)} {what}, first token after {statistics.median(times):.2f} s ({min(times):.2f} to {max(times):.2f})"
        for what, times in groups.items()
        if times
    ]
    print(f"{name}: of {len(turns)} conversations " + "; ".join(said))


def small_model(directory: Path, arguments: argparse.Namespace) -> Model:
    made = make_tiny("llama", directory / "llama", max_position_embeddings=arguments.tokens + 256, **SHAPE)
    return Model(made, "float32", TOKEN_BYTES, PAGE_TOKENS)


def large_model(directory: Path, arguments: argparse.Namespace) -> Model:
    made = make_model_apart(arguments.model_dir or directory / "model", arguments)
    return Model(made, arguments.dtype, kv_bytes(arguments) // arguments.tokens, LARGE_PAGE_TOKENS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="of a conversation's first turn, answer and all")
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--pool", type=float, default=2.2, help="conversations that each server's KV pool holds")
    parser.add_argument("--large", action="store_true", help="a model of the shape below, for a GPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where the large model is made")
    add_shape(parser, LARGE_VOCAB)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = large_model(Path(directory), arguments) if arguments.large else small_model(Path(directory), arguments)
        for name, offload in (("without offload", False), ("with a host of 4 times the pool", True)):
            run_dir = Path(directory) / str(offload)
            say(name, second_turns(model, run_dir, arguments.tokens, arguments.conversations, arguments.pool, offload))


if __name__ == "__main__":
    main()
