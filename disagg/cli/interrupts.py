"""What Ctrl-C does before a command has anything to tidy up: it ends the process, silently, with the status of shells. So does
SIGTERM, which the first process of a container does not even hear unless it has said what it does then.

KeyboardInterrupt would be raised in the middle of imports, which print a traceback, or take it for an error of their own.
Imports nothing that takes time.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from disagg.types.status import BY_SIGNAL

FIRST_PID = 1  # of a container: the kernel keeps signals from it that would end it by default


def end_at_ctrl_c() -> None:
    """From now on, until the command says otherwise. Where Ctrl-C is ignored (a shell's background job), it stays so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    if os.getpid() == FIRST_PID:
        signal.signal(signal.SIGTERM, _end)


def raise_at_ctrl_c() -> None:
    """For a command that has processes or files to end: they are ended by whoever lets KeyboardInterrupt through. So they are at
    SIGTERM, which is raised as SystemExit with the status of shells."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, _end):
        signal.signal(signal.SIGTERM, _raise)


def _raise(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # once is enough, and what ends then is not to be interrupted
    sys.exit(BY_SIGNAL + number)


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(BY_SIGNAL + number)
