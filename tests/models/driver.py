"""The least engine that can drive a PagedModel: greedy, chunked prefill mixed with decode, pages in shuffled order."""

from __future__ import annotations

import random
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import torch

from disagg.models.batch import DecodeRun, ForwardBatch, PrefillRun
from disagg.models.model import PagedModel
from disagg.models.pool import KvPool


@dataclass
class Sequence:
    """tokens: prompt, then outputs; computed: tokens whose KV is in the pool; logits: one row per output."""

    tokens: list[int]
    prompt_tokens: int
    chunk: int
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)

    @property
    def outputs(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]

    @property
    def decoding(self) -> bool:
        return self.computed >= self.prompt_tokens


def build_batch(work: SequenceOf[tuple[Sequence, int]], page_tokens: int, device: str = "cpu") -> ForwardBatch:
    """work: (sequence, tokens to compute), sequences that prefill first. Decoding ones compute 1 token."""

    def long(values: list) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    ids: list[int] = []
    positions: list[int] = []
    slot_pages: list[int] = []
    slot_offsets: list[int] = []
    logits_rows: list[int] = []
    prefills: list[PrefillRun] = []
    decoding: list[Sequence] = []
    decode_start = 0
    for sequence, count in work:
        start, end = len(ids), sequence.computed + count
        new = range(sequence.computed, end)
        ids += sequence.tokens[sequence.computed : end]
        positions += new
        slot_pages += [sequence.pages[p // page_tokens] for p in new]
        slot_offsets += [p % page_tokens for p in new]
        if end >= sequence.prompt_tokens:
            logits_rows.append(len(ids) - 1)
        if sequence.decoding:
            assert count == 1
            decode_start = decode_start if decoding else start
            decoding.append(sequence)
        else:
            pages = sequence.pages[: -(-end // page_tokens)]
            prefills.append(PrefillRun(start, count, sequence.computed, long(pages)))
    decodes = None
    if decoding:
        lengths = [s.computed + 1 for s in decoding]
        width = max(len(s.pages) for s in decoding)
        table = [s.pages + [0] * (width - len(s.pages)) for s in decoding]
        decodes = DecodeRun(decode_start, long(table), long(lengths), max(lengths))
    return ForwardBatch(
        long(ids), long(positions), long(slot_pages), long(slot_offsets), tuple(prefills), decodes, long(logits_rows)
    )


class Driver:
    """Owns a pool full of garbage and hands its pages out in shuffled order."""

    def __init__(self, model: PagedModel, num_pages: int, page_tokens: int, seed: int = 0) -> None:
        self.model = model
        self.page_tokens = page_tokens
        self.pool: KvPool = model.make_pool(num_pages, page_tokens)
        self.pool.kv.normal_(std=3.0, generator=torch.Generator().manual_seed(seed))
        self._free = list(range(num_pages))
        random.Random(seed).shuffle(self._free)

    def sequence(self, prompt: SequenceOf[int], chunk: int) -> Sequence:
        return Sequence(list(prompt), len(prompt), chunk)

    def step(self, sequences: SequenceOf[Sequence]) -> None:
        """Computes the next chunk or token of every sequence, in one forward."""
        work = [(s, min(s.chunk, s.prompt_tokens - s.computed)) for s in sequences if not s.decoding]
        work += [(s, 1) for s in sequences if s.decoding]
        for sequence, count in work:
            while len(sequence.pages) * self.page_tokens < sequence.computed + count:
                sequence.pages.append(self._free.pop())
        logits = iter(self.model.forward(build_batch(work, self.page_tokens), self.pool))
        for sequence, count in work:
            sequence.computed += count
            if sequence.decoding:
                row = next(logits)
                sequence.logits.append(row)
                sequence.tokens.append(int(row.argmax()))
        assert next(logits, None) is None

    def run(self, sequences: SequenceOf[Sequence], outputs: int) -> None:
        """Steps until every sequence has that many outputs; those that have do not run along."""
        while unfinished := [s for s in sequences if len(s.outputs) < outputs]:
            self.step(unfinished)
