"""A worker that ends as soon as it is started, while a file is there: `python -m tests.cluster.unstarted_worker FILE ...`."""

from __future__ import annotations

import sys
from pathlib import Path

if Path(sys.argv.pop(1)).exists():
    sys.exit("it is told not to start")

from disagg.worker.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
