"""Tokens: JWTs that somebody else has signed, by the public keys in a JWKS file. Whose one is, is its claim `tenant`, else `sub`.

Only signatures that the router could not make itself count: a key of the file verifies by its own algorithm, whatever a token's
head says, so neither `none` nor a MAC with a public key for its secret is one. Needs PyJWT (the extra `auth`).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jwt
from jwt.exceptions import InvalidKeyError, InvalidTokenError, PyJWKError

from disagg.types.bounded import forget_oldest
from disagg.types.errors import ConfigError, Unauthenticated
from disagg.types.small_files import json_object, read_small
from disagg.types.tenants import MAX_TENANT_CHARS, TENANT, TENANT_SIGNS

JWKS_BYTES = 1 << 20
MAX_KEYS = 256
LEEWAY_S = 30.0  # by which clocks may differ
MIN_RSA_BITS = 2048
MAX_TOKEN_BYTES = 8 << 10
MAX_KNOWN = 4096  # tokens that were found good, which are not verified again: to do that takes some 50 to 200 us
TRIED = 4  # keys, for a token that names none
# Of a key's type (and curve): RS256 RSA, ES256 on P-256, EdDSA.
_ALGORITHMS = {("RSA", ""): "RS256", ("EC", "P-256"): "ES256", ("OKP", "Ed25519"): "EdDSA", ("OKP", "Ed448"): "EdDSA"}
# Times are looked at by `_window`, on our clock; whom a token is meant for and whose it is by `_check_meant`.
_NO_OBJECT = "Invalid payload string"  # as PyJWT has it, of a token whose signature counts
_SIGNATURE_ONLY: Any = {
    "verify_signature": True,
    **dict.fromkeys(("verify_exp", "verify_nbf", "verify_iat", "verify_aud", "verify_iss", "verify_sub"), False),
}
_SERVED = "RS256 (RSA, 2048 bits at least), ES256 (P-256) and EdDSA (Ed25519, Ed448) are served"


class VerifyingKey:
    """A public key and the one algorithm that it verifies with."""

    def __init__(self, key: Any, algorithm: str) -> None:
        self.key = key
        self.algorithm = algorithm


class Tokens:
    """Verifies by the keys of one file. keys: by their ids; those without one have a number of their own. audience, issuer: which
    a token must name; empty: it may have any, or none."""

    def __init__(
        self,
        keys: Mapping[str | int, VerifyingKey],
        audience: str = "",
        issuer: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._keys = dict(keys)
        self._audience = audience
        self._issuer = issuer
        self._clock = clock
        self._known: dict[bytes, tuple[str, float, float]] = {}  # tenant, from when, until when

    def __len__(self) -> int:
        return len(self._keys)

    def tenant_of(self, token: bytes) -> str:
        """Raises Unauthenticated. Costs at most one signature, or TRIED for a token that names no key."""
        if len(token) > MAX_TOKEN_BYTES:
            raise Unauthenticated(f"the token has {len(token)} bytes; at most {MAX_TOKEN_BYTES} are read", "bad_token")
        digest = hashlib.sha256(token).digest()
        now_s = self._clock()
        if (known := self._known.get(digest)) is not None:
            tenant, from_s, until_s = known
            if from_s <= now_s < until_s:
                return tenant
            del self._known[digest]
        claims = self._claims(token)
        self._check_meant(claims)
        from_s, until_s = _window(claims, now_s)
        tenant = _tenant(claims)
        self._known[digest] = (tenant, from_s, until_s)
        forget_oldest(self._known, MAX_KNOWN)
        return tenant

    def _check_meant(self, claims: Mapping[str, Any]) -> None:
        """Raises Unauthenticated, which repeats neither what the token says nor what it should say."""
        if self._issuer and claims.get("iss") != self._issuer:
            raise Unauthenticated("the token is of another issuer than counts here (iss)", "other_issuer")
        said = claims.get("aud")
        audiences = said if isinstance(said, list) else [said]
        if self._audience and self._audience not in audiences:
            raise Unauthenticated("the token is meant for others (aud)", "other_audience")

    def _claims(self, token: bytes) -> Mapping[str, Any]:
        try:
            head = jwt.get_unverified_header(token)
        except InvalidTokenError:
            raise Unauthenticated("the token cannot be read", "bad_token") from None
        algorithm, kid = head.get("alg"), head.get("kid")
        if kid is None:
            fitting = [key for key in self._keys.values() if key.algorithm == algorithm][:TRIED]
        else:
            named = self._keys.get(kid) if isinstance(kid, str) else None
            fitting = [named] if named is not None and named.algorithm == algorithm else []
        for key in fitting:
            try:
                claims: dict[str, Any] = jwt.decode(token, key.key, algorithms=[key.algorithm], options=_SIGNATURE_ONLY)
                return claims
            except (InvalidTokenError, InvalidKeyError, ValueError) as error:
                if str(error).startswith(_NO_OBJECT):
                    raise Unauthenticated("the token's payload is no JSON object", "bad_token") from None
                continue
        raise Unauthenticated("the token is not signed by a key that counts here", "bad_token")


def read_jwks(path: Path, audience: str = "", issuer: str = "") -> Tokens:
    """audience, issuer: as `Tokens` has them. Raises ConfigError naming the file, and which of its keys is at fault."""
    at = f"auth.jwks_file = {path}"
    try:
        content = json_object(read_small(path, JWKS_BYTES), path)
    except FileNotFoundError as error:
        raise ConfigError(f"{at}: there is no such file") from error
    except ConfigError as error:  # which names the path only
        raise ConfigError(f"auth.jwks_file = {error}") from error
    entries = content.get("keys")
    if not isinstance(entries, list) or not 0 < len(entries) <= MAX_KEYS:
        raise ConfigError(f'{at}: it must be a JWKS: {{"keys": [...]}}, with 1 to {MAX_KEYS} keys')
    keys: dict[str | int, VerifyingKey] = {}
    for number, entry in enumerate(entries, start=1):
        where = f"{at}, key {number}"
        if not isinstance(entry, dict):
            raise ConfigError(f"{where}: it is no JSON object")
        if entry.get("use", "sig") != "sig":
            continue
        kid = entry.get("kid", number)
        if not isinstance(kid, str if "kid" in entry else int) or kid in keys:
            raise ConfigError(f"{where}: its kid must be a text that no other key has")
        keys[kid] = _verifying_key(entry, where)
    if not keys:
        raise ConfigError(f"{at}: none of its keys is for signatures, so nobody could be served")
    return Tokens(keys, audience, issuer)


def _verifying_key(entry: Mapping[str, Any], where: str) -> VerifyingKey:
    algorithm = _ALGORITHMS.get((str(entry.get("kty")), "" if entry.get("kty") == "RSA" else str(entry.get("crv"))))
    if algorithm is None or entry.get("alg", algorithm) not in (algorithm, entry.get("crv")):
        raise ConfigError(f"{where}: it is of a kind that is not served; {_SERVED}")
    if "d" in entry:
        raise ConfigError(f"{where}: it is a private key; a router needs the public part only")
    try:
        key = jwt.PyJWK(dict(entry), algorithm=algorithm).key
    except (PyJWKError, InvalidKeyError, InvalidTokenError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{where}: it cannot be read: {type(error).__name__}") from error
    if algorithm == "RS256" and key.key_size < MIN_RSA_BITS:
        raise ConfigError(f"{where}: it has {key.key_size} bits; {_SERVED}")
    return VerifyingKey(key, algorithm)


def _window(claims: Mapping[str, Any], now_s: float) -> tuple[float, float]:
    """Seconds since 1970: from when until when the token counts. Raises Unauthenticated if that is not now."""
    until_s = _seconds(claims, "exp")
    if until_s is None:
        raise Unauthenticated("the token has no claim exp, so it would never end", "bad_token")
    begin_s = _seconds(claims, "nbf")
    from_s = 0.0 if begin_s is None else begin_s - LEEWAY_S
    if now_s >= until_s + LEEWAY_S:
        raise Unauthenticated("the token has expired", "expired")
    if now_s < from_s:
        raise Unauthenticated("the token does not count yet (nbf)", "not_yet")
    return from_s, until_s + LEEWAY_S


def _seconds(claims: Mapping[str, Any], name: str) -> float | None:
    value = claims.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:
        raise Unauthenticated(f"the token's claim {name} is no time", "bad_token")
    return float(value)


def _tenant(claims: Mapping[str, Any]) -> str:
    name = "tenant" if "tenant" in claims else "sub"
    value = claims.get(name)
    if not isinstance(value, str) or not TENANT.fullmatch(value):
        raise Unauthenticated(
            f"the token's claim {name} names no tenant: it must be a text of 1 to {MAX_TENANT_CHARS} characters, "
            f"which are letters (A-Z, a-z), digits or {TENANT_SIGNS}",
            "bad_token",
        )
    return value
