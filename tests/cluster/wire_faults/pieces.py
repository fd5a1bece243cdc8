"""Writes and notifications that are lost, repeated, late or damaged, in a worker's process. See the plan.

A backend around the shipped one. A write that is dropped is not done, though it is reported as complete, and nobody is
notified. One that is repeated is done twice and then notified once: bytes that come after their notification are what no
transport may do. A damaged one has one bit turned over in the staged bytes, after their checksum was made, and its
notification is marked, so that the receiving end can say what came of it.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from disagg.messages.transfer import Landing, TransferEvent
from disagg.staging import copy
from disagg.staging.pieces import TRAILER_BYTES
from disagg.transfer.backends.base import FailedWrite, Peer, Polled, Region
from disagg.transfer.backends.nixl import NixlBackend
from disagg.worker import receiver, transfer_driver
from tests.cluster.wire_faults.plan import Fault, FaultPlan, FrozenWrite

_INTACT, _FLIPPED = b"\x00", b"\x01"  # the mark, last in every notification
_HALF = -1  # handle of the first half of a write
FINISH_S = 30.0
NAP_S = 0.001

Write = Callable[[], int]  # starts a write, returns the other backend's handle


@dataclass(frozen=True, eq=False)
class _Late:
    """A write that waits."""

    due_s: float
    peer: Peer
    handle: int  # ours
    write: Write


class FaultyBackend:
    """A `TransferBackend` around another. Handles are its own, since one write may become none or two of the other's."""

    def __init__(self, inner: Any, plan: FaultPlan, server: str, flipped: set[int]) -> None:
        """flipped: gets the number of every ring entry whose damaged bytes are handed on here."""
        self._inner = inner
        self._plan = plan
        self._rng = random.Random(f"{plan.seed} pieces {server}")
        self._log = plan.log
        self._freeze = FrozenWrite(plan.log_dir, server)
        self._flipped = flipped
        self._next_handle = 0
        self._ours: dict[int, int] = {}  # handle of the other backend -> our handle
        self._again: dict[int, tuple[int, Write]] = {}  # handle of the other backend -> (our handle, what follows it)
        self._late_writes: list[_Late] = []
        self._late_notifications: list[tuple[float, tuple[str, bytes]]] = []  # (when, the notification)
        self._completed: list[int] = []  # to be reported by the next poll, like the following
        self._failed: list[FailedWrite] = []
        self._notifications: list[tuple[str, bytes]] = []
        self._gone: list[Peer] = []

    def __getattr__(self, name: str) -> Any:
        """Everything that suffers nothing."""
        return getattr(self._inner, name)

    @property
    def outstanding(self) -> int:
        return self._inner.outstanding + len(self._late_writes) + len(self._completed) + len(self._failed)

    def _write(
        self,
        peer: Peer,
        local: Region,
        local_offset: int,
        remote: Region,
        remote_offset: int,
        nbytes: int,
        notification: bytes,
    ) -> int:
        handle, self._next_handle = self._next_handle, self._next_handle + 1

        def part(start: int, stop: int, told: bytes) -> int:
            return self._inner.prepare_write(
                peer, local, local_offset + start, remote, remote_offset + start, stop - start, told
            )()

        def whole() -> int:
            return part(0, nbytes, notification + _INTACT)

        if self._freeze.take():
            self._stop_half_way(handle, part, nbytes, notification + _INTACT)
            return handle
        fault = self._plan.writes.draw(self._rng)
        if fault is not Fault.NONE:
            self._log.note("write", fault)
        match fault:
            case Fault.DROP:
                self._completed.append(handle)
            case Fault.DELAY:
                due_s = time.monotonic() + self._rng.uniform(0.0, self._plan.writes.delay_s)
                self._late_writes.append(_Late(due_s, peer, handle, whole))
            case Fault.DUPLICATE:
                first = part(0, nbytes, b"")
                self._again[first] = (handle, whole)
            case Fault.FLIP:
                # Rows of these models are whole words, so there is no padding that nobody verifies. The trailer would be
                # missed without checksums too: the receiving end compares it with the sum that it did not make.
                damageable = nbytes - TRAILER_BYTES if self._plan.ignore_checksums else nbytes
                bit = self._rng.randrange(8 * damageable)
                ctypes.c_uint8.from_address(local.address + local_offset + bit // 8).value ^= 1 << bit % 8
                self._ours[part(0, nbytes, notification + _FLIPPED)] = handle
            case Fault.NONE:
                self._ours[whole()] = handle
        return handle

    def prepare_write(self, *arguments: Any) -> Callable[[], int]:
        """What befalls a write befalls it when it begins."""
        return partial(self._write, *arguments)

    def _stop_half_way(self, handle: int, part: Callable[[int, int, bytes], int], nbytes: int, told: bytes) -> None:
        """Half of the bytes are in place when this process stops itself; the others follow when somebody continues it."""
        self._ours[part(0, nbytes // 2, b"")] = _HALF
        self._finish(_HALF)
        self._completed = [done for done in self._completed if done != _HALF]
        self._failed = [failed for failed in self._failed if failed.handle != _HALF]
        self._freeze.say_frozen()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._ours[part(nbytes // 2, nbytes, told)] = handle
        self._finish(handle)
        self._freeze.say_resumed()

    def _finish(self, handle: int) -> None:
        """Poll until a write of ours is completed or has failed."""
        deadline = time.monotonic() + FINISH_S
        while handle in self._ours.values():
            assert time.monotonic() < deadline, "a write takes for ever"
            self._look()
            time.sleep(NAP_S)

    def remove_peer(self, peer: Peer) -> None:
        self._inner.remove_peer(peer)
        for late in [late for late in self._late_writes if late.peer == peer]:
            self._post(late)  # fails, as the caller is to be told

    def _post(self, late: _Late) -> None:
        self._late_writes.remove(late)
        self._ours[late.write()] = late.handle

    def poll(self) -> Polled:
        self._look()
        now = time.monotonic()
        for late in [late for late in self._late_writes if late.due_s <= now]:
            self._post(late)
        self._notifications += [notification for due_s, notification in self._late_notifications if due_s <= now]
        self._late_notifications = [late for late in self._late_notifications if late[0] > now]
        polled = Polled(*(tuple(each) for each in (self._completed, self._failed, self._notifications, self._gone)))
        for each in (self._completed, self._failed, self._notifications, self._gone):
            each.clear()
        return polled

    def _look(self) -> None:
        """Poll the other backend once; what it says is kept for our caller's next poll."""
        polled = self._inner.poll()
        for theirs in polled.completed:
            again = self._again.pop(theirs, None)
            if again is not None:
                self._ours[again[1]()] = again[0]
            else:
                self._completed.append(self._ours.pop(theirs))
        for failed in polled.failed:
            again = self._again.pop(failed.handle, None)
            handle = again[0] if again is not None else self._ours.pop(failed.handle)
            self._failed.append(FailedWrite(handle, failed.reason))
        self._gone += polled.gone
        for peer, payload in polled.notifications:
            if payload:  # the first writing of two, or the first half of one, tells nobody
                self._notified(peer, payload[:-1], payload[-1:])

    def _notified(self, peer: str, payload: bytes, mark: bytes) -> None:
        if mark == _FLIPPED:  # these are counted, so they suffer nothing more
            self._flipped.add(int.from_bytes(payload, "little"))
            self._notifications.append((peer, payload))
            return
        fault = self._plan.notifications.draw(self._rng)
        if fault is not Fault.NONE:
            self._log.note("notification", fault)
        match fault:
            case Fault.DROP:
                pass
            case Fault.DUPLICATE:
                self._notifications += [(peer, payload)] * 2
            case Fault.DELAY:
                due_s = time.monotonic() + self._rng.uniform(0.0, self._plan.notifications.delay_s)
                self._late_notifications.append((due_s, (peer, payload)))
            case _:
                self._notifications.append((peer, payload))


def install(plan: FaultPlan, server: str) -> None:
    """From now on this process's transfers suffer, and what came of damaged pieces is logged."""
    flipped: set[int] = set()
    log = plan.log

    def faulty(**options: Any) -> FaultyBackend:
        return FaultyBackend(NixlBackend(**options), plan, server, flipped)

    class LoggingDriver(transfer_driver.TransferDriver):
        def take_events(self) -> tuple[TransferEvent, ...]:
            reports = super().take_events()
            for report in reports:
                if isinstance(report, Landing) and (not report.ok or report.entry_id in flipped):
                    damage = "damaged" if report.entry_id in flipped else "intact"
                    log.note("landing", damage, report.reason or "taken")
            return reports

    transfer_driver.create = lambda backend, **options: faulty(**options)
    transfer_driver.TransferDriver = LoggingDriver
    if plan.ignore_checksums:
        copy.checksum = receiver.checksum = lambda staged, payload, seed: 0
