"""What a process is doing right now, as text: the stacks of its threads and of its asyncio tasks."""

from __future__ import annotations

import asyncio
import faulthandler
import io
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any, TextIO


def format_stacks() -> str:
    """Stacks of all Python threads, and of the tasks of this thread's running event loop, if it has one."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    out = io.StringIO()
    for ident, frame in sys._current_frames().items():
        out.write(f"--- thread {names.get(ident, '(not of Python)')} ({ident})\n")
        out.writelines(traceback.format_stack(frame))
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:
        return out.getvalue()  # no loop runs in this thread
    for task in sorted(tasks, key=lambda each: each.get_name()):
        out.write(f"--- task {task.get_name()}\n")
        out.writelines(_awaits(task.get_coro()))
    return out.getvalue()


def _awaits(awaited: Any) -> Iterator[str]:
    """Where a suspended coroutine waits, outermost first, down to what is not Python's (a future, a socket, C)."""
    while awaited is not None:
        for kind in ("cr", "gi", "ag"):  # coroutine, generator, async generator
            frame = getattr(awaited, f"{kind}_frame", None)
            if frame is not None:
                # Cython's coroutines have frames without a line.
                code = frame.f_code
                yield f'  File "{code.co_filename}", line {frame.f_lineno or "?"}, in {code.co_name}\n'
                awaited = getattr(awaited, f"{kind}_await" if kind != "gi" else "gi_yieldfrom", None)
                break
        else:
            yield f"  waits for {awaited!r}\n"
            return


def dump_stacks_on_signal(stream: TextIO | None = None) -> None:
    """From now on SIGUSR1, and any crash of the interpreter, writes all thread stacks to `stream` (stderr).

    Written by the C handler, so also while the interpreter hangs. The stream must have a file descriptor.
    """
    out = stream if stream is not None else sys.stderr
    faulthandler.enable(file=out, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=out, all_threads=True, chain=False)
