"""What a step costs the host, without any GPU: `python -m bench.host`.

Plans as an engine gives them, of sequences that decode: messages between server and worker (encoded and decoded), what the worker
knows of sequences, the tensors of the batch, and their copy into the inputs of graphs (here on the CPU). Microseconds a step,
medians of many. What an engine decides and what a launch takes is not in it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections import defaultdict
from types import SimpleNamespace

import torch

from disagg.messages.layout import GroupPages, LayerGroup
from disagg.messages.plan import (
    Run,
    SampledToken,
    SamplerStart,
    SequenceStart,
    StepResult,
    WorkerPlan,
    decode_from_worker,
    decode_to_worker,
    encode_from_worker,
    encode_to_worker,
)
from disagg.messages.sequence_diff import KnownSequences
from disagg.models.graphs import _Inputs
from disagg.types.sampling import SamplingParams
from disagg.worker.batch import build_batch

PAGE_TOKENS = 16
GROUP = LayerGroup("full", tuple(range(32)), 8, 128, "bfloat16")


class Host:
    """Both ends of the messages of one worker, and all of a worker but what computes."""

    def __init__(self, count: int, tokens: int, steps: int) -> None:
        rng = random.Random(0)
        self._known = KnownSequences()
        model = SimpleNamespace(device=torch.device("cpu"), max_model_len=2 * tokens + steps)
        pool = SimpleNamespace(groups=(GROUP,), page_tokens=PAGE_TOKENS)
        self._inputs = _Inputs(model, pool, count, torch.zeros(count, dtype=torch.int64))  # type: ignore[arg-type]
        self._pages = iter(range(1 << 30))
        self._count = count
        self._computed = [tokens + rng.randrange(PAGE_TOKENS) for _ in range(count)]  # pages end in different steps
        self._plan_no = 0
        self.spent_s: dict[str, list[float]] = defaultdict(list)
        params = SamplingParams(max_tokens=steps + 2, temperature=0.0)
        starts = tuple(
            SequenceStart(
                index, (5,) * (done + 1), done + 1, done, (GroupPages(0, self._fresh(-(-done // PAGE_TOKENS))),), params,
                (SamplerStart(index, 0),),
            )
            for index, done in enumerate(self._computed)
        )  # fmt: skip
        self.step(starts)
        self.spent_s.clear()

    def _fresh(self, count: int) -> tuple[int, ...]:
        return tuple(next(self._pages) for _ in range(count))

    def step(self, starts: tuple[SequenceStart, ...] = ()) -> None:
        runs = []
        for index, done in enumerate(self._computed):
            new = (self._fresh(1),) if done % PAGE_TOKENS == 0 else ()
            runs.append(Run(index, 1, True, new))
            self._computed[index] += 1
        plan = WorkerPlan(self._plan_no, starts=starts, runs=tuple(runs))
        self._plan_no += 1
        clock = _Clock(self.spent_s)
        data = encode_to_worker(plan)
        clock.note("plan encoded")
        plan = decode_to_worker(data)
        clock.note("plan decoded")
        _, _, views = self._known.apply(plan)
        clock.note("diff applied")
        batch, ordered = build_batch(views, (GROUP,), PAGE_TOKENS)
        clock.note("batch built")
        self._inputs.fill(batch)
        clock.note("inputs filled")
        sampled = tuple(SampledToken(view.sequence.seq_id, 0, 7, None) for view in ordered)
        for view in ordered:
            view.sequence.tokens.append(7)
        clock.note("tokens noted")
        data = encode_from_worker(StepResult(0, plan.plan_no, sampled, 0.01, 0.0, 0.01))
        clock.note("result encoded")
        decode_from_worker(data)
        clock.note("result decoded")


class _Clock:
    def __init__(self, spent_s: dict[str, list[float]]) -> None:
        self._spent_s = spent_s
        self._at_s = time.perf_counter()

    def note(self, what: str) -> None:
        now_s = time.perf_counter()
        self._spent_s[what].append(now_s - self._at_s)
        self._at_s = time.perf_counter()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, nargs="*", default=[1, 32, 256])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for count in arguments.sequences:
        host = Host(count, arguments.tokens, arguments.steps)
        for _ in range(arguments.steps):
            host.step()
        medians = {what: statistics.median(spent) * 1e6 for what, spent in host.spent_s.items()}
        parts = ", ".join(f"{what} {us:.0f}" for what, us in medians.items())
        print(f"{count:4d} sequences of {arguments.tokens}: {sum(medians.values()):.0f} us a step: {parts}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
