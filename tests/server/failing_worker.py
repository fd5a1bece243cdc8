"""A real worker in which one thing fails with an exception of any kind: for `test_workers.py`.

Arguments: those of a worker, after what fails (plan, job or transfer) and the exception's name.
"""

from __future__ import annotations

import builtins
import sys
from typing import Any, NoReturn

from disagg.worker import process
from disagg.worker.__main__ import main

WHAT, NAME = sys.argv.pop(1), sys.argv.pop(1)
METHODS = {"plan": "_run_plan", "job": "_try", "transfer": "_beat"}


class Unheard(Exception):
    """Of a class that nobody knows."""


def fail(*_: Any) -> NoReturn:
    raise getattr(builtins, NAME, Unheard)("row 262144 is out of bounds")


setattr(process.WorkerProcess, METHODS[WHAT], fail)

if __name__ == "__main__":
    sys.exit(main())
