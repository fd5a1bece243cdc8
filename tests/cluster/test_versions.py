"""A server under which the code is replaced, as by an upgrade in place: it never has workers of another version than its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

import disagg
from disagg.cli.rundir import pick_ports
from disagg.config.load import dump_config, load_config
from disagg.types.status import FAILED
from tests.cluster.cluster import START_S
from tests.cluster.separate import SeparateProcesses


def worker_of(process: subprocess.Popen[bytes]) -> int | None:
    found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(found[0]) if found else None


@pytest.mark.timeout(300)
def test_a_server_whose_code_was_replaced_ends_and_comes_back_as_the_new_one(
    tmp_path: Path, talking_model: Path
) -> None:
    package = tmp_path / "site" / "disagg"
    shutil.copytree(Path(disagg.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    enter = ("env", "-C", str(package.parent), f"PYTHONPATH={package.parent}")
    port, metrics_port = pick_ports("127.0.0.1", 2)
    given = {"server.port": str(port), "server.metrics_port": str(metrics_port), "model.name": str(talking_model)}
    sizes = {"model.dtype": "float32", "engine.kv_memory_bytes": "16MiB", "server.name": "prefill-0"}
    config = dump_config(load_config(None, {**given, **sizes}, {}))
    with SeparateProcesses(tmp_path / "run") as processes:

        def ready(times: int) -> bool:
            assert processes.processes["prefill-0"].poll() is None, processes.logs()
            return log.read_text().count("prefill-0 is ready") == times

        def lose_workers() -> None:
            worker = worker_of(processes.processes["prefill-0"])
            assert worker is not None
            os.kill(worker, signal.SIGKILL)

        log = processes.run_dir / "prefill-0.log"
        processes.start("prefill-0", "prefill", config, enter)
        processes.wait(lambda: ready(1), START_S, "the server")
        lose_workers()  # nothing has changed: others come
        processes.wait(lambda: ready(2), START_S, "its new workers")
        with (package / "worker" / "process.py").open("a") as file:
            file.write("# of the next version\n")
        lose_workers()
        assert processes.processes["prefill-0"].wait(60) == FAILED, processes.logs()
        assert "the code of disagg has been changed under prefill-0" in log.read_text()
        processes.start("prefill-0", "prefill", config, enter)  # as whoever watches it does
        processes.wait(lambda: ready(3), START_S, "the server of the new code")
