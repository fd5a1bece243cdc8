"""How commands end with an error: one line on stderr, and a status of `types/status`."""

from __future__ import annotations

import contextlib
import errno
import sys
from typing import IO, Any

import click

from disagg.types.errors import ConfigError, DisaggError, Interrupted
from disagg.types.plain import printable_text
from disagg.types.status import FAILED, INTERRUPTED, REFUSED


class _Failed(click.ClickException):
    """An error of ours, as one line and an exit code."""

    exit_code = FAILED

    def show(self, file: IO[Any] | None = None) -> None:
        stream = file or sys.stderr
        with contextlib.suppress(OSError):  # nobody reads, which the exit code does not change
            print(f"error: {printable_text(self.message)}", file=stream, flush=True)


class _Misconfigured(_Failed):
    """One that would come again however often it is tried."""

    exit_code = REFUSED


class _Interrupted(_Failed):
    """The person at the terminal does not want it any more."""

    exit_code = INTERRUPTED


class CommandGroup(click.Group):
    """A group whose commands raise DisaggError for what the person at the terminal can mend."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise _Interrupted("interrupted") from error
        except Interrupted as error:
            raise _Interrupted(str(error)) from error
        except ConfigError as error:
            raise _Misconfigured(str(error)) from error
        except DisaggError as error:
            raise _Failed(str(error)) from error
        except OSError as error:
            if error.errno == errno.EPIPE:  # nobody reads any more: click ends quietly
                raise
            raise _Failed(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}") from error

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # as they are written here: the usual ones first
