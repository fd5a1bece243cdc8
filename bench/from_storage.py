"""How much of what storage has is found when many ask for theirs at once, beside a pool and a host that hold two of them:
`python -m bench.from_storage`.

A real cluster (one prefill, one decode server, SmolLM2-135M on CPU) answers prompts of random tokens, all at once, and stores
them. All servers are started anew, and the same prompts are asked once more, all at once: tokens that were found, and seconds for
all of them. Answers must be the same.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.cluster.cluster import Cluster

OUTPUTS = 20
STORED_S = 3.0  # for what is on its way to storage when all are answered


class Round(NamedTuple):
    """tokens: of each answer; cached: of all prompts."""

    tokens: list[tuple[int, ...]]
    cached: int
    took_s: float


def ask_all(cluster: Cluster, prompts: list[list[int]]) -> Round:
    began_s = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as threads:
        asked = [
            threads.submit(cluster.complete, prompt, max_tokens=OUTPUTS, ignore_eos=True, timeout_s=600)
            for prompt in prompts
        ]
        got = [each.result() for each in asked]
    took_s = time.perf_counter() - began_s
    cached = sum(each.usage["prompt_tokens_details"]["cached_tokens"] for each in got)
    return Round([tuple(each.token_ids[0]) for each in got], cached, took_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=600, help="of each")
    parser.add_argument("--memory", default="64MiB", help="of each server's pool, and as much of its host")
    arguments = parser.parse_args()
    draw = random.Random(1)
    prompts = [[draw.randrange(1000, 40000) for _ in range(arguments.tokens)] for _ in range(arguments.prompts)]
    with tempfile.TemporaryDirectory() as folder:
        memory = ("--kv-memory", arguments.memory, "--host-memory", arguments.memory)
        flags = (*memory, "--offload", "on", "--storage", f"file://{folder}/store")
        rounds = []
        for name in ("first", "again"):
            with Cluster(Path(folder, name), *flags) as cluster:
                rounds.append(ask_all(cluster, prompts))
                time.sleep(STORED_S)
    first, again = rounds
    assert again.tokens == first.tokens, "what came from storage has changed answers"
    print(f"{arguments.prompts} prompts of {arguments.tokens} tokens at once: computed in {first.took_s:.1f} s;")
    print(f"again, {again.cached} of {arguments.prompts * arguments.tokens} tokens found, in {again.took_s:.1f} s")


if __name__ == "__main__":
    main()
