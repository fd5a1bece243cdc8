"""The page at `/` as it is sent: whole, allowed to do little, and behind the keys. What it does is in tests/browser."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry

from disagg.api.app import create_app, serve
from disagg.api.dashboard import FILE, read_page
from disagg.api.entry import require_credentials
from disagg.auth.audit import Audit
from disagg.auth.gate import open_gate
from disagg.config.tree import AuthConfig
from tests.api.fakes import FakeChatTemplate, FakeRouter

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


class Parts(html.parser.HTMLParser):
    """Tags with their attributes, and the text within each style and script."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.within: dict[str, str] = {}
        self._in = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in = tag

    def handle_data(self, data: str) -> None:
        if self._in in ("style", "script"):
            self.within[self._in] = self.within.get(self._in, "") + data

    def handle_endtag(self, tag: str) -> None:
        self._in = ""


@pytest.fixture(name="parts")
def make_parts() -> Parts:
    parts = Parts()
    parts.feed(FILE.read_text())
    return parts


@pytest.fixture(name="http")
async def make_http(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    (tmp_path / "keys").write_text("key-a team-a\n")
    gate = open_gate(AuthConfig(api_keys_file=str(tmp_path / "keys")), Audit(CollectorRegistry()))
    assert gate is not None
    app = create_app(FakeRouter(), FakeChatTemplate(), CollectorRegistry(), version="1")
    require_credentials(app, gate)
    running = await serve(app, "127.0.0.1", 0)
    async with httpx.AsyncClient(base_url=running.base_url, trust_env=False, timeout=30) as client:
        yield client
    await running.shutdown(grace_s=1.0)


def test_the_page_needs_nothing_from_elsewhere(parts: Parts) -> None:
    text = FILE.read_text()
    addresses = set(re.findall(r"https?://[^\s\"'<>)]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}
    for tag, attributes in parts.tags:
        assert tag not in ("img", "iframe", "object", "embed", "base")
        assert "src" not in attributes and "style" not in attributes
        assert not any(name.startswith("on") for name in attributes)
        assert not (tag == "link" and attributes["href"] != "data:,")
    assert "@import" not in text and "url(" not in text


def test_the_policy_lets_run_what_stands_in_the_page_and_nothing_else(parts: Parts) -> None:
    policy = dict(each.strip().split(" ", 1) for each in read_page().headers["content-security-policy"].split(";"))
    for tag in ("style", "script"):
        digest = base64.b64encode(hashlib.sha256(parts.within[tag].encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert policy["default-src"] == policy["frame-ancestors"] == policy["form-action"] == "'none'"
    assert policy["connect-src"] == "'self'"


def test_text_of_others_is_never_made_markup(parts: Parts) -> None:
    script = parts.within["script"]
    for sink in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        "DOMParser",
    ):
        assert sink not in script


def test_every_field_and_button_has_a_name(parts: Parts) -> None:
    labelled = {attributes.get("for") for tag, attributes in parts.tags if tag == "label"}
    fields = [attributes for tag, attributes in parts.tags if tag == "input"]
    assert fields and all("aria-label" in each or each["id"] in labelled for each in fields)
    ids = [attributes["id"] for _, attributes in parts.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    named = {attributes["aria-labelledby"] for _, attributes in parts.tags if "aria-labelledby" in attributes}
    assert named <= set(ids)


async def test_a_browser_without_a_key_gets_the_page_that_asks_for_one_as_a_refusal(http: httpx.AsyncClient) -> None:
    answer = await http.get("/", headers=BROWSER)
    assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
    assert answer.content == FILE.read_bytes()  # without anything of this router
    assert "content-security-policy" in answer.headers


@pytest.mark.parametrize("path", ["/status", "/metrics", "/debug/requests", "/x", "/index.html", "/?x"])
async def test_nothing_else_answers_a_browser_with_a_page(http: httpx.AsyncClient, path: str) -> None:
    answer = await http.get(path, headers=BROWSER)
    assert answer.status_code == 401
    assert (answer.content == FILE.read_bytes()) == (path == "/?x")


async def test_other_clients_get_an_error_that_they_can_read(http: httpx.AsyncClient) -> None:
    assert (await http.get("/")).json()["error"]["code"] == "invalid_api_key"
    assert (await http.post("/", headers=BROWSER)).json()["error"]["code"] == "invalid_api_key"


async def test_with_a_key_the_page_and_the_requests_that_it_lists_are_served(http: httpx.AsyncClient) -> None:
    key = {"authorization": "Bearer key-a"}
    page = await http.get("/", headers=key)
    assert (page.status_code, page.content) == (200, FILE.read_bytes())
    assert page.headers["cache-control"] == "no-store"
    assert (await http.get("/debug/requests", headers=key)).json()["running"] == []
