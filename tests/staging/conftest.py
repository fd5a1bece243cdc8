"""How tests of the kernels run."""

from __future__ import annotations

import pytest


@pytest.fixture
def one_thread() -> None:
    import torch  # which most tests do without

    torch.set_num_threads(1)
