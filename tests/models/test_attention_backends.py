"""Every attention backend gives what float64 gives, for everything that it says it can do.

On the CPU Triton's kernels run in its interpreter, a program some milliseconds; with `TRITON_INTERPRET=0` all backends run
on a CUDA device, and at larger shapes (see tests/conftest).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import pytest
import torch

from disagg.memory.layout import PageSizing
from disagg.messages.layout import GroupKind, LayerGroup
from disagg.models.attention.backend import Ask, Phase, Scoring
from disagg.models.attention.choice import OFFERS, Offer
from disagg.models.attention.writer import TorchWriter, TritonWriter
from disagg.models.model import HOPPER
from disagg.models.pool import AttentionPages
from tests.models.attention_work import batch_of, decode_work, expected, prefill_work, run_with_pages, shuffled
from tests.models.pools import make_pool

ON_GPU = os.environ["TRITON_INTERPRET"] == "0"
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
LAYER_IN_GROUP = 1
NEEDS_GPU = {"cudnn", "hopper"}
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # of ‖out - expected‖ / ‖expected‖


@dataclass(frozen=True)
class Case:
    """runs: (tokens computed, tokens of the run), prefill or decode alike. Named by how it differs from the usual."""

    runs: tuple[tuple[int, int], ...] = ((0, 9), (40, 6), (21, 17), (0, 1))
    decodes: tuple[int, ...] = (1, 30, 7, 90, 16)
    kv_heads: int = 2
    per_kv_head: int = 3
    head_dim: int = 16
    page_tokens: int = 4
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    dtype: torch.dtype = torch.float32


CASES = {
    "usual": Case(),
    "page of 16": Case(page_tokens=16),
    "page of 128": Case(page_tokens=128, decodes=(1, 300, 129), runs=((0, 130), (200, 70)), kv_heads=1),
    "one head each": Case(per_kv_head=1, kv_heads=3),
    "eight heads each": Case(per_kv_head=8, kv_heads=1),
    "more heads than a matrix product has rows": Case(per_kv_head=71, kv_heads=1, decodes=(20, 5), runs=((3, 4),)),
    "64 dims": Case(head_dim=64, kv_heads=1),
    "80 dims": Case(head_dim=80, kv_heads=1),
    "96 dims": Case(head_dim=96, kv_heads=1),
    "128 dims": Case(head_dim=128, kv_heads=1, per_kv_head=2),
    "256 dims": Case(head_dim=256, kv_heads=1, per_kv_head=2, decodes=(70, 3), runs=((9, 20),)),
    "window of one": Case(window=1),
    "window": Case(window=8),
    "window over pages": Case(window=21, page_tokens=16),
    "window that nothing outgrows": Case(window=100),
    "softcap": Case(softcap=2.0),
    "sinks": Case(sinks=True),
    "softcap, sinks and window": Case(softcap=2.0, sinks=True, window=13),
    "bfloat16": Case(dtype=torch.bfloat16, head_dim=64),
    "bfloat16 with all": Case(dtype=torch.bfloat16, softcap=2.0, sinks=True, window=13),
    "float16": Case(dtype=torch.float16, head_dim=64),
}
_LONG = Case(
    runs=((0, 1500), (2000, 1100), (77, 513), (3000, 1), (0, 5)),
    decodes=(1, 4000, 16, 33, 2000, 999, 128, 129),
    kv_heads=8,
    per_kv_head=4,
    head_dim=128,
    page_tokens=16,
    dtype=torch.bfloat16,
)
GPU_CASES = {
    "llama": _LONG,
    "llama in pages of 128": replace(_LONG, page_tokens=128),
    "llama in pages of 64": replace(_LONG, page_tokens=64),
    "llama of 64 dims in pages of 64": replace(_LONG, page_tokens=64, head_dim=64),
    "llama in float16": replace(_LONG, dtype=torch.float16),
    "llama in float32": replace(_LONG, dtype=torch.float32),
    "gemma": replace(_LONG, head_dim=256, kv_heads=4, per_kv_head=2, window=512, softcap=50.0),
    "gemma in float32": replace(_LONG, head_dim=256, kv_heads=4, per_kv_head=2, window=512, dtype=torch.float32),
    "gpt-oss": replace(_LONG, head_dim=64, per_kv_head=8, window=128, sinks=True),
    "phi": replace(_LONG, head_dim=96, per_kv_head=1, kv_heads=32, window=2047),
    "80 dims, long": replace(_LONG, head_dim=80, per_kv_head=1, kv_heads=32),
    "one KV head": replace(_LONG, kv_heads=1, per_kv_head=71, head_dim=64),
    "many short sequences": replace(_LONG, decodes=tuple(range(1, 300, 2)), runs=((0, 30),) * 40),
}
BATCHES = {**CASES, **(GPU_CASES if ON_GPU else {})}


def offers() -> list[object]:
    return [
        pytest.param(offer, id=f"{offer.name}-{offer.capabilities.phase}")
        for offer in OFFERS
        if ON_GPU or offer.name not in NEEDS_GPU
    ]


def view_of(case: Case, num_pages: int) -> AttentionPages:
    """Pages that are further apart than they are long, full of NaN."""
    kind = GroupKind.FULL if case.window is None else GroupKind.WINDOW
    dtype = str(case.dtype).removeprefix("torch.")
    group = LayerGroup("seen", (0, 1), case.kv_heads, case.head_dim, dtype, kind, case.window or 0)
    other = LayerGroup("other", (2, 3, 4), case.kv_heads, case.head_dim, dtype)
    pool = make_pool((group, other), num_pages, case.page_tokens, PageSizing.MAX, DEVICE)
    view = pool.attention(0)
    view.kv.fill_(torch.nan)
    return view


def scoring_of(case: Case, query_heads: int) -> Scoring:
    sinks = torch.linspace(-1, 2, query_heads, device=DEVICE).to(case.dtype) if case.sinks else None
    return Scoring(case.head_dim**-0.5, case.softcap, sinks)


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("offer", offers())
def test_a_backend_gives_what_float64_gives(offer: Offer, name: str) -> None:
    case = BATCHES[name]
    phase = offer.capabilities.phase
    ask = Ask(
        phase,
        DEVICE.type,
        case.dtype,
        case.head_dim,
        case.window is not None,
        case.softcap is not None,
        case.sinks,
        hopper=ON_GPU and torch.cuda.get_device_capability()[0] == HOPPER,
    )
    if lacks := replace(offer.capabilities, devices=frozenset({DEVICE.type})).lacks(ask):
        pytest.skip(f"it says it has no {lacks}")
    if offer.name == "triton" and not ON_GPU and case.dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies bfloat16 as if they were integers")
    work = [(length - 1, 1) for length in case.decodes if length > 1] if phase is Phase.DECODE else case.runs
    assert_right(offer, case, [run for run in work if (run[1] == 1 and run[0] > 0) == (phase is Phase.DECODE)])


def assert_right(offer: Offer, case: Case, work: list[tuple[int, int]], view: AttentionPages | None = None) -> None:
    """Also that a backend writes all rows of its phase and no others, and reads nothing that a row does not see."""
    num_pages = sum(-(-(computed + count) // case.page_tokens) for computed, count in work) + 8
    free = shuffled(num_pages)
    if view is None:
        view = view_of(case, num_pages)
    else:
        free = [view.num_pages - 1 - page for page in free]
    runs = [run_with_pages(computed, count, case.page_tokens, free, case.window) for computed, count in work]
    # Rows of the other phase, which are not this backend's to write.
    other = run_with_pages(5, 1, case.page_tokens, free) if offer.capabilities.phase is Phase.PREFILL else None
    other = other or run_with_pages(0, 3, case.page_tokens, free)
    batch, tables, ordered = batch_of([*runs, other], view)
    generator = torch.Generator(DEVICE).manual_seed(0)
    query_heads = case.kv_heads * case.per_kv_head
    for run in ordered:  # what the pages hold: up to each run's end and no further, if no more may be read
        for position, page in enumerate(run.sequence.tables[0]):
            places = run.start + run.num_tokens - position * case.page_tokens
            if page < view.num_pages:
                unit = view.kv[page, LAYER_IN_GROUP, :, :, : None if offer.capabilities.whole_pages else places]
                unit.copy_(torch.randn(unit.shape, generator=generator, device=DEVICE))

    def rows(heads: int) -> torch.Tensor:
        """[heads, N, D], of memory that has rows outside heads, as projections give it."""
        shape = (batch.num_rows, heads, case.head_dim)
        return torch.randn(shape, generator=generator, device=DEVICE).to(case.dtype).transpose(0, 1)

    query, key, value = rows(query_heads), rows(case.kv_heads), rows(case.kv_heads)
    row_index = view.row_index(tables.write_pages, batch.write_offsets)
    view.write(LAYER_IN_GROUP, row_index, key, value)
    plan = offer.make().plan(
        prefill_work(batch, tables, view)
        if offer.capabilities.phase is Phase.PREFILL
        else decode_work(batch, tables, view)
    )
    scoring = scoring_of(case, query_heads)
    out = torch.full((batch.num_rows, query_heads, case.head_dim), torch.nan, dtype=case.dtype, device=DEVICE)
    for _ in range(2):  # a second layer finds what the first one left in scratch
        plan.run(LAYER_IN_GROUP, query, key, value, scoring, out)
    right = expected(view, LAYER_IN_GROUP, ordered, query, case.window, scoring)
    start = 0
    for run in ordered:
        some = slice(start, start := start + run.num_tokens)
        got = out[some].double().cpu()
        if run.sequence is other.sequence:
            assert got.isnan().all(), "a row of the other phase was written"
            continue
        error = ((got - right[some]).norm() / right[some].norm()).item()
        assert error < TOLERANCE[case.dtype], f"{run.num_tokens} tokens after {run.start} are off by {error:.1e}"


@pytest.mark.parametrize("offer", offers())
def test_pages_lie_anywhere_in_a_pool_larger_than_32_bits_count(offer: Offer) -> None:
    """The memory is asked for, but never touched where no page of the test is."""
    dims = max(16, offer.capabilities.head_dims[0])
    case = Case(page_tokens=16, head_dim=dims, dtype=torch.float16, runs=((0, 9), (20, 6)), decodes=(40, 7))
    group = LayerGroup("seen", (0, 1), case.kv_heads, case.head_dim, "float16")
    stride = 1 << 20
    pages = (5 << 30) // stride  # 2.5 * 2^30 elements
    view = AttentionPages(
        group, torch.empty(pages * stride, dtype=torch.uint8, device=DEVICE), stride, case.page_tokens
    )
    work = list(case.runs) if offer.capabilities.phase is Phase.PREFILL else [(n - 1, 1) for n in case.decodes]
    assert_right(offer, case, work, view)


@pytest.mark.parametrize("name", ["usual", "80 dims", "page of 128", "one head each", "float16"])
def test_new_rows_are_written_to_their_slots_and_nowhere_else(name: str) -> None:
    case = CASES[name]
    plain, written = view_of(case, 20), view_of(case, 20)
    for view in (plain, written):
        view.elements.zero_()
    generator = torch.Generator(DEVICE).manual_seed(0)
    rows = 2 * case.page_tokens
    shape = (2, rows, case.kv_heads, case.head_dim)
    key, value = torch.randn(shape, generator=generator, device=DEVICE).to(case.dtype).transpose(1, 2)
    pages = torch.tensor([17, 3], device=DEVICE).repeat_interleave(case.page_tokens)
    offsets = torch.arange(rows, device=DEVICE) % case.page_tokens
    TorchWriter(plain, pages[1:], offsets[1:]).write(LAYER_IN_GROUP, key[:, 1:], value[:, 1:])
    pages[0] = -1  # a row of no sequence
    TritonWriter(written, pages, offsets).write(LAYER_IN_GROUP, key, value)
    assert torch.equal(written.elements, plain.elements)
    assert written.elements.count_nonzero() > 0


@pytest.mark.parametrize(
    "offer",
    [offer for offer in OFFERS if offer.capabilities.captured and offer.capabilities.phase is Phase.DECODE],
)
def test_a_row_of_no_sequence_reads_nothing_and_gives_zeros(offer: Offer) -> None:
    """As the rows have that fill a captured batch up."""
    case = CASES["usual"]
    view = view_of(case, 8)
    batch, tables, _ = batch_of([run_with_pages(5, 1, case.page_tokens, shuffled(8)) for _ in range(2)], view)
    work = decode_work(batch, tables, view)
    work.batch.lengths.zero_()
    shape = (case.kv_heads * case.per_kv_head, 2, case.head_dim)
    query = torch.randn(shape, device=DEVICE).to(case.dtype)
    out = torch.full((2, shape[0], case.head_dim), torch.nan, dtype=case.dtype, device=DEVICE)
    offer.make().plan(work).run(LAYER_IN_GROUP, query, query, query, scoring_of(case, shape[0]), out)
    assert torch.equal(out, torch.zeros_like(out))
