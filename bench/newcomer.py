"""What a long prompt adds to the silences of sequences that decode: `python -m bench.newcomer`.

A real cluster (one prefill, one decode server) with a random model of Llama-3.1-8B's shape, nothing set. Sequences decode, and
prompts of 8192 tokens come to them, one after the other: each is prefilled elsewhere, and its KV lands beside their steps.
For each, the longest silence of any sequence from its arrival to its last token, against that of as long a time just before
it, with nobody coming; and the same apart for the time until its first token, in which its KV comes, and for its other tokens,
which are in the sequences' own steps. Seen at the client, over HTTP, from processes of its own. The goal is 1 ms more.
`--device cpu` with a small shape runs the same on a CPU, to try it.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from msgspec import Struct

from bench.engine import SHAPE
from bench.gpu_cluster import add_shape, answered, make_model_apart, prompt_of
from bench.streams import STREAMS_PER_PROCESS, Crowd, Stream, completion
from tests.cluster.cluster import Cluster

CONTEXT = 900
SETTLED_S = 0.5  # after the last sequence has begun
GOAL_MS = 1.0


class Visit(Struct, frozen=True):
    """A newcomer: when it was asked, had its first token and was answered, by the client's clock."""

    begin_s: float
    first_s: float
    end_s: float


class Silences(Struct, frozen=True):
    """Milliseconds, of any sequence the longest: until a newcomer's first token, from there to its last one, and in as long a
    time before it as it was there."""

    arriving_ms: float
    joined_ms: float
    before_ms: float

    @property
    def with_it_ms(self) -> float:
        return max(self.arriving_ms, self.joined_ms)

    @property
    def added_ms(self) -> float:
        return self.with_it_ms - self.before_ms


def longest_ms(streams: Sequence[Sequence[float]], begin_s: float, end_s: float) -> float:
    """The longest silence of any that ended between two moments."""
    ended = (b - a for times in streams for a, b in itertools.pairwise(times) if begin_s < b <= end_s)
    return max(ended, default=0.0) * 1e3


def silences(streams: Sequence[Sequence[float]], visit: Visit) -> Silences:
    """streams: times of tokens, of each sequence."""
    length_s = visit.end_s - visit.begin_s
    return Silences(
        arriving_ms=longest_ms(streams, visit.begin_s, visit.first_s),
        joined_ms=longest_ms(streams, visit.first_s, visit.end_s),
        before_ms=longest_ms(streams, visit.begin_s - length_s, visit.begin_s),
    )


def undisturbed(streams: Sequence[Stream], visits: Sequence[Visit]) -> list[Visit]:
    """Those that came, with as long a time before them, while all sequences decoded, and nobody else was there."""
    settled_s = max(stream.first_s for stream in streams) + SETTLED_S
    over_s = min(stream.ended_s for stream in streams)
    found, free_s = [], settled_s
    for visit in visits:
        if visit.begin_s - (visit.end_s - visit.begin_s) >= free_s and visit.end_s < over_s:
            found.append(visit)
        free_s = max(free_s, visit.end_s)
    return found


def come(cluster: Cluster, vocab: int, tokens: int, count: int, wait_s: float) -> list[Visit]:
    """Newcomers, each at a random moment of a step, and long enough after the one before it."""
    draw, visits = random.Random(7), []
    for number in range(count):
        longest_s = max((visit.end_s - visit.begin_s for visit in visits), default=1.0)
        time.sleep(wait_s if number == 0 else 1.2 * longest_s + draw.uniform(0.1, 0.2))
        begin_s = time.perf_counter()
        _, times = answered(cluster, prompt_of(1000 + number, tokens, vocab), 4)
        visits.append(Visit(begin_s, begin_s + times[0], begin_s + times[-1]))
    return visits


def measure(cluster: Cluster, crowd: Crowd, arguments: argparse.Namespace, note: Callable[[str], None]) -> None:
    for number in range(2):  # the first newcomers of a cluster compile and introduce
        answered(cluster, prompt_of(500 + number, arguments.tokens, arguments.vocab), 4)
    bodies = [
        completion(cluster.model, prompt_of(number, CONTEXT, arguments.vocab), arguments.outputs)
        for number in range(arguments.sequences)
    ]
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(
            come, cluster, arguments.vocab, arguments.tokens, arguments.newcomers, arguments.wait_seconds
        )
        streams = crowd.ask(cluster.http, bodies)
        visits = coming.result()
    kept = undisturbed(streams, visits)
    times = [stream.heard_s[0] for stream in streams]
    found = [silences(times, visit) for visit in kept]
    for visit, each in zip(kept, found, strict=True):
        note(
            f"newcomer of {arguments.tokens} tokens, there for {(visit.end_s - visit.begin_s) * 1e3:.0f} ms: longest silence "
            f"{each.with_it_ms:.2f} ms ({each.arriving_ms:.2f} until its first token, {each.joined_ms:.2f} from there), before "
            f"{each.before_ms:.2f}: {each.added_ms:+.2f}"
        )
    if not found:
        note(f"none of {len(visits)} came while all {arguments.sequences} decoded: more --outputs are needed")
        return
    added = [each.added_ms for each in found]
    note(
        f"{len(found)} of {len(visits)} newcomers to {arguments.sequences} sequences add {statistics.median(added):.2f} ms "
        f"in the median ({min(added):.2f} to {max(added):.2f}) to the longest silence; goal {GOAL_MS:g}"
    )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.newcomer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    add_shape(parser, SHAPE.vocab_size)
    parser.add_argument("--tokens", type=int, default=8192, help="of a newcomer")
    parser.add_argument("--sequences", type=int, default=32, help="that decode")
    parser.add_argument("--newcomers", type=int, default=10)
    parser.add_argument("--outputs", type=int, default=2500, help="tokens of each answer: how long there is to come")
    parser.add_argument("--wait-seconds", type=float, default=3.0, help="before the first one comes")
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="SECTION.FIELD=VALUE")
    return parser.parse_args(argv)


def main(argv: Sequence[str] = sys.argv[1:]) -> None:
    arguments = parse(argv)

    def note(text: str) -> None:
        print(text, flush=True)

    with tempfile.TemporaryDirectory() as directory:
        model_dir = make_model_apart(arguments.model_dir or Path(directory) / "model", arguments)
        sets = (f"model.device={arguments.device}", *arguments.sets)
        flags = ("--model", str(model_dir), "--dtype", arguments.dtype)
        processes = -(-arguments.sequences // STREAMS_PER_PROCESS)
        with Cluster(Path(directory) / "run", *flags, sets=sets) as cluster, Crowd(processes) as crowd:
            measure(cluster, crowd, arguments, note)


if __name__ == "__main__":
    main()
