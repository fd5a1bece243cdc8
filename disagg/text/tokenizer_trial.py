"""Reads and uses a model's tokenizer files in a process of their own, before the router does.

The library that reads them is not ours and not Python: what it does to a file that makes no sense may end its process or take
all memory (it has ended one with SIGABRT, with a file that nobody kept). Here it may, and the files are refused. The
program (`python -m disagg.text.tokenizer_trial PID`) reads a `_Task` from its stdin and answers with its status; where that
is REFUSED, in words on its stdout.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from disagg.telemetry.process import die_with_parent, ended_from_outside, leave_signals_to_parent, limit_resources
from disagg.text.model_files import (
    ADDED_TOKENS,
    CONFIG,
    GENERATION,
    SPECIAL_TOKENS_MAP,
    TOKENIZER,
    TOKENIZER_CONFIG,
    ModelFiles,
)
from disagg.text.tokenizer import Tokenizer
from disagg.types.errors import ConfigError, DisaggError, InvalidRequest
from disagg.types.plain import quoted

SPARE_BYTES = 4 << 30  # the largest file that is read has 128 MiB, and takes ten times as much
THREAD_BYTES = 128 << 20  # of addresses: the library has a thread per core, each with a stack and an arena
DEADLINE_S = 120.0
REFUSED = 3
PROGRAM = "disagg.text.tokenizer_trial"
_FILES = (CONFIG, GENERATION, TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, ADDED_TOKENS)
_WORDS_BYTES = 8 << 10
_CAUSE_CHARS = 400
_SAMPLE = "A few words,\tdon't they? 12,345.67\n\n    naïve — 日本語 👩‍👩‍👧 <s> [INST] ▁Ġ é́ \u200b\x00"


class _Task(Struct, frozen=True, array_like=True):
    model_dir: str
    contents: dict[str, bytes]
    rows: int | None


async def try_out(
    files: ModelFiles, rows: int | None, *, program: Sequence[str] = ("-m", PROGRAM), deadline_s: float = DEADLINE_S
) -> None:
    """rows: as in `Tokenizer.of`. program: what Python is to run, for tests.

    Raises ConfigError where the files cannot be used, or end the process that tries; DisaggError where somebody else ended
    it (SIGKILL and its like), which says nothing of the files. Call it on the thread that outlives
    the process: it ends with that.
    """
    contents = {name: files.contents[name] for name in _FILES if name in files.contents}
    asked = msgspec.msgpack.encode(_Task(str(files.model_dir), contents, rows))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *program, str(os.getpid())),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    path = files.model_dir / TOKENIZER
    try:
        async with asyncio.timeout(deadline_s):
            said, _ = await process.communicate(asked)
    except TimeoutError:
        raise ConfigError(f"{path} cannot be used: reading it takes more than {deadline_s:g} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    if process.returncode == REFUSED:
        raise ConfigError(said[:_WORDS_BYTES].decode("utf-8", "replace"))
    if ended_from_outside(process.returncode or 0):
        raise DisaggError(
            f"whether {path} can be used is not known: the process that read it was ended {_ended(process.returncode or 0)}"
        )
    if process.returncode:
        raise ConfigError(f"{path} cannot be used: a process that read it ended {_ended(process.returncode)}")


def _ended(status: int) -> str:
    return f"with {signal.Signals(-status).name}" if status < 0 else f"with status {status}"


def use(tokenizer: Tokenizer, path: Path) -> None:
    """Text to ids and back, each id alone too. What the library then raises is a request's to hear, but for a panic:
    that is a file which it took for a sound one. Raises ConfigError."""
    try:
        ids = tokenizer.encode(_SAMPLE)
        tokenizer.decode(ids)
        for token_id in ids:
            tokenizer.decode([token_id])
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        cause = error.__cause__ if isinstance(error, InvalidRequest) and error.__cause__ else error
        if not isinstance(cause, Exception):
            raise ConfigError(
                f"{path} cannot be used: the library that reads it panics at a text: {quoted(str(cause), _CAUSE_CHARS)}"
            ) from error


def main(parent_pid: int) -> int:
    die_with_parent(parent_pid)
    leave_signals_to_parent()
    task = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=_Task)
    limit_resources(SPARE_BYTES + THREAD_BYTES * (os.cpu_count() or 1))
    try:
        files = ModelFiles(Path(task.model_dir), task.contents)
        use(Tokenizer.of(files, task.rows), files.model_dir / TOKENIZER)
    except ConfigError as error:
        sys.stdout.buffer.write(str(error).encode("utf-8", "replace"))
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
