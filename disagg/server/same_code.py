"""Whether workers that are started now would be of their server's version: they speak in messages that have none."""

from __future__ import annotations

from disagg.types.errors import DisaggError
from disagg.types.version import DIGITS, code_at_start, code_digest


def check_code(name: str) -> None:
    """Workers start with the code that is on disk. Raises DisaggError where it is not the code that this process, server `name`,
    began with: whoever starts it again, starts all of it anew. Blocks for 30 ms.
    """
    began, now = code_at_start(), code_digest()
    if began and now and began != now:
        raise DisaggError(
            f"the code of disagg has been changed under {name} (its digest was {began[:DIGITS]}, and is "
            f"{now[:DIGITS]} now): workers would be of another version than their server, so it ends, to be started again"
        )
