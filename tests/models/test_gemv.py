"""Two layouts of one weight: the same function, and only the rows decide which is read."""

from __future__ import annotations

import torch

from disagg.models.gemv import GemvLinear, add_gemv_copies


def test_one_row_and_many_rows_give_what_the_plain_layer_gives() -> None:
    torch.manual_seed(0)
    for bias in (False, True):
        plain = torch.nn.Linear(48, 96, bias=bias)
        both = torch.nn.Linear(48, 96, bias=bias)
        both.load_state_dict(plain.state_dict())
        assert add_gemv_copies(both) == 48 * 96 * 4
        for shape in ((48,), (1, 48), (1, 1, 48), (2, 48), (1, 7, 48)):
            rows = torch.randn(shape)
            torch.testing.assert_close(both(rows), plain(rows), rtol=1e-5, atol=1e-5)


def test_one_row_reads_the_copy_and_more_rows_the_weight() -> None:
    layer = torch.nn.Linear(8, 8, bias=False)
    add_gemv_copies(layer)
    with torch.no_grad():
        layer.transposed.zero_()
    assert not layer(torch.ones(1, 8)).any()
    assert layer(torch.ones(2, 8)).any()


def test_layers_that_narrow_and_other_kinds_of_layers_are_left_alone() -> None:
    class Special(torch.nn.Linear):
        pass

    module = torch.nn.ModuleList([torch.nn.Linear(8, 4), Special(4, 8), torch.nn.Linear(4, 8)])
    assert add_gemv_copies(module) == 4 * 8 * 4
    assert [type(layer) for layer in module] == [torch.nn.Linear, Special, GemvLinear]


def test_tied_layers_share_one_copy() -> None:
    first, second = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False)
    second.weight = first.weight
    assert add_gemv_copies(torch.nn.ModuleList([first, second])) == 8 * 8 * 4
    assert first.transposed is second.transposed
