"""Mixed servers under every policy: token-identical to transformers, whatever is asked and however short memory is.

One round asks everything at once: prompts that end on and beside pages and chunks, prompts that begin alike, choices, streams,
logprobs, stop strings, seeds. The pool is so small that sequences give way where the policy lets them.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from disagg.convert.model_dir import resolve
from disagg.scheduler.policies import POLICIES
from tests.cluster.campaign import MAX_TIGHT_ROUNDS, check, conversations, sizes, total
from tests.cluster.cluster import Cluster
from tests.cluster.rounds import Round
from tests.models import reference
from tests.models.tiny import VOCAB_SIZE, make_tiny
from tests.scheduler.mixed_policies import MIXED_POLICIES

CACHE = Path("~/.cache/disagg/models").expanduser()
ALONE = ("--prefill", "0", "--decode", "0", "--mixed", "1")
SIX = {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 96}


@dataclass(frozen=True)
class Case:
    """A model (a known name, or a family and what differs in its tiny configuration) on servers of so many ranks."""

    model: str
    tp: int
    page_tokens: int = 4
    chunk_tokens: int = 16
    checkpoint_tokens: int = 16
    outputs: int = 32
    fields: dict[str, Any] = field(default_factory=dict)
    pp: int = 1

    def __str__(self) -> str:
        return f"{self.model}-{self.tp}" + (f"x{self.pp}" if self.pp > 1 else "")

    @property
    def known(self) -> bool:
        return self.model in ("smollm2-135m", "gemma3-270m")

    def make(self, directory: Path) -> Path:
        return (
            resolve(self.model, CACHE) if self.known else make_tiny(self.model, directory / self.model, **self.fields)
        )

    @property
    def lengths(self) -> tuple[int, ...]:
        page, chunk = self.page_tokens, self.chunk_tokens
        if self is QUICK:
            return (1, page, chunk + 1, 2 * chunk + 3, 5 * chunk + page)
        return (1, page - 1, page, page + 1, chunk - 1, chunk, chunk + 1, 2 * chunk + 3, 3 * chunk, 5 * chunk + page)


QUICK = Case("llama", 1, outputs=24)
SLOW = (
    Case("llama", 1),
    Case("llama", 3, fields=SIX),
    Case("gemma3_text", 1),
    Case("gemma3_text", 3, fields=SIX),
    Case("jamba", 1),
    Case("falcon_h1", 2),
)
KNOWN = (
    Case("smollm2-135m", 1, 16, 64, 512, 16),
    Case("smollm2-135m", 3, 16, 64, 512, 16),
    # Only 3 of its 18 layers grow beyond what is counted when a prompt begins, so that short answers hardly ever lack a page;
    # and three ranks cannot share its four query heads.
    Case("gemma3-270m", 1, 4, 64, 512, 64),
    Case("gemma3-270m", 2, 4, 64, 512, 64),
)


def run(case: Case, tmp_path: Path, policies: tuple[str, ...]) -> None:
    """Seeded choices have no reference: what the first policy makes of them is what all others must say."""
    model_dir = case.make(tmp_path)
    vocab = 40_000 if case.known else VOCAB_SIZE
    prompts = conversations(case.tp, vocab, case.lengths)
    asked = Round(prompts, reference.generate(model_dir, prompts, case.outputs))
    for policy in policies:
        # Of policies that compute prompts whole, a chunk is as long as the longest of them.
        longest = max(case.lengths) + case.outputs
        chunk = longest if POLICIES[policy].whole_prompts else case.chunk_tokens
        cut = sizes(model_dir, longest, case.page_tokens, chunk, case.checkpoint_tokens, case.tp, case.pp)
        tight = cut.tight_bytes if POLICIES[policy].reserves else cut.tight_bytes * 3 // 2
        ranks = ("--mixed-tp", str(case.tp), "--mixed-pp", str(case.pp))
        flags = (*ALONE, *ranks, "--policy", policy, "--kv-memory", str(tight))
        sets = (*cut.sets, "engine.lookahead_tokens=0")  # what begins may come to lack pages: it is what is tried here
        with Cluster(tmp_path / policy, "--model", str(model_dir), *flags, *cut.flags, sets=sets) as cluster:
            server = cluster.server("mixed-0")
            assert (server["role"], server["tp"], len(server["worker_pids"])) == ("mixed", case.tp, case.tp * case.pp)
            asked.alone(cluster)
            for number in range(MAX_TIGHT_ROUNDS):  # who has to give way to whom is a matter of timing
                asked.at_once(cluster, f"{case}, {policy}, round {number}")
                gave_way = total(cluster, "disagg_preemptions")
                if gave_way or POLICIES[policy].reserves:
                    break
            cluster.check_adds_up()
            print(f"{case}, {policy}: {asked.compared}; {gave_way:g} preemptions in {number + 1} rounds", flush=True)
            assert bool(gave_way) != POLICIES[policy].reserves, f"{gave_way} preemptions under {policy}"


@pytest.mark.timeout(900)
def test_a_mixed_server_says_what_transformers_says(tmp_path: Path) -> None:
    run(QUICK, tmp_path, ("sarathi",))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", SLOW, ids=str)
def test_mixed_servers_of_every_policy_say_what_transformers_says(case: Case, tmp_path: Path) -> None:
    run(case, tmp_path, MIXED_POLICIES)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", KNOWN, ids=str)
def test_trained_models_on_mixed_servers_of_every_policy_say_what_transformers_says(case: Case, tmp_path: Path) -> None:
    run(case, tmp_path, MIXED_POLICIES)


async def at_once(cluster: Cluster, prompts: list[list[int]], outputs: int) -> list[list[int]]:
    """By one client, since a thread for each would be slower than the servers."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=cluster.http, timeout=900, limits=limits) as client:

        async def ask(prompt: list[int]) -> list[int]:
            fields = {"max_tokens": outputs, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
            reply = await client.post("/v1/completions", json={"model": cluster.model, "prompt": prompt, **fields})
            assert reply.status_code == 200, reply.text
            return reply.json()["choices"][0]["token_ids"]

        return await asyncio.gather(*map(ask, prompts))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_512_requests_at_once_are_answered_alike_by_a_pair_and_by_a_mixed_server(tmp_path: Path) -> None:
    """As transformers answers some of them, and all for which the two differ."""
    model_dir = make_tiny("llama", tmp_path / "llama", num_hidden_layers=2)
    rng, outputs = random.Random(512), 64
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(1, 80))] for _ in range(512)]
    flags = ("--model", str(model_dir), "--dtype", "float32", "--page-tokens", "4", "--kv-memory", "64MiB")
    said = []
    for name, servers in (("pair", ("--prefill", "1", "--decode", "1")), ("mixed", ALONE)):
        with Cluster(tmp_path / name, *flags, *servers, sets=("engine.max_running=256",)) as cluster:
            said.append(asyncio.run(at_once(cluster, prompts, outputs)))
            role = "mixed" if name == "mixed" else "decode"
            width = total(cluster, "disagg_decode_tokens", role) / total(cluster, "disagg_engine_steps", role)
            print(f"{name}: {width:.1f} tokens of answers a step")
            assert width > 16, "so many were never together"
            cluster.check_adds_up()
    pair, mixed = said
    compared = [number for number in range(512) if number % 16 == 0 or pair[number] != mixed[number]]
    answers = reference.generate(model_dir, [prompts[number] for number in compared], outputs)
    for each in said:
        check(answers, [each[number] for number in compared], "at once")
