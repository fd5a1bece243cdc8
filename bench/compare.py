"""disagg against `transformers` generate, side by side on this CPU: `python -m bench.compare`.

Same model, dtype (fp32), prompts, 256 tokens in and 64 out, greedy; one thread for the reference, and one per phase for
disagg (a prefill worker and a decode worker). Rounds alternate, so that what else the machine does hits both; figures
are medians over rounds, and the ratio is what counts.

    alone          one request at a time
    concurrent     16 requests at once: disagg, against the reference one after the other, and as one padded batch
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from disagg.convert.model_dir import resolve
from tests.cluster.cluster import Cluster

CONCURRENT = 16


class Sample(Struct, frozen=True):
    """One request. Seconds from its asking; gaps between its tokens."""

    ttft_s: float
    gaps_s: tuple[float, ...]
    tokens: int


class Run(Struct, frozen=True):
    """Requests that were measured together."""

    elapsed_s: float
    samples: tuple[Sample, ...]

    @property
    def tokens_per_s(self) -> float:
        return sum(sample.tokens for sample in self.samples) / self.elapsed_s

    @property
    def ttft_s(self) -> float:
        return statistics.mean(sample.ttft_s for sample in self.samples)

    @property
    def itl_s(self) -> float:
        return statistics.mean(gap for sample in self.samples for gap in sample.gaps_s)


def prompts_for(round_no: int, count: int, tokens: int, vocab_size: int) -> list[list[int]]:
    """Distinct, fixed by their numbers: no cache of any kind can help."""
    return [
        [(7919 * (round_no * 1000 + i) + 104729 * j + j * j) % (vocab_size - 1000) + 500 for j in range(tokens)]
        for i in range(count)
    ]


# ---- the reference, in a process of its own that answers lines of JSON


def reference_process(model_dir: str, threads: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None

    class Clock(BaseStreamer):
        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: object) -> None:
            self.times.append(time.perf_counter())  # the first call hands over the prompt

        def end(self) -> None:
            pass

    class Steps(list):  # type: ignore[type-arg]
        """Stopping criteria that only look at the clock: `generate` streams no batches."""

        def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
            self.append(time.perf_counter())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    @torch.inference_mode()
    def one(batch: list[list[int]], outputs: int) -> list[Sample]:
        ids = torch.tensor(batch)
        started = time.perf_counter()
        arguments = {"max_new_tokens": outputs, "do_sample": False, "pad_token_id": 0}
        if len(batch) == 1:
            clock = Clock()
            model.generate(ids, attention_mask=torch.ones_like(ids), streamer=clock, **arguments)
            times = clock.times[1:]
        else:
            steps = Steps()
            from transformers import StoppingCriteriaList

            criteria = StoppingCriteriaList([steps])
            model.generate(ids, attention_mask=torch.ones_like(ids), stopping_criteria=criteria, **arguments)
            times = list(steps)
        gaps = tuple(b - a for a, b in itertools.pairwise(times))
        return [Sample(times[0] - started, gaps, len(times)) for _ in batch]

    one([[5] * 8], 2)
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        started = time.perf_counter()
        if job["batched"]:
            samples = one(job["prompts"], job["outputs"])
        else:
            samples = [sample for prompt in job["prompts"] for sample in one([prompt], job["outputs"])]
        run = Run(time.perf_counter() - started, tuple(samples))
        print(msgspec.json.encode(run).decode(), flush=True)


class Reference:
    def __init__(self, model_dir: Path, threads: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.compare", "--reference", str(model_dir), "--threads", str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line, "the reference process has ended"
        return line

    def run(self, prompts: list[list[int]], outputs: int, batched: bool) -> Run:
        assert self._process.stdin is not None
        print(
            json.dumps({"prompts": prompts, "outputs": outputs, "batched": batched}),
            file=self._process.stdin,
            flush=True,
        )
        return msgspec.json.decode(self._line(), type=Run)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


# ---- disagg


async def _stream(client: httpx.AsyncClient, url: str, model: str, prompt: list[int], outputs: int) -> Sample:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": outputs,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    started = time.perf_counter()
    times: list[float] = []
    async with client.stream("POST", f"{url}/v1/completions", json=body) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                data = json.loads(line.removeprefix("data: "))
                assert "error" not in data, data
                for choice in data["choices"]:
                    times += [time.perf_counter()] * len(choice.get("token_ids") or [])
    assert len(times) == outputs, f"{len(times)} of {outputs} tokens came"
    return Sample(times[0] - started, tuple(b - a for a, b in itertools.pairwise(times)), len(times))


async def _disagg(url: str, model: str, prompts: list[list[int]], outputs: int, at_once: bool) -> Run:
    async with httpx.AsyncClient(timeout=600) as client:
        started = time.perf_counter()
        if at_once:
            samples = await asyncio.gather(*(_stream(client, url, model, p, outputs) for p in prompts))
        else:
            samples = [await _stream(client, url, model, p, outputs) for p in prompts]
        return Run(time.perf_counter() - started, tuple(samples))


# ---- the table


def median(runs: Sequence[Run], what: str) -> float:
    return statistics.median(getattr(run, what) for run in runs)


def table_rows(results: dict[str, list[Run]]) -> list[tuple[str, ...]]:
    def row(name: str, runs: list[Run], against: list[Run] | None) -> tuple[str, ...]:
        ratios = [a.tokens_per_s / b.tokens_per_s for a, b in zip(runs, against, strict=True)] if against else []
        return (
            name,
            f"{median(runs, 'tokens_per_s'):.1f}",
            f"{median(runs, 'ttft_s'):.2f}",
            f"{median(runs, 'itl_s') * 1e3:.0f}",
            f"{statistics.median(ratios):.2f}x" if ratios else "1.00x",
        )

    alone, sequential = results["transformers, alone"], results["transformers, sequential"]
    return [
        row("1 alone: transformers generate", alone, None),
        row("1 alone: disagg", results["disagg, alone"], alone),
        row("16: transformers generate, one after another", sequential, None),
        row("16: transformers generate, one batch", results["transformers, batched"], sequential),
        row("16: disagg, concurrent", results["disagg, concurrent"], sequential),
    ]


HEADERS = ("", "output tokens/s", "TTFT s", "ITL ms", "ratio")


def measure(console: Console, rounds: int, tokens_in: int, tokens_out: int, threads: int) -> dict[str, list[Run]]:
    model_dir = resolve("smollm2-135m", Path("~/.cache/disagg/models").expanduser())
    results: dict[str, list[Run]] = {}

    def note(name: str, run: Run) -> None:
        results.setdefault(name, []).append(run)
        console.log(f"{name}: {run.tokens_per_s:.1f} tokens/s, TTFT {run.ttft_s:.2f} s, ITL {run.itl_s * 1e3:.0f} ms")

    with tempfile.TemporaryDirectory() as directory:
        console.log("starting one prefill and one decode server, and the reference")
        with Cluster(Path(directory), "--dtype", "float32", sets=[f"worker.threads={threads}"]) as cluster:
            reference = Reference(model_dir, threads)
            try:
                asyncio.run(_disagg(cluster.http, cluster.model, prompts_for(999, 2, 32, 40000), 4, at_once=True))
                for number in range(rounds):
                    few = prompts_for(number, 2, tokens_in, 40000)
                    many = prompts_for(100 + number, CONCURRENT, tokens_in, 40000)
                    note("transformers, alone", reference.run(few, tokens_out, batched=False))
                    note("disagg, alone", asyncio.run(_disagg(cluster.http, cluster.model, few, tokens_out, False)))
                    note("transformers, sequential", reference.run(many, tokens_out, batched=False))
                    note(
                        "disagg, concurrent", asyncio.run(_disagg(cluster.http, cluster.model, many, tokens_out, True))
                    )
                    note("transformers, batched", reference.run(many, tokens_out, batched=True))
            finally:
                reference.close()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens-in", type=int, default=256)
    parser.add_argument("--tokens-out", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1, help="of the reference, and of each phase of disagg")
    parser.add_argument("--reference", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.reference:
        reference_process(args.reference, args.threads)
        return
    console = Console()
    results = measure(console, args.rounds, args.tokens_in, args.tokens_out, args.threads)
    title = f"SmolLM2-135M, fp32, {args.tokens_in} in, {args.tokens_out} out, {args.threads} thread(s) per phase"
    table = Table(title=f"{title}; medians of {args.rounds} rounds")
    for header in HEADERS:
        table.add_column(header, justify="left" if not header else "right")
    for row in table_rows(results):
        table.add_row(*row)
    console.print(table)


if __name__ == "__main__":
    main()
