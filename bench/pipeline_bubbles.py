"""How long pipeline stages stand idle, by policy: `python -m bench.pipeline_bubbles`.

By default the shipped engine and policies, with stages whose steps take a time that is computed:

    seconds of a stage = (fixed + each * (tokens + tokens * context / attention_tokens)) / stages, and what passes between them

So many clients ask one request after another, with prompts and answers of lengths that are drawn once, the same for all. With
`--cluster` it is a real cluster of one mixed server on this machine, with a random Llama, and its own metrics. Shares are of the
time in which a plan was in flight, all stages together.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import random
import tempfile
from pathlib import Path

from msgspec import Struct

from bench.streams import ask, client, completion
from disagg.engine.instructions import Instruction, ToRouter, ToWorkers
from disagg.engine.now import Now
from disagg.messages.legs import LegEnd, LegTokens, Outcome, StartLeg
from disagg.messages.plan import SampledToken, SamplerStart, StepResult, WorkerPlan
from disagg.mixed_server.role import mixed_engine
from disagg.scheduler.policies import POLICIES
from disagg.types.sampling import SamplingParams
from tests.cluster.cluster import Cluster
from tests.engine.lone_engine import facts, start
from tests.models.tiny import VOCAB_SIZE, make_tiny

LAYERS = 8  # of the cluster's model
LONGEST = 4096
TOKEN = 5  # that is always sampled


class Times(Struct, frozen=True):
    """Of a model on one GPU: some 8e9 parameters. latency_s: of a plan or a report, and of hidden states between stages."""

    fixed_s: float = 0.006
    each_s: float = 25e-6
    attention_tokens: float = 16_384
    latency_s: float = 0.0002

    def step_s(self, runs: list[tuple[int, int]]) -> float:
        """runs: for each, tokens before it, and its own."""
        cost = sum(count * (1 + (before + count / 2) / self.attention_tokens) for before, count in runs)
        return self.fixed_s + self.each_s * cost


class Request(Struct, frozen=True):
    prompt: int
    outputs: int


class Result(Struct, frozen=True):
    """idle: share of the stages' time. tokens_per_s: of answers. gap_s: between two tokens of one, P50 and P99."""

    idle: float
    tokens_per_s: float
    gap_s: tuple[float, float]


def drawn(number: int, longest: int) -> list[Request]:
    rng = random.Random(14)
    return [Request(int(min(longest, rng.lognormvariate(6.2, 1.0) + 16)), rng.randint(32, 256)) for _ in range(number)]


class Simulated:
    """One engine, and stages that take their time. Plans reach all stages at once; each computes them in order."""

    def __init__(self, policy: str, stages: int, chunk_tokens: int, times: Times, requests: list[Request]) -> None:
        whole = POLICIES[policy].whole_prompts
        self._engine = mixed_engine(
            facts(
                num_large=1 << 20,
                max_model_len=2 * LONGEST,
                policy=policy,
                chunk_tokens=LONGEST if whole else chunk_tokens,
                max_slots=256 + 63,
                max_running=256,
                max_waiting=10_000,
                prefix_cache=False,
                pp=stages,
            )
        )
        self._stages, self._times = stages, times
        self._left = list(enumerate(requests))[::-1]
        self._free_s = [0.0] * stages
        self._events: list[tuple[float, int, int, WorkerPlan, float]] = []  # (when, plan, stage, plan, how long)
        self._samplers: dict[int, tuple[SamplerStart, ...]] = {}
        self._last_s: dict[str, float] = {}
        self._gaps: list[float] = []
        self._tokens = 0

    def run(self, clients: int) -> Result:
        for _ in range(clients):
            self._ask(0.0)
        now_s = 0.0
        while self._events:
            now_s, _, stage, plan, seconds = heapq.heappop(self._events)
            sampled = self._sampled(plan) if stage == self._stages - 1 else ()
            result = StepResult(stage, plan.plan_no, sampled, seconds, now_s - seconds, now_s)
            self._do(self._engine.step_done(result, Now(now_s)), now_s)
        assert self._engine.idle and not self._left
        spent = self._engine.counters.stage_seconds
        busy, bubble = (sum(spent[kind, stage] for stage in range(self._stages)) for kind in ("busy", "bubble"))
        gaps = sorted(self._gaps)
        return Result(
            bubble / (busy + bubble), self._tokens / now_s, (gaps[len(gaps) // 2], gaps[int(0.99 * len(gaps))])
        )

    def _ask(self, now_s: float) -> None:
        if self._left:
            number, request = self._left.pop()
            params = SamplingParams(max_tokens=request.outputs, ignore_eos=True)
            leg: StartLeg = start(f"r{number}", request.prompt, 1, params)
            self._do(self._engine.start_leg(1, leg, Now(now_s)), now_s)

    def _do(self, out: list[Instruction], now_s: float) -> None:
        for instruction in [*out, *self._engine.schedule(Now(now_s))]:
            if isinstance(instruction, ToWorkers):
                self._publish(instruction.plan, now_s)
            elif isinstance(instruction, ToRouter) and isinstance(instruction.message, LegTokens):
                name = instruction.message.key.request_id
                if name in self._last_s:
                    self._gaps.append(now_s - self._last_s[name])
                self._last_s[name] = now_s
                self._tokens += 1
            elif isinstance(instruction, ToRouter) and isinstance(instruction.message, LegEnd):
                assert instruction.message.outcome is Outcome.DONE, instruction.message
                self._ask(now_s)

    def _publish(self, plan: WorkerPlan, now_s: float) -> None:
        self._samplers.update((begun.seq_id, begun.samplers) for begun in plan.starts)
        runs = []
        for run in plan.runs:
            sequence = self._engine.sequence(run.seq_id)
            assert sequence is not None
            runs.append((sequence.position - run.num_tokens, run.num_tokens))
        seconds = self._times.step_s(runs) / self._stages if runs else 0.0
        at_s = now_s
        for stage in range(self._stages):
            at_s = self._free_s[stage] = max(at_s + self._times.latency_s, self._free_s[stage]) + seconds
            heapq.heappush(self._events, (at_s, plan.plan_no, stage, plan, seconds))

    def _sampled(self, plan: WorkerPlan) -> tuple[SampledToken, ...]:
        runs = [run for run in plan.runs if run.sample]
        return tuple(SampledToken(r.seq_id, each.choice, TOKEN) for r in runs for each in self._samplers[r.seq_id])


async def _load(cluster: Cluster, requests: list[Request], clients: int) -> None:
    rng, left = random.Random(1), list(requests)
    async with client() as http:

        async def one() -> None:
            while left:
                request = left.pop()
                ids = [rng.randrange(10, VOCAB_SIZE) for _ in range(request.prompt)]
                await ask(http, cluster.http, completion(cluster.model, ids, request.outputs))

        await asyncio.gather(*(one() for _ in range(clients)))


def measured(folder: Path, model: Path, policy: str, stages: int, options: argparse.Namespace) -> float:
    """The idle share of a real cluster's stages, by its own metrics."""
    servers = ("--prefill", "0", "--decode", "0", "--mixed", "1", "--mixed-pp", str(stages), "--policy", policy)
    flags = ("--model", str(model), *servers, "--chunk-tokens", str(options.chunk_tokens), "--prefix-cache", "off")
    with Cluster(folder, *flags, "--http-port", "0", "--grpc-port", "0") as cluster:
        asyncio.run(_load(cluster, drawn(options.requests, 900), options.clients))
        metrics = cluster.metrics("mixed-0")
    spent = {
        kind: sum(value for name, value in metrics.items() if name.startswith(f"disagg_pipeline_{kind}_seconds_total"))
        for kind in ("busy", "bubble")
    }
    return spent["bubble"] / (spent["busy"] + spent["bubble"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--policies", nargs="+", default=["sarathi", "vllm", "orca"])
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--cluster", action="store_true", help="a real one on this machine")
    options = parser.parse_args()
    if options.cluster:
        print("| stages | policy | idle |\n|---:|---|---:|")
        with tempfile.TemporaryDirectory() as folder:
            model = make_tiny("llama", Path(folder, "tiny"), num_hidden_layers=LAYERS, hidden_size=256)
            for stages in options.stages:
                for policy in options.policies:
                    idle = measured(Path(folder, f"{stages}-{policy}"), model, policy, stages, options)
                    print(f"| {stages} | `{policy}` | {idle:.1%} |", flush=True)
        return
    print("| stages | policy | idle | tokens/s | between tokens ms, P50 / P99 |\n|---:|---|---:|---:|---:|")
    for stages in options.stages:
        for policy in options.policies:
            requests = drawn(options.requests, LONGEST)
            found = Simulated(policy, stages, options.chunk_tokens, Times(), requests).run(options.clients)
            gaps = " / ".join(f"{1000 * each:.0f}" for each in found.gap_s)
            print(f"| {stages} | `{policy}` | {found.idle:.1%} | {found.tokens_per_s:.0f} | {gaps} |", flush=True)


if __name__ == "__main__":
    main()
