"""JWTs by a JWKS file: whose they are, and every way in which one is none."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm
from prometheus_client import CollectorRegistry

from disagg.auth.audit import Audit
from disagg.auth.gate import open_gate
from disagg.auth.tokens import LEEWAY_S, Tokens, read_jwks
from disagg.config.tree import AuthConfig
from disagg.types.errors import ConfigError, Unauthenticated

NOW_S = 1_800_000_000.0
RSA = rsa.generate_private_key(65537, 2048)
OTHER_RSA = rsa.generate_private_key(65537, 2048)
EC = ec.generate_private_key(ec.SECP256R1())
ED = ed25519.Ed25519PrivateKey.generate()
SIGNERS = {"RS256": RSA, "ES256": EC, "EdDSA": ED}
CLAIMS = {"sub": "someone", "exp": NOW_S + 600}


def public(key: Any, **more: str) -> dict[str, Any]:
    kinds: list[tuple[type, Any]] = [
        (rsa.RSAPrivateKey, RSAAlgorithm),
        (ec.EllipticCurvePrivateKey, ECAlgorithm),
        (ed25519.Ed25519PrivateKey, OKPAlgorithm),
    ]
    algorithm = next(each for kind, each in kinds if isinstance(key, kind))
    return {**algorithm.to_jwk(key.public_key(), as_dict=True), **more}


def write(path: Path, *keys: object) -> Path:
    path.write_text(json.dumps({"keys": keys}))
    return path


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    keys = [public(key, kid=algorithm) for algorithm, key in SIGNERS.items()]
    made = read_jwks(write(tmp_path / "jwks", *keys))
    made._clock = lambda: NOW_S
    return made


def signed(algorithm: str = "RS256", key: Any = None, kid: str | None = "", **claims: object) -> bytes:
    headers = {"kid": algorithm if kid == "" else kid} if kid is not None else None
    payload = {name: value for name, value in {**CLAIMS, **claims}.items() if value is not None}
    return jwt.encode(payload, key or SIGNERS[algorithm], algorithm, headers=headers).encode()


def by_hand(head: dict[str, Any], secret: bytes | None = None, **claims: object) -> bytes:
    parts = [base64.urlsafe_b64encode(json.dumps(each).encode()).rstrip(b"=") for each in (head, {**CLAIMS, **claims})]
    body = b".".join(parts)
    mac = b"" if secret is None else base64.urlsafe_b64encode(hmac.digest(secret, body, hashlib.sha256)).rstrip(b"=")
    return body + b"." + mac


@pytest.mark.parametrize("algorithm", SIGNERS)
@pytest.mark.parametrize("named", [True, False])
def test_a_token_is_its_tenants(tokens: Tokens, algorithm: str, named: bool) -> None:
    kid = "" if named else None
    assert tokens.tenant_of(signed(algorithm, kid=kid)) == "someone"
    assert tokens.tenant_of(signed(algorithm, kid=kid, tenant="team-a", aud="anything", nbf=NOW_S)) == "team-a"


@pytest.mark.parametrize("algorithm", SIGNERS)
def test_what_others_have_signed_or_changed_is_none(tokens: Tokens, algorithm: str) -> None:
    others = {
        "RS256": OTHER_RSA,
        "ES256": ec.generate_private_key(ec.SECP256R1()),
        "EdDSA": ed25519.Ed25519PrivateKey.generate(),
    }
    good = signed(algorithm, tenant="team-a")
    head, body, signature = good.split(b".")
    forged = by_hand({"alg": algorithm, "kid": algorithm}, tenant="team-b").split(b".")[1]
    for bad in (
        signed(algorithm, others[algorithm]),
        signed(algorithm, others[algorithm], kid=None),
        signed(algorithm, kid="none-such"),
        signed(algorithm, kid=next(name for name in SIGNERS if name != algorithm)),
        b".".join((head, forged, signature)),
        b".".join((head, body, b"")),
        b".".join((head, body, signature[:-8] + b"AAAAAAAA")),
    ):
        assert refused(tokens, bad) == "bad_token"
    assert tokens.tenant_of(good) == "team-a"


def refused(tokens: Tokens, token: bytes) -> str:
    with pytest.raises(Unauthenticated) as refusal:
        tokens.tenant_of(token)
    assert token.decode("latin-1")[:20] not in str(refusal.value)
    return refusal.value.reason


def test_what_a_token_may_hold_is_said(tokens: Tokens) -> None:
    listed = jwt.PyJWS().encode(b"[1]", RSA, "RS256", headers={"kid": "RS256"}).encode()
    forged = listed[:-8] + b"AAAAAAAA"
    for token, says in (
        (listed, "the token's payload is no JSON object"),
        (forged, "not signed by a key that counts"),
        (signed(tenant="a b"), "a text of 1 to 128 characters, which are letters (A-Z, a-z), digits or ._@:/+=-"),
    ):
        with pytest.raises(Unauthenticated, match=re.escape(says)):
            tokens.tenant_of(token)


def test_a_token_without_a_signature_or_with_a_mac_by_a_public_key_is_none(tokens: Tokens) -> None:
    pems = [
        key.public_key().public_bytes(encoding, format)  # type: ignore[attr-defined]
        for key in SIGNERS.values()
        for encoding, format in (
            (Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
            (Encoding.DER, PublicFormat.SubjectPublicKeyInfo),
        )
    ]
    for kid in (*SIGNERS, None, 7):
        for algorithm in ("none", "None", "NONE", "", None):
            assert refused(tokens, by_hand({"alg": algorithm, "kid": kid})) == "bad_token"
        for algorithm in ("HS256", "HS384", "RS256", "ES256"):
            for secret in (*pems, b""):
                assert refused(tokens, by_hand({"alg": algorithm, "kid": kid}, secret)) == "bad_token"


def test_algorithms_that_are_not_served_are_none_although_their_key_is(tokens: Tokens) -> None:
    for algorithm in ("RS384", "RS512", "PS256"):
        assert refused(tokens, signed(algorithm, RSA, kid="RS256")) == "bad_token"


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ({"exp": NOW_S - LEEWAY_S}, "expired"),
        ({"exp": 1}, "expired"),
        ({"nbf": NOW_S + LEEWAY_S + 1}, "not_yet"),
        ({"exp": None}, "bad_token"),
        ({"exp": float("nan")}, "bad_token"),
        ({"exp": True}, "bad_token"),
        ({"nbf": -1}, "bad_token"),
        ({"sub": None}, "bad_token"),
        ({"tenant": ""}, "bad_token"),
        ({"tenant": "a b"}, "bad_token"),
        ({"tenant": "t" * 129}, "bad_token"),
        ({"tenant": ["team-a"]}, "bad_token"),
    ],
)
def test_a_claim_that_is_wrong_refuses_the_token(tokens: Tokens, claims: dict[str, object], reason: str) -> None:
    assert refused(tokens, signed("EdDSA", **claims)) == reason
    assert refused(tokens, signed("EdDSA", **claims)) == reason


def test_a_token_ends_also_where_it_is_known(tokens: Tokens) -> None:
    now_s = NOW_S
    tokens._clock = lambda: now_s
    token = signed("ES256", exp=NOW_S + 10, nbf=NOW_S)
    assert tokens.tenant_of(token) == tokens.tenant_of(token) == "someone"
    now_s = NOW_S + 10 + LEEWAY_S
    assert refused(tokens, token) == "expired"


@pytest.mark.parametrize("token", [b"", b".", b"..", b"a.b.c", b"\xff.\xff.\xff", b"e30.e30.", b"x" * 10_000])
def test_nonsense_is_none(tokens: Tokens, token: bytes) -> None:
    with pytest.raises(Unauthenticated):
        tokens.tenant_of(token)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"kty": "oct", "k": "c2VjcmV0"}, "kind that is not served"),
        ({**public(RSA), "alg": "HS256"}, "kind that is not served"),
        ({**public(RSA), "alg": "RS512"}, "kind that is not served"),
        (public(ec.generate_private_key(ec.SECP384R1())), "kind that is not served"),
        (public(rsa.generate_private_key(65537, 1024)), "1024 bits"),
        (RSAAlgorithm.to_jwk(RSA, as_dict=True), "private key"),
        ({"kty": "RSA", "n": "AQAB"}, "cannot be read"),
        ({"kty": "OKP", "crv": "Ed25519", "x": "AQAB"}, "cannot be read"),
        ({**public(RSA), "kid": ["x"]}, "kid must be"),
        ("key", "no JSON object"),
    ],
)
def test_a_key_that_cannot_be_used_is_refused_by_its_number(tmp_path: Path, entry: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refusal:
        read_jwks(write(tmp_path / "jwks", public(ED), entry))
    assert "key 2" in str(refusal.value)


def test_a_file_that_is_no_set_of_keys_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "jwks"
    for content in ("", "[]", "{}", '{"keys": []}', '{"keys": {}}', json.dumps({"keys": [public(RSA, use="enc")]})):
        path.write_text(content)
        with pytest.raises(ConfigError):
            read_jwks(path)
    with pytest.raises(ConfigError, match="no other key has"):
        read_jwks(write(path, public(RSA, kid="one"), public(EC, kid="one")))


def test_keys_and_tokens_count_beside_each_other_and_a_new_file_ends_the_old_keys(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("a.b.c team-a\n")
    path = write(tmp_path / "jwks", public(RSA))
    auth = AuthConfig(api_keys_file=str(tmp_path / "keys"), jwks_file=str(path))
    gate = open_gate(auth, Audit(CollectorRegistry()))
    assert gate is not None and gate._tokens is not None
    token = signed("RS256", kid=None, exp=4e9)
    assert gate.tenant_of([b"Bearer a.b.c"]) == "team-a"
    assert gate.tenant_of([b"Bearer " + token]) == "someone"
    write(path, public(OTHER_RSA))
    assert gate._tokens.look()
    with pytest.raises(Unauthenticated):
        gate.tenant_of([b"Bearer " + token])
    assert gate.tenant_of([b"Bearer " + signed("RS256", OTHER_RSA, kid=None, exp=4e9)]) == "someone"


def test_a_path_that_cannot_be_read_is_named_with_its_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^auth.jwks_file = .* is no regular file"):
        read_jwks(tmp_path)
    (tmp_path / "jwks").write_text("[")
    with pytest.raises(ConfigError, match=r"^auth.jwks_file = .* cannot be read as JSON"):
        read_jwks(tmp_path / "jwks")


@pytest.fixture
def meant(tmp_path: Path) -> Tokens:
    """Tokens of one issuer, for one audience."""
    made = read_jwks(write(tmp_path / "jwks", public(RSA, kid="RS256")), "our-cluster", "https://ours.example/")
    made._clock = lambda: NOW_S
    return made


@pytest.mark.parametrize("audience", ["our-cluster", ["others", "our-cluster"]])
def test_a_token_for_this_audience_of_this_issuer_counts(meant: Tokens, audience: object) -> None:
    assert meant.tenant_of(signed(aud=audience, iss="https://ours.example/")) == "someone"


@pytest.mark.parametrize(
    "audience", [None, "", "others", "our-cluster-2", ["others"], [], [["our-cluster"]], 7, {"our-cluster": 1}]
)
def test_a_token_for_others_does_not(meant: Tokens, audience: object) -> None:
    with pytest.raises(Unauthenticated) as refused:
        meant.tenant_of(signed(aud=audience, iss="https://ours.example/"))
    assert refused.value.reason == "other_audience"
    assert "our-cluster" not in str(refused.value) and "others" in str(refused.value)


@pytest.mark.parametrize(
    "issuer", [None, "", "https://ours.example", "https://theirs.example/", ["https://ours.example/"], 7]
)
def test_a_token_of_another_issuer_does_not(meant: Tokens, issuer: object) -> None:
    with pytest.raises(Unauthenticated) as refused:
        meant.tenant_of(_with_claims(aud="our-cluster", iss=issuer))
    assert refused.value.reason == "other_issuer"
    assert "example" not in str(refused.value)


def test_what_is_not_signed_says_nothing_of_what_would_count(meant: Tokens) -> None:
    """The claims of a token that somebody made up are not looked at."""
    with pytest.raises(Unauthenticated) as refused:
        meant.tenant_of(signed(key=OTHER_RSA, aud="others", iss="https://theirs.example/"))
    assert refused.value.reason == "bad_token"


def test_without_these_settings_any_audience_and_issuer_do(tokens: Tokens) -> None:
    assert tokens.tenant_of(signed(aud=["x"], iss="https://anybody.example/")) == "someone"


def _with_claims(**claims: object) -> bytes:
    """Signed as it is: PyJWT itself would make no token with an issuer that is no text."""
    payload = {name: value for name, value in {**CLAIMS, **claims}.items() if value is not None}
    return jwt.api_jws.encode(json.dumps(payload).encode(), RSA, "RS256", headers={"kid": "RS256"}).encode()
