"""Computes plans: turns them into tensors, runs the model, samples, and says which tokens came out.

Of several ranks all compute every plan, and one samples for all. Knows the mirror of the engine's sequences, the pool and
the sampler; nothing of requests, peers or sockets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import transformers

from disagg.messages.control import Computation
from disagg.messages.layout import LayerGroup
from disagg.messages.mirror import Mirror, MirrorSequence, RunView
from disagg.messages.plan import SampledToken, StepResult, TokenLogprobs, WorkerPlan
from disagg.models.batch import ForwardBatch
from disagg.models.graphs import DecodeGraphs, try_capture
from disagg.models.model import PagedModel
from disagg.models.pool import Pool
from disagg.models.ranks import Ranks
from disagg.types.errors import ConfigError
from disagg.worker.batch import build_batch
from disagg.worker.profile import measure_largest_step
from disagg.worker.sampler import Sampler


class Executor:
    """One rank's model and pool, and the sampler on the rank that samples.

    `load`, `connect`, perhaps `profile`, then `make_pool`, then `run` plan after plan.
    """

    def __init__(self, rank: int, num_ranks: int = 1) -> None:
        self._ranks = Ranks(rank, num_ranks)
        self._mirror = Mirror()
        self._model: PagedModel | None = None
        self._pool: Pool | None = None
        self._sampler: Sampler | None = None
        self._graphs: DecodeGraphs | None = None
        self._captures = True
        self._device = "cpu"

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
        return self._graphs

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
        self.adopt(PagedModel.load(model_dir, dtype, device, self._ranks, computation), graphs=computation.graphs)
        if gemv_copies:
            self.model.add_gemv_copies()

    def adopt(self, model: PagedModel, *, graphs: bool) -> None:
        """Take a model that is loaded. graphs: decode steps are captured, where they can be."""
        self._model = model
        self._device = str(model.device)
        self._captures = graphs

    def connect(self, meeting: Path, meet_s: float, collective_s: float) -> None:
        """Wait for the other ranks, if there are any; see models/ranks."""
        self._ranks.connect(meeting, self.model.device, meet_s, collective_s)

    def profile(self, chunk_tokens: int, max_slots: int) -> tuple[int, int]:
        """(bytes of the device, most that the largest step had in use); zeros on CPU. Raises ConfigError if it does not
        fit."""
        return measure_largest_step(self.model, chunk_tokens, max_slots, captures=self._captures)

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
        if self._captures:
            self._graphs = try_capture(self.model, self._pool, max_slots)
        if self._ranks.samples:
            self._sampler = Sampler(self.model.vocab_size, max_slots, self._device)
        return self._pool.bytes.nbytes

    @torch.inference_mode()
    def run(self, plan: WorkerPlan, written: Callable[[int], None] | None = None) -> StepResult:
        """written: as in PagedModel.forward. Raises ProtocolError when a plan was lost."""
        started_unix_s, started_s = time.time(), time.perf_counter()
        sampler = self._sampler
        assert (sampler is not None) == self._ranks.samples
        ended, begun, runs = self._mirror.apply(plan)
        if sampler is not None:
            for sequence in ended:
                for sampling in sequence.samplers:
                    sampler.remove(sampling.slot)
        self.pool.copy_pages(plan.copies)
        if self.pool.mixed:
            self._zero_new_pages(plan)
        if sampler is not None:
            for sequence in begun:
                self._open_slots(sampler, sequence)
        sampled = self._compute(sampler, runs, written) if runs else ()
        if self._device != "cpu":
            # What samples has waited for the device. The rest must too: once this plan is reported its pages may be freed, and
            # KV that lands in them next is not ordered behind what still reads them.
            torch.cuda.current_stream().synchronize()
        return StepResult(
            rank=self._ranks.rank,
            plan_no=plan.plan_no,
            sampled=sampled,
            compute_s=time.perf_counter() - started_s,
            started_unix_s=started_unix_s,
            ended_unix_s=time.time(),
        )

    def _zero_new_pages(self, plan: WorkerPlan) -> None:
        """Another group's elements may be NaN to attention, which reads whole pages, though it weighs the rest zero."""
        for index, group in enumerate(self.groups):
            if not group.is_state:
                self.pool.zero_pages(
                    index, [page for run in plan.runs if run.new_pages for page in run.new_pages[index]]
                )

    def _open_slots(self, sampler: Sampler, sequence: MirrorSequence) -> None:
        prompt, outputs = sequence.tokens[: sequence.num_prompt], sequence.tokens[sequence.num_prompt :]
        for sampling in sequence.samplers:
            eos = self.model.eos_token_ids
            sampler.add(sampling.slot, sequence.params, sampling.choice, prompt, outputs, eos)

    def _forward(self, batch: ForwardBatch, written: Callable[[int], None] | None) -> torch.Tensor:
        """As PagedModel.forward, of a batch on the host."""
        if self._graphs is None or not self._graphs.captured(batch):
            return self.model.forward(batch.on(self.pool.device), self.pool, written)
        logits = self._graphs.forward(batch)
        if written is not None:
            for layer in self.model.writing_layers:
                written(layer)
        return logits

    def _compute(
        self, sampler: Sampler | None, runs: list[RunView], written: Callable[[int], None] | None
    ) -> tuple[SampledToken, ...]:
        """What was sampled: nothing on a rank that does not sample, though it learns the tokens too."""
        batch, ordered = build_batch(runs, self.groups, self.pool.page_tokens)
        if sampler is None:
            batch = replace(batch, logits_rows=batch.logits_rows[:0])
        logits = self._forward(batch, written)
        slots: list[int] = []
        rows: list[int] = []
        owners: list[tuple[MirrorSequence, int]] = []
        sampling_runs = [run for run in ordered if run.sample]
        for row, run in enumerate(sampling_runs):
            for sampling in run.sequence.samplers:
                slots.append(sampling.slot)
                rows.append(row)
                owners.append((run.sequence, sampling.choice))
        if not slots:
            return ()
        picked = []
        if sampler is not None:
            picked = sampler.sample(logits, torch.tensor(rows, device=self._device), slots).rows()
        tokens = self._ranks.agree([chosen.token_id for chosen in picked], len(slots), self._device)
        for (sequence, _), token in zip(owners, tokens, strict=True):
            if len(sequence.samplers) == 1:
                sequence.tokens.append(token)
        if sampler is None:
            return ()
        out = []
        for (sequence, choice), chosen in zip(owners, picked, strict=True):
            logprobs = None if chosen.logprob is None else TokenLogprobs(chosen.logprob, chosen.top)
            out.append(SampledToken(sequence.seq_id, choice, chosen.token_id, logprobs))
        return tuple(out)


def gpu_index(device: str, num_gpus: int) -> int:
    """Of "cuda:N". Raises ConfigError if this process is shown no such GPU."""
    index = torch.device(device).index or 0
    if index >= num_gpus:
        shown = f"has GPUs 0 to {num_gpus - 1}" if num_gpus else f"shows no GPU to torch {torch.__version__}"
        raise ConfigError(
            f"a rank is placed on GPU {index} (server.first_gpu and its number), but this machine {shown}"
        )
    return index
