"""For all tests. CI has no GPU, so Triton's kernels run in its interpreter; `TRITON_INTERPRET=0` runs them on a CUDA device.

Triton reads the variable when a kernel is defined, so it is set before any test module is imported.
"""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
