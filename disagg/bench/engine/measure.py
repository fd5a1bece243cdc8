"""`disagg bench engine`: an engine by itself, sweep by sweep, against what its device could do at most in the same run."""

from __future__ import annotations

import asyncio
import random
import statistics
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from rich.console import Console

from disagg.bench.engine.offline import Offline, Step
from disagg.bench.engine.report import Measured, legend, roofline, table_of
from disagg.bench.engine.work import Ceilings, Shape, weights_of
from disagg.bench.serve.keep import keep, try_to_write
from disagg.config.tree import Config
from disagg.convert.safetensors_file import find_weight_files, read_header
from disagg.messages.layout import DTYPE_BYTES
from disagg.mixed_server.role import MIXED
from disagg.server.bringup import with_device
from disagg.server.device import choose_dtype
from disagg.types.errors import DisaggError

FILE_COLUMNS = 120  # where output is no terminal
CEILINGS_S = 300.0

Decode = tuple[int, int]  # sequences, tokens that each begins with


class Defaults(Struct, frozen=True):
    decodes: tuple[Decode, ...]
    prompts: tuple[int, ...]
    steps: int


DEFAULTS = {
    "cpu": Defaults(((1, 256), (4, 256), (16, 256)), (256, 1024), 8),
    "cuda": Defaults(
        ((1, 1024), (32, 1024), (128, 1024), (256, 1024), (32, 8192), (1, 32768)), (2048, 8192, 32768), 24
    ),
}


class EngineOptions(Struct, frozen=True, kw_only=True):
    """As given; what is empty or 0 follows from the device (`DEFAULTS`). tps: one engine after the other."""

    tps: tuple[int, ...]
    decodes: tuple[Decode, ...]
    prompts: tuple[int, ...]
    steps: int
    rounds: int
    json_file: Path | None
    plot_file: Path | None


def run_engine_bench(options: EngineOptions, config: Config, model_dir: Path, say: Callable[[str], None]) -> int:
    """Measure, print, and keep; `say` is told how far it is. Raises ConfigError, DisaggError."""
    for file in (options.json_file, options.plot_file):
        if file is not None:
            try_to_write(file)
    _, device = with_device(config, MIXED)
    usual = DEFAULTS[device]
    if not options.decodes and not options.prompts:
        options = replace(options, decodes=usual.decodes, prompts=usual.prompts)
    options = replace(options, steps=options.steps or usual.steps, tps=options.tps or (config.server.tp,))
    servers = [replace(config.server, tp=tp) for tp in dict.fromkeys(options.tps)]
    benches = [_Bench(options, replace(config, server=server), model_dir, say) for server in servers]
    ceilings = benches[0].ceilings()
    measured = [row for bench in benches for row in asyncio.run(bench.measure(ceilings))]
    console = Console(highlight=False, width=None if sys.stdout.isatty() else FILE_COLUMNS)
    console.print(table_of(measured))
    console.print(legend(ceilings, device))
    if options.plot_file is not None:
        keep(options.plot_file, roofline(measured, ceilings).encode())
        say(f"roofline drawn in {options.plot_file}")
    if options.json_file is not None:
        kept = {"ceilings": ceilings, "options": options, "measured": measured}
        keep(options.json_file, msgspec.json.format(msgspec.json.encode(kept, enc_hook=str)) + b"\n")
        say(f"figures kept in {options.json_file}")
    return 0 if any(not each.why_not for each in measured) else 1


class _Bench:
    """Of one TP size."""

    def __init__(self, options: EngineOptions, config: Config, model_dir: Path, say: Callable[[str], None]) -> None:
        self._options = options
        self._config = config
        self._model_dir = model_dir
        self._say = say
        self._rng = random.Random(0)
        most = max((count for count, _ in options.decodes), default=1)
        self._engine = Offline(config, model_dir, most)
        self._dtype = choose_dtype(config.model.dtype, self._engine.device, self._engine.inspected.torch_dtype)

    def ceilings(self) -> Ceilings:
        """Before the engine takes its memory. Raises DisaggError."""
        self._say(f"measuring what {self._engine.device} can do at most")
        command = [sys.executable, "-m", "disagg.bench.engine.ceilings", self._engine.device, self._dtype]
        try:
            done = subprocess.run(
                [*command, str(self._config.worker.threads)], capture_output=True, timeout=CEILINGS_S, check=True
            )
        except subprocess.CalledProcessError as error:
            last = error.stderr.decode(errors="replace").strip().splitlines()[-1:]
            raise DisaggError(f"the device's ceilings cannot be measured: {''.join(last)}") from error
        except subprocess.TimeoutExpired as error:
            raise DisaggError(f"the device's ceilings were not measured in {CEILINGS_S:g} s") from error
        return msgspec.json.decode(done.stdout, type=Ceilings)

    async def measure(self, ceilings: Ceilings) -> list[Measured]:
        tp = self._config.server.tp
        self._say(f"TP {tp}: loading {self._model_dir.name}")
        measured = []
        async with self._engine as engine:
            shape = self._shape(engine)
            for count, tokens in self._options.decodes:
                self._say(f"TP {tp}: decode steps of {count} sequences of {tokens} tokens")
                measured.append(await self._decode(engine, shape, ceilings, count, tokens))
            for tokens in self._options.prompts:
                self._say(f"TP {tp}: prompts of {tokens} tokens")
                measured.append(await self._prompt(engine, shape, ceilings, tokens))
        return measured

    def _shape(self, engine: Offline) -> Shape:
        tensors = {
            name: header.shape
            for file in find_weight_files(self._model_dir)
            for name, header in read_header(file).tensors.items()
        }
        top = msgspec.json.decode((self._model_dir / "config.json").read_bytes(), type=dict)
        text = {**top, **top["text_config"]} if isinstance(top.get("text_config"), dict) else top
        inspected, facts = engine.inspected, engine.facts
        weights = weights_of(tensors, text, inspected.vocab_size)
        return Shape(weights, facts.model.groups, inspected.num_heads, DTYPE_BYTES[self._dtype], facts.tp)

    def _tokens(self, count: int) -> tuple[int, ...]:
        vocab_size = self._engine.facts.model.vocab_size
        return tuple(self._rng.randrange(vocab_size) for _ in range(count))

    def _sharing(self, engine: Offline) -> int:
        return engine.facts.tp if engine.device == "cpu" else 1

    async def _decode(self, engine: Offline, shape: Shape, ceilings: Ceilings, count: int, tokens: int) -> Measured:
        """Medians over steps that follow each other."""
        try:
            steps = await engine.decode([self._tokens(tokens) for _ in range(count)], self._options.steps + 1)
        except DisaggError as error:
            return Measured(shape.tp, "decode", count, tokens, why_not=str(error))
        apart_s = [after.ended_s - before.ended_s for before, after in pairwise(steps)]
        middle = steps[len(steps) // 2]
        work = shape.step(middle.rows)
        return Measured(
            shape.tp,
            "decode",
            count,
            sum(rows.start for rows in middle.rows) // count,
            seconds=statistics.median(apart_s),
            compute_s=statistics.median(step.compute_s for step in steps[1:]),
            floor_s=work.floor_s(ceilings, self._sharing(engine)),
            tokens_out=count,
            nbytes=work.nbytes,
            flops=work.flops,
        )

    async def _prompt(self, engine: Offline, shape: Shape, ceilings: Ceilings, tokens: int) -> Measured:
        """The median of some prompts, behind a first one."""
        rounds: list[list[Step]] = []
        try:
            for _ in range(1 + self._options.rounds):
                rounds.append(await engine.prompt(self._tokens(tokens)))
        except DisaggError as error:
            return Measured(shape.tp, "prefill", 1, tokens, why_not=str(error))
        works = [shape.step(step.rows) for step in rounds[-1]]
        return Measured(
            shape.tp,
            "prefill",
            1,
            tokens,
            seconds=statistics.median(steps[-1].ended_s - steps[0].started_s for steps in rounds[1:]),
            compute_s=statistics.median(sum(step.compute_s for step in steps) for steps in rounds[1:]),
            floor_s=sum(work.floor_s(ceilings, self._sharing(engine)) for work in works),
            tokens_out=tokens,
            nbytes=sum(work.nbytes for work in works),
            flops=sum(work.flops for work in works),
        )
