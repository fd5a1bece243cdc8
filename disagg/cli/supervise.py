"""Decides what `disagg up` does with its children: start, restart, kill, drain, give up. Pure; knows names and times.

Events go in with the time, instructions come out. What a child is, is nobody's business here.

    WAITING ──due──> RUNNING ──exited──> WAITING (backoff), or ENDED while draining
                        │ silent                ▲
                        └──────> KILLED ────────┘ exited

Draining goes wave by wave: the first (the router) is asked to end; when all of it has, or its time is up, the next.
"""

from __future__ import annotations

import enum
import signal

from msgspec import Struct

from disagg.types.status import DONE, INTERRUPTED, REFUSED


class Limits(Struct, frozen=True, kw_only=True):
    """Times in seconds. drain_s: one per wave, in the order of draining."""

    drain_s: tuple[float, ...]
    silent_s: float = 10.0  # without a heartbeat for this long a child is hung
    first_beat_s: float = 60.0  # importing takes a while
    backoff_first_s: float = 0.2
    backoff_most_s: float = 5.0
    settled_s: float = 30.0  # a child that ran this long starts again without delay's growth


# ---- events


class Begin(Struct, frozen=True):
    """Start everything."""


class Beat(Struct, frozen=True):
    """A child showed that its loop runs."""

    name: str


class Proven(Struct, frozen=True):
    """A child serves, so its configuration works."""

    name: str


class Exited(Struct, frozen=True):
    """A child ended. status: as of `subprocess`, negative for a signal."""

    name: str
    status: int


class Tick(Struct, frozen=True):
    """Time has passed. Comes several times a second."""


class Stop(Struct, frozen=True):
    """The operator wants an end; a second one wants it now."""


Event = Begin | Beat | Proven | Exited | Tick | Stop


# ---- instructions


class Start(Struct, frozen=True):
    name: str


class Terminate(Struct, frozen=True):
    """Ask the child to drain and end (SIGTERM)."""

    name: str


class Kill(Struct, frozen=True):
    """End the child's whole process group (SIGKILL)."""

    name: str
    why: str


class Died(Struct, frozen=True):
    """Report: a child ended by itself, or was killed for its silence, and will be started again."""

    name: str
    status: int
    restart_in_s: float


class DiedDraining(Struct, frozen=True):
    """Report: a child that was to drain ended otherwise."""

    name: str
    status: int


class GiveUp(Struct, frozen=True):
    """Report: a child cannot run with this configuration; everything is drained."""

    name: str


class Ended(Struct, frozen=True):
    """Nothing runs any more; exit with this code."""

    exit_code: int


Instruction = Start | Terminate | Kill | Died | DiedDraining | GiveUp | Ended


class Phase(enum.Enum):
    WAITING = "waiting"  # to be started at due_s
    RUNNING = "running"
    KILLED = "killed"  # SIGKILL was sent; its exit has not been seen
    ENDED = "ended"


class _Child:
    def __init__(self, wave: int) -> None:
        self.wave = wave
        self.phase = Phase.WAITING
        self.due_s = 0.0
        self.started_s = 0.0
        self.silent_at_s = 0.0  # without a beat until then it is hung
        self.failures = 0  # in a row
        self.proven = False  # it has served: if it finds no model or no port now, that may pass


class Supervisor:
    """The state of all children. waves: names, in the order of draining."""

    def __init__(self, waves: tuple[tuple[str, ...], ...], limits: Limits) -> None:
        assert len(waves) == len(limits.drain_s), "one drain time per wave"
        self._limits = limits
        self._children = {name: _Child(index) for index, wave in enumerate(waves) for name in wave}
        self._num_waves = len(waves)
        self._last_tick_s: float | None = None
        self._draining: int | None = None  # index of the wave that drains
        self._drain_until_s = 0.0
        self._stops = 0
        self._exit_code = DONE
        self._ended = False

    def handle(self, event: Event, now_s: float) -> list[Instruction]:
        """What to do now, in order. Events of unknown children, and everything after `Ended`, are our bugs."""
        assert not self._ended, f"{event} after the end"
        match event:
            case Begin():
                return [self._start(name, now_s) for name in self._children]
            case Beat(name):
                self._children[name].silent_at_s = now_s + self._limits.silent_s
                return []
            case Proven(name):
                self._children[name].proven = True
                return []
            case Exited(name, status):
                return self._exited(name, status, now_s)
            case Tick():
                return self._tick(now_s)
            case Stop():
                return self._stop(now_s)

    def phase(self, name: str) -> Phase:
        return self._children[name].phase

    @property
    def draining(self) -> bool:
        return self._draining is not None

    def check_integrity(self) -> None:
        """Asserts what always holds."""
        for name, child in self._children.items():
            if self._draining is None:
                assert child.phase is not Phase.ENDED, f"{name} ended while nobody asked for an end"
            else:
                assert child.phase is not Phase.WAITING, f"{name} waits for a start that will not come"
                if child.wave < self._draining:
                    assert child.phase is Phase.ENDED, f"{name} outlived its wave"
            assert child.failures >= 0
        assert self._ended == (self._draining is not None and not self._alive()), "the end is when nothing lives"

    def _start(self, name: str, now_s: float) -> Instruction:
        child = self._children[name]
        child.phase = Phase.RUNNING
        child.started_s = now_s
        child.silent_at_s = now_s + self._limits.first_beat_s
        return Start(name)

    def _exited(self, name: str, status: int, now_s: float) -> list[Instruction]:
        child = self._children[name]
        assert child.phase in (Phase.RUNNING, Phase.KILLED), f"{name} exited while {child.phase.value}"
        if self.draining:
            # 0 is a drain; -SIGTERM too, of one that had not come far enough to have anything to drain.
            expected = child.phase is Phase.KILLED or status in (0, -signal.SIGTERM)
            child.phase = Phase.ENDED
            return [*([] if expected else [DiedDraining(name, status)]), *self._advance(now_s)]
        if status == REFUSED and not child.proven:  # it would be refused again, unless it has served before
            child.phase = Phase.ENDED
            self._exit_code = REFUSED
            return [GiveUp(name), *self._drain(now_s)]
        if now_s - child.started_s >= self._limits.settled_s:
            child.failures = 0
        delay_s = min(self._limits.backoff_first_s * 2.0 ** min(child.failures, 30), self._limits.backoff_most_s)
        child.failures += 1
        child.phase = Phase.WAITING
        child.due_s = now_s + delay_s
        return [Died(name, status, delay_s)]

    def _tick(self, now_s: float) -> list[Instruction]:
        self._forgive_own_absence(now_s)
        if self._draining is not None:
            return self._drain_tick(now_s)
        out: list[Instruction] = []
        for name, child in self._children.items():
            if child.phase is Phase.WAITING and child.due_s <= now_s:
                out.append(self._start(name, now_s))
            elif child.phase is Phase.RUNNING and child.silent_at_s <= now_s:
                child.phase = Phase.KILLED
                out.append(Kill(name, "no heartbeat"))
        return out

    def _forgive_own_absence(self, now_s: float) -> None:
        """When this process itself was stopped or starved, the silence was not the children's."""
        last_s, self._last_tick_s = self._last_tick_s, now_s
        if last_s is None or now_s - last_s < self._limits.silent_s / 4:
            return
        for child in self._children.values():
            child.silent_at_s = max(child.silent_at_s, now_s + self._limits.silent_s)

    def _stop(self, now_s: float) -> list[Instruction]:
        self._stops += 1
        if not self.draining:
            return self._drain(now_s)
        if self._stops == 1:
            return []  # draining already, because a child gave up: the first request changes nothing
        self._exit_code = INTERRUPTED
        return self._kill_all("asked to end now", range(self._num_waves))

    def _drain(self, now_s: float) -> list[Instruction]:
        self._draining = -1
        for child in self._children.values():
            if child.phase is Phase.WAITING:
                child.phase = Phase.ENDED
        return self._advance(now_s)

    def _advance(self, now_s: float) -> list[Instruction]:
        """Goes on to the next wave once the present one has ended."""
        assert self._draining is not None
        if not self._alive():
            self._ended = True
            return [Ended(self._exit_code)]
        if any(child.wave <= self._draining for child in self._alive()):
            return []
        self._draining = min(child.wave for child in self._alive())
        self._drain_until_s = now_s + self._limits.drain_s[self._draining]
        return [
            Terminate(name)
            for name, child in self._children.items()
            if child.wave == self._draining and child.phase is Phase.RUNNING
        ]

    def _drain_tick(self, now_s: float) -> list[Instruction]:
        assert self._draining is not None
        if now_s < self._drain_until_s:
            return []
        return self._kill_all("still running when its time to drain was up", range(self._draining, self._draining + 1))

    def _kill_all(self, why: str, waves: range) -> list[Instruction]:
        out: list[Instruction] = []
        for name, child in self._children.items():
            if child.wave in waves and child.phase is Phase.RUNNING:
                child.phase = Phase.KILLED
                out.append(Kill(name, why))
        return out

    def _alive(self) -> list[_Child]:
        return [child for child in self._children.values() if child.phase in (Phase.RUNNING, Phase.KILLED)]
