"""A real cluster for tests: `disagg up` as a child process, and what an operator or client would look at.

Nothing here reaches into processes: it reads status, metrics and logs, calls gRPC and HTTP, and sends signals.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

START_S = 240.0
STOP_S = 120.0
ANSWER_S = 60.0  # of a status or of metrics; all processes share few cores
CLI = (sys.executable, "-m", "disagg.cli")


@dataclass
class Answer:
    """What one request got. token_ids by choice."""

    id: str
    token_ids: list[list[int]]
    text: list[str]
    finish: list[str | None]
    usage: dict[str, Any]


class Cluster:
    """`with Cluster(...) as cluster:`; flags as for `disagg up`, of which cli is the command."""

    def __init__(
        self,
        run_dir: Path,
        *flags: str,
        sets: Sequence[str] = (),
        env: dict[str, str] | None = None,
        cli: Sequence[str] = CLI,
    ) -> None:
        self._parent = run_dir
        self.run_dir = run_dir  # the directory of this run, once `up` has said it
        self._cli = tuple(cli)
        self._flags = flags
        self._env = {**os.environ, **(env or {})}
        for each in sets:
            path, _, value = each.partition("=")
            self._env["DISAGG__" + path.upper().replace(".", "__")] = value
        self.process: subprocess.Popen[bytes] | None = None
        self.http = ""
        self.grpc = ""
        self.lines: list[str] = []
        self._partial = b""  # a line that is not whole yet

    def __enter__(self) -> Cluster:
        command = (
            *self._cli,
            "up",
            "--http-port",
            "0",
            "--grpc-port",
            "0",
            "--run-dir",
            str(self._parent),
            *self._flags,
        )
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=self._env)
        os.set_blocking(self.process.stdout.fileno(), False)
        try:
            self.wait(lambda: self._ready(), START_S, "the ready line")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        process = self.process
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._read()

    def _read(self) -> None:
        """What `up` has said since, line by line."""
        while True:
            try:
                said = os.read(self.process.stdout.fileno(), 1 << 16)
            except BlockingIOError:
                return
            *lines, self._partial = (self._partial + said).split(b"\n")
            if not said and self._partial:  # the last words
                lines, self._partial = [self._partial], b""
            self.lines += [line.decode() for line in lines]
            if not said:
                return

    def _ready(self) -> bool:
        self._read()
        if self.process.poll() is not None:
            raise AssertionError(f"up exited with {self.process.returncode}:\n" + "\n".join(self.lines))
        for line in self.lines:
            if line.startswith("run directory: "):
                self.run_dir = Path(line.removeprefix("run directory: "))
            if line.startswith("ready"):
                self.http = re.search(r"http=(\S+)", line)[1]
                self.grpc = re.search(r"grpc=(\S+)", line)[1]
                return True
        return False

    def output(self) -> str:
        self._read()
        return "\n".join(self.lines)

    def wait(self, done: Callable[[], Any], timeout_s: float, what: str) -> Any:
        deadline = time.monotonic() + timeout_s
        while not (value := done()):
            if time.monotonic() > deadline:
                logs = "\n".join(f"== {log}\n{log.read_text()[-3000:]}" for log in self.run_dir.glob("*.log"))
                raise AssertionError(f"{what} did not come within {timeout_s:g} s; up said:\n{self.output()}\n{logs}")
            time.sleep(0.05)
        return value

    # ---- what an operator sees

    def status(self) -> dict[str, Any]:
        return httpx.get(f"{self.http}/status", timeout=ANSWER_S).json()

    def server(self, name: str) -> dict[str, Any]:
        return next(s for s in self.status()["servers"] if s["name"] == name)

    def servers(self, role: str) -> list[str]:
        return [s["name"] for s in self.status()["servers"] if s["role"] == role]

    def healthy(self) -> bool:
        try:
            return httpx.get(f"{self.http}/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def metrics(self, server: str) -> dict[str, float]:
        """Samples by `name` or `name{label="x"}`."""
        return parse_metrics(self.said_by(server, "/metrics"))

    def said_by(self, server: str, path: str) -> str:
        port = tomllib.loads((self.run_dir / f"{server}.toml").read_text())["server"]["metrics_port"]
        return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=ANSWER_S).text

    def router_metrics(self) -> dict[str, float]:
        return parse_metrics(httpx.get(f"{self.http}/metrics", timeout=ANSWER_S).text)

    def kill(self, pid: int, number: int = signal.SIGKILL) -> None:
        os.kill(pid, number)

    def wait_healthy(self, timeout_s: float = START_S) -> None:
        """Every server ready again."""
        self.wait(
            lambda: self.healthy() and all(s["state"] == "ready" for s in self.status()["servers"]),
            timeout_s,
            "a cluster with every server ready",
        )

    def check_adds_up(self, timeout_s: float = 120.0) -> None:
        """What must add up, on every rank, with nothing used, leased or quarantined. KV may be cached."""

        def quiet() -> bool:
            try:
                return all(not self._debts(server["name"]) for server in self.status()["servers"])
            except httpx.TransportError:  # a server that is being restarted
                return False

        try:
            self.wait(quiet, timeout_s, "an idle cluster that adds up")
        except AssertionError as error:
            debts = {s["name"]: self._debts(s["name"]) for s in self.status()["servers"]}
            raise AssertionError(f"{debts}\n{error}") from None

    def wait_offloaded(self, timeout_s: float = 120.0) -> None:
        """No server has anything to copy to the host or to write to storage any more. To be called when it adds up."""

        def idle() -> bool:
            dumps = [self.said_by(server["name"], "/debug/dump") for server in self.status()["servers"]]
            return all('"idle": true' in dump and '"publishing": []' in dump for dump in dumps)

        self.wait(idle, timeout_s, "the end of all offloads")

    def _debts(self, name: str) -> dict[str, float]:
        m = self.metrics(name)
        pages = {state: m[f'disagg_kv_large_pages{{state="{state}"}}'] for state in ("free", "used", "evictable")}
        arena = {state: m[f'disagg_arena_bytes{{state="{state}"}}'] for state in ("free", "leased", "quarantined")}
        status = self.server(name)
        debts = {
            "large pages used": pages["used"],
            "large pages missing": status["pages_total"] - sum(pages.values()),
            "arena leased": arena["leased"],
            "arena quarantined": arena["quarantined"],
            "running": m["disagg_requests_running"],
            "waiting": m["disagg_requests_waiting"],
        }
        return {what: amount for what, amount in debts.items() if amount}

    # ---- what a client does

    def complete(self, prompt: str | list[int], timeout_s: float = 300.0, **fields: Any) -> Answer:
        body = {"model": self.model, "prompt": prompt, "return_token_ids": True, "temperature": 0, **fields}
        reply = httpx.post(f"{self.http}/v1/completions", json=body, timeout=timeout_s)
        assert reply.status_code == 200, f"{reply.status_code}: {reply.text}"
        data = reply.json()
        choices = sorted(data["choices"], key=lambda c: c["index"])
        return Answer(
            data["id"],
            [c["token_ids"] for c in choices],
            [c["text"] for c in choices],
            [c["finish_reason"] for c in choices],
            data["usage"],
        )

    def stream(self, prompt: list[int], timeout_s: float = 300.0, **fields: Any) -> Iterator[dict[str, Any]]:
        """The events of one completion, as they come."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "return_token_ids": True,
            "temperature": 0,
            "stream": True,
            **fields,
        }
        with httpx.stream("POST", f"{self.http}/v1/completions", json=body, timeout=timeout_s) as reply:
            assert reply.status_code == 200, f"{reply.status_code}: {reply.read().decode()}"
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    yield event

    def timeline(self, request_id: str) -> list[dict[str, Any]]:
        """Of a request that has been answered, once the decode server has said its part."""

        def events() -> list[dict[str, Any]]:
            reply = httpx.get(f"{self.http}/debug/timeline", params={"request_id": request_id}, timeout=ANSWER_S)
            assert reply.status_code == 200, reply.text
            told = reply.json()["events"]
            return told if any(event["name"].endswith("/decode") for event in told) else []

        return self.wait(events, 30, f"the timeline of {request_id}")

    @property
    def model(self) -> str:
        if not hasattr(self, "_model"):
            self._model = httpx.get(f"{self.http}/v1/models", timeout=ANSWER_S).json()["data"][0]["id"]
        return self._model


def parse_metrics(text: str) -> dict[str, float]:
    samples = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            samples[name] = float(value)
    return samples


def pretty(value: object) -> str:
    return json.dumps(value, indent=1, default=str)
