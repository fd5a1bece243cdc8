"""Computes plans: turns them into tensors, runs the model, samples, and says which tokens came out.

Knows the mirror of the engine's sequences, the pool and the sampler; nothing of requests, peers or sockets.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
import transformers

from disagg.messages.layout import LayerGroup
from disagg.messages.mirror import Mirror, MirrorSequence, RunView
from disagg.messages.plan import SampledToken, StepResult, TokenLogprobs, WorkerPlan
from disagg.models.batch import DecodeRun, ForwardBatch, PrefillRun
from disagg.models.model import PagedModel
from disagg.models.pool import KvPool
from disagg.worker.sampler import Sampler


class Executor:
    """One rank's model, pool and sampler. `load`, then `make_pool`, then `run` plan after plan."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._mirror = Mirror()
        self._model: PagedModel | None = None
        self._pool: KvPool | None = None
        self._sampler: Sampler | None = None
        self._device = "cpu"

    @property
    def model(self) -> PagedModel:
        assert self._model is not None, "no model is loaded"
        return self._model

    @property
    def pool(self) -> KvPool:
        assert self._pool is not None, "no pool was made"
        return self._pool

    @property
    def group(self) -> LayerGroup:
        return self.model.groups[0]

    def load(self, model_dir: Path, dtype: str, device: str, threads: int, gemv_copies: bool = False) -> None:
        """Raises ConfigError for a model that cannot be served."""
        torch.set_num_threads(threads)
        transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # a bar in a log file is noise
        self._device = device
        self._model = PagedModel.load(model_dir, dtype, device)
        if gemv_copies:
            self._model.add_gemv_copies()

    def make_pool(self, num_pages: int, page_tokens: int, max_slots: int) -> int:
        """Bytes of the pool."""
        self._pool = self.model.make_pool(num_pages, page_tokens)
        self._sampler = Sampler(self.model.vocab_size, max_slots, self._device)
        return self._pool.num_pages * self._pool.page_bytes

    @torch.inference_mode()
    def run(self, plan: WorkerPlan) -> StepResult:
        """Raises ProtocolError when a plan was lost."""
        started_unix_s, started_s = time.time(), time.perf_counter()
        sampler = self._sampler
        assert sampler is not None
        ended, begun, runs = self._mirror.apply(plan)
        for sequence in ended:
            for sampling in sequence.samplers:
                sampler.remove(sampling.slot)
        self.pool.copy_pages(plan.copies)
        for sequence in begun:
            self._open_slots(sampler, sequence)
        sampled = self._compute(sampler, runs) if runs else ()
        return StepResult(
            rank=self._rank,
            plan_no=plan.plan_no,
            sampled=sampled if self._rank == 0 else (),
            compute_s=time.perf_counter() - started_s,
            started_unix_s=started_unix_s,
            ended_unix_s=time.time(),
        )

    def _open_slots(self, sampler: Sampler, sequence: MirrorSequence) -> None:
        prompt, outputs = sequence.tokens[: sequence.num_prompt], sequence.tokens[sequence.num_prompt :]
        for sampling in sequence.samplers:
            eos = self.model.eos_token_ids
            sampler.add(sampling.slot, sequence.params, sampling.choice, prompt, outputs, eos)

    def _compute(self, sampler: Sampler, runs: list[RunView]) -> tuple[SampledToken, ...]:
        batch, ordered = self._batch(runs)
        logits = self.model.forward(batch, self.pool)
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
        picked = sampler.sample(logits, torch.tensor(rows, device=self._device), slots).rows()
        out = []
        for (sequence, choice), chosen in zip(owners, picked, strict=True):
            logprobs = None if chosen.logprob is None else TokenLogprobs(chosen.logprob, chosen.top)
            out.append(SampledToken(sequence.seq_id, choice, chosen.token_id, logprobs))
            if len(sequence.samplers) == 1:
                sequence.tokens.append(chosen.token_id)
        return tuple(out)

    def _batch(self, runs: list[RunView]) -> tuple[ForwardBatch, list[RunView]]:
        """The tensors of one forward, and the runs in row order: prefill runs, then single tokens after a context."""
        page_tokens = self.pool.page_tokens
        decodes = [run for run in runs if run.num_tokens == 1 and run.start > 0]
        prefills = [run for run in runs if run.num_tokens > 1 or run.start == 0]
        ordered = prefills + decodes
        ids: list[int] = []
        positions: list[int] = []
        pages: list[int] = []
        logits_rows: list[int] = []
        prefill_runs: list[PrefillRun] = []
        for run in ordered:
            first = len(ids)
            ids += run.token_ids
            stop = run.start + run.num_tokens
            positions += range(run.start, stop)
            table = run.sequence.pages
            pages += [table[position // page_tokens] for position in range(run.start, stop)]
            assert len(ids) == first + run.num_tokens, "a run names tokens that this worker does not know"
            if run.sample:
                logits_rows.append(len(ids) - 1)
            if len(prefill_runs) < len(prefills):
                used = table[: -(-stop // page_tokens)]
                prefill_runs.append(PrefillRun(first, run.num_tokens, run.start, self._longs(used)))
        decode_run = None
        if decodes:
            lengths = [run.start + 1 for run in decodes]
            longest = max(lengths)
            width = -(-longest // page_tokens)
            tables = []
            for run, length in zip(decodes, lengths, strict=True):
                used = run.sequence.pages[: -(-length // page_tokens)]
                tables.append(used + [used[0]] * (width - len(used)))
            start = len(ids) - len(decodes)
            decode_run = DecodeRun(start, self._longs(tables), self._longs(lengths), longest)
        position_ids = self._longs(positions)
        batch = ForwardBatch(
            input_ids=self._longs(ids),
            positions=position_ids,
            slot_pages=self._longs(pages),
            slot_offsets=position_ids % page_tokens,
            prefills=tuple(prefill_runs),
            decodes=decode_run,
            logits_rows=self._longs(logits_rows),
        )
        return batch, ordered

    def _longs(self, values: list[int] | list[list[int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
