"""Where workers compute: on this machine's GPUs or its CPU, and what follows from that. Asks the driver; loads no torch."""

from __future__ import annotations

import ctypes
import importlib.metadata
from typing import Literal

from disagg.config.staging import Device

UCX_TLS_ON_CPU = "posix,cma,tcp"
UCX_NET_DEVICES_ON_CPU = "lo"

_SUCCESS = 0


def choose_device(wanted: Literal["auto", "cpu", "cuda"]) -> Device:
    """auto: the GPUs, if there are any and the installed torch can compute on them."""
    if wanted != "auto":
        return wanted
    return "cuda" if _torch_has_cuda() and count_gpus() else "cpu"


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
