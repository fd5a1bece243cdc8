"""Launches kernels through Triton with a driver that only notes what it is told: `python -m tests.staging.recorded_launches`.

Prints, as JSON, for kernels whose launches overlap and for those whose launches do not:

    pairs   what a call of a kernel and what the same launch, bound, gave the driver
    steps   in what order each kernel waits for other launches, lets the next one begin, and goes to memory

Kernels are compiled for a GPU that need not be there, so this must run where TRITON_INTERPRET is not 1.
"""

from __future__ import annotations

import json
import re
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from disagg.messages.pieces import HeadSlice, Piece
from disagg.staging import kernels
from disagg.staging.kernels import SUMS, Launcher, launch_of
from disagg.staging.rows import PagedRows, PageShape

STREAM = 7
STEPS = re.compile(r"griddepcontrol\.(wait|launch_dependents)|\b(ld|st|atom)\.(?:relaxed\.\w+\.)?global")

told: list[list[Any]] = []


class NotingLauncher:
    """Stands for `CudaLauncher`, whose signature it has."""

    def __init__(self, src: Any, metadata: Any) -> None:
        self._name = metadata.name
        self._overlaps = metadata.launch_pdl

    def __call__(self, *arguments: Any) -> None:
        grid, stream, function, values = arguments[:3], arguments[3], arguments[4], arguments[9:]
        addresses = [value.data_ptr() if hasattr(value, "data_ptr") else value for value in values]
        told.append([self._name, self._overlaps, *grid, stream, function, *addresses])


class Utils:
    def load_binary(self, *_: Any) -> tuple[int, int, int, int, int]:
        """(module, function, registers, spills, threads of a program)."""
        return 1, 2, 32, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 1 << 16}


class Driver:
    launcher_cls = NotingLauncher
    utils = Utils()

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return STREAM


def launches(overlap: bool) -> dict[str, Any]:
    """Pairs and steps."""
    kernels._overlaps = lambda device: overlap  # type: ignore[assignment]
    sums, verdict = torch.zeros(SUMS, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    launcher = Launcher(STREAM)
    pairs, steps = [], []
    for row_bytes in (16, 12):  # of one kernel's rows, and of the other's
        shape = PageShape(3, 2, 4, row_bytes, 1)
        pool = torch.zeros((5, shape.nbytes), dtype=torch.uint8)
        for piece, of_scatter in (
            (Piece(0, 0, 3, 5, 18), None),
            (Piece(0, 1, 2, 8, 11), None),
            (Piece(0, 0, 2, 4, 9), verdict),
        ):
            heads = HeadSlice(0, 0, 1, 1, 1)
            rows = PagedRows(pool, torch.tensor([3, 1, 4, 0]), shape, piece, heads, seed=(1 << 63) + 5, first_page=1)
            staging = torch.zeros(rows.staged_bytes, dtype=torch.uint8)
            launch = launch_of(rows, staging, sums, of_scatter)
            launch()
            bound = launcher.bind(launch_of(rows, torch.zeros_like(staging), sums, of_scatter))
            bound(staging, launch.tensors["verdict"], True)
            pairs.append(told[-2:])
            ptx = launcher.compiled(launch).asm["ptx"]
            steps.append([found[1] or found[2] for found in STEPS.finditer(ptx)])
    return {"pairs": pairs, "steps": steps}


def main() -> None:
    driver.set_active(Driver())
    print(json.dumps({"overlapping": launches(True), "apart": launches(False)}))


if __name__ == "__main__":
    main()
