"""Computes plans: turns them into tensors, runs the model, samples, and says which tokens came out.

Of several ranks all compute every plan, and one samples for all. Data-parallel ranks have plans of their
own; where they share experts they step together, and one without rows takes part for these. Of several pipeline stages each
computes its layers of every plan, and the last one samples; the others learn tokens by the plans that come after. Knows what
plans have said of sequences, the pool and the sampler; nothing of requests, peers or sockets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import transformers

from disagg.messages.control import Computation
from disagg.messages.layout import LayerGroup
from disagg.messages.plan import NO_TOKEN, SampledToken, SamplerStart, StepResult, TokenLogprobs, WorkerPlan
from disagg.messages.sequence_diff import KnownSequence, KnownSequences, RunView
from disagg.models.batch import ForwardBatch
from disagg.models.captures import NO_CAPTURES, CapturedSteps, Captures, kinds
from disagg.models.device import on_host, upload
from disagg.models.experts import Spread
from disagg.models.graphs import DecodeGraphs
from disagg.models.model import PagedModel
from disagg.models.pool import Pool
from disagg.models.ranks import Ranks
from disagg.models.stage_links import StageLinks
from disagg.types.errors import ConfigError
from disagg.worker.batch import UNKNOWN, build_batch
from disagg.worker.profile import measure_largest_step
from disagg.worker.sampler import Sampled, Sampler


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose token is sampled. position: of that token in the sequence; None where several choices are sampled from it, or where
    a plan will say it."""

    sequence: KnownSequence
    sampling: SamplerStart
    position: int | None


@dataclass(frozen=True, slots=True)
class Drawn:
    """What tokens a step gives.

    tokens: one of each owner, on the host once the step is over; None where this rank is not told by the one that samples.
    sampled: likewise, what more the rank that samples knows of them; None on others.
    """

    owners: tuple[Owner, ...] = ()
    tokens: torch.Tensor | None = None
    sampled: Sampled | None = None


NOTHING_DRAWN = Drawn()


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that has begun. launched_s: when all of it was on its way to the device. over: behind all that it launched; None
    on a CPU, where launching is computing."""

    plan_no: int
    started_unix_s: float
    started_s: float
    launched_s: float
    drawn: Drawn
    over: torch.cuda.Event | None

    @property
    def is_over(self) -> bool:
        """Whether `collect` would not wait."""
        return self.over is None or bool(self.over.query())  # type: ignore[no-untyped-call]


class Executor:
    """One rank's model and pool, and the sampler on the rank that samples.

    `load`, `connect`, perhaps `profile`, then `make_pool`, then plan after plan `run`, or as a pipeline:

        host     launch 1 │ launch 2 │ ........ collect 1 │ launch 3 │ ........ collect 2 │
        device            │ step 1 ...............│ step 2 ................│ step 3 ...

    What a step samples, the next one finds on the device; the host learns it when it collects.
    """

    def __init__(self, rank: int, tp: int = 1, dp: int = 1, pp: int = 1) -> None:
        """rank: of all tp x dp, or tp x pp; those that have one sequence's heads between them follow each other, and make a
        group or a stage."""
        assert dp == 1 or pp == 1, "data-parallel ranks have no stages"
        self._rank = rank
        self._ranks = Ranks(rank % tp, tp)
        self._peers = Ranks(rank // tp, dp) if dp > 1 else Ranks()
        self._everyone = Ranks(rank, tp * dp) if dp > 1 else self._ranks
        self._links = StageLinks(rank // tp, pp) if pp > 1 else StageLinks()
        self._known = KnownSequences()
        self._model: PagedModel | None = None
        self._pool: Pool | None = None
        self._sampler: Sampler | None = None
        self._captures = Captures()
        self._captured = CapturedSteps([])
        self._device = "cpu"
        self.overlaps = False
        """Whether a step may be launched before the one before it is collected."""
        self._tokens_before = torch.empty(0, dtype=torch.int64)  # what the last step sampled, on the device
        self._all_rows = torch.empty(0, dtype=torch.int64)
        self._carried: dict[int, int] = {}  # where in it the last token of a sequence is, by id
        self._collected_s = 0.0

    @property
    def model(self) -> PagedModel:
        assert self._model is not None, "no model is loaded"
        return self._model

    @property
    def pool(self) -> Pool:
        assert self._pool is not None, "no pool was made"
        return self._pool

    @property
    def graphs(self) -> DecodeGraphs | None:
        """Of decode steps, once the pool is made; None where there are none."""
        return self._captured.decodes

    @property
    def num_ranks(self) -> int:
        """Of this rank's group."""
        return self._ranks.size

    @property
    def lockstep(self) -> bool:
        """Groups share experts: all take part in each step in which any has rows."""
        return self.model.spread is not None and self._peers.size > 1

    @property
    def stage(self) -> int:
        return self._links.stage

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """As this rank keeps them."""
        return self.model.groups

    def load(
        self,
        model_dir: Path,
        dtype: str,
        device: str,
        threads: int,
        gemv_copies: bool = False,
        computation: Computation | None = None,
    ) -> None:
        """Raises ConfigError for a model that cannot be served."""
        torch.set_num_threads(threads)
        transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # a bar in a log file is noise
        computation = computation or Computation()
        if device != "cpu":
            index = gpu_index(device, torch.cuda.device_count())
            torch.cuda.set_device(index)  # this thread's, which NCCL and kernels look at
            # Where float32 is asked for it is meant: convolutions would take 10 bits of their inputs' 23.
            torch.backends.cudnn.allow_tf32 = False
        spread = Spread(self._everyone, self._peers) if self._everyone.size > 1 else None
        model = PagedModel.load(model_dir, dtype, device, self._ranks, computation, spread, self._links)
        self.adopt(model, NO_CAPTURES if self._links.several else captures_of(computation))
        if gemv_copies:
            self.model.add_gemv_copies()

    def adopt(self, model: PagedModel, captures: Captures) -> None:
        """Take a model that is loaded. captures: steps that are captured, where they can be."""
        self._model = model
        self._device = str(model.device)
        self._captures = captures
        # Stages learn tokens from the host, and groups do not compute experts ahead of each other.
        self.overlaps = model.device.type == "cuda" and not self._links.several and model.spread is None

    def connect(self, meeting: Path, meet_s: float, collective_s: float) -> None:
        """Wait for the other ranks, groups and stages, if there are any; see models/ranks. meeting: what the names of its files
        begin with."""
        device, group, stage, place = self.model.device, self._peers.rank, self._links.stage, self._ranks.rank
        self._ranks.connect(meeting.with_name(f"{meeting.name}-{group}-{stage}"), device, meet_s, collective_s)
        self.model.share_sums()
        if self.lockstep:
            self._everyone.connect(meeting.with_name(f"{meeting.name}-all"), device, meet_s, collective_s)
            self._peers.connect(meeting.with_name(f"{meeting.name}-peers-{place}"), device, meet_s, collective_s)
        wait_s = collective_s * self._links.count  # of all the stages before, in a pipeline that is empty
        self._links.connect(meeting.with_name(f"{meeting.name}-links-{place}"), device, meet_s, wait_s)

    def profile(self, chunk_tokens: int, max_slots: int) -> tuple[int, int]:
        """(bytes of the device, most that the largest step had in use); zeros on CPU. Raises ConfigError if it does not
        fit."""
        return measure_largest_step(self.model, chunk_tokens, max_slots, self._captures)

    def make_pool(
        self, num_large: int, large_bytes: int, strides: Sequence[int], page_tokens: int, max_slots: int
    ) -> int:
        """Bytes of the pool. Arguments: see messages/control.MakePool."""
        try:
            self._pool = self.model.make_pool(num_large, large_bytes, strides, page_tokens)
        except torch.OutOfMemoryError as error:
            raise RuntimeError(
                f"{num_large} large pages of {large_bytes} bytes cannot be had on {self._device}; what other processes take "
                f"there must be left out of engine.gpu_memory_utilization or engine.kv_memory_bytes: {error}"
            ) from error
        self._tokens_before = torch.zeros(max_slots, dtype=torch.int64, device=self._pool.device)
        self._all_rows = torch.arange(max_slots, device=self._pool.device)
        wanted = kinds(self.model, self._pool, max_slots, self._tokens_before, self._captures)
        self._captured = CapturedSteps(wanted, lambda mine: self._ranks.all_have(mine, self.model.device))
        if self.model.samples:
            self._sampler = Sampler(self.model.vocab_size, max_slots, self._device)
        return self._pool.bytes.nbytes

    def run(self, plan: WorkerPlan, written: Callable[[int], None] | None = None) -> StepResult:
        """`launch` and `collect`."""
        return self.collect(self.launch(plan, written))

    @torch.inference_mode()
    def launch(self, plan: WorkerPlan, written: Callable[[int], None] | None = None) -> Launched:
        """Begin a step; where `overlaps`, without waiting for the device. Steps are collected in the order of their launch.

        written: as in PagedModel.forward. Raises ProtocolError when a plan was lost.
        """
        started_unix_s, started_s = time.time(), time.perf_counter()
        sampler = self._sampler
        assert (sampler is not None) == self.model.samples
        if self._links.several:
            plan = plan.of_groups(self.model.own_groups)
        ended, begun, runs = self._known.apply(plan)
        rows = sum(run.num_tokens for run in runs)
        hidden = self.model.receive(rows) if rows else None
        if hidden is not None:  # what the stages before took is not this one's time
            started_unix_s, started_s = time.time(), time.perf_counter()
        if sampler is not None:
            for sequence in ended:
                for sampling in sequence.samplers:
                    sampler.remove(sampling.slot)
        self.pool.copy_pages(plan.copies)
        if self.pool.blanks or self._links.several:  # only the last stage hears of logits that are no numbers
            self._zero_new_pages(plan)
        if sampler is not None:
            for sequence in begun:
                self._open_slots(sampler, sequence)
        drawn = self._step_of(plan, sampler, runs, written, hidden)
        over = None
        if self._device != "cpu":
            over = torch.cuda.Event()  # type: ignore[no-untyped-call]
            over.record()
        return Launched(plan.plan_no, started_unix_s, started_s, time.perf_counter(), drawn, over)

    @torch.inference_mode()
    def collect(self, launched: Launched) -> StepResult:
        """Waits until the step is over, and says what was sampled.

        All that it launched is over then: once a plan is reported its pages may be freed, and KV that lands in them next is not
        ordered behind what still reads them.
        """
        if launched.over is not None:
            launched.over.synchronize()
        sampled = self._tell(launched.drawn)
        # A step that was launched while the one before it ran, began when that one was over.
        waited_s = max(0.0, self._collected_s - launched.started_s)
        ahead_s = None if launched.over is None else self._collected_s - launched.launched_s
        self._collected_s = time.perf_counter()
        return StepResult(
            rank=self._rank,
            plan_no=launched.plan_no,
            sampled=sampled,
            compute_s=self._collected_s - launched.started_s - waited_s,
            started_unix_s=launched.started_unix_s + waited_s,
            ended_unix_s=time.time(),
            ahead_s=ahead_s,
        )

    def _step_of(
        self,
        plan: WorkerPlan,
        sampler: Sampler | None,
        runs: list[RunView],
        written: Callable[[int], None] | None,
        hidden: torch.Tensor | None,
    ) -> Drawn:
        """As `_compute`, and with the other groups where they step together."""
        spread = self.model.spread
        if spread is not None and self.lockstep:
            spread.rows = plan.rows or (0,) * self._peers.size
            if not runs:
                spread.join()
        return self._compute(sampler, runs, written, hidden) if runs else NOTHING_DRAWN

    def _zero_new_pages(self, plan: WorkerPlan) -> None:
        """What others have left there may be NaN to attention, which reads whole pages, though it weighs the rest zero."""
        for index, group in enumerate(self.groups):
            if not group.is_state:
                self.pool.zero_pages(
                    index, [page for run in plan.runs if run.new_pages for page in run.new_pages[index]]
                )

    def _open_slots(self, sampler: Sampler, sequence: KnownSequence) -> None:
        prompt, outputs = sequence.tokens[: sequence.num_prompt], sequence.tokens[sequence.num_prompt :]
        for sampling in sequence.samplers:
            eos = self.model.eos_token_ids
            sampler.add(sampling.slot, sequence.params, sampling.choice, prompt, outputs, eos)

    def _forward(
        self, batch: ForwardBatch, written: Callable[[int], None] | None, hidden: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(what PagedModel.forward gives, where each row's first maximum is, if that is known).

        batch: on the host. hidden: as there.
        """
        replayed = self._captured.forward(batch)
        if replayed is None:
            return self.model.forward(batch.on(self.pool.device), self.pool, written, hidden=hidden), None
        if written is not None:
            for layer in self.model.writing_layers:
                written(layer)
        return replayed

    def _compute(
        self,
        sampler: Sampler | None,
        runs: list[RunView],
        written: Callable[[int], None] | None,
        hidden: torch.Tensor | None,
    ) -> Drawn:
        batch, ordered = build_batch(runs, self.groups, self.pool.page_tokens, self._carried)
        batch = replace(batch, tokens_before=self._tokens_before)
        if not self._links.is_last:
            batch = replace(batch, logits_rows=batch.logits_rows[:0])
        logits, first = self._forward(batch, written, hidden)
        if not self._links.is_last:
            self._links.send(logits)  # that are hidden states
            return NOTHING_DRAWN
        self._carried = {}
        rows: list[int] = []
        owners: list[Owner] = []
        for row, run in enumerate(run for run in ordered if run.sample):
            for sampling in run.sequence.samplers:
                alone = len(run.sequence.samplers) == 1 and not self._links.several
                owners.append(Owner(run.sequence, sampling, len(run.sequence.tokens) if alone else None))
                rows.append(row)
        if not owners:
            return NOTHING_DRAWN
        sampled = None
        if sampler is not None:
            at, first = self._rows_at(rows, first)
            sampled = sampler.sample(logits, at, [owner.sampling.slot for owner in owners], first)
        return self._told(tuple(owners), sampled)

    def _rows_at(self, rows: list[int], first: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """These rows' numbers, and their first maxima, if they are known, on the device."""
        if rows == list(range(len(rows))):  # mostly: they are there
            return self._all_rows[: len(rows)], None if first is None else first[: len(rows)]
        at = upload(torch.tensor(rows), self.pool.device)
        return at, None if first is None else first.index_select(0, at)

    def _told(self, owners: tuple[Owner, ...], sampled: Sampled | None) -> Drawn:
        """With the tokens of the rank that samples on all of its group, for the next step and on their way to the host."""
        if self._links.several:  # plans will say them
            return Drawn(owners, None, None if sampled is None else sampled.on_host())
        if sampled is None:
            tokens = torch.empty(len(owners), dtype=torch.int64, device=self.pool.device)
        else:
            tokens = sampled.token_ids
        self._ranks.take(tokens)
        if self.overlaps:
            self._carry(owners, tokens)
        if sampled is None:
            return Drawn(owners, on_host(tokens))
        sampled = sampled.on_host()
        return Drawn(owners, sampled.token_ids, sampled)

    def _carry(self, owners: Sequence[Owner], tokens: torch.Tensor) -> None:
        """Let the next step find these tokens on the device, before they are on the host."""
        if tokens.data_ptr() != self._tokens_before.data_ptr():  # where a graph has put them already
            self._tokens_before[: len(owners)].copy_(tokens)
        for place, owner in enumerate(owners):
            if owner.position is not None:
                owner.sequence.tokens.append(UNKNOWN)
                self._carried[owner.sequence.seq_id] = place

    def _tell(self, drawn: Drawn) -> tuple[SampledToken, ...]:
        """The step's tokens, which the known sequences get, too."""
        if drawn.tokens is not None:
            for owner, token in zip(drawn.owners, drawn.tokens.tolist(), strict=True):
                self.pool.overflowed |= token == NO_TOKEN
                if owner.position is not None:
                    # In place of UNKNOWN, if that is there. Where there was none, nothing that comes of it is used.
                    owner.sequence.tokens[owner.position : owner.position + 1] = [max(token, 0)]
        if drawn.sampled is None:
            return ()
        out = []
        for owner, chosen in zip(drawn.owners, drawn.sampled.rows(), strict=True):
            self.pool.overflowed |= chosen.token_id == NO_TOKEN
            logprobs = None if chosen.logprob is None else TokenLogprobs(chosen.logprob, chosen.top)
            out.append(SampledToken(owner.sequence.seq_id, owner.sampling.choice, chosen.token_id, logprobs))
        return tuple(out)


def captures_of(computation: Computation) -> Captures:
    if not computation.graphs:
        return NO_CAPTURES
    chunks = computation.chunk_rows
    return Captures(computation.decode_rows, chunks, chunks if computation.mixed else 0)


def gpu_index(device: str, num_gpus: int) -> int:
    """Of "cuda:N". Raises ConfigError if this process is shown no such GPU."""
    index = torch.device(device).index or 0
    if index >= num_gpus:
        shown = f"has GPUs 0 to {num_gpus - 1}" if num_gpus else f"shows no GPU to torch {torch.__version__}"
        raise ConfigError(
            f"a rank is placed on GPU {index} (server.first_gpu and its number), but this machine {shown}"
        )
    return index
