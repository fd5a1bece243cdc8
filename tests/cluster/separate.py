"""A cluster whose processes are started one by one, as Kubernetes would: each has a configuration file and a log of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tomllib
from collections.abc import Sequence
from pathlib import Path

import httpx

from tests.cluster.cluster import ANSWER_S, CLI, STOP_S, Cluster, parse_metrics


class SeparateProcesses(Cluster):
    """`start` each; they end with the `with`, the last one first. hosts: where each server's exporter is asked."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.hosts: dict[str, str] = {}

    def __enter__(self) -> SeparateProcesses:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        return self

    def start(self, name: str, role: str, config: str, enter: Sequence[str] = (), *, orphan: bool = False) -> None:
        """enter: what the command is run by. orphan: it cannot see this process, and does not end with it."""
        file = self.run_dir / f"{name}.toml"
        file.write_text(config)
        parent = () if orphan else ("--parent-pid", str(os.getpid()))
        command = (*enter, *CLI, role, "--config", str(file), *parent)
        with (self.run_dir / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log)

    def all_ready(self, count: int) -> bool:
        for process in self.processes.values():
            if process.poll() is not None:
                raise AssertionError(f"{process.args} exited with {process.returncode}:\n{self.logs()}")
        with contextlib.suppress(httpx.TransportError):
            servers = self.status()["servers"]
            return len(servers) == count and all(server["state"] == "ready" for server in servers)
        return False

    def logs(self) -> str:
        return "\n".join(log.read_text()[-2000:] for log in self.run_dir.glob("*.log"))

    def signal(self, name: str, number: int) -> None:
        """To the process itself, also where another one waits for it and hears no signals."""
        own = self.processes[name].pid
        children = Path(f"/proc/{own}/task/{own}/children").read_text().split()
        entered = Path(f"/proc/{own}/exe").resolve().name == "unshare"
        os.kill(int(children[0]) if entered and children else own, number)

    def __exit__(self, *_: object) -> None:
        for name in reversed(self.processes):  # the router first
            with contextlib.suppress(OSError):  # it has ended
                self.signal(name, signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def output(self) -> str:
        return ""  # each process has a log of its own

    def metrics(self, server: str) -> dict[str, float]:
        port = tomllib.loads((self.run_dir / f"{server}.toml").read_text())["server"]["metrics_port"]
        host = self.hosts.get(server, "127.0.0.1")
        return parse_metrics(httpx.get(f"http://{host}:{port}/metrics", timeout=ANSWER_S).text)
