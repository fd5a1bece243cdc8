"""A name for a router that was given none: its own among all that share servers with it."""

from __future__ import annotations

import os
import re
import secrets
import socket

MAX_HOST_CHARS = 32


def drawn_name() -> str:
    """Another one at every call: host, process and a random number, such as `router-gpu7-4312-9f3a61`."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:MAX_HOST_CHARS]
    return f"router-{host}-{os.getpid()}-{secrets.token_hex(3)}"
