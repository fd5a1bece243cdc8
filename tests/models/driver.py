"""The least engine that can drive a PagedModel: greedy, chunked prefill mixed with decode, pages in shuffled order.

It releases every page that has left its group's window, as an engine may: the page is filled with NaN until it is another
sequence's, and the entry that named it becomes a page that the pool has not got. So whatever reads or writes behind a
window fails.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import torch

from disagg.memory.layout import PageSizing
from disagg.messages.sequence_diff import KnownSequence, RunView, page_table
from disagg.models.batch import ForwardBatch
from disagg.models.model import PagedModel
from disagg.types.sampling import SamplingParams
from disagg.worker.batch import build_batch
from tests.models.pools import PageSource, fill, make_pool

STALE = 1 << 40


@dataclass
class Sequence:
    """known: what a worker knows of it; chunk: tokens per prefill step; logits: one row per output."""

    known: KnownSequence
    chunk: int
    logits: list[torch.Tensor] = field(default_factory=list)
    released: list[int] = field(default_factory=list)  # pages of each group's table that are gone

    @property
    def outputs(self) -> list[int]:
        return self.known.tokens[self.known.num_prompt :]

    @property
    def decoding(self) -> bool:
        return self.known.computed >= self.known.num_prompt

    @property
    def next_tokens(self) -> int:
        """Tokens of the next run."""
        return 1 if self.decoding else min(self.chunk, self.known.num_prompt - self.known.computed)


def sequence_of(tokens: SequenceOf[int], num_groups: int, computed: int = 0) -> KnownSequence:
    """A sequence of those tokens without any pages."""
    tables = [page_table() for _ in range(num_groups)]
    return KnownSequence(0, list(tokens), len(tokens), computed, tables, SamplingParams(max_tokens=1), ())


def run_of(sequence: KnownSequence, num_tokens: int) -> RunView:
    """The sequence's next tokens; sampled from, if they are the last ones known."""
    stop = sequence.computed + num_tokens
    last_pages = tuple(table[-1] if table else -1 for table in sequence.tables)
    return RunView(sequence, sequence.computed, num_tokens, stop == len(sequence.tokens), last_pages)


class Driver:
    """Owns a pool full of garbage and hands its pages out."""

    def __init__(
        self,
        model: PagedModel,
        num_large: int,
        page_tokens: int,
        seed: int = 0,
        sizing: PageSizing = PageSizing.LCM,
    ) -> None:
        self.model = model
        self.page_tokens = page_tokens
        self.pool = make_pool(model.groups, num_large, page_tokens, sizing, model.device)
        fill(self.pool, seed=seed)
        self._source = PageSource(self.pool, seed)
        self._rng = random.Random(seed)

    def sequence(self, prompt: SequenceOf[int], chunk: int) -> Sequence:
        num_groups = len(self.model.groups)
        return Sequence(sequence_of(prompt, num_groups), chunk, released=[0] * num_groups)

    def batch_of(self, sequences: SequenceOf[Sequence]) -> tuple[ForwardBatch, list[tuple[Sequence, RunView]]]:
        """As `host_batch_of`, on the model's device."""
        batch, owned = self.host_batch_of(sequences)
        return batch.on(self.model.device), owned

    def host_batch_of(self, sequences: SequenceOf[Sequence]) -> tuple[ForwardBatch, list[tuple[Sequence, RunView]]]:
        """The next chunk or token of every sequence, and whose each run is, in row order. Takes pages for them."""
        owners = {}
        runs = []
        for sequence in sequences:
            run = run_of(sequence.known, sequence.next_tokens)
            self._take_pages(sequence, run.start + run.num_tokens)
            runs.append(run)
            owners[id(run)] = sequence
        batch, ordered = build_batch(runs, self.model.groups, self.page_tokens)
        return batch, [(owners[id(run)], run) for run in ordered]

    def step(self, sequences: SequenceOf[Sequence]) -> None:
        """Computes the next chunk or token of every sequence, in one forward."""
        batch, owned = self.host_batch_of(sequences)
        logits = iter(self.forward(batch))
        for sequence, run in owned:
            sequence.known.computed += run.num_tokens
            if run.sample:
                row = next(logits)
                sequence.logits.append(row.cpu())
                sequence.known.tokens.append(int(row.argmax()))
            self._release_pages(sequence)
        assert next(logits, None) is None

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """batch: on the host."""
        return self.model.forward(batch.on(self.model.device), self.pool)

    def take_page(self, group: int) -> int:
        return self._source.take(group)

    def run(self, sequences: SequenceOf[Sequence], outputs: int) -> None:
        """Steps until every sequence has that many outputs; those that have do not run along."""
        while unfinished := [s for s in sequences if len(s.outputs) < outputs]:
            self.step(unfinished)

    def _take_pages(self, sequence: Sequence, num_tokens: int) -> None:
        for group, table in enumerate(sequence.known.tables):
            if self.model.groups[group].is_state:
                self._take_state_page(group, sequence)
                continue
            kv = self.pool.attention(group).kv
            while len(table) * self.page_tokens < num_tokens:
                table.append(self.take_page(group))
                kv[table[-1]].nan_to_num_(nan=2.0)

    def _take_state_page(self, group: int, sequence: Sequence) -> None:
        """For its first run, and for every other one: as if the state before were to stay as a checkpoint."""
        table = sequence.known.tables[group]
        if not table or self._rng.random() < 0.5:
            table.append(self.take_page(group))
            self.pool.states(group).bytes[table[-1]] = 255  # NaN in every dtype

    def _release_pages(self, sequence: Sequence) -> None:
        for index, (group, table) in enumerate(zip(self.model.groups, sequence.known.tables, strict=True)):
            if group.is_state:
                for position, page in enumerate(table[:-1]):
                    if page != STALE:
                        self.pool.states(index).bytes[page] = 255
                        self._source.give_back(index, page)
                        table[position] = STALE
                continue
            first_token = sequence.known.computed + 1 - group.window if group.window else 0
            while (sequence.released[index] + 1) * self.page_tokens <= first_token:
                position = sequence.released[index]
                self.pool.attention(index).kv[table[position]] = torch.nan
                self._source.give_back(index, table[position])
                table[position] = STALE
                sequence.released[index] += 1
