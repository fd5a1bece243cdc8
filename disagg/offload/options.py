"""Where storage is, and how its client is set up: a URL and one flat table of options. Pure.

obstore keeps options of the store, of its HTTP client and of retries apart, and does not refuse all unknown ones as an
error. So they are known here by name, checked and sorted before obstore sees them.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal
from urllib.parse import urlsplit

from msgspec import Struct

from disagg.types.errors import ConfigError
from disagg.types.plain import quoted

OptionValue = bool | int | float | str
Kind = Literal["text", "address", "switch", "count", "seconds"]

MAX_URL_CHARS = 2048
MAX_VALUE_CHARS = 16384  # certificates and keys of service accounts are texts of some thousand characters
MAX_SECONDS = 86400.0
DEFAULT_RETRIES = 2
DEFAULT_RETRY_S = 10.0

_CLIENT: dict[str, Kind] = {
    "allow_http": "switch",
    "allow_invalid_certificates": "switch",
    "connect_timeout": "seconds",
    "default_content_type": "text",
    "http1_only": "switch",
    "http2_keep_alive_interval": "seconds",
    "http2_keep_alive_timeout": "seconds",
    "http2_keep_alive_while_idle": "switch",
    "http2_only": "switch",
    "pool_idle_timeout": "seconds",
    "pool_max_idle_per_host": "count",
    "proxy_ca_certificate": "text",
    "proxy_excludes": "text",
    "proxy_url": "address",
    "randomize_addresses": "switch",
    "read_timeout": "seconds",
    "root_certificate": "text",
    "timeout": "seconds",
    "user_agent": "text",
}
_RETRY: dict[str, Kind] = {"max_retries": "count", "retry_timeout": "seconds"}
_S3_SWITCHES = (
    "disable_bulk_delete",
    "disable_tagging",
    "imdsv1_fallback",
    "s3_express",
    "skip_signature",
    "sse_bucket_key_enabled",
    "unsigned_payload",
    "virtual_hosted_style_request",
)
_S3_TEXTS = (
    "access_key_id",
    "aws_endpoint_url_s3",
    "checksum_algorithm",
    "conditional_put",
    "container_authorization_token_file",
    "container_credentials_full_uri",
    "container_credentials_relative_uri",
    "copy_if_not_exists",
    "default_region",
    "endpoint",
    "metadata_endpoint",
    "region",
    "request_payer",
    "role_arn",
    "role_session_name",
    "secret_access_key",
    "server_side_encryption",
    "session_token",
    "sse_customer_key_base64",
    "sse_kms_key_id",
    "sts_endpoint",
    "web_identity_token_file",
)
_GCS_SWITCHES = ("skip_signature",)
_GCS_TEXTS = ("application_credentials", "base_url", "bearer_token", "service_account", "service_account_key")
_AZURE_SWITCHES = ("disable_tagging", "skip_signature", "use_azure_cli", "use_emulator", "use_fabric_endpoint")
_AZURE_TEXTS = (
    "account_key",
    "account_name",
    "authority_host",
    "client_id",
    "client_secret",
    "credential_type",
    "encryption_key",
    "endpoint",
    "fabric_cluster_identifier",
    "fabric_session_token",
    "fabric_token_service_url",
    "fabric_workload_host",
    "federated_token_file",
    "msi_endpoint",
    "msi_resource_id",
    "object_id",
    "sas_key",
    "tenant_id",
    "token",
)


_ADDRESSES = (
    "authority_host",
    "aws_endpoint_url_s3",
    "base_url",
    "container_credentials_full_uri",
    "endpoint",
    "fabric_token_service_url",
    "metadata_endpoint",
    "msi_endpoint",
    "sts_endpoint",
)


def _table(texts: tuple[str, ...], switches: tuple[str, ...]) -> dict[str, Kind]:
    kinds: dict[str, Kind] = {name: "address" if name in _ADDRESSES else "text" for name in texts}
    return kinds | dict.fromkeys(switches, "switch")


# By scheme of the URL: what the store itself can be told, beside what is in the URL.
STORE_OPTIONS: dict[str, dict[str, Kind]] = {
    "file": {},
    "s3": _table(_S3_TEXTS, _S3_SWITCHES),
    "gs": _table(_GCS_TEXTS, _GCS_SWITCHES),
    "az": _table(_AZURE_TEXTS, _AZURE_SWITCHES),
}
_SECRETS = (
    "secret",
    "token",
    "password",
    "sas_key",
    "account_key",
    "encryption_key",
    "access_key",
    "service_account_key",
    "customer_key",
)


class StorageTarget(Struct, frozen=True):
    """What obstore is given. url: without a slash at its end."""

    url: str
    scheme: str
    store: dict[str, Any]
    client: dict[str, Any]
    retry: dict[str, Any]


def storage_target(url: str, options: Mapping[str, OptionValue]) -> StorageTarget:
    """Raises ConfigError that names what is wrong, and what is allowed."""
    scheme = _check_url(url)
    known = options_of(scheme)
    store: dict[str, Any] = {}
    client: dict[str, Any] = {}
    retry: dict[str, Any] = {"max_retries": DEFAULT_RETRIES, "retry_timeout": timedelta(seconds=DEFAULT_RETRY_S)}
    for name, value in options.items():
        if name not in known:
            raise ConfigError(_unknown(name, scheme, known))
        text = _read(name, known[name], value)
        if name in _RETRY:
            retry[name] = int(text) if name == "max_retries" else timedelta(seconds=float(value))
        elif name in STORE_OPTIONS[scheme]:
            store[name] = text
        else:
            client[name] = text
    for name in ("endpoint", "aws_endpoint_url_s3"):
        if store.get(name, "").startswith("http:") and client.get("allow_http", "false") != "true":
            raise ConfigError(f"storage.options.{name}: http needs storage.options.allow_http = true")
    return StorageTarget(url.rstrip("/"), scheme, store, client, retry)


def options_of(scheme: str) -> dict[str, Kind]:
    """All that may be said of storage at such a URL: to its store, to its HTTP client, and of retries."""
    return STORE_OPTIONS[scheme] | (_CLIENT | _RETRY if scheme != "file" else {})


def is_secret(name: str) -> bool:
    """An option whose value is not for the eyes of who looks at the configuration."""
    return any(part in name for part in _SECRETS) and not name.endswith(("_file", "_url", "_id"))


def _check_url(url: str) -> str:
    allowed = ", ".join(f"{scheme}://" for scheme in STORE_OPTIONS)
    if not url:
        raise ConfigError(f"there is no storage: storage.url is empty; it must begin with one of {allowed}")
    if len(url) > MAX_URL_CHARS or not url.isprintable():
        raise ConfigError(f"storage.url = {quoted(url)}: it must be printable, of at most {MAX_URL_CHARS} characters")
    try:
        parts = urlsplit(url)
        named, password = parts.hostname or "", parts.password
    except ValueError as error:
        raise ConfigError(f"storage.url = {quoted(url)} is not a URL: {error}") from error
    if parts.scheme not in STORE_OPTIONS or "://" not in url:
        raise ConfigError(f"storage.url = {quoted(url)}: it must begin with one of {allowed}")
    if parts.query or parts.fragment or password or "@" in parts.netloc:
        raise ConfigError(
            "storage.url may have neither a user nor a query; what they would say goes into storage.options"
        )
    if parts.scheme == "file" and (named or not parts.path.startswith("/")):
        raise ConfigError(
            f"storage.url = {quoted(url)}: it must name an absolute path, as file:///var/lib/disagg/kv does"
        )
    if parts.scheme != "file" and not named:
        raise ConfigError(f"storage.url = {quoted(url)}: it must name a bucket, as {parts.scheme}://bucket/folder does")
    return parts.scheme


def _check_address(path: str, text: str) -> None:
    """A client that is given another one does not refuse it; it breaks at its first call."""
    try:
        parts = urlsplit(text)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fine = False
    if not fine or not text.isprintable() or " " in text:
        raise ConfigError(f"{path}: it must be a URL, as https://host:port is")


def _unknown(name: str, scheme: str, known: Mapping[str, Kind]) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    hint = f"nearest: {', '.join(near)}" if near else f"{scheme}:// has {', '.join(sorted(known)) or 'none'}"
    return f"storage.options.{name} is not an option of {scheme}:// ({hint})"


def _read(name: str, kind: Kind, value: OptionValue) -> str:
    """As obstore takes it. Values come from TOML or JSON, or as text from flags."""
    path = f"storage.options.{name}"
    if isinstance(value, str) and len(value) > MAX_VALUE_CHARS:
        raise ConfigError(f"{path} has {len(value)} characters; at most {MAX_VALUE_CHARS} are allowed")
    if kind == "text":
        if isinstance(value, bool):
            raise ConfigError(f"{path}: it must be a text")
        return str(value)
    if kind == "address":
        _check_address(path, str(value))
        return str(value)
    if kind == "switch":
        text = str(value).lower()
        if text not in ("true", "false"):
            raise ConfigError(f"{path}: it must be true or false")
        return text
    try:
        number = float("nan") if isinstance(value, bool) else float(value)
    except ValueError:
        number = float("nan")
    if kind == "count":
        if not (0 <= number <= 1000 and number == int(number)):
            raise ConfigError(f"{path}: it must be a whole number from 0 to 1000")
        return str(int(number))
    if not 0 < number <= MAX_SECONDS:
        raise ConfigError(f"{path}: it must be a number of seconds, at most {MAX_SECONDS:.0f}")
    return f"{max(1, round(number * 1000))}ms"
