"""What goes wrong on the wire of a cluster under test, how often, and what came of it.

The plan stands in the environment as JSON. What was done is logged, line by line, in the plan's directory, so that a
test can say that faults really happened, and which.
"""

from __future__ import annotations

import enum
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

VARIABLE = "WIRE_FAULTS"
COMMAND = (sys.executable, "-m", "tests.cluster.wire_faults")  # in the place of `python -m disagg.cli`


class Fault(enum.StrEnum):
    NONE = "none"
    DROP = "drop"
    DUPLICATE = "duplicate"
    DELAY = "delay"
    FLIP = "flip"


class Rates(Struct, frozen=True):
    """Which share of what passes meets each fault. A delay is drawn from 0 to delay_s, so that others overtake.

    flip: one bit is turned over.
    """

    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    flip: float = 0.0
    delay_s: float = 0.5

    def draw(self, rng: random.Random) -> Fault:
        at = rng.random()
        for fault in (Fault.DROP, Fault.DUPLICATE, Fault.DELAY, Fault.FLIP):
            at -= getattr(self, fault.value)
            if at < 0:
                return fault
        return Fault.NONE


class FaultPlan(Struct, frozen=True):
    """What goes wrong, and how often.

    frames: link messages, either way. writes: pieces on their way. notifications: as the receiver sees them.
    ignore_checksums: nothing that lands is verified; to show that the tests would notice.
    """

    log_dir: str
    seed: int = 0
    frames: Rates = Rates()
    writes: Rates = Rates()
    notifications: Rates = Rates()
    ignore_checksums: bool = False

    def environ(self) -> dict[str, str]:
        """For a cluster of `COMMAND`."""
        Path(self.log_dir).mkdir(parents=True, exist_ok=True)
        command = json.dumps([*COMMAND, "worker"])
        return {VARIABLE: msgspec.json.encode(self).decode(), "DISAGG__WORKER__COMMAND": command}

    @property
    def log(self) -> FaultLog:
        return FaultLog(Path(self.log_dir))

    def freeze_next_write(self, server: str) -> FrozenWrite:
        """The next piece that a worker of `server` writes is written half; then the worker stops itself."""
        frozen = FrozenWrite(self.log_dir, server)
        frozen.ask()
        return frozen


class FrozenWrite:
    """A request to a worker to stop itself in the middle of a write, and its answers, as files."""

    def __init__(self, directory: str, server: str) -> None:
        self._asked, self._taken, self._frozen, self._resumed = (
            Path(directory) / f"{server} {word}" for word in ("is to freeze", "freezes", "is frozen", "has resumed")
        )

    def ask(self) -> None:
        for answer in (self._taken, self._frozen, self._resumed):
            answer.unlink(missing_ok=True)
        self._asked.touch()

    def take(self) -> bool:
        """The worker asks, before each write: now? Told yes once."""
        try:
            self._asked.rename(self._taken)
        except FileNotFoundError:
            return False
        return True

    def say_frozen(self) -> None:
        """Half of the bytes are in place."""
        self._frozen.touch()

    def say_resumed(self) -> None:
        """The other half has been written too, or cannot be any more."""
        self._resumed.touch()

    @property
    def frozen(self) -> bool:
        return self._frozen.exists()

    @property
    def resumed(self) -> bool:
        return self._resumed.exists()


class FaultLog:
    """Lines of what was done and what came of it. Many processes write, each into a file of its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file = directory / f"{os.getpid()}.faults"

    def note(self, *what: object) -> None:
        with self._file.open("a") as file:
            print(*what, file=file)

    def counts(self) -> Counter[str]:
        """How often each line was written, by whomever."""
        return Counter(line for file in self._directory.glob("*.faults") for line in file.read_text().splitlines())


def plan_of(environ: Mapping[str, str]) -> FaultPlan:
    return msgspec.json.decode(environ[VARIABLE], type=FaultPlan)
