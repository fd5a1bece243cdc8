"""Options of storage: sorted by what obstore wants where, and refused by name where it does not know them."""

from __future__ import annotations

import ast
from importlib import resources
from typing import Any

import pytest

from disagg.offload import options
from disagg.offload.options import STORE_OPTIONS, is_secret, storage_target
from disagg.offload.store import open_store
from disagg.types.errors import ConfigError

IN_THE_URL = {"bucket", "container_name"}
NO_TEXT = {"default_headers"}  # a table: there is no flat way to write it


def documented(file: str, name: str) -> set[str]:
    """The fields of one of obstore's typed dictionaries."""
    tree = ast.parse((resources.files("obstore") / "_store" / file).read_text())
    [found] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    return {
        each.target.id for each in found.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }


def test_the_options_are_those_that_obstore_documents() -> None:
    assert set(STORE_OPTIONS["s3"]) == documented("_aws.pyi", "S3Config") - IN_THE_URL
    assert set(STORE_OPTIONS["gs"]) == documented("_gcs.pyi", "GCSConfig") - IN_THE_URL
    assert set(STORE_OPTIONS["az"]) == documented("_azure.pyi", "AzureConfig") - IN_THE_URL
    assert set(options._CLIENT) == documented("_client.pyi", "ClientConfig") - NO_TEXT
    assert set(options._RETRY) == documented("_retry.pyi", "RetryConfig") - {"backoff"}


def test_one_flat_table_is_sorted_by_who_takes_what() -> None:
    target = storage_target(
        "s3://bucket/folder/",
        {"region": "us-east-1", "allow_http": True, "timeout": 1.5, "max_retries": "7", "skip_signature": "True"},
    )
    assert target.url == "s3://bucket/folder"
    assert target.store == {"region": "us-east-1", "skip_signature": "true"}
    assert target.client == {"allow_http": "true", "timeout": "1500ms"}
    assert target.retry["max_retries"] == 7


@pytest.mark.parametrize(
    ("url", "given", "says"),
    [
        ("s3://b", {"allow_htp": True}, "storage.options.allow_htp is not an option of s3:// (nearest: allow_http"),
        ("s3://b", {"service_account": "x"}, "storage.options.service_account is not an option of s3://"),
        (
            "file:///x",
            {"allow_http": True},
            "storage.options.allow_http is not an option of file:// (file:// has none)",
        ),
        ("gs://b", {"region": "x"}, "storage.options.region is not an option of gs://"),
        ("s3://b", {"allow_http": "maybe"}, "it must be true or false"),
        ("s3://b", {"timeout": "soon"}, "it must be a number of seconds"),
        ("s3://b", {"timeout": float("nan")}, "it must be a number of seconds"),
        ("s3://b", {"timeout": True}, "it must be a number of seconds"),
        ("s3://b", {"max_retries": 1.5}, "it must be a whole number"),
        ("s3://b", {"max_retries": float("inf")}, "it must be a whole number"),
        ("s3://b", {"region": True}, "it must be a text"),
        ("s3://b", {"endpoint": "x" * 20000}, "at most 16384"),
        ("s3://b", {"endpoint": "notaurl"}, "it must be a URL"),
        ("s3://b", {"endpoint": "http://"}, "it must be a URL"),
        ("s3://b", {"endpoint": "https://host:x"}, "it must be a URL"),
        ("s3://b", {"endpoint": "ftp://host"}, "it must be a URL"),
        ("s3://b", {"proxy_url": "host:3128"}, "it must be a URL"),
        ("s3://b", {"endpoint": "http://host:9000"}, "http needs storage.options.allow_http"),
        ("", {}, "storage.url is empty"),
        ("/var/kv", {}, "it must begin with one of file://, s3://, gs://, az://"),
        ("file:x", {}, "it must begin with one of"),
        ("file://host/x", {}, "it must name an absolute path"),
        ("ftp://x/y", {}, "it must begin with one of"),
        ("s3://", {}, "it must name a bucket"),
        ("s3://user:pass@b/x", {}, "neither a user nor a query"),
        ("s3://b/x?y=1", {}, "neither a user nor a query"),
        ("s3://[b", {}, "is not a URL"),
        ("s3://b\n", {}, "must be printable"),
        ("s3://" + "b" * 3000, {}, "at most 2048"),
    ],
)
def test_what_cannot_work_is_refused_by_name(url: str, given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        storage_target(url, given)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("url", ["s3://b/x", "gs://b/x", "az://c/x"])
def test_what_obstore_refuses_is_an_error_of_the_configuration(url: str) -> None:
    bad = {
        "s3": {"checksum_algorithm": "md2"},
        "gs": {"service_account_key": "{no"},
        "az": {"account_key": "no base 64"},
    }
    with pytest.raises(ConfigError, match="cannot be used"):
        open_store(url, bad[url[:2]])


def test_a_secret_is_not_repeated_in_an_error_and_is_known_as_one() -> None:
    with pytest.raises(ConfigError) as caught:
        storage_target("s3://b", {"secret_access_key": True})
    assert "True" not in str(caught.value)
    secrets = {name for table in STORE_OPTIONS.values() for name in table if is_secret(name)}
    assert secrets >= {"secret_access_key", "session_token", "account_key", "sas_key", "client_secret", "bearer_token"}
    assert secrets >= {"encryption_key", "sse_customer_key_base64"}
    assert not secrets & {"region", "endpoint", "access_key_id", "web_identity_token_file", "account_name"}


@pytest.mark.parametrize("name", ["allow_http", "timeout", "max_retries", "endpoint", "proxy_url"])
def test_no_value_is_repeated_since_it_may_be_a_secret_in_the_wrong_place(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        storage_target("s3://b", {name: "hunter2"})
    assert name in str(caught.value) and "hunter2" not in str(caught.value)
