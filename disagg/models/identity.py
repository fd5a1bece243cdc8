"""Which model a worker has loaded: a hash over every byte of every weight in memory, as it was loaded.

Not over a path, which may name other files a moment later. Equal checkpoints, loaded in one dtype, have equal hashes on every
host, device and rank: a rank hashes the whole model before it is cut. What torch computes by itself (rotary frequencies) is
not part of it, since it differs between CPUs in the last bit; what it is computed from, config.json, is.

    SHA-256 over  config.json's hash, the ids that end a text,
                  and of every tensor, by name: dtype, shape, SHA-256 of each segment of its bytes

Every bit counts, so nothing that differs passes. It costs 0.6 to 1 s per GB and thread, threads side by side: 17 GB take 1.9 s
with `MOST_THREADS` on the host of an H200. Knows modules and files' stamps; nothing of servers.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from disagg.convert.safetensors_file import find_weight_files
from disagg.types.errors import ConfigError

SEGMENT_BYTES = 16 << 20  # what one thread hashes at a time; part of the hash
MOST_THREADS = 8
STAMPED = (".json", ".jinja", ".safetensors")

Stamps = frozenset[tuple[str, int, int, int, int, int]]


def stamps(model_dir: Path) -> Stamps:
    """What tells whether a file was written or replaced: of every file that a model may be loaded from.

    Equal before and after a load, they say that all of it came from one version of each file. Empty where there is no
    directory any more.
    """
    found = set()
    try:
        with os.scandir(model_dir) as entries:
            paths = {Path(entry.path) for entry in entries if entry.name.endswith(STAMPED)}
        paths |= set(find_weight_files(model_dir))
    except (OSError, ConfigError):
        return frozenset()
    for path in paths:
        try:
            stat = path.stat()
        except OSError:
            continue
        found.add((path.name, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
    return frozenset(found)


@torch.no_grad()
def detach_from_files(module: torch.nn.Module) -> None:
    """Gives every parameter and buffer on the CPU memory of its own.

    As safetensors loads them they are views of a mapped file, so that what is written into the file later is computed with,
    and a file that gets shorter kills the process. Costs the weights' bytes per rank, which before were the page cache's.
    """
    copies: dict[tuple[int, torch.Size, tuple[int, ...], torch.dtype], torch.Tensor] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device.type != "cpu" or not tensor.numel():
            continue
        where = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if where not in copies:
            copies[where] = tensor.detach().clone()
        tensor.data = copies[where]


def weights_hash(module: torch.nn.Module, config_digest: str, eos_token_ids: Sequence[int], threads: int) -> str:
    """64 hexadecimal digits. module: whole, on the CPU. threads: that hash side by side."""
    named = sorted((name, each) for name, each in module.state_dict().items() if isinstance(each, torch.Tensor))
    digest = hashlib.sha256(f"1 {config_digest} {tuple(eos_token_ids)}".encode())
    with ThreadPoolExecutor(max(1, threads)) as pool:
        hashes = iter(
            list(pool.map(_hash_segment, (part for _, tensor in _distinct(named) for part in _segments(tensor))))
        )
    known: dict[tuple[object, ...], bytes] = {}
    for _, tensor in _distinct(named):
        known[_place(tensor)] = b"".join(next(hashes) for _ in _segments(tensor))
    for name, tensor in named:
        digest.update(f"{len(name)} {name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(known[_place(tensor)])
    return digest.hexdigest()


def hash_threads(num_ranks: int) -> int:
    """As many as this process may use, shared with the other ranks."""
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // num_ranks))


def _distinct(named: Sequence[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tied weights once."""
    seen = set()
    for name, tensor in named:
        if _place(tensor) not in seen:
            seen.add(_place(tensor))
            yield name, tensor


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)


def _segments(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Its bytes in order, SEGMENT_BYTES at a time."""
    yield from torch.split(tensor.detach().contiguous().reshape(-1).view(torch.uint8), SEGMENT_BYTES)


def _hash_segment(part: torch.Tensor) -> bytes:
    return hashlib.sha256(part.numpy().data).digest()  # lets go of the interpreter meanwhile
