"""One thread (spinning OpenMP threads make tiny operations slow) and no progress bars."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import transformers


@pytest.fixture(autouse=True, scope="session")
def quiet_single_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    yield
    torch.set_num_threads(before)
