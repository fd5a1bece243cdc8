"""All that is to be measured and tested on a GPU machine, in parts, the most valuable first: `python -m bench.gpu_session`.

    --list                      the parts: how long each takes, how many GPUs it needs, what it answers, its command
    --minutes 9                 run as many as fit into that time, in this order
    --from PART                 the same, from that part on
    --only PART                 the same of that part alone; may be repeated. A call says at last what it left
    --out DIR                   summary.json and output.txt are written there, after each part

A part is a command of this repository by itself, a process with all its children: one that takes too long is ended, and the next
one begins. A part that says whether fusions compute what they should decides whether later ones measure with them. Nothing is
downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, get_args

import msgspec
from msgspec import Struct

from bench.shards import PYTEST_FLAGS, plugins
from disagg.config.tree import Fusion

ROOT = Path(__file__).parents[1]
MODEL_DIR = "{scratch}/llama-8b"  # made by the first part that wants it, for all of them; 16 GiB
SECONDS_PER_MINUTE = 60.0
LATE = 1.6  # times what a part is expected to take, it is ended
LEAST_LATE_S = 60.0  # but not before it had as much more
END_S = 10.0  # from SIGTERM to SIGKILL
OUTPUT_BYTES = 1 << 20  # of a part, at most, of which the end is kept
DIGEST_CHARS = 9000  # of the ends of all parts together, at last
Status = Literal["passed", "failed", "ended: too late", "not run"]


class Part(Struct, frozen=True):
    """answers: what is known afterwards. args: behind the interpreter; {scratch} is a folder of this machine.

    drops: fusions that later parts go without if this one fails.
    """

    name: str
    minutes: float
    answers: str
    args: tuple[str, ...]
    gpus: int = 1
    drops: tuple[str, ...] = ()


def module(name: str, *flags: str) -> tuple[str, ...]:
    return ("-m", name, *flags)


def tests(*selection: str) -> tuple[str, ...]:
    return ("-m", "pytest", "-s", *PYTEST_FLAGS, *plugins(), *selection)


def beside_each_other(processes: int, *files: str) -> tuple[str, ...]:
    """Tests whose time is that of a compiler."""
    return module("bench.shards", "--processes", str(processes), *files)


EIGHT_B = ("--model-dir", MODEL_DIR)
ALL_FUSIONS: tuple[str, ...] = get_args(Fusion)
PARTS = (
    Part(
        "parity",
        2.5,
        "whether fused modules and captured steps compute what plain ones do (Show 5)",
        beside_each_other(
            4, "tests/models/test_captured.py", "tests/models/test_fused.py", "tests/models/test_graphs.py"
        ),
        drops=("rotation", "ends"),  # the youngest
    ),
    Part(
        "decode",
        1.5,
        "decode steps of 1 to 256 sequences over their floor: 1.12 / 1.18 / 1.2 / 1.2 (Show 1)",
        module("bench.engine", "--phases", "decode"),
    ),
    Part(
        "mixed",
        1.5,
        "steps of both phases, captured, over their floor: with chunks of 512 they took 20 to 33 ms, of which products need 13",
        module("bench.engine", "--phases", "mixed"),
    ),
    Part(
        "client",
        3.0,
        "the same at the client, and a burst of prompts from eight processes (.85) (Show 3)",
        module("bench.client", *EIGHT_B, "--sequences", "1", "32", "64", "--lengths", "3", "--newcomer", "0"),
    ),
    Part(
        "newcomer",
        3.0,
        "how much prompts of 8k tokens add to the longest silence of 32 sequences that decode: 1 ms (Show 4)",
        module("bench.newcomer", *EIGHT_B),
        gpus=2,  # on one, prefill takes the sequences' multiprocessors
    ),
    Part(
        "prefill",
        1.0,
        "prompts of 2k / 8k / 32k in chunks of 8192 and 512, of a sustained product: .90 / .92 / .93, .84 / .85 / .88 (Show 2)",
        module("bench.engine", "--phases", "prefill"),
    ),
    Part(
        "experts",
        1.0,
        "whether experts are spread with this machine's transformers",
        tests("tests/models/test_experts.py"),
    ),
    Part(
        "attention",
        2.5,
        "attention of every backend on this chip against float64",
        beside_each_other(5, "tests/models/test_attention_backends.py"),
    ),
    Part(
        "kernels",
        1.5,
        "products, first argmax, copies of pages and staging on this chip, against float64 and plain copies",
        tests(
            "tests/models/test_products.py",
            "tests/models/test_argmax.py",
            "tests/worker/test_page_copies.py",
            "tests/staging/test_kernels.py",
            "tests/staging/test_kernel_checksums.py",
        ),
    ),
    Part(
        "logits",
        1.5,
        "bfloat16 logits of the 8B shape against the unfused module: 0.055 to 0.060 (Show 5)",
        module("bench.engine", "--parity", "--most-sequences", "64"),
    ),
    Part(
        "offload",
        1.5,
        "copies of strides against contiguous ones (.85; .65 before), and what decode feels of them (1.03)",
        module("bench.offload_copies", "--rounds", "5"),
    ),
    Part(
        "starts",
        2.0,
        "seconds from `disagg up` to ready for the 8B shape, at first and warm (30) (Show 6)",
        module("bench.starts", *EIGHT_B),
    ),
    Part(
        "cluster",
        7.0,
        "answers, restarts, shared pools and killed workers of whole clusters, on as many GPUs as there are",
        tests("-v", "tests/cluster/test_gpu.py"),
    ),
    Part(
        "families",
        3.0,
        "every family against transformers on a GPU in float32 (204 cases) (Show 5)",
        beside_each_other(5, "tests/models/test_parity.py"),
    ),
    Part(
        "resumable",
        2.5,
        "how many long conversations stay resumable with a host of four times the pool, and their first tokens",
        module("bench.resumable", "--large", *EIGHT_B, "--conversations", "8"),
    ),
    Part(
        "staging",
        0.5,
        "gathers and scatters of KV against plain copies (.95)",
        module("bench.staging", "--rounds", "2"),
    ),
    Part(
        "transfer",
        2.5,
        "KV from a GPU to another, TP 1:1, of a copy: 80 / 92 / 95% of 2k / 8k / 32k tokens",
        module("disagg.cli", "bench", "transfer", "--tp", "1:1", "--piece", "64MiB", "--in-flight", "6", "--no-curve"),
        gpus=2,
    ),
    Part(
        "sums-parity",
        2.0,
        "whether sums of ranks in norms and products are what they should be, and models with them say what whole ones do",
        tests("tests/models/test_sums.py"),
        gpus=2,
        drops=("rank_sums",),
    ),
    Part(
        "rank-sums",
        2.0,
        "what sums of two ranks' rows take by NCCL, by kernels that read the other's memory, and in norms and products",
        module("bench.rank_sums"),
        gpus=2,
    ),
    Part(
        "ranks",
        2.0,
        "decode steps of two ranks over their floor: 1.21 / 1.37 / 1.37 / 1.32",
        module(
            "disagg.cli",
            "bench",
            "engine",
            "--model",
            MODEL_DIR,
            "--tp",
            "2",
            "--decode",
            "1x1024",
            "--decode",
            "32x1024",
            "--decode",
            "64x1024",
            "--decode",
            "128x1024",
        ),
        gpus=2,
    ),
    Part(
        "stages",
        2.0,
        "pipeline stages on GPUs: that they answer, and the share of time in which stages idle",
        module("bench.pipeline_bubbles", "--cluster", "--stages", "2", "--policies", "sarathi", "vllm"),
        gpus=2,
    ),
    Part(
        "data-parallel",
        3.0,
        "data-parallel ranks on GPUs: that they answer, and what prefill delays gain",
        module("bench.prefill_delay_cpu", "--rounds", "1"),
        gpus=2,
    ),
    Part(
        "goodput",
        8.5,
        "goodput of sarathi against vllm (1.3) and orca (2), and of 1P1D against mixed servers (1.3 where the ITL is tight)",
        module("bench.goodput", *EIGHT_B, "--minutes", "8.3"),
        gpus=2,
    ),
)


class Ran(Struct, frozen=True):
    """A part, and what came of it. seconds: by the clock; tail: the end of what it said."""

    name: str
    answers: str
    command: str
    status: Status
    seconds: float
    tail: str


def chosen(parts: Sequence[Part], left_minutes: float, gpus: int) -> Part | None:
    """The first that fits into the time that is left, on so many GPUs."""
    return next((part for part in parts if part.minutes <= left_minutes and part.gpus <= gpus), None)


def fusions_without(dropped: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in ALL_FUSIONS if name not in dropped)


def command_of(part: Part, scratch: str, dropped: Sequence[str]) -> list[str]:
    args = [each.replace("{scratch}", scratch) for each in part.args]
    if dropped and "bench.engine" in args:
        args += ["--fusions", *fusions_without(dropped)]
    return [sys.executable, *args]


def environment(dropped: Sequence[str]) -> dict[str, str]:
    """Of a part: kernels run on the GPU, and clusters fuse what was not dropped."""
    fusions = json.dumps(fusions_without(dropped))
    return {**os.environ, "TRITON_INTERPRET": "0", "PYTHONUNBUFFERED": "1", "DISAGG__MODEL__FUSIONS": fusions}


def latest_end_s(part: Part, left_s: float) -> float:
    """How long it may take at most. left_s: of the whole time."""
    expected_s = part.minutes * SECONDS_PER_MINUTE
    return max(min(left_s, max(LATE * expected_s, expected_s + LEAST_LATE_S)), expected_s)


def run(part: Part, command: Sequence[str], env: dict[str, str], limit_s: float, output: Path) -> Ran:
    """Whatever it starts has ended when this returns, but for what left its process group."""
    started_s = time.monotonic()
    with output.open("w+b") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=env, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
            status: Status = "passed" if code == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "ended: too late"
        finally:
            end(process)
        seconds = time.monotonic() - started_s
        file.seek(max(0, file.seek(0, os.SEEK_END) - OUTPUT_BYTES))
        tail = file.read().decode(errors="replace")
    return Ran(part.name, part.answers, " ".join(command[1:]), status, round(seconds, 1), tail)


def end(process: subprocess.Popen[bytes]) -> None:
    """The whole group, and no other."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            return
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            continue


class Session:
    """Runs parts, and writes what came of them after each."""

    def __init__(self, out: Path, scratch: str, machine: str, say: Callable[[str], None]) -> None:
        self._out = out
        self._scratch = scratch
        self._machine = machine
        self._say = say
        self._dropped: list[str] = []
        self.ran: list[Ran] = []
        out.mkdir(parents=True, exist_ok=True)

    def drop(self, fusions: Sequence[str]) -> None:
        """From here on, parts go without these."""
        self._dropped += [name for name in fusions if name not in self._dropped]

    def run(self, part: Part, left_s: float) -> Ran:
        command = command_of(part, self._scratch, self._dropped)
        self._say(f"== {part.name}: {part.answers}\n   {' '.join(command[1:])}")
        with tempfile.TemporaryDirectory() as directory:
            output = Path(directory) / "output"
            ran = run(part, command, environment(self._dropped), latest_end_s(part, left_s), output)
        if ran.status != "passed" and part.drops:
            self.drop(part.drops)
            self._say(f"   from here on without the fusions {', '.join(part.drops)}")
        self.ran.append(ran)
        self._say(f"   {ran.status} after {ran.seconds:.0f} s (expected {part.minutes * SECONDS_PER_MINUTE:.0f})")
        self._write()
        return ran

    def _write(self) -> None:
        parts = [{**msgspec.structs.asdict(ran), "tail": last_chars(ran.tail, 2000)} for ran in self.ran]
        summary = {"machine": self._machine, "without_fusions": self._dropped, "parts": parts}
        (self._out / "summary.json").write_text(json.dumps(summary, indent=1))
        texts = [f"==== {ran.name}: {ran.status}, {ran.seconds} s\n{ran.command}\n\n{ran.tail}\n" for ran in self.ran]
        (self._out / "output.txt").write_text("\n".join(texts))

    def digest(self) -> str:
        """The end of each part's output, all of them together short."""
        each = DIGEST_CHARS // max(1, len(self.ran))
        return "\n".join(
            f"---- {ran.name}: {ran.status}, {ran.seconds:.0f} s\n{last_chars(ran.tail.strip(), each)}"
            for ran in self.ran
        )


def last_chars(text: str, count: int) -> str:
    """Whole lines, where there are any."""
    if len(text) <= count:
        return text
    cut = text[-count:]
    _, newline, rest = cut.partition("\n")
    return rest if newline else cut


def run_session(
    session: Session, parts: Sequence[Part], minutes: float, gpus: int, clock: Callable[[], float]
) -> list[Part]:
    """Runs what fits, in order; returns what it left, for want of time or of GPUs."""
    deadline_s = clock() + minutes * SECONDS_PER_MINUTE
    left = list(parts)
    while (part := chosen(left, (deadline_s - clock()) / SECONDS_PER_MINUTE, gpus)) is not None:
        left.remove(part)
        session.run(part, deadline_s - clock())
    return left


def listing() -> str:
    lines = [
        f"{part.name:14s} {part.minutes:4.1f} min, {part.gpus} GPU{'s' * (part.gpus > 1):1s}  {part.answers}\n"
        f"{'':16s}python {' '.join(part.args)}"
        for part in PARTS
    ]
    return "\n".join([*lines, f"{sum(part.minutes for part in PARTS):.1f} minutes in all"])


def wanted(only: Sequence[str] | None, first: str) -> list[Part]:
    """Those of these names, or all from one on; in order."""
    names = [part.name for part in PARTS]
    return [part for part in PARTS[names.index(first) :] if not only or part.name in only]


def machine() -> tuple[int, str]:
    """(GPUs, what this machine is), by a process of its own: one that has looked at a GPU keeps memory of it."""
    look = (
        "import torch, triton, transformers, json; n = torch.cuda.device_count(); "
        "print(json.dumps([n, f'{n} x {torch.cuda.get_device_name() if n else None}, torch {torch.__version__}, "
        "triton {triton.__version__}, transformers {transformers.__version__}']))"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True, cwd=ROOT)
    gpus, said = json.loads(done.stdout.splitlines()[-1])
    return int(gpus), str(said)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_session", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in PARTS]
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--only", action="append", choices=names, metavar="PART")
    parser.add_argument("--from", dest="first", choices=names, default=names[0], metavar="PART")
    parser.add_argument("--without-fusions", nargs="*", default=[], choices=ALL_FUSIONS, metavar="FUSION")
    parser.add_argument("--out", type=Path, default=Path("gpu-session"))
    return parser.parse_args(argv)


def main(argv: Sequence[str] = sys.argv[1:]) -> int:
    arguments = parse(argv)
    if arguments.list:
        print(listing())
        return 0

    def say(text: str) -> None:
        print(text, flush=True)

    gpus, said = machine()
    say(said)
    if not gpus:
        say("there is no GPU here; nothing was run")
        return 2
    scratch = Path(tempfile.gettempdir()) / "gpu-session"
    scratch.mkdir(exist_ok=True)
    session = Session(arguments.out, str(scratch), said, say)
    session.drop(arguments.without_fusions)
    left = run_session(session, wanted(arguments.only, arguments.first), arguments.minutes, gpus, time.monotonic)
    say(session.digest())
    say("left, go on with: " + " ".join(f"--only {part.name}" for part in left) if left else "nothing is left")
    return 0 if all(ran.status == "passed" for ran in session.ran) else 1


if __name__ == "__main__":
    sys.exit(main())
