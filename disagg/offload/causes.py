"""Why stored KV cannot be had. Pure."""

from __future__ import annotations

import enum


class Cause(enum.StrEnum):
    """Why there is nothing to be had."""

    ABSENT = "absent"  # it is not there
    TRUNCATED = "truncated"
    CORRUPT = "corrupt"  # a checksum or a length is wrong
    VERSION = "version"  # another version's format
    FOREIGN = "foreign"  # whole, but of other pages, another group, another model: it is in the wrong place
    FAILED = "failed"  # the store did not say
    LATE = "late"  # nor did it within the deadline
    DEGRADED = "degraded"  # nor was it asked, because it failed lately
