"""Products of few rows, each kernel alone: `python -m bench.products`.

Of Llama-3.1-8B's shapes in bfloat16: microseconds of torch's product (and the pass behind it that a kernel here has in it),
and of kernels of models/products in several tiles, those that models/products/choice takes first. Weights are read from
memory: so many of them in turn that no cache holds them. Floors are bytes over the rate of a copy.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from disagg.bench.engine.ceilings import graph_seconds, measure_ceilings
from disagg.models.fused import kernels as fused
from disagg.models.overlap import overlap
from disagg.models.products.choice import FewRows, OneRow, few_rows, one_row
from disagg.models.products.launch import SILU, Norm, Scaled, launch_few, launch_one

CACHE_BYTES = 700_000_000  # more than a cache holds
COMPILERS = 14


class Product(Struct, frozen=True):
    """columns: of the result; gated: of a weight twice as wide. in_parts: whoever takes it adds partial sums up."""

    name: str
    columns: int
    depth: int
    gated: bool = False
    in_parts: bool = False

    def of_rank(self, ranks: int) -> Product:
        """What one of several ranks has of it."""
        if self.in_parts:
            return replace(self, depth=self.depth // ranks)
        return replace(self, columns=self.columns // ranks)

    @property
    def weight_shape(self) -> tuple[int, int]:
        return self.columns * (2 if self.gated else 1), self.depth


PRODUCTS = (
    Product("qkv", 6144, 4096),
    Product("output", 4096, 4096, in_parts=True),
    Product("gate-up", 14336, 4096, gated=True),
    Product("down", 4096, 14336, in_parts=True),
)
FEW = {
    32: ((64, 128, 4, 4), (64, 64, 4, 6), (32, 128, 4, 5), (32, 256, 4, 3), (32, 128, 2, 4), (16, 256, 2, 4)),
    128: ((64, 64, 4, 5), (64, 64, 4, 4), (64, 128, 4, 3), (128, 64, 8, 4), (32, 128, 4, 3), (32, 64, 4, 5)),
}  # block_n, block_k, warps, stages
ONE = (OneRow(4, 2048, 8, 2), OneRow(4, 1024, 4, 4), OneRow(8, 1024, 4, 4), OneRow(4, 512, 2, 4), OneRow(2, 2048, 4, 2))


def few_candidates(product: Product, rows: int) -> list[FewRows]:
    """What is chosen comes first."""
    chosen = few_rows(rows, product.columns, product.depth, gated=product.gated, in_parts=product.in_parts)
    found = [] if chosen is None else [chosen]
    padded = max(16, 1 << (rows - 1).bit_length())
    for block_n, block_k, warps, stages in FEW[32 if rows <= 32 else 128]:
        for parts in (2, 4) if product.in_parts else (1,):
            how = FewRows(padded, block_n, block_k, parts, warps, stages)
            shared = (block_n * (2 if product.gated else 1) + padded) * block_k * 2 * stages
            if how not in found and shared <= 227 * 1024 and product.depth % (block_k * parts) == 0:
                found.append(how)
    return found


def one_candidates(product: Product) -> list[OneRow]:
    chosen = one_row(product.columns, product.depth, gated=product.gated)
    return [chosen, *(how for how in ONE if how != chosen)]


class Work:
    """One product's tensors."""

    def __init__(self, product: Product, rows: int, copies: int) -> None:
        self.product, self.rows = product, rows
        self.x = torch.randn(rows, product.depth, device="cuda", dtype=torch.bfloat16)
        self.weights = [
            torch.randn(*product.weight_shape, device="cuda", dtype=torch.bfloat16) / 64 for _ in range(copies)
        ]
        self._norm = Norm(torch.ones(product.columns, device="cuda", dtype=torch.bfloat16), 1e-5, False)
        self._squares = torch.ones(1024, device="cuda")
        self._residual = torch.randn(1, product.columns, device="cuda", dtype=torch.bfloat16)

    def library(self, weight: Tensor) -> Tensor:
        """Without the norm before it and the sum behind it."""
        both = torch.mm(self.x, weight.t())
        if not self.product.gated:
            return both
        out = torch.empty(self.rows, self.product.columns, device="cuda", dtype=both.dtype)
        grid = (self.rows, -(-self.product.columns // 1024))
        fused._gate[grid](
            both, out, SIZE=self.product.columns, BLOCK=1024, TANH=False, num_warps=4, **overlap(both.device)
        )
        return out

    def few(self, how: FewRows) -> Callable[[Tensor], object]:
        gate = SILU if self.product.gated else 0
        return lambda weight: launch_few(how, self.x, weight, None, gate)

    def one(self, how: OneRow) -> Callable[[Tensor], object]:
        """With the halves of norms, the gate and the residual that it has in a layer."""
        if self.product.in_parts:
            return lambda weight: launch_one(how, self.x, weight, residual=self._residual, norm=self._norm)
        gate = SILU if self.product.gated else 0
        normed = Scaled(self.x, self.x, self._squares, 1e-5)
        return lambda weight: launch_one(how, normed, weight, gate=gate)

    def microseconds(self, run: Callable[[Tensor], object]) -> float:
        def all_of_them() -> None:
            for weight in self.weights:
                run(weight)

        return graph_seconds(all_of_them) / len(self.weights) * 1e6


def compile_one(job: tuple[Product, int, FewRows | OneRow]) -> None:
    """In a process of its own: the compiled kernel is found in Triton's cache afterwards."""
    product, rows, how = job
    work = Work(product, rows, 1)
    run = work.one(how) if isinstance(how, OneRow) else work.few(how)
    run(work.weights[0])


def candidates(product: Product, rows: int) -> list[FewRows] | list[OneRow]:
    return one_candidates(product) if rows == 1 else few_candidates(product, rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32, 64, 128])
    parser.add_argument("--ranks", type=int, default=1, help="shapes of one of so many")
    arguments = parser.parse_args()
    products = [product.of_rank(arguments.ranks) for product in PRODUCTS]
    jobs = [
        (product, rows, how) for rows in arguments.rows for product in products for how in candidates(product, rows)
    ]
    with ProcessPoolExecutor(COMPILERS, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_one, jobs))
    ceilings = measure_ceilings()
    print(f"{torch.cuda.get_device_name()}: {ceilings.describe()}", flush=True)
    for rows in arguments.rows:
        for product in products:
            columns, depth = product.weight_shape
            moved = 2 * (columns * depth + rows * (depth + product.columns))
            work = Work(product, rows, max(2, CACHE_BYTES // (2 * columns * depth)))
            floor_us = moved / ceilings.copy * 1e6
            library_us = work.microseconds(work.library)
            print(f"{rows:4d} {product.name:8s} floor {floor_us:6.1f} us; torch {library_us:6.1f}", end="")
            for how in candidates(product, rows):
                run = work.one(how) if isinstance(how, OneRow) else work.few(how)
                tiles = ",".join(str(getattr(how, name)) for name in how.__slots__)
                print(f"; {tiles} {work.microseconds(run):6.1f}", end="", flush=True)
            print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
