"""Whether `disagg bench serve` and `vllm bench serve` say the same of one server: `python -m bench.client_check --vllm PYTHON`.

PYTHON is that of an environment with vLLM (no GPU is needed for its client). Both clients ask as many prompts of the same
lengths, as many at a time, in turns, so many rounds. Without --url they ask an endpoint whose delays are known (each request's
first token and gaps are its own), so that what a client adds shows; with it, whatever answers there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.bench.fake_endpoint import Step, answer, fake_endpoint
from tests.models.tiny import write_tokenizer

# Of requests: the first one's first token comes after 50 ms and its gaps are 10 ms, the last one's 240 and 29.
KINDS = 20
FIGURES = ("mean", "p50", "p90", "p99")
AGREES = 0.05


def main() -> None:
    args = arguments()
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url, model, tokenizer = args.url, args.model, args.tokenizer
        if url is None:
            url, model, tokenizer = stack.enter_context(known_endpoint()), "fake", directory / "tokenizer"
            tokenizer.mkdir()
            write_tokenizer(tokenizer)
        rounds = []
        for number in range(args.rounds):
            print(f"round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
            rounds.append((ours(args, url, model, directory), vllms(args, url, model, tokenizer, directory)))
    show(rounds)


def show(rounds: list[tuple[dict[str, float], dict[str, float]]]) -> None:
    print(f"{'':<22}{'disagg':>10}{'vllm':>10}{'ratio':>8}   of {len(rounds)} rounds: median, ratios")
    worst = 0.0
    for figure in rounds[0][0]:
        both = [(mine[figure], theirs[figure]) for mine, theirs in rounds]
        ratios = sorted(mine / theirs for mine, theirs in both)
        ratio = statistics.median(ratios)
        worst = max(worst, abs(ratio - 1))
        mine, theirs = (statistics.median(values) for values in zip(*both, strict=True))
        print(f"{figure:<22}{mine:>10.4f}{theirs:>10.4f}{ratio:>8.3f}   {ratios[0]:.3f} to {ratios[-1]:.3f}")
    print(f"the farthest from each other: {worst:.1%} (to agree: {AGREES:.0%})")


@contextlib.contextmanager
def known_endpoint() -> Iterator[str]:
    def script(number: int, body: dict[str, Any]) -> list[Step]:
        kind = number % KINDS
        return answer(body, ttft_s=0.05 + 0.01 * kind, itl_s=0.01 + 0.001 * kind)

    with fake_endpoint(script) as fake:
        yield fake.url


def ours(args: argparse.Namespace, url: str, model: str, directory: Path) -> dict[str, float]:
    kept = directory / "ours.json"
    run(
        *(sys.executable, "-m", "disagg", "bench", "serve", "--url", url, "--model", model, "--warmup", str(KINDS)),
        *("--requests", str(args.requests), "--concurrency", str(args.concurrency), "--prompts", "text"),
        *("--input-tokens", str(args.input_tokens), "--output-tokens", str(args.output_tokens), "--json", str(kept)),
    )
    found = json.loads(kept.read_text())
    times = {f"{name} {figure} s": found[f"{name}_s"][figure] for name in ("ttft", "itl") for figure in FIGURES}
    return {**times, "requests/s": found["requests_per_s"]}


def vllms(args: argparse.Namespace, url: str, model: str, tokenizer: Path, directory: Path) -> dict[str, float]:
    kept = directory / "vllm.json"
    # One request more is asked before the load, to see whether anybody answers.
    run(
        *(args.vllm, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "openai", "--base-url", url),
        *("--model", model, "--served-model-name", model, "--tokenizer", str(tokenizer), "--dataset-name", "random"),
        *("--num-warmups", str(KINDS - 1), "--num-prompts", str(args.requests), "--ignore-eos", "--temperature", "0"),
        *("--max-concurrency", str(args.concurrency), "--random-input-len", str(args.input_tokens)),
        *("--random-output-len", str(args.output_tokens), "--percentile-metrics", "ttft,itl", "--disable-tqdm"),
        *("--metric-percentiles", "50,90,99", "--save-result", "--result-dir", str(directory)),
        *("--result-filename", kept.name),
    )
    found = json.loads(kept.read_text())
    times = {
        f"{name} {figure} s": found[f"{figure}_{name}_ms"] / 1000 for name in ("ttft", "itl") for figure in FIGURES
    }
    return {**times, "requests/s": found["request_throughput"]}


def run(*command: str) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    if done.returncode:
        sys.exit(f"{' '.join(command[:5])} ... failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, metavar="PYTHON")
    parser.add_argument("--url", help="ask this server; needs --model and --tokenizer")
    parser.add_argument("--model")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=10 * KINDS)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--input-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=32)
    args = parser.parse_args()
    if args.url is not None and not (args.model and args.tokenizer):
        parser.error("--url needs --model and --tokenizer")
    return args


if __name__ == "__main__":
    main()
