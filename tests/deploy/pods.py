"""The chart's pods as processes of this machine: their commands, environments, config files and volumes, as Helm rendered them.

What stands for the cluster: the API that routers find pods by is a fake, which a kubeconfig in their environment names; a volume
is a directory, whose path replaces that of its mount; what the cluster's DNS would know, a pod that has been started or the
routers' Service, is 127.0.0.1, so pods have ports of their own. Where this machine lets us (root, and a mount namespace) all that
is no volume of the pod is read-only, as the chart says.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import httpx

from tests.deploy.chart import ROOT, Process

DNS_NAME = re.compile(r"[a-z0-9-]+-0\.[a-z0-9.-]+\.svc\.cluster\.local|(?<==)[a-z0-9-]+-router(?=:\d)")
IP = "127.0.0.1"
# A mount namespace in which the root is read-only, and the pod's own directory, $0, is not.
CONFINED = (
    "unshare",
    "--mount",
    "--propagation=private",
    "sh",
    "-ec",
    'mount --bind "$0" "$0"; mount -o remount,bind,ro /; exec "$@"',
)


def confinement(directory: Path) -> tuple[str, ...]:
    """The command before the command; empty where it cannot be had."""
    tried = subprocess.run([*CONFINED, str(directory), "true"], capture_output=True, timeout=30, check=False)
    return (*CONFINED, str(directory)) if tried.returncode == 0 else ()


class Pod:
    """One of them. `log` has what it printed."""

    def __init__(
        self,
        process: Process,
        name: str,
        model: Path,
        beside: Mapping[str, str],
        secrets: Mapping[str, Mapping[str, str]],
    ) -> None:
        """beside: what else its environment has. secrets: what is in each, by its name."""
        self.process = process
        self._beside = beside
        self._secrets = secrets
        self.name = name
        self._directory = Path(tempfile.mkdtemp(prefix="pod-"))  # a short path: sockets are in it
        self._volumes = {mount: self._volume(mount, volume, model) for mount, volume in self._mounts()}
        self.confined = confinement(self._directory)
        self.log = self._directory / "log"
        self._output: IO[bytes] = self.log.open("wb")
        self.child: subprocess.Popen[bytes] | None = None

    def _mounts(self) -> Iterator[tuple[str, dict[str, Any]]]:
        volumes = {each["name"]: each for each in self.process.pod["volumes"]}
        for mount in self.process.container["volumeMounts"]:
            yield mount["mountPath"], volumes[mount["name"]]

    def _volume(self, mount: str, volume: dict[str, Any], model: Path) -> Path:
        if "hostPath" in volume:
            assert volume["hostPath"]["path"] == str(model)
            return model
        directory = self._directory / mount.strip("/").replace("/", "-")
        directory.mkdir()
        if "secret" in volume:
            for name, content in self._secrets[volume["secret"]["secretName"]].items():
                (directory / name).write_text(content)
        return directory

    def here(self, text: str) -> str:
        """What is said of the cluster, as it is here."""
        mounts = "|".join(re.escape(each) for each in sorted(self._volumes, key=len, reverse=True))
        path = re.compile(rf"(?<![\w/.-])({mounts})(?=$|[/\"'\s])")
        return DNS_NAME.sub(IP, path.sub(lambda found: str(self._volumes[found[1]]), text))

    def start(self) -> None:
        (self._volumes["/etc/disagg"] / "disagg.toml").write_text(self.here(self.process.config))
        environ = {name: self.here(value) for name, value in self.process.environ(self.name, IP).items()} | self._beside
        self.child = self.run(self.process.argv, environ)

    def run(self, argv: Sequence[str], environ: dict[str, str]) -> subprocess.Popen[bytes]:
        """A command of the image, with nothing of this process' environment."""
        program, *args = argv
        assert program == "disagg"
        base = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "PYTHONPATH": str(ROOT), "LANG": "C.UTF-8"}
        command = (*self.confined, sys.executable, "-m", "disagg.cli", *(self.here(each) for each in args))
        return subprocess.Popen(
            command, env={**base, **environ}, stdout=self._output, stderr=subprocess.STDOUT, start_new_session=True
        )

    def probe(self, kind: str) -> bool:
        """As the kubelet does it: an HTTP GET with a timeout, and any status from 200 to 399 is well."""
        probe = self.process.container[f"{kind}Probe"]
        ports = {each["name"]: each["containerPort"] for each in self.process.container["ports"]}
        scheme = probe["httpGet"].get("scheme", "HTTP").lower()
        url = f"{scheme}://{IP}:{ports[probe['httpGet']['port']]}{probe['httpGet']['path']}"
        try:  # whose certificate it is shown the kubelet does not look at, and it shows none
            answer = httpx.get(url, timeout=probe["timeoutSeconds"], trust_env=False, verify=False)
        except httpx.TransportError:
            return False
        return 200 <= answer.status_code < 400

    def probe_until(self, kind: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.probe(kind):
            assert self.child is not None
            assert self.child.poll() is None, f"{self.name} ended with {self.child.returncode}:\n{self.tail()}"
            assert time.monotonic() < deadline, f"{self.name}: no {kind} within {timeout_s:g} s:\n{self.tail()}"
            time.sleep(0.1)

    def lives(self) -> bool:
        """What the kubelet goes by: not one probe that was late, but as many in a row as end a container."""
        return any(self.probe("liveness") for _ in range(self.process.container["livenessProbe"]["failureThreshold"]))

    def startup_s(self) -> float:
        """What the kubelet gives it before it kills it."""
        probe = self.process.container["startupProbe"]
        return float(probe["periodSeconds"] * probe["failureThreshold"])

    def end(self) -> int:
        """SIGTERM, and the grace period. The exit status."""
        assert self.child is not None
        self.child.send_signal(signal.SIGTERM)
        return self.child.wait(self.process.pod["terminationGracePeriodSeconds"])

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def close(self) -> None:
        if self.child is not None and self.child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.child.pid, signal.SIGKILL)
            self.child.wait(30)
        self._output.close()
        shutil.rmtree(self._directory, ignore_errors=True)
