"""What `engine.policy` of a mixed server may be."""

from __future__ import annotations

from typing import get_args

from disagg.config.tree import MixedPolicy

MIXED_POLICIES: tuple[str, ...] = tuple(filter(None, get_args(MixedPolicy)))
