"""What it gains to let prompts wait for a better pass, on data-parallel ranks in lockstep: `python -m bench.prefill_delay`.

A simulation: ranks that share the experts of a model take each step together, and it takes as long as the slowest of them.
Which prompts wait is decided by the shipped delayer (scheduler/prefill_delayer), what runs by the shipped policies, and a step
costs what bench/engine measured for a model of 8e9 parameters on one H200: BASE_MS, and TOKEN_MS for each token. Requests wait in
their rank's queue; slots are all that they need. `offline`: all are there at the beginning. `online`: they come at a share of
the rate at which the same ranks answer offline without delays.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections import deque
from dataclasses import dataclass, field

from disagg.engine.passes import WINDOW_PASSES
from disagg.scheduler.budget import of_tokens
from disagg.scheduler.policies import POLICIES, Candidate, Phase, StepState
from disagg.scheduler.prefill_delayer import LargestBatch, Limits, PrefillDelayer, RankState, SinglePass, Together

BASE_MS, TOKEN_MS = 8.0, 0.024
MAX_RUNNING = 64


@dataclass(eq=False)
class Request:
    number: int
    arrival_s: float
    prompt: int
    outputs: int
    computed: int = 0
    told: list[float] = field(default_factory=list)  # when each token came

    @property
    def is_prompt(self) -> bool:
        return self.computed < self.prompt


class Rank:
    def __init__(self, policy: str, chunk_tokens: int, chunks_wait: bool) -> None:
        self.chunk_tokens = chunk_tokens
        self.policy = POLICIES[policy]
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}
        self.largest = LargestBatch(WINDOW_PASSES)
        self.last: Phase | None = None
        self.go_on = not chunks_wait

    def prefillable(self, now_s: float) -> bool:
        under_way = not self.go_on and any(request.is_prompt for request in self.running.values())
        return under_way or self.next_one(now_s) is not None

    def next_one(self, now_s: float) -> Request | None:
        if len(self.running) < MAX_RUNNING and self.waiting and self.waiting[0].arrival_s <= now_s:
            return self.waiting[0]
        return None

    def state(self, prefillable: bool, limits: Limits, pass_no: int) -> RankState:
        decoding = sum(not request.is_prompt for request in self.running.values())
        return limits.state(
            prefillable=prefillable, usage=1.0, running=decoding, largest_batch=self.largest.at(pass_no)
        )

    def step(self, allow: bool, now_s: float, pass_no: int) -> tuple[list[tuple[Request, int]], bool]:
        """(what runs and how many tokens of each, whether prompts do)."""
        while allow and (request := self.next_one(now_s)) is not None:
            self.waiting.popleft()
            self.running[request.number] = request
        candidates = tuple(
            Candidate(r.number, Phase.PREFILL, r.prompt - r.computed, start=r.computed)
            if r.is_prompt
            else Candidate(r.number, Phase.DECODE, 1, start=r.computed)
            for r in self.running.values()
            if allow or self.go_on or not r.is_prompt
        )
        state = StepState(of_tokens(self.chunk_tokens), whole=self.policy.whole_prompts, last=self.last)
        runs = [(self.running[run.seq_id], run.num_tokens) for run in self.policy.schedule(candidates, state).runs]
        prompts = [request for request, _ in runs if request.is_prompt]
        self.last = Phase.PREFILL if prompts else Phase.DECODE if runs else None
        self.largest.add(pass_no, sum(not request.computed for request in prompts))
        return runs, bool(prompts)

    def computed(self, runs: list[tuple[Request, int]], now_s: float) -> None:
        for request, tokens in runs:
            request.computed += tokens
            if not request.is_prompt:
                request.told.append(now_s)
                if len(request.told) == request.outputs:
                    del self.running[request.number]


@dataclass
class Result:
    seconds: float
    tokens: int
    steps: int
    with_prompts: int
    ttft_s: list[float]
    itl_s: list[float]


def simulate(
    requests: list[list[Request]], policy: str, passes: int, chunk_tokens: int, chunks_wait: bool = False
) -> Result:
    """requests: of each rank, by arrival. chunks_wait: prompts that have begun wait, too, to compare with."""
    ranks = [Rank(policy, chunk_tokens, chunks_wait) for _ in requests]
    for rank, own in zip(ranks, requests, strict=True):
        rank.waiting.extend(own)
    limits = Limits(passes, MAX_RUNNING)
    together = Together(len(ranks))
    delayer = PrefillDelayer(limits, together)
    now_s, pass_no, with_prompts = 0.0, 0, 0
    while any(rank.waiting or rank.running for rank in ranks):
        if not any(rank.running or rank.next_one(now_s) for rank in ranks):
            now_s = min(rank.waiting[0].arrival_s for rank in ranks if rank.waiting)
        allow = True
        if passes:
            together.states = tuple(rank.state(rank.prefillable(now_s), limits, pass_no) for rank in ranks)
            one = SinglePass(delayer, lambda prefillable: together.states[0], now_s)
            allow = one.finalize(executed=False).verdict.allow
        steps = [rank.step(allow, now_s, pass_no) for rank in ranks]
        pass_no += 1
        most = max(sum(tokens for _, tokens in runs) for runs, _ in steps)
        now_s += (BASE_MS + TOKEN_MS * most) / 1000
        with_prompts += any(prompts for _, prompts in steps)
        for rank, (runs, _) in zip(ranks, steps, strict=True):
            rank.computed(runs, now_s)
    done = [request for own in requests for request in own]
    return Result(
        seconds=now_s,
        tokens=sum(len(request.told) for request in done),
        steps=pass_no,
        with_prompts=with_prompts,
        ttft_s=[request.told[0] - request.arrival_s for request in done],
        itl_s=[b - a for request in done for a, b in zip(request.told, request.told[1:], strict=False)],
    )


def some_requests(ranks: int, each: int, rate: float, seed: int) -> list[list[Request]]:
    """rate: of each rank, per second; 0: all at the beginning."""
    rng = random.Random(seed)
    out: list[list[Request]] = []
    for rank in range(ranks):
        now_s, own = 0.0, []
        for at in range(each):
            now_s += rng.expovariate(rate) if rate else 0.0
            own.append(Request(rank * each + at, now_s, rng.randint(256, 2048), rng.randint(64, 512)))
        out.append(own)
    return out


def p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]


def show(name: str, result: Result, base: Result | None) -> None:
    rate = result.tokens / result.seconds
    gain = "" if base is None else f"{100 * (rate / (base.tokens / base.seconds) - 1):+.0f}%"
    print(
        f"| {name} | {rate:.0f} | {gain} | {100 * result.with_prompts / result.steps:.0f}% "
        f"| {statistics.median(result.ttft_s):.2f} / {p99(result.ttft_s):.2f} "
        f"| {1000 * statistics.mean(result.itl_s):.1f} / {1000 * p99(result.itl_s):.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=200, help="of each rank")
    parser.add_argument("--chunk-tokens", type=int, default=8192)
    parser.add_argument("--passes", type=int, default=30)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--policies", nargs="+", default=["vllm", "sarathi"])
    parser.add_argument("--load", type=float, nargs="+", default=[0.0, 0.9], help="0: offline")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--chunks-wait", action="store_true", help="prompts that have begun wait, too, to compare with")
    options = parser.parse_args()
    print("| load, policy, ranks, passes | tokens/s | | steps with prompts | TTFT s, P50 / P99 | ITL ms, mean / P99 |")
    print("|---|---:|---:|---:|---:|---:|")
    capacity: dict[tuple[str, int], float] = {}
    for load in options.load:
        for policy in options.policies:
            for ranks in options.ranks:
                base = None
                for passes in (0, options.passes):
                    rate = load * capacity.get((policy, ranks), 0.0)
                    requests = some_requests(ranks, options.requests, rate, options.seed)
                    result = simulate(requests, policy, passes, options.chunk_tokens, options.chunks_wait)
                    if base is None and not load:
                        capacity[policy, ranks] = options.requests / result.seconds
                    show(f"{load or 'offline'}, {policy}, {ranks}, {passes}", result, base)
                    base = base or result


if __name__ == "__main__":
    main()
