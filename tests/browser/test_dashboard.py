"""The dashboard in a headless Chromium: what it shows of a router, clicked through, also when that asks for a key or is gone."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from disagg.api.app import HttpServer, create_app, serve
from disagg.api.entry import require_credentials
from disagg.auth.audit import Audit
from disagg.auth.gate import open_gate
from disagg.config.tree import AuthConfig
from disagg.messages.legs import TimelineEvent
from disagg.router.metrics import RouterMetrics
from tests.api.fakes import FakeChatTemplate, FakeRouter
from tests.browser.chromium import Chromium, find_chromium

pytestmark = [
    pytest.mark.skipif(find_chromium() is None, reason="there is no Chromium here: .ci/test-browser fetches one"),
    pytest.mark.timeout(300),
    pytest.mark.long,
]
NASTY = '<img src=x onerror="window.hit=1"><script>window.hit=1</script>\u202e'
BEGAN_S = 1_700_000_000.0
EVENTS = (
    TimelineEvent("queued", BEGAN_S, BEGAN_S + 0.01, "r"),
    TimelineEvent("attempt 1", BEGAN_S + 0.01, BEGAN_S + 1.0, "prefill-0 > decode-0: done"),
    TimelineEvent("prefill-0/chunk", BEGAN_S + 0.02, BEGAN_S + 0.3, "tokens 0-64"),
    *(TimelineEvent("decode-0/piece", BEGAN_S + 0.1 + i / 100, BEGAN_S + 0.105 + i / 100, "rank 0") for i in range(9)),
    TimelineEvent("decode-0/decode", BEGAN_S + 0.35, BEGAN_S + 1.0, NASTY),
)


def server_says(name: str, role: str, **more: Any) -> dict[str, Any]:
    memory = {"sizing": "lcm", "large_bytes": 1 << 20, "large_free": 4, "large_evictable": 2, "large_used": 2}
    groups = [
        {
            "name": group,
            "kind": "full",
            "page_bytes": 1 << 16,
            "empty_pages": 0,
            "evictable_pages": 32,
            "used_pages": 32,
        }
        for group in ("full", "window-64")
    ]
    host = {"pages_used": 1, "pages_total": 4, "bytes": 4 << 20}
    return {
        "name": name,
        "role": role,
        "tp": 2,
        "pid": 7,
        "state": "ready",
        "running": 3,
        "waiting": 1,
        "pages_used": 2,
        "pages_total": 8,
        "pages_free": 4,
        "pages_evictable": 2,
        "incarnation": "abc",
        "memory": {**memory, "fragmentation_bytes": 0, "groups": groups, "host": host},
        "address": "h:1",
        "arena": {"free": 10, "leased": 5, "quarantined": 0},
        "received": [],
        "loop_gap_s": 0.01,
        "error": "",
        "offload": {"store": "ok"},
        **more,
    }


class Scripted(FakeRouter):
    """A router whose status and requests a test sets."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = 0
        self.alarms: list[dict[str, str]] = []
        self.decode: dict[str, Any] = {}
        self.timelines["r1"] = EVENTS

    def status(self) -> dict[str, object]:
        self.moved += 1 << 20
        received = [{"peer": "prefill-0", "bytes": self.moved, "transfers": 4, "failures": 1, "seconds": 0.2}]
        decode = server_says("decode-0", "decode", received=received, **self.decode)
        return {
            "state": self.state,
            "alarms": self.alarms,
            "ended_last_minute": {"ok": 5, "failed": 2},
            "servers": [server_says("prefill-0", "prefill"), decode],
            "routers": [{"name": NASTY, "pid": 1, "inflight": 3, "queued": 4, "error": ""}],
        }

    def known_requests(self) -> dict[str, object]:
        ended = {"request_id": "r1", "took_s": 1.0, "attempts": 1, "detail": "prefill-0 > decode-0: done"}
        odd = {"request_id": NASTY, "took_s": 0.5, "attempts": 2, "detail": NASTY}
        return {"running": [], "running_total": 0, "ended": [ended, odd]}


class Served:
    """A face in a thread of its own, since the browser is waited for in this one."""

    def __init__(self, keys: Path | None = None, debug_remote: bool = True) -> None:
        self.router = Scripted()
        self.registry = CollectorRegistry()
        self.metrics = RouterMetrics(self.registry)
        self._keys, self._debug = keys, debug_remote
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._http = self.do(self._start())
        self.url = f"{self._http.base_url}/"

    def do(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    async def _start(self) -> HttpServer:
        app = create_app(self.router, FakeChatTemplate(), self.registry, version="1", debug_remote=self._debug)
        if self._keys is not None:
            auth = AuthConfig(api_keys_file=str(self._keys), operators=("team-a",))
            gate = open_gate(auth, Audit(CollectorRegistry()))
            assert gate is not None
            require_credentials(app, gate)
        return await serve(app, "127.0.0.1", 0)

    def stop(self) -> None:
        if self._thread.is_alive():
            self.do(self._http.shutdown(grace_s=0.1))
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(20)


@pytest.fixture(name="served_by")
def make_served() -> Iterator[Callable[..., Served]]:
    running: list[Served] = []

    def begin(**how: Any) -> Served:
        running.append(Served(**how))
        return running[-1]

    yield begin
    for each in running:
        each.stop()


@pytest.fixture(name="page")
def make_page(tmp_path: Path) -> Iterator[Chromium]:
    with Chromium(tmp_path) as page:
        yield page
        assert page.errors == []


def test_the_page_shows_the_cluster_and_is_clicked_through(served_by: Callable[..., Served], page: Chromium) -> None:
    served = served_by()
    page.open(served.url)
    page.wait("!document.getElementById('data').hidden")
    assert page.text("#state") == "ready" and page.shown("#no-alarms")
    assert "prefill: 1 of 1 ready" in page.text("#pool-tables") and "decode: 1 of 1 ready" in page.text("#pool-tables")
    assert "3 running, 1 waiting" in page.text("#pool-tables")
    memory = page.text("#mem")
    assert "2 MiB used, 2 MiB cached" in memory and "window-64" in memory and "host" in memory and "staging" in memory
    tiles = page.text("#tiles")
    assert "failed 2" in tiles
    served.metrics.completion_tokens.value += 5000
    for _ in range(100):
        served.metrics.ttft_s.observe(0.15)
    page.wait("!document.querySelector('#tiles').innerText.includes('–\\noutput')")
    page.wait("/1\\d\\d ms\\s+TTFT p50/.test(document.querySelector('#tiles').innerText)")
    page.wait("/[1-9]\\S* [KM]iB\\/s/.test(document.querySelector('#transfer-table').innerText)")
    assert "50 ms" in page.text("#transfer-table")

    page.click("#request-list button")
    page.wait("document.querySelector('#waterfall table')")
    fall = page.text("#waterfall")
    assert "decode-0/piece ×9" in fall and "prefill-0 > decode-0: done" in fall and "1 s" in fall
    assert page.run("document.querySelector('#request-list button').getAttribute('aria-pressed')") == "true"
    left = page.run("parseFloat([...document.querySelectorAll('.fall .track span')].at(-1).style.left)")
    assert 34 < left < 36  # decode begins after 0.35 of 1.0 s

    served.router.alarms = [{"level": "bad", "subject": "decode-0", "text": "is lost"}]
    served.router.decode = {"state": "dead"}
    page.wait("document.querySelector('#alarm-list li')")
    assert page.text("#alarm-list li").split() == ["bad", "decode-0", "is", "lost"] and not page.shown("#no-alarms")
    page.wait("document.querySelector('#pool-tables').innerText.includes('decode: 0 of 1 ready')")

    page.click("#theme")
    light = page.run("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    assert page.text("#theme") == "Theme: dark" and page.run("getComputedStyle(document.body).backgroundColor") != light


def test_what_others_say_stays_text(served_by: Callable[..., Served], page: Chromium) -> None:
    served = served_by()
    served.router.alarms = [{"level": "warn", "subject": NASTY, "text": NASTY}]
    served.router.decode = {"reason": NASTY, "address": NASTY}
    page.open(served.url)
    page.wait("document.querySelectorAll('#request-list button').length === 2")
    page.run("document.querySelectorAll('#request-list button')[1].click()")
    page.wait("document.querySelector('#waterfall').innerText.includes('no timeline')")
    page.click("#request-list button")
    page.wait("document.querySelector('#waterfall table')")
    assert page.run("window.hit") is None
    assert page.run("document.querySelectorAll('main img, main script').length") == 0
    assert "\u202e" not in page.text("body") and "<img src=x" in page.text("#alarm-list")


def test_an_operator_types_a_key_and_sees_the_cluster(
    served_by: Callable[..., Served], page: Chromium, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key-a team-a\nkey-b team-b\n")
    wrong = "!document.getElementById('wrong').hidden && document.getElementById('wrong').innerText.includes('{}')"
    page.open(served_by(keys=keys).url)
    page.wait("!document.getElementById('ask').hidden")
    assert not page.shown("#data") and "decode-0" not in page.text("body")
    page.type("wrong")  # the field has the focus
    page.press("Enter")
    page.wait(wrong.format("not known"))
    page.type("key-b")
    page.press("Enter")
    page.wait(wrong.format("no operator"))
    assert not page.shown("#data")
    for typed in ("wrong", "key-a"):  # the second one before the first one is answered
        page.type(typed)
        page.press("Enter")
    page.wait("!document.getElementById('data').hidden")
    page.wait("document.querySelector('#pool-tables').innerText.includes('decode-0')")
    page.open(page.run("location.href") + "?again")  # the tab knows the key
    page.wait("!document.getElementById('data').hidden")
    page.click("#forget")
    page.wait("!document.getElementById('ask').hidden")
    assert not page.shown("#data") and page.run("sessionStorage.length") == 0


def test_it_says_when_the_router_is_gone_and_how_old_its_numbers_are(
    served_by: Callable[..., Served], page: Chromium
) -> None:
    served = served_by()
    page.open(served.url)
    page.wait("!document.getElementById('data').hidden")
    served.stop()
    page.wait("!document.getElementById('unreachable').hidden")
    said = page.text("#unreachable")
    assert "cannot be reached" in said and "old" in said and page.text("#state") == "not reachable"


def test_from_another_machine_it_says_why_it_shows_no_requests(
    served_by: Callable[..., Served], page: Chromium, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("disagg.telemetry.near.is_loopback", lambda address: False)
    page.open(served_by(debug_remote=False).url)
    page.wait("!document.getElementById('refused').hidden")
    assert "debug.remote" in page.text("#refused") and not page.shown("#request-view")
    assert page.shown("#pool-tables") and not page.shown("#unreachable")


def test_pause_stops_asking_and_goes_on_again(served_by: Callable[..., Served], page: Chromium) -> None:
    served = served_by()
    page.open(served.url)
    page.wait("!document.getElementById('data').hidden")
    page.click("#pause")
    page.wait("document.getElementById('age').innerText === 'paused'")
    time.sleep(0.5)
    moved = served.router.moved
    time.sleep(5)
    assert served.router.moved == moved
    page.click("#pause")
    page.wait("document.getElementById('age').innerText === 'live'")


def test_a_key_is_enough_to_get_everywhere(served_by: Callable[..., Served], page: Chromium) -> None:
    page.open(served_by().url)
    page.wait("document.querySelector('#request-list button')")
    for _ in range(40):
        page.press("Tab")
        if page.run("document.activeElement.closest('#request-list') !== null"):
            break
    page.press("Enter")
    page.wait("document.querySelector('#waterfall table')")
    unnamed = "e => e.checkVisibility() && !(e.innerText || e.labels.length || e.ariaLabel)"
    assert page.run(f"[...document.querySelectorAll('button, input')].filter({unnamed}).length") == 0
