"""How commands end with an error: one line on stderr, and a status of `types/status`."""

from __future__ import annotations

import contextlib
import errno
import sys
from typing import IO, Any

import click

from disagg.types.errors import ConfigError, DisaggError, Interrupted
from disagg.types.plain import printable
from disagg.types.status import FAILED, INTERRUPTED, REFUSED


class _Failed(click.ClickException):
    """An error of ours, as one line and an exit code."""

    exit_code = FAILED

    def show(self, file: IO[Any] | None = None) -> None:
        stream = file or sys.stderr
        with contextlib.suppress(OSError):  # nobody reads, which the exit code does not change
            print(f"error: {printable(self.message)}", file=stream, flush=True)


class _Misconfigured(_Failed):
    """One that would come again however often it is tried."""

    exit_code = REFUSED


class _Interrupted(_Failed):
    """The person at the terminal does not want it any more."""

    exit_code = INTERRUPTED


def _plain(error: click.UsageError) -> click.UsageError:
    """The same on one line, but for the help that a group shows where it is given nothing."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        return error
    return click.UsageError(printable(error.format_message()), error.ctx)


class CommandGroup(click.Group):
    """A group whose commands raise DisaggError for what the person at the terminal can mend.

    What the person wrote is repeated in errors, and a line feed in it would forge a line of its own: all are one line.
    """

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        try:
            return super().make_context(*args, **extra)
        except click.UsageError as error:
            raise _plain(error) from error

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            raise _plain(error) from error
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
