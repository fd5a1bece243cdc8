"""API keys: the file that lists them, and whose a key is. Knows no network.

# a comment
KEY TENANT
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from disagg.types.errors import ConfigError
from disagg.types.small_files import read_small
from disagg.types.tenants import MAX_TENANT_CHARS, TENANT, TENANT_SIGNS

KEYS_BYTES = 16 << 20
MAX_KEYS = 100_000
MAX_KEY_CHARS = 4096
KEY = re.compile(rb"[!-~]{1,%d}" % MAX_KEY_CHARS)


class ApiKeys:
    """Whose each key is.

    Keys are looked up by a digest under a secret of this process, so that how long that takes says nothing of how much of a
    key was guessed; the keys themselves are not kept.
    """

    def __init__(self, tenants: Mapping[bytes, str]) -> None:
        self._secret = secrets.token_bytes(32)
        self._tenants = {self._digest(key): tenant for key, tenant in tenants.items()}

    def __len__(self) -> int:
        return len(self._tenants)

    def tenant_of(self, key: bytes) -> str | None:
        return self._tenants.get(self._digest(key))

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._secret, digest_size=32).digest()


def read_keys(path: Path) -> ApiKeys:
    """Raises ConfigError naming the file, and the line that is at fault, but none of the keys."""
    try:
        content = read_small(path, KEYS_BYTES)
    except FileNotFoundError as error:
        raise ConfigError(f"auth.api_keys_file = {path}: there is no such file") from error
    except ConfigError as error:  # which names the path only
        raise ConfigError(f"auth.api_keys_file = {error}") from error
    return ApiKeys(parse_keys(content, path))


def parse_keys(content: bytes, path: Path) -> dict[bytes, str]:
    """Tenants by their keys. path: for messages. Raises ConfigError as `read_keys` does."""
    tenants: dict[bytes, str] = {}
    for number, line in enumerate(content.split(b"\n"), start=1):
        words = line.split()
        if not words or words[0].startswith(b"#"):
            continue
        at = f"auth.api_keys_file = {path}, line {number}"
        if len(words) != 2:
            raise ConfigError(f"{at}: it has {len(words)} words; it must be KEY TENANT, a comment (#) or empty")
        key, tenant = words[0], words[1].decode("utf-8", "replace")
        if not KEY.fullmatch(key):
            raise ConfigError(f"{at}: the key must be printable ASCII, at most {MAX_KEY_CHARS} characters")
        if not TENANT.fullmatch(tenant):
            raise ConfigError(
                f"{at}: the tenant must have letters, digits and {TENANT_SIGNS} only, and at most {MAX_TENANT_CHARS} characters"
            )
        if key in tenants:
            raise ConfigError(f"{at}: this key stands in an earlier line, too; every key must be there once")
        if len(tenants) == MAX_KEYS:
            raise ConfigError(f"{at}: {MAX_KEYS} keys are the most")
        tenants[key] = tenant
    if not tenants:
        raise ConfigError(
            f"auth.api_keys_file = {path}: there is no key in it, so nobody could be served; add KEY TENANT"
        )
    return tenants
