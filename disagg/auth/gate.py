"""Whose a request is, by the `authorization` that it shows: an API key, or a token. No I/O but reading files again.

authorization: Bearer KEY          auth.api_keys_file says whose KEY is
authorization: Bearer TOKEN        a key in auth.jwks_file has signed whose TOKEN is
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from disagg.auth.audit import Audit
from disagg.auth.keys import ApiKeys, read_keys
from disagg.auth.reloaded import LOOK_S, Reloaded
from disagg.config.tree import AuthConfig
from disagg.types.errors import ConfigError, Unauthenticated
from disagg.types.small_files import home_expanded

if TYPE_CHECKING:
    from disagg.auth.tokens import Tokens

logger = logging.getLogger(__name__)

MAX_CREDENTIAL_BYTES = 16 << 10
SHOW = "send the header `authorization: Bearer KEY`"


class Gate:
    """Of one router, for both faces. Made by `open_gate`."""

    def __init__(
        self,
        keys: Reloaded[ApiKeys] | None,
        tokens: Reloaded[Tokens] | None,
        audit: Audit,
        operators: frozenset[str] = frozenset(),
    ) -> None:
        self._keys = keys
        self._tokens = tokens
        self._operators = operators
        self.audit = audit

    def may_operate(self, tenant: str) -> bool:
        """Whether it may read what concerns all tenants, and change what servers do."""
        return not self._operators or tenant in self._operators

    def tenant_of(self, shown: Sequence[bytes]) -> str:
        """shown: the values of all `authorization` headers. Raises Unauthenticated.

        Takes some microseconds, whatever is shown; for a token that was not shown before, verifying its signature.
        """
        if not shown:
            raise Unauthenticated(f"this needs a key: {SHOW}", "missing")
        if len(shown) > 1:
            raise Unauthenticated(f"there are {len(shown)} authorization headers; there may be one", "malformed")
        scheme, _, credential = shown[0].strip().partition(b" ")
        credential = credential.strip()
        if scheme.lower() != b"bearer" or not credential or len(credential) > MAX_CREDENTIAL_BYTES:
            raise Unauthenticated(f"the authorization header is not in the form that is served: {SHOW}", "malformed")
        if self._keys is not None and (tenant := self._keys.value.tenant_of(credential)) is not None:
            return tenant
        if self._tokens is not None and credential.count(b".") == 2:
            return self._tokens.value.tenant_of(credential)
        raise Unauthenticated("the key is not known here, or not any more", "unknown_key")

    async def look_always(self, every_s: float = LOOK_S) -> None:
        """Keeps up with the files. Runs until it is cancelled."""
        await asyncio.gather(*(each.look_always(every_s) for each in (self._keys, self._tokens) if each is not None))


def open_gate(auth: AuthConfig, audit: Audit) -> Gate | None:
    """None where no credentials are asked for. Raises ConfigError for a file that cannot be used."""
    keys, tokens = None, None
    if auth.api_keys_file:
        keys_file = home_expanded(auth.api_keys_file, "auth.api_keys_file")
        keys = Reloaded((keys_file,), lambda: read_keys(keys_file), "auth.api_keys_file")
    if auth.jwks_file:
        tokens = _open_tokens(home_expanded(auth.jwks_file, "auth.jwks_file"), auth)
    if keys is None and tokens is None:
        return None
    if not auth.operators:
        logger.warning(
            "auth.operators is empty: whoever has a key may read what all tenants do (/status, /metrics, /debug) and drain "
            "servers; name the tenants that may"
        )
    return Gate(keys, tokens, audit, frozenset(auth.operators))


def _open_tokens(path: Path, auth: AuthConfig) -> Reloaded[Tokens]:
    try:
        from disagg.auth.tokens import read_jwks
    except ImportError as error:
        raise ConfigError(f"auth.jwks_file = {path}: reading it needs PyJWT: pip install 'disagg[auth]'") from error
    return Reloaded((path,), lambda: read_jwks(path, auth.jwt_audience, auth.jwt_issuer), "auth.jwks_file")
