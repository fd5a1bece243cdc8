"""Runs the largest step that can come, to learn how much memory steps take beside weights and pool.

Knows models, pools and samplers; nothing of plans. What the step computes is of no use to anyone: all pages of all
sequences are one page, whose content is garbage.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from disagg.messages.sequence_diff import KnownSequence, RunView, page_table
from disagg.models.attention.backend import PREPARING
from disagg.models.captures import NO_CAPTURES, Captures, kinds
from disagg.models.graphs import Capturable
from disagg.models.model import PagedModel
from disagg.models.pool import Pool
from disagg.types.arithmetic import ceil_div, round_up
from disagg.types.errors import ConfigError
from disagg.types.sampling import MAX_LOGPROBS, SamplingParams
from disagg.worker.batch import build_batch
from disagg.worker.sampler import Sampled, Sampler

PAGE_TOKENS = 16
FEW_TOKENS = 32  # of a step that other kernels compute: what is compiled now, no request waits for

# CUDA's context and NCCL's buffers take less on every GPU and driver so far. What is in use beyond that, and is not torch's
# here, belongs to other processes, which have a share of the GPU of their own.
MOST_BESIDE_TORCH = 2 << 30
MOST_OF_GRAPHS_BESIDE_TORCH = 1 << 30  # the same of what the driver keeps for the first graph of a kind and its kernels
MOST_OF_A_GRAPH_BESIDE_TORCH = 32 << 20  # and for each other one

# What takes the sampler most: every edit and every filter.
_SAMPLING = SamplingParams(
    max_tokens=2,
    min_tokens=1,
    temperature=1.0,
    top_k=40,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias=((0, 1.0),),
    stop_token_ids=(1,),
    logprobs=MAX_LOGPROBS,
)


@torch.inference_mode()
def measure_largest_step(
    model: PagedModel, chunk_tokens: int, max_slots: int, captures: Captures = NO_CAPTURES
) -> tuple[int, int]:
    """(bytes of the device, most bytes that this process had in use on it); (0, 0) on CPU, which is not measured.

    captures: with what these graphs hold. Raises ConfigError if the device has not enough for the step.
    """
    device = model.device
    if device.type != "cuda":
        return 0, 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    try:
        largest_step(model, FEW_TOKENS, 1)
        preparing = PREPARING.set(True)
        try:
            largest_step(model, chunk_tokens, max_slots)
        finally:
            PREPARING.reset(preparing)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"a step of {chunk_tokens} tokens of a prompt and of {max_slots} sequences does not fit on {device}, at the "
            f"model's limit of {model.max_model_len} tokens: {error}"
        ) from error
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats(device)
    torch.cuda.empty_cache()
    beside_torch = total - free - stats["reserved_bytes.all.current"]
    captured_bytes = _captured_bytes(model, max_slots, captures)
    return total, own_peak_bytes(stats["reserved_bytes.all.peak"], beside_torch) + captured_bytes


def _captured_bytes(model: PagedModel, max_slots: int, captures: Captures) -> int:
    """What graphs will hold, with their inputs. All are captured when the pool is there; here the two largest of each kind."""
    tokens = torch.zeros(max_slots, dtype=torch.int64, device=model.device)
    return sum(
        _bytes_of(kind.make, model.device) for kind in kinds(model, _scratch_pool(model), max_slots, tokens, captures)
    )


def _bytes_of(make: Callable[[], Capturable], device: torch.device) -> int:
    """Each of the others is taken to hold what the second largest does beside the largest. 0 of what cannot be captured."""
    made: list[Capturable] = []

    def capture_largest() -> None:
        made.append(make())
        made[0].capture(made[0].variants[-1:])

    try:
        held = _growth(capture_largest, device, MOST_OF_GRAPHS_BESIDE_TORCH)
        rest = made[0].variants[:-1]
        if rest:
            held += len(rest) * _growth(lambda: made[0].capture(rest[-1:]), device, MOST_OF_A_GRAPH_BESIDE_TORCH)
    except RuntimeError:  # whoever captures all of them says so
        torch.cuda.synchronize()
        return 0
    return held


def _growth(work: Callable[[], None], device: torch.device, most_beside_torch: int) -> int:
    """By how many bytes more is in use after it."""
    torch.cuda.empty_cache()
    free_before, torch_before = torch.cuda.mem_get_info(device)[0], torch.cuda.memory_reserved(device)
    work()
    torch.cuda.empty_cache()
    free_after, torch_after = torch.cuda.mem_get_info(device)[0], torch.cuda.memory_reserved(device)
    return own_captured_bytes(torch_after - torch_before, free_before - free_after, most_beside_torch)


def own_captured_bytes(
    torch_bytes: int, device_bytes: int, most_beside_torch: int = MOST_OF_GRAPHS_BESIDE_TORCH
) -> int:
    """What graphs hold, of what more is in use since they were captured: by torch here, and on the device by whomever.

    Another process may make its pool, or end, in that very second.
    """
    beside_torch = min(max(0, device_bytes - torch_bytes), most_beside_torch)
    return max(0, torch_bytes) + beside_torch


def own_peak_bytes(torch_peak_bytes: int, beside_torch_bytes: int) -> int:
    """Most that this process had in use. beside_torch_bytes: in use on the device and not by torch here, by whomever."""
    return torch_peak_bytes + min(beside_torch_bytes, MOST_BESIDE_TORCH)


def largest_step(model: PagedModel, chunk_tokens: int, max_slots: int) -> Sampled | None:
    """The last chunk of the longest prompt, and a token for each of as many of the longest sequences as there are slots.

    All ranks run it at once; None on those that do not sample.
    """
    longest = model.max_model_len
    chunk_tokens = min(chunk_tokens, longest)
    device = str(model.device)
    pool = _scratch_pool(model)
    tables = [
        page_table([group]) * (1 if spec.is_state else ceil_div(longest, PAGE_TOKENS))
        for group, spec in enumerate(model.groups)
    ]
    sequence = KnownSequence(0, [0] * longest, longest, longest, tables, _SAMPLING, ())
    last_pages = tuple(range(len(model.groups)))
    prefill = RunView(sequence, longest - chunk_tokens, chunk_tokens, False, last_pages)
    decode = RunView(sequence, longest - 1, 1, True, last_pages)
    batch, _ = build_batch([prefill] + [decode] * max_slots, model.groups, PAGE_TOKENS)
    batch = batch.on(model.device)
    hidden = model.blank_hidden(batch.num_rows)
    if not model.links.is_last:
        batch = replace(batch, logits_rows=batch.logits_rows[:0])
    logits = model.forward(batch, pool, hidden=hidden)
    if not model.samples:
        return None
    sampler = Sampler(model.vocab_size, max_slots, device)
    for slot in range(max_slots):
        sampler.add(slot, _SAMPLING, 0, (0,), (), model.eos_token_ids)
    return sampler.sample(logits, torch.arange(max_slots, device=model.device), list(range(max_slots)))


def _scratch_pool(model: PagedModel) -> Pool:
    """One page per group: group g's is its page g."""
    align_bytes = math.lcm(*(group.align_bytes(PAGE_TOKENS) for group in model.groups))
    large_bytes = round_up(max(group.page_bytes(PAGE_TOKENS) for group in model.groups), align_bytes)
    num_groups = len(model.groups)
    return model.make_pool(num_groups, large_bytes, (large_bytes,) * num_groups, PAGE_TOKENS)
