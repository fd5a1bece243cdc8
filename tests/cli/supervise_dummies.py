"""`disagg up` in small: supervises dummy children, named on the command line, until SIGTERM. For tests.

Arguments: directory for pids and logs, silent_s, names. The first name is the group that drains first.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

from disagg.cli.children import Children, ChildSpec
from disagg.cli.logpump import LogPump
from disagg.cli.supervise import Limits
from disagg.cli.up import log_files
from disagg.config.tree import LogConfig
from disagg.telemetry.process import describe_status


class Printed:
    def __init__(self, pump: LogPump) -> None:
        self._pump = pump

    def cannot_start(self, spec: ChildSpec, why: str) -> None:
        print(f"{spec.name} cannot be started: {why}", flush=True)

    def died(self, spec: ChildSpec, status: int, restart_in_s: float) -> None:
        print(f"{spec.name} {describe_status(status)}", flush=True)

    def died_draining(self, spec: ChildSpec, status: int) -> None:
        print(f"{spec.name} {describe_status(status)} while draining", flush=True)

    def killed(self, spec: ChildSpec, why: str) -> None:
        print(f"{spec.name} killed: {why}", flush=True)

    def gave_up(self, spec: ChildSpec) -> None:
        print(f"{spec.name} gave up: {' '.join(self._pump.last_lines(spec.name, 10.0))}", flush=True)

    def draining(self) -> None:
        print("draining", flush=True)


async def main(directory: Path, silent_s: float, names: list[str]) -> int:
    script = str(Path(__file__).with_name("dummy_child.py"))
    specs = [
        ChildSpec(name, (sys.executable, script, name, str(directory / "pids")), directory / f"{name}.log")
        for name in names
    ]
    limits = Limits(drain_s=(60.0, 60.0), silent_s=silent_s, first_beat_s=30.0)
    pump = LogPump(log_files([spec.log for spec in specs], LogConfig()), lambda name, line: None)
    children = Children((tuple(specs[:1]), tuple(specs[1:])), limits, Printed(pump), os.environ, pump.open)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, children.drain)
    loop.add_signal_handler(signal.SIGINT, children.interrupt)
    try:
        return await children.run()
    finally:
        pump.close(10.0)


sys.exit(asyncio.run(main(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])))
