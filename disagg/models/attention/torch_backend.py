"""Attention by torch's own operations, on any device: pages are gathered into a scratch buffer that attention reads.

Knows batches, pages and tensors; nothing of models. Whatever is equal for the group's layers (gather indices, masks,
which rows go together) is computed here once per forward.

Decode rows are cut into *buckets*. A bucket's K and V are gathered into one scratch buffer, which attention reads at
once. On CPU a bucket is small, for two reasons: the buffer stays in the core's cache (at batch 16 and 300 tokens of
context: 61 ms for 30 layers of SmolLM2, 79 as one bucket), and rows of unlike lengths do not pad each other. On a GPU
rows are padded to the longest, in as few buckets as their bytes allow: a launch costs more than padding, and lengths are
not known to the host.

Chunks of a prompt take the kernel that never shows its scores, wherever it can be had. On a GPU torch has it for fewer KV
heads than query heads only without a mask, or with one that is causal by name; else the heads are repeated for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from disagg.models.attention.backend import HALF_DTYPES, DecodeWork, PrefillWork, Scoring
from disagg.models.batch import PrefillRun
from disagg.models.pool import AttentionPages
from disagg.types.arithmetic import ceil_div

# Rows share a bucket on CPU while its K and V of one layer stay below this, a usual L2 cache. Measured: 0.25 to 2 MiB
# are alike at long contexts, where a row is half a MiB by itself; at short ones each further bucket costs 40 us a layer.
BUCKET_BYTES = 2 * 1024 * 1024
# ... and while every row has at least this part of the longest one's pages.
BUCKET_FILL = 0.75
# The same on a GPU, where it only keeps long contexts of many rows from taking the whole device.
PADDED_BUCKET_BYTES = 1024 * 1024 * 1024
# What the kernel for grouped heads computes in.
FLASH_DTYPES: frozenset[torch.dtype] = HALF_DTYPES
# Scores of a chunk that exist at one time, in float32, where the kernel that never shows its scores cannot be used.
SCORES_BYTES = 256 * 1024 * 1024


class PageSpan:
    """Pages of n sequences to gather side by side; tokens [first, last) of each one's pages are used.

    The views that every layer's gather writes and reads are made once, by `bind`.
    """

    def __init__(self, view: AttentionPages, pages: torch.Tensor, num_sequences: int, first: int, last: int) -> None:
        """pages: [n * pages per sequence] int64."""
        self._view = view
        self._head_page_index = view.head_page_index(pages)
        self._num_sequences = num_sequences
        self._first = first
        self._last = last

    @property
    def num_units(self) -> int:
        return self._head_page_index.shape[0]

    def bind(self, scratch: torch.Tensor) -> None:
        """scratch: [at least num_units, page_tokens * head_dim]; others may use it between two gathers' uses."""
        group = self._view.group
        self._units = scratch[: self.num_units]
        kv = self._units.view(2, group.kv_heads, self._num_sequences, -1, group.head_dim)
        kv = kv[:, :, :, self._first : self._last].transpose(1, 2)
        self._keys, self._values = kv[0], kv[1]

    def gather(self, layer_in_group: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, each [n, kv_heads, last - first, head_dim]."""
        self._view.gather(layer_in_group, self._head_page_index, self._units)
        return self._keys, self._values


@dataclass(frozen=True, slots=True)
class Bucket:
    """Rows of one token each. rows: a slice of the batch's rows, or [n] int64; mask: [n, 1, 1, keys] or None."""

    rows: slice | torch.Tensor
    span: PageSpan
    mask: torch.Tensor | None

    def attend(self, layer_in_group: int, grouped: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        """grouped: [N, kv_heads, group, head_dim], all rows of the batch. Returns [n, kv_heads, group, head_dim].

        The query heads that share a KV head stand where attention expects tokens: each key is read once, not per head.
        """
        keys, values = self.span.gather(layer_in_group)
        queries = grouped[self.rows]
        if scoring.needs_scores:
            return _attend_with_scores(queries, keys, values, self.mask, scoring)
        return scaled_dot_product_attention(queries, keys, values, attn_mask=self.mask, scale=scoring.scaling)


@dataclass(slots=True)
class Chunk:
    """One prefill run of several tokens. span is None when every key it sees is one of its own rows. for_gpu: see
    TorchPrefill.as_on_gpu."""

    rows: slice
    span: PageSpan | None
    first_query: int  # position of the first row
    first_key: int  # position of the first key
    window: int | None
    device: torch.device
    dtype: torch.dtype
    for_gpu: bool
    _mask: torch.Tensor | None = field(default=None, init=False)

    @property
    def plain_causal(self) -> bool:
        return self.span is None and self.window is None

    def mask(self) -> torch.Tensor:
        """[num_tokens, keys]: zero where the key is visible, else -inf."""
        if self._mask is None:
            num_tokens = self.rows.stop - self.rows.start
            queries = torch.arange(self.first_query, self.first_query + num_tokens, device=self.device).unsqueeze(1)
            keys = torch.arange(self.first_key, self.first_query + num_tokens, device=self.device)
            visible = keys <= queries
            if self.window is not None:
                visible &= keys > queries - self.window
            self._mask = _additive(visible, self.dtype)
        return self._mask

    def attend(
        self, layer_in_group: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """query, key, value: [heads, N, head_dim], all rows. Returns [num_tokens, query_heads, head_dim]."""
        query = query[:, self.rows].unsqueeze(0)
        if self.span is None:
            keys, values = key[:, self.rows].unsqueeze(0), value[:, self.rows].unsqueeze(0)
        else:
            keys, values = self.span.gather(layer_in_group)
        if scoring.needs_scores:
            out = self._attend_with_scores(query, keys, values, scoring)
        elif self.for_gpu:
            out = self._attend_on_gpu(query, keys, values, scoring)
        else:
            out = scaled_dot_product_attention(
                query,
                keys,
                values,
                attn_mask=None if self.plain_causal else self.mask(),
                is_causal=self.plain_causal,
                scale=scoring.scaling,
                enable_gqa=query.shape[1] != keys.shape[1],
            )
        return out[0].transpose(0, 1)

    def _attend_on_gpu(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """As `attend`, of [1, heads, tokens, D] each, so that torch finds a kernel that never writes all scores to memory."""
        mask: torch.Tensor | None = None
        if self.window is not None:
            mask = self.mask()
        elif not self.plain_causal:
            mask = causal_lower_right(query.shape[2], keys.shape[2])
        repeats = query.shape[1] // keys.shape[1]
        if repeats > 1 and (self.window is not None or self.dtype not in FLASH_DTYPES):
            keys, values = keys.repeat_interleave(repeats, dim=1), values.repeat_interleave(repeats, dim=1)
        return scaled_dot_product_attention(
            query,
            keys,
            values,
            attn_mask=mask,
            is_causal=self.plain_causal,
            scale=scoring.scaling,
            enable_gqa=query.shape[1] != keys.shape[1],
        )

    def _attend_with_scores(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """As many queries at once as SCORES_BYTES holds. query: [1, query_heads, num_tokens, D], and so returns."""
        _, query_heads, num_tokens, _ = query.shape
        step = max(1, SCORES_BYTES // (4 * query_heads * keys.shape[2]))
        parts = []
        for start in range(0, num_tokens, step):
            part = query[:, :, start : start + step]
            # [1, query_heads, M, D] as [1, kv_heads, group * M, D], and back again
            grouped = part.reshape(1, keys.shape[1], -1, query.shape[3])
            mask = self.mask()[start : start + step]
            parts.append(_attend_with_scores(grouped, keys, values, mask, scoring).view(part.shape))
        return torch.cat(parts, dim=2)


def _attend_with_scores(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scoring: Scoring
) -> torch.Tensor:
    """Attention in plain operations, softmax in float32.

    queries: [n, kv_heads, group * M, D], group outside M; keys, values: [n, kv_heads, S, D]; mask: [M, S] or
    [n, 1, 1, S] or None. Returns the shape of queries.
    """
    scores = torch.matmul(queries, keys.transpose(2, 3)) * scoring.scaling
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    scores = scores.float()
    num_queries, num_keys = scores.shape[2:]
    if mask is not None:
        if mask.dim() == 2:
            scores = (scores.view(*scores.shape[:2], -1, *mask.shape) + mask).flatten(2, 3)
        else:
            scores = scores + mask
    if scoring.sinks is not None:
        # [query_heads] -> [1, kv_heads, group, 1] -> one extra column for each of the group * M queries
        sinks = scoring.sinks.float().view(1, queries.shape[1], -1, 1)
        sinks = sinks.repeat_interleave(num_queries // sinks.shape[2], dim=2).expand(scores.shape[0], -1, -1, 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :num_keys]
    return torch.matmul(weights.to(values.dtype), values)


def _additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Zero where visible, -inf elsewhere: the fused kernels would make this of a bool mask again in every layer."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -math.inf)


@dataclass(frozen=True, slots=True)
class TorchPrefill:
    """Chunk by chunk; rows that are a prompt's only token, together. as_on_gpu: by the kernels that a GPU has, anywhere."""

    as_on_gpu: bool = False

    def plan(self, work: PrefillWork) -> TorchPlan:
        view, window = work.view, work.view.group.window or None
        for_gpu = self.as_on_gpu or view.device.type != "cpu"
        chunks, singles = [], []
        for run, row in zip(work.runs, work.rows, strict=True):
            first, pages = work.table.firsts[row], work.table.pages[row]
            if run.num_tokens == 1:
                singles.append(_single(run.start, pages, first, run.total_tokens, window, view.page_tokens))
            else:
                chunks.append(_chunk(run, pages, first, view, window, for_gpu))
        return TorchPlan(chunks, [_bucket(alike, view) for alike in _alike(singles, view)], view)


@dataclass(frozen=True, slots=True)
class TorchDecode:
    """Bucket by bucket. as_on_gpu: without asking the device for anything; rows are made alike by padding."""

    as_on_gpu: bool = False

    def plan(self, work: DecodeWork) -> TorchPlan:
        view, window = work.view, work.view.group.window or None
        if self.as_on_gpu or view.device.type != "cpu":
            return TorchPlan([], list(_padded_buckets(work, view, window)), view)
        lengths = work.batch.lengths.tolist()
        rows = zip(work.table.pages.unbind(0), work.table.firsts, lengths, strict=True)
        singles = [
            _single(row, pages, first, length, window, view.page_tokens)
            for row, (pages, first, length) in enumerate(rows, work.batch.start)
        ]
        return TorchPlan([], [_bucket(alike, view) for alike in _alike(singles, view)], view)


class TorchPlan:
    """Chunks and buckets that share one scratch buffer."""

    def __init__(self, chunks: list[Chunk], buckets: list[Bucket], view: AttentionPages) -> None:
        self.chunks = chunks
        self.buckets = buckets
        spans = [b.span for b in buckets] + [c.span for c in chunks if c.span is not None]
        scratch_units = max((span.num_units for span in spans), default=0)
        scratch = torch.empty(
            (scratch_units, view.page_tokens * view.group.head_dim), dtype=view.kv.dtype, device=view.device
        )
        for span in spans:
            span.bind(scratch)
        self._kv_heads = view.group.kv_heads

    def is_one_bucket(self, num_rows: int) -> bool:
        """Whether one bucket has all rows of the batch: then what it gives is the output, and need not be copied there."""
        rows = [bucket.rows for bucket in self.buckets]
        return not self.chunks and len(rows) == 1 and isinstance(rows[0], slice) and rows[0] == slice(0, num_rows)

    def run_one_bucket(self, layer_in_group: int, query: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        """query: as of `run`. Returns what `run` would write to `out`; a row of SmolLM2 takes 15 us a layer less so on a CPU."""
        query_heads, num_rows, head_dim = query.shape
        grouped = query.transpose(0, 1).view(num_rows, self._kv_heads, -1, head_dim)
        given = self.buckets[0].attend(layer_in_group, grouped, scoring)
        return given.reshape(num_rows, query_heads, head_dim).contiguous()

    def run(
        self,
        layer_in_group: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scoring: Scoring,
        out: torch.Tensor,
    ) -> None:
        """See AttentionPlan."""
        for chunk in self.chunks:
            out[chunk.rows] = chunk.attend(layer_in_group, query, key, value, scoring)
        if self.buckets:
            by_kv_head = (out.shape[0], self._kv_heads, -1, out.shape[2])
            grouped, grouped_out = query.transpose(0, 1).view(by_kv_head), out.view(by_kv_head)
            for bucket in self.buckets:
                grouped_out[bucket.rows] = bucket.attend(layer_in_group, grouped, scoring)


@dataclass(frozen=True, slots=True)
class _Single:
    """One row that sees keys [first, last) of the tokens in `pages`."""

    row: int
    pages: torch.Tensor
    first: int
    last: int


def _single(
    row: int, pages: torch.Tensor, first_page: int, length: int, window: int | None, page_tokens: int
) -> _Single:
    """pages: from page number `first_page` on; length: tokens of the sequence, the row's own among them."""
    skipped = first_page * page_tokens
    first_token = 0 if window is None else max(0, length - window)
    needed = pages[: ceil_div(length, page_tokens) - first_page]
    return _Single(row, needed, first_token - skipped, length - skipped)


def _alike(singles: Sequence[_Single], view: AttentionPages) -> Iterator[list[_Single]]:
    """Groups rows of like page counts, as many as BUCKET_BYTES holds."""
    page_bytes = view.page_bytes // len(view.group.layers)
    group: list[_Single] = []
    for single in sorted(singles, key=lambda single: -single.pages.shape[0]):
        longest = group[0].pages.shape[0] if group else 0
        fits = (len(group) + 1) * longest * page_bytes <= BUCKET_BYTES
        if group and not (fits and single.pages.shape[0] >= BUCKET_FILL * longest):
            yield group
            group = []
        group.append(single)
    if group:
        yield group


def _bucket(group: Sequence[_Single], view: AttentionPages) -> Bucket:
    num_pages = group[0].pages.shape[0]
    if len(group) == 1:
        (single,) = group
        span = PageSpan(view, single.pages, 1, single.first, single.last)
        return Bucket(slice(single.row, single.row + 1), span, None)
    group = sorted(group, key=lambda single: single.row)  # so that neighbours make a slice, which is cheaper
    start, stop = group[0].row, group[-1].row + 1
    rows: slice | torch.Tensor = slice(start, stop)
    if stop - start != len(group):
        rows = torch.tensor([single.row for single in group], device=view.device)
    num_pages = max(single.pages.shape[0] for single in group)
    # Padding repeats a row's own last page, which is surely initialised; the mask hides it.
    pages = torch.cat([torch.cat((s.pages, s.pages[-1:].expand(num_pages - s.pages.shape[0]))) for s in group])
    first, last = min(single.first for single in group), max(single.last for single in group)
    mask = None
    if any((single.first, single.last) != (first, last) for single in group):
        keys = torch.arange(first, last, device=view.device)
        bounds = torch.tensor([(single.first, single.last) for single in group], device=view.device)
        visible = (keys >= bounds[:, :1]) & (keys < bounds[:, 1:])
        mask = _additive(visible, view.kv.dtype)[:, None, None]
    return Bucket(rows, PageSpan(view, pages, len(group), first, last), mask)


def _padded_buckets(work: DecodeWork, view: AttentionPages, window: int | None) -> Iterator[Bucket]:
    """All decode rows, as many at once as PADDED_BUCKET_BYTES holds, without asking the device for anything."""
    pages, batch = work.table.pages, work.batch
    num_sequences, num_pages = pages.shape
    page_bytes = view.page_bytes // len(view.group.layers)
    step = max(1, PADDED_BUCKET_BYTES // (num_pages * page_bytes))
    places = torch.arange(num_pages * view.page_tokens, device=view.device)
    for start in range(0, num_sequences, step):
        some = slice(start, min(start + step, num_sequences))
        # places in a row's pages at which its tokens end
        ends = (batch.lengths[some] - work.table.first_pages[some] * view.page_tokens).unsqueeze(1)
        visible = places < ends
        if window is not None:
            visible &= places >= ends - window
        span = PageSpan(view, pages[some].reshape(-1), some.stop - some.start, 0, places.shape[0])
        rows = slice(batch.start + some.start, batch.start + some.stop)
        yield Bucket(rows, span, _additive(visible, view.kv.dtype)[:, None, None])


def _chunk(
    run: PrefillRun, pages: torch.Tensor, first_page: int, view: AttentionPages, window: int | None, for_gpu: bool
) -> Chunk:
    """pages: [at least as many as the run reaches], from page number `first_page` on."""
    rows = slice(run.start, run.start + run.num_tokens)
    if window is not None and window >= run.total_tokens:
        window = None
    if run.context_tokens == 0:
        return Chunk(rows, None, 0, 0, window, view.device, view.kv.dtype, for_gpu)
    first_key = 0 if window is None else max(0, run.context_tokens - window + 1)
    skipped = first_page * view.page_tokens
    needed = pages[: ceil_div(run.total_tokens, view.page_tokens) - first_page]
    span = PageSpan(view, needed, 1, first_key - skipped, run.total_tokens - skipped)
    return Chunk(rows, span, run.context_tokens, first_key, window, view.device, view.kv.dtype, for_gpu)
