from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.worker.sampler_order import first_argmax, largest

torch.set_num_threads(1)


def logits(rows: int, width: int, kind: str, seed: int) -> torch.Tensor:
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 3
    if kind == "bf16":
        x = x.bfloat16().float()
    elif kind == "few":
        x = x.round().clamp(-1, 1) * torch.tensor([0.0, 1.0])[torch.arange(width) % 2]  # also -0.0
    elif kind == "holes":
        x[:, ::3] = -torch.inf
    return x


@settings(derandomize=True, deadline=None, max_examples=80)
@given(
    st.integers(1, 5),
    st.sampled_from([1, 50, 64, 1024, 2048, 5000, 8192]),
    st.sampled_from(["plain", "bf16", "few", "holes"]),
    st.integers(0, 10**6),
    st.data(),
)
def test_order_is_by_value_and_then_by_id(rows, width, kind, seed, data):
    x = logits(rows, width, kind, seed)
    k = data.draw(st.one_of(st.integers(1, min(width, 40)), st.integers(1, width)))
    values, ids = largest(x, k)
    for row in range(rows):
        plain = x[row].tolist()
        expected = sorted(range(width), key=lambda i: (-plain[i], i))[:k]
        assert ids[row].tolist() == expected
        assert values[row].tolist() == [plain[i] for i in expected]
    assert first_argmax(x).tolist() == largest(x, 1)[1][:, 0].tolist()


def test_ties_across_distant_tiles_go_to_the_lowest_id():
    x = torch.zeros(2, 8192)
    x[0, [777, 4000, 8191]] = 5.0
    x[1, [8190, 64, 63]] = 5.0
    assert first_argmax(x).tolist() == [777, 63]
    assert largest(x, 5)[1].tolist() == [[777, 4000, 8191, 0, 1], [63, 64, 8190, 0, 1]]
