"""The page at `/`: one file that asks this router's `/status`, `/metrics` and `/debug` for all that it shows.

It holds no data itself and loads nothing: what may run in it is named by digest in its Content-Security-Policy, so that nothing
that a client or server said could, even if it came to stand there as markup.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from msgspec import Struct

FILE = Path(__file__).with_name("dashboard.html")


class Page(Struct, frozen=True):
    """What is sent."""

    body: bytes
    headers: dict[str, str]


def read_page(file: Path = FILE) -> Page:
    """Once, at start. Raises OSError."""
    text = file.read_text(encoding="utf-8")
    policy = (
        "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        f"style-src {_digests(text, 'style')}; script-src {_digests(text, 'script')}"
    )
    headers = {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": policy,
        "cache-control": "no-store",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    return Page(text.encode(), headers)


def _digests(text: str, tag: str) -> str:
    """Of what stands between its tags, as a policy names it."""
    return " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()}'"
        for part in re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    )
