"""A headless Chromium for tests, driven over a pipe with the DevTools protocol. No driver, no package beside the browser.

Where there is no browser, `find_chromium` says None: CI fetches one (`.ci/test-browser`).
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

FETCHED = Path(sys.prefix) / "browser"
NAMES = ("chromium", "chromium-browser", "google-chrome", "headless_shell")
ANSWER_S = 60.0
# The browser reads from 3 and writes to 4.
BECOME = """
import fcntl, os, sys
theirs = [fcntl.fcntl(int(each), fcntl.F_DUPFD, 10) for each in sys.argv[1:3]]
for number, each in enumerate(theirs, 3):
    os.dup2(each, number)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_chromium() -> str | None:
    """The one that CI fetched, or one of this machine's."""
    fetched = FETCHED / "chromium"
    if fetched.exists():
        return str(fetched)
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Chromium:
    """`with Chromium(directory) as page:` one page. What goes wrong in it (exceptions, refusals of its policy) is in `errors`."""

    def __init__(self, directory: Path, width: int = 1320, height: int = 900) -> None:
        self._directory = directory
        self._size = f"{width},{height}"
        self._number = 0
        self._unread = b""
        self._session = ""
        self.errors: list[str] = []

    def __enter__(self) -> Chromium:
        path = find_chromium()
        assert path is not None
        flags = (
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
            *("--single-process", "--no-zygote") * (Path(path).parent == FETCHED),  # as that build is made to run
            *(f"--user-data-dir={self._directory}", f"--window-size={self._size}", "--remote-debugging-pipe"),
        )
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        env = {**os.environ, "LD_LIBRARY_PATH": f"{FETCHED}/lib:{os.environ.get('LD_LIBRARY_PATH', '')}"}
        with (self._directory / "chromium.log").open("wb") as log:
            command = (
                sys.executable,
                "-S",
                "-E",
                "-c",
                BECOME,
                str(theirs_in),
                str(theirs_out),
                path,
                *flags,
                "about:blank",
            )
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(theirs_in, theirs_out), env=env
            )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            targets = self.call("Target.getTargets")["targetInfos"]
            target = next(each["targetId"] for each in targets if each["type"] == "page")
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._to)
        os.close(self._from)
        self._process.kill()
        self._process.wait()

    def call(self, method: str, **params: Any) -> Any:
        """The command's result. Raises AssertionError for what the browser refuses, and when it does not answer."""
        self._number += 1
        sent: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            sent["sessionId"] = self._session
        os.write(self._to, json.dumps(sent).encode() + b"\0")
        deadline_s = time.monotonic() + ANSWER_S
        while True:
            said = self._next(deadline_s, method)
            if said.get("id") == self._number:
                assert "error" not in said, said["error"]
                return said["result"]
            self._note(said)

    def _next(self, deadline_s: float, what: str) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline_s - time.monotonic()))
            read = os.read(self._from, 1 << 20) if ready else b""
            log = (self._directory / "chromium.log").read_text(errors="replace")[-2000:] if not read else ""
            assert read, f"the browser did not answer {what}:\n{log}"
            self._unread += read
        message, _, self._unread = self._unread.partition(b"\0")
        said: dict[str, Any] = json.loads(message)
        return said

    def _note(self, said: dict[str, Any]) -> None:
        params = said.get("params", {})
        if said.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:500])
        elif said.get("method") == "Log.entryAdded" and params["entry"]["source"] != "network":
            self.errors.append(params["entry"]["text"])

    # ---- what a person does and sees

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script: str, timeout_s: float = 60.0) -> None:
        """Until the expression is true."""
        deadline_s = time.monotonic() + timeout_s
        while not self.run(f"!!({script})"):
            if time.monotonic() > deadline_s:
                raise AssertionError(f"{script} did not come true; the page says:\n{self.text('body')[:3000]}")
            time.sleep(0.1)

    def text(self, selector: str) -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    def shown(self, selector: str) -> bool:
        return bool(self.run(f"document.querySelector({json.dumps(selector)}).checkVisibility()"))

    def click(self, selector: str) -> None:
        """With the mouse, in its middle: what lies above it would get the click."""
        x, y = self.run(
            f"(e => {{ e.scrollIntoView({{block: 'center'}}); const r = e.getBoundingClientRect();"
            f" return [r.x + r.width / 2, r.y + r.height / 2] }})(document.querySelector({json.dumps(selector)}))"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Where the focus is."""
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        code = {"Enter": 13, "Tab": 9}[key]
        text = "\r" if key == "Enter" else ""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, text=text)

    def screenshot(self, file: Path, width: int = 1320, height: int | None = None) -> None:
        """Of the whole page, or of its first `height` pixels."""
        tall = int(self.run("document.documentElement.scrollHeight"))
        clip = {"x": 0, "y": 0, "width": width, "height": height or tall, "scale": 1}
        shot = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))
