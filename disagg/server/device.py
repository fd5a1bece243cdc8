"""Where workers compute: on this machine's GPUs or its CPU, and what follows from that. Asks the driver; loads no torch."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
from pathlib import Path
from typing import Literal

from disagg.config.sizes import show_bytes
from disagg.config.staging import Device
from disagg.convert.inspect import ModelFacts
from disagg.messages.layout import DTYPE_BYTES
from disagg.types.errors import ConfigError

UCX_TLS_ON_CPU = "posix,cma,tcp"

_SUCCESS = 0


def choose_device(wanted: Literal["auto", "cpu", "cuda"]) -> Device:
    """auto: the GPUs, if there are any and the installed torch can compute on them."""
    if wanted != "auto":
        return wanted
    return "cuda" if _torch_has_cuda() and count_gpus() else "cpu"


def choose_dtype(wanted: str, device: Device, checkpoint: str) -> str:
    """auto: float32 on a CPU, the checkpoint's own on a GPU."""
    if wanted != "auto":
        return wanted
    return "float32" if device == "cpu" else checkpoint


def count_gpus() -> int:
    """How many GPUs CUDA shows to this process and its children; 0 without a driver. Honours CUDA_VISIBLE_DEVICES."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != _SUCCESS or driver.cuDeviceGetCount(ctypes.byref(count)) != _SUCCESS:
        return 0
    return count.value


def memory_bytes() -> int:
    """Of this machine with its swap space, or less where this process' control group has a limit; 0 where that is not known."""
    found = []
    with contextlib.suppress(OSError, ValueError, KeyError):
        rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        found.append(sum(int(rows[name].split()[0]) * 1024 for name in ("MemTotal", "SwapTotal")))
    with contextlib.suppress(OSError, ValueError):
        # Version 2 only. Within a container the path is often not ours to see; then its root is the container's.
        path = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip().lstrip("/")
        for group in (Path("/sys/fs/cgroup") / path, *(Path("/sys/fs/cgroup") / path).parents):
            with contextlib.suppress(OSError, ValueError):
                found.append(int((group / "memory.max").read_text()))  # "max" where there is none
            if group == Path("/sys/fs/cgroup"):
                break
    return min(found, default=0)


def ucx_choice(setting: str, device: Device, on_cpu: str) -> str:
    """What UCX is told; empty: nothing, it chooses. Among GPUs it knows best, and on a CPU it looks at every network."""
    if setting != "auto":
        return setting
    return on_cpu if device == "cpu" else ""


def _torch_has_cuda() -> bool:
    """By its version, in which builds for the CPU alone say so ("2.11.0+cpu"); others are taken to have it."""
    try:
        return "cpu" not in importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False


def check_weights(facts: ModelFacts, dtype: str, machine_bytes: int) -> None:
    """Raises ConfigError for weights that a CPU's memory cannot hold; machine_bytes 0: it is not known."""
    needed = facts.num_parameters * DTYPE_BYTES.get(dtype, 1)
    if machine_bytes and needed > machine_bytes:
        raise ConfigError(
            f"the model's {facts.num_parameters} weights take {show_bytes(needed)} in {dtype}: more than this machine has, "
            f"{show_bytes(machine_bytes)}"
        )
