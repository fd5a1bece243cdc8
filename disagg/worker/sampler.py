"""Chooses the next token of every running choice of a batch. Knows logits, slots and sampling parameters; nothing of
requests, pages or ranks.

Order, as in vLLM v1:

    logits -> raw log-probabilities (reported; nothing below touches them)
           -> min_tokens mask, logit bias -> repetition, frequency, presence penalties -> greedy rows: argmax
           -> temperature -> min_p -> top_k -> top_p -> argmax(scaled logits + Gumbel noise)

Tokens are ordered by logit, ties by lowest id: greedy takes the first, top_k exactly the first k, and top_p the
shortest prefix that holds at least that share of what min_p and top_k left. (vLLM's own paths differ in what they do
with ties.) top_k = 1 is therefore greedy. Everything after the penalties is decided in float64 from differences to the
row's maximum, so the outcome does not hang on which path computed it or on what else is in the batch. A row whose raw logits are
no numbers (`sampler_order`) has no token, whatever its parameters: it gives NO_TOKEN, and whoever asked must not get an answer.

What a batch needs is known on the host (parameters and output indices live there, in arrays by slot), so work that no
row asked for is not done and nothing waits for a GPU. Where a look at the data would help (how many tokens top_p or
min_p leaves), the CPU looks and tries few candidates first; a GPU sorts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from disagg.messages.plan import NO_TOKEN
from disagg.models.device import on_host, upload
from disagg.types.sampling import SamplingParams
from disagg.worker.noise import approximate_exponentials, exponentials, row_keys
from disagg.worker.nucleus import nucleus
from disagg.worker.sampler_order import first_argmax, first_or_none, has_first, largest
from disagg.worker.sampler_tables import SeenTokens, TokenLists

_FEW_CANDIDATES = 128  # holds the nucleus of most steps of most models
_MANY_CANDIDATES = 4096
_LEAST_TEMPERATURE = 1e-30  # float32 can still divide by it; anything below is greedy in all but name


@dataclass(frozen=True)
class SampledRow:
    """One sample on the host. `top` holds the k most likely tokens with their log-probabilities, best first."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Sampled:
    """What `Sampler.sample` chose, still on the device. K is the most that any row asked for; a row that asked for no
    log-probabilities holds NaN, and ids of -1. A row that had nothing to choose from has NO_TOKEN."""

    token_ids: Tensor  # [R] int64
    logprobs: Tensor | None  # [R] float32; None if no row asked
    top_ids: Tensor | None  # [R, K] int64; None if no row asked for more than the chosen token's
    top_logprobs: Tensor | None  # [R, K] float32
    asked: tuple[int | None, ...]  # each row's own `logprobs`

    def on_host(self) -> Sampled:
        """The same on the host, once the device has come so far: does not wait for it."""

        def copied(values: Tensor | None) -> Tensor | None:
            return None if values is None else on_host(values)

        token_ids = on_host(self.token_ids)
        return Sampled(token_ids, copied(self.logprobs), copied(self.top_ids), copied(self.top_logprobs), self.asked)

    def rows(self) -> list[SampledRow]:
        """Plain values, each row with as many alternatives as it asked for. Waits for the device."""
        none: list[float] = [math.nan] * len(self.asked)
        logprobs = none if self.logprobs is None else self.logprobs.tolist()
        top_ids = [[]] * len(self.asked) if self.top_ids is None else self.top_ids.tolist()
        top_logprobs = [[]] * len(self.asked) if self.top_logprobs is None else self.top_logprobs.tolist()
        return [
            SampledRow(token, None if k is None else logprob, tuple(zip(ids[: k or 0], values[: k or 0], strict=True)))
            for token, k, logprob, ids, values in zip(
                self.token_ids.tolist(), self.asked, logprobs, top_ids, top_logprobs, strict=True
            )
        ]


class Sampler:
    """Sampling state of up to `max_slots` running choices, and the batched choice of their next tokens."""

    def __init__(self, vocab_size: int, max_slots: int, device: str) -> None:
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._seen = SeenTokens(vocab_size, self._device)
        self._biases = TokenLists(self._device)
        self._masks = TokenLists(self._device)
        self._token_ids = torch.arange(vocab_size, dtype=torch.int32, device=self._device)

        self._params: list[SamplingParams | None] = [None] * max_slots
        self._temperature = np.ones(max_slots)
        self._top_k = np.full(max_slots, vocab_size)  # vocab_size: no limit
        self._top_p = np.full(max_slots, np.inf)  # inf: no limit
        self._log_min_p = np.full(max_slots, -np.inf)  # -inf: no limit
        self._penalties = np.zeros((max_slots, 3), dtype=np.float32)  # repetition, frequency, presence
        self._min_tokens = np.zeros(max_slots, dtype=np.int64)
        self._logprobs = np.full(max_slots, -1)  # -1: none
        self._seed = np.zeros(max_slots, dtype=np.uint64)
        self._choice = np.zeros(max_slots, dtype=np.int64)
        self._index = np.zeros(max_slots, dtype=np.int64)  # output tokens so far
        self._seen_row = np.full(max_slots, -1)  # -1: not needed; also below
        self._bias_row = np.full(max_slots, -1)
        self._mask_row = np.full(max_slots, -1)

    def add(
        self,
        slot: int,
        params: SamplingParams,
        choice: int,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        eos_token_ids: Sequence[int],
    ) -> None:
        """Starts a choice in a free slot, as if it had already sampled `output_ids`."""
        assert self._params[slot] is None, f"slot {slot} is taken"
        self._params[slot] = params
        self._temperature[slot] = params.temperature and max(params.temperature, _LEAST_TEMPERATURE)
        self._top_k[slot] = min(params.top_k, self._vocab_size) if params.top_k > 0 else self._vocab_size
        self._top_p[slot] = params.top_p if params.top_p < 1.0 else np.inf
        self._log_min_p[slot] = math.log(params.min_p) if params.min_p > 0.0 else -np.inf
        self._min_tokens[slot] = params.min_tokens
        self._logprobs[slot] = -1 if params.logprobs is None else min(params.logprobs, self._vocab_size)
        self._seed[slot] = params.seed
        self._choice[slot] = choice
        self._index[slot] = len(output_ids)

        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        self._penalties[slot] = penalties
        if penalties != (1.0, 0.0, 0.0):
            self._seen_row[slot] = self._seen.put(prompt_ids, output_ids)
        if params.logit_bias:
            self._bias_row[slot] = self._biases.put(tuple(dict(params.logit_bias).items()))
        stops = dict.fromkeys((*eos_token_ids, *params.stop_token_ids), -math.inf)
        if stops and len(output_ids) < params.min_tokens:
            self._mask_row[slot] = self._masks.put(tuple(stops.items()))

    def remove(self, slot: int) -> None:
        """Ends the slot's choice; the slot is free again."""
        assert self._params[slot] is not None, f"slot {slot} is free"
        self._params[slot] = None
        for table, rows in (
            (self._seen, self._seen_row),
            (self._biases, self._bias_row),
            (self._masks, self._mask_row),
        ):
            if rows[slot] >= 0:
                table.free(int(rows[slot]))
                rows[slot] = -1

    def sample(
        self, logits: Tensor, rows: Tensor, slots: Sequence[int] | Tensor, first: Tensor | None = None
    ) -> Sampled:
        """Chooses one token per slot and counts it as that slot's next output.

        logits: [L, V] of any floating dtype, left as they are; rows: [R] int64 on the logits' device, the logits row of each
        sample; slots: [R], each at most once, on the host; first: [R] int64, where the first maximum of each sample's row is,
        or NO_TOKEN, if that is known; what is returned may be that tensor. Does not wait for a GPU.
        """
        if isinstance(slots, Tensor):
            assert slots.device.type == "cpu", "slots must be on the host: reading them from a device would wait for it"
            slots = slots.tolist()
        assert logits.shape[1] == self._vocab_size
        assert logits.dtype.is_floating_point
        assert all(self._params[s] is not None for s in slots), "sampled a free slot"
        assert len(set(slots)) == len(slots), "sampled a slot twice"
        slot_ids = np.asarray(slots, dtype=np.int64)

        greedy = self._temperature[slot_ids] == 0.0
        edited = (self._seen_row[slot_ids] >= 0) | (self._bias_row[slot_ids] >= 0) | self._masked(slot_ids)
        if greedy.all() and not edited.any():
            token_ids = first_or_none(logits).index_select(0, rows) if first is None else first
        else:
            sound = has_first(logits).index_select(0, rows) if first is None else first >= 0
            edits = bool(edited.any())
            x = logits.index_select(0, rows).float() if edits else _rows_of(logits, rows)
            if (
                x.device.type == "cpu" and not sound.all()
            ):  # a GPU computes something of them; nothing here raises there
                x = x.masked_fill(~sound.unsqueeze(1), 0.0)
            if edits:
                self._edit(x, slot_ids)
            token_ids = self._choose(x, slot_ids, greedy).where(sound, NO_TOKEN)
        logprobs, top_ids, top_logprobs = self._raw_logprobs(logits, rows, slot_ids, token_ids)

        self._index[slot_ids] += 1
        at = np.flatnonzero(self._seen_row[slot_ids] >= 0)
        if at.size:
            chosen = token_ids.index_select(0, self._send(at)).clamp_(min=0)
            self._seen.count(self._send(self._seen_row[slot_ids[at]]), chosen)
        asked = tuple(None if k < 0 else k for k in self._logprobs[slot_ids].tolist())
        return Sampled(token_ids, logprobs, top_ids, top_logprobs, asked)

    def _masked(self, slot_ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        masked: NDArray[np.bool_] = (self._mask_row[slot_ids] >= 0) & (
            self._index[slot_ids] < self._min_tokens[slot_ids]
        )
        return masked

    def _edit(self, x: Tensor, slot_ids: NDArray[np.int64]) -> None:
        """Mask, bias and penalties, in place. x: [R, V]."""
        at = np.flatnonzero(self._masked(slot_ids))
        if at.size:
            self._masks.fill(x, self._send(at), self._send(self._mask_row[slot_ids[at]]), -math.inf)
        at = np.flatnonzero(self._bias_row[slot_ids] >= 0)
        if at.size:
            self._biases.add_to(x, self._send(at), self._send(self._bias_row[slot_ids[at]]))
        at = np.flatnonzero(self._seen_row[slot_ids] >= 0)
        if at.size:
            penalties = self._send(self._penalties[slot_ids[at]])
            self._seen.penalize(x, self._send(at), self._send(self._seen_row[slot_ids[at]]), penalties)

    def _choose(self, x: Tensor, slot_ids: NDArray[np.int64], greedy: NDArray[np.bool_]) -> Tensor:
        """Token ids [R] from edited logits x [R, V], each kind of row by its cheapest way."""
        top_k = self._top_k[slot_ids]
        open_ended = np.isfinite(self._top_p[slot_ids]) | (top_k < self._vocab_size)
        if x.device.type == "cpu":  # min_p leaves few tokens mostly, but only a look tells
            open_ended |= np.isfinite(self._log_min_p[slot_ids])
        listed = ~greedy & (top_k <= min(_MANY_CANDIDATES, self._vocab_size - 1))
        sought = ~greedy & ~listed & open_ended
        free = ~greedy & ~listed & ~sought
        token_ids: Tensor | None = None
        for members, choose in (
            (greedy, lambda x, _: first_argmax(x)),
            (listed, self._choose_listed),
            (sought, self._choose_sought),
            (free, self._choose_free),
        ):
            if members.all():
                return choose(x, slot_ids)
            if members.any():
                if token_ids is None:
                    token_ids = torch.empty(x.shape[0], dtype=torch.int64, device=x.device)
                at = np.flatnonzero(members)
                positions = self._send(at)
                token_ids.index_copy_(0, positions, choose(x.index_select(0, positions), slot_ids[at]))
        assert token_ids is not None
        return token_ids

    def _choose_listed(self, x: Tensor, slot_ids: NDArray[np.int64]) -> Tensor:
        """Rows with a top_k: what survives is among the first max(top_k) candidates."""
        limits = self._limits(slot_ids)
        token_ids, _ = _filtered_race(x, int(self._top_k[slot_ids].max()), limits, None)
        return token_ids

    def _choose_sought(self, x: Tensor, slot_ids: NDArray[np.int64]) -> Tensor:
        """Rows whose number of survivors is not known beforehand."""
        limits = self._limits(slot_ids)
        mass, weights = torch.ones_like(limits.top_p), None  # what top_p is a share of
        if np.isfinite(self._top_p[slot_ids]).any():
            scaled = x.double().sub_(x.amax(-1, keepdim=True)).div_(limits.temperature)
            if np.isfinite(self._log_min_p[slot_ids]).any():
                scaled.masked_fill_(scaled < limits.log_min_p, -math.inf)
            weights = scaled.exp_()
            mass = weights.sum(-1, keepdim=True)
        if x.device.type != "cpu":
            return _filtered_race(x, self._vocab_size, limits, mass)[0]
        token_ids = torch.empty(x.shape[0], dtype=torch.int64)
        # A (huge) top_k and its share of the mass are not seen among few candidates.
        huge = torch.from_numpy(self._top_k[slot_ids] < self._vocab_size)
        left = (~huge).nonzero().squeeze(1)
        for candidates in (_FEW_CANDIDATES, _MANY_CANDIDATES):
            if not left.numel():
                break
            count = min(candidates, self._vocab_size)
            chosen, complete = _filtered_race(x[left], count, limits.of(left), mass[left])
            token_ids[left[complete]] = chosen[complete]
            left = left[~complete]
        many = torch.cat([left, huge.nonzero().squeeze(1)])
        if many.numel():
            of_many = None if weights is None else weights[many]
            token_ids[many] = self._choose_among_many(x[many], slot_ids[many.numpy()], of_many)
        return token_ids

    def _choose_among_many(self, x: Tensor, slot_ids: NDArray[np.int64], weights: Tensor | None) -> Tensor:
        """Of rows that keep more than a few candidates. x: [R, V], which is written to; weights: [R, V], if there is a top_p."""
        limits = self._limits(slot_ids)
        scaled = x.double().sub_(x.amax(-1, keepdim=True)).div_(limits.temperature)
        allowed = scaled >= limits.log_min_p
        weights = scaled.exp_() if weights is None else weights
        sorts = np.zeros(len(slot_ids), dtype=bool)
        for row, (top_k, top_p) in enumerate(zip(self._top_k[slot_ids], self._top_p[slot_ids], strict=True)):
            kept = nucleus(x[row].numpy(), weights[row].numpy(), allowed[row].numpy(), int(top_k), float(top_p))
            sorts[row] = kept is None
            if kept is not None:
                x[row].masked_fill_(~torch.from_numpy(kept), -math.inf)
        if not sorts.any():
            return self._choose_free(x, slot_ids)
        token_ids = torch.empty(len(slot_ids), dtype=torch.int64)
        at, others = torch.from_numpy(np.flatnonzero(sorts)), torch.from_numpy(np.flatnonzero(~sorts))
        mass = weights[at].sum(-1, keepdim=True)
        token_ids[at] = _filtered_race(x[at], self._vocab_size, limits.of(at), mass)[0]
        if others.numel():
            token_ids[others] = self._choose_free(x[others], slot_ids[~sorts])
        return token_ids

    def _choose_free(self, x: Tensor, slot_ids: NDArray[np.int64]) -> Tensor:
        """Rows with at most a min_p: every token takes part."""
        limits = self._limits(slot_ids)
        top = x.amax(-1, keepdim=True)
        if np.isfinite(self._log_min_p[slot_ids]).any():
            x = x.masked_fill(x.double().sub_(top).div_(limits.temperature) < limits.log_min_p, -math.inf)
        # A race of exponentials in float32, argmin(noise / probability), names two finalists; float64 decides between
        # them as it does among candidates. Three within float32's error of each other do not happen.
        slowness = (x - top).div_(-limits.temperature.float()).exp_()
        finish = slowness.mul_(approximate_exponentials(limits.keys, self._token_ids)).neg_()
        first = first_argmax(finish).unsqueeze(1)
        second = first_argmax(finish.scatter_(1, first, -math.inf)).unsqueeze(1)
        ids = torch.cat([first, second], dim=1)
        scaled = (x.gather(1, ids).double() - top) / limits.temperature
        score = scaled - exponentials(limits.keys, ids).log_()
        return ids.gather(1, score.argmax(-1, keepdim=True)).squeeze(1)

    def _raw_logprobs(
        self, logits: Tensor, rows: Tensor, slot_ids: NDArray[np.int64], token_ids: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """log_softmax of the untouched logits: [R], [R, K] ids, [R, K]; None where nobody asked."""
        wanted = self._logprobs[slot_ids]
        most = int(wanted.max(initial=-1))
        if most < 0:
            return None, None, None
        at = np.flatnonzero(wanted >= 0)
        positions = self._send(at)
        x = _rows_of(logits, rows.index_select(0, positions))
        top = x.amax(-1, keepdim=True)
        log_total = (x - top).exp_().sum(-1, keepdim=True).log_()

        logprobs = torch.full((len(slot_ids),), math.nan, device=x.device)
        chosen = x.gather(1, token_ids.index_select(0, positions).clamp_(min=0).unsqueeze(1))
        logprobs.index_copy_(0, positions, (chosen - top - log_total).squeeze(1))
        if not most:
            return logprobs, None, None
        values, ids = largest(x, most)
        top_ids = torch.full((len(slot_ids), most), -1, dtype=torch.int64, device=x.device)
        top_logprobs = torch.full((len(slot_ids), most), math.nan, device=x.device)
        top_ids.index_copy_(0, positions, ids)
        top_logprobs.index_copy_(0, positions, values - top - log_total)
        return logprobs, top_ids, top_logprobs

    def _limits(self, slot_ids: NDArray[np.int64]) -> _Limits:
        columns = (self._temperature, self._top_k, self._top_p, self._log_min_p)
        packed = self._send(np.stack([c[slot_ids].astype(np.float64) for c in columns], axis=-1))
        keys = row_keys(self._seed[slot_ids], self._choice[slot_ids], self._index[slot_ids])
        temperature, top_k, top_p, log_min_p = packed.unsqueeze(-1).unbind(1)
        return _Limits(temperature, top_k, top_p, log_min_p, self._send(keys))

    def _send(self, values: NDArray[np.generic]) -> Tensor:
        return upload(torch.from_numpy(values), self._device)


def _rows_of(logits: Tensor, rows: Tensor) -> Tensor:
    """logits[rows] in float32, to be read only. On a CPU looking is free and copying is not: no copy if it is all in order."""
    if logits.device.type == "cpu" and torch.equal(rows, torch.arange(logits.shape[0])):
        return logits.float()
    return logits.index_select(0, rows).float()


@dataclass(frozen=True)
class _Limits:
    """What the rows of a batch filter by, each [R, 1] float64, and their noise keys [R, 2] int32."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor
    keys: Tensor

    def of(self, rows: Tensor) -> _Limits:
        return _Limits(
            self.temperature[rows], self.top_k[rows], self.top_p[rows], self.log_min_p[rows], keys=self.keys[rows]
        )


def _filtered_race(x: Tensor, candidates: int, limits: _Limits, mass: Tensor | None) -> tuple[Tensor, Tensor]:
    """Filters and draws among the first `candidates` tokens of each row.

    x: [R, V] float32; mass: [R, 1] float64, the sum of exp(scaled logit) that top_p is a share of, or None where every
    row's top_k is within the candidates. Returns token ids [R] and, per row, whether no survivor can lie beyond the
    candidates (only then is the token the answer).
    """
    values, ids = largest(x, candidates)
    top = values[:, :1].double()
    scaled = (values.double() - top) / limits.temperature
    rank = torch.arange(candidates, device=x.device)
    keep = (rank < limits.top_k) & (scaled >= limits.log_min_p)
    upto = scaled.exp().masked_fill_(~keep, 0.0).cumsum(-1)
    before = torch.cat([torch.zeros_like(top), upto[:, :-1]], dim=1)
    whole = upto[:, -1:] if mass is None else torch.where(limits.top_k < x.shape[1], upto[:, -1:], mass)
    keep &= before < limits.top_p * whole
    score = (scaled - exponentials(limits.keys, ids).log_()).masked_fill_(~keep, -math.inf)
    complete = ~keep[:, -1] | (limits.top_k.squeeze(1) <= candidates)
    return ids.gather(1, score.argmax(-1, keepdim=True)).squeeze(1), complete
