"""One thread (spinning OpenMP threads make tiny operations slow), no progress bars, and float32 that is float32."""

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
    torch.backends.cudnn.allow_tf32 = False  # as a worker has it
    yield
    torch.set_num_threads(before)
