"""A full picture of some pods, kept by list and watch. Knows the protocol of the API, by `PodSource`; nothing of HTTP.

    list ──> publish all ──> watch from its version ──event──> publish all
      ^                        │        └──the server ends it──> watch from the last version
      │                        ├── 410, or RELIST_S since the list ──> list at once
      └── backoff, jittered <──┴── anything else, also an end long before its time: what was known stays

Every call has a deadline. A list now and then finds what no event said.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Protocol

from msgspec import Struct

from disagg.discovery.faults import Faults
from disagg.discovery.found import Publish, by_key
from disagg.discovery.pods import fault_of, found_in, uid_of, version_of
from disagg.types.plain import quoted

logger = logging.getLogger(__name__)

Pod = Mapping[str, Any]
EARLY_S = 2.0  # a watch that ends sooner, and sooner than half of what was asked for, is not begun again at once


class Timing(Struct, frozen=True, kw_only=True):
    """relist_s: between lists, though nothing seems to be missing. watch_s: after which the server ends a watch."""

    list_s: float = 30.0
    watch_s: float = 60.0
    spare_s: float = 10.0  # beyond watch_s, before the connection is taken for dead
    relist_s: float = 300.0
    first_backoff_s: float = 0.5
    max_backoff_s: float = 30.0


class Expired(Exception):
    """410: the version is too old to be watched from, or to be listed on from."""


class SourceError(Exception):
    """Anything else that went wrong: refused, forbidden, unavailable, or an answer that makes no sense."""


class Event(Struct, frozen=True):
    """kind: ADDED, MODIFIED, DELETED or BOOKMARK."""

    kind: str
    pod: Pod


class PodSource(Protocol):
    """Raises Expired or SourceError."""

    async def list(self) -> tuple[list[Pod], str]:
        """All pods, and the version of the list."""
        ...

    def watch(self, version: str, timeout_s: float) -> AsyncIterator[Event]:
        """What happens from there on, until the server ends it, after timeout_s at the latest."""
        ...


class Reflector:
    """pods: by name, as they were last heard."""

    def __init__(
        self,
        source: PodSource,
        publish: Publish,
        timing: Timing | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._source = source
        self._publish = publish
        self._timing = timing or Timing()
        self._clock = clock
        self._jitter = jitter
        self._pods: dict[str, Pod] = {}
        self._twice: dict[str, str] = {}  # names that several pods of the list had, and what is said of that
        self.faults = Faults()
        self._version = ""  # to watch from; empty: list first
        self._listed_s = 0.0
        self._failures = 0
        self.error = ""  # of the last call, while none has worked since

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            try:
                if not self._version:
                    await self._list()
                await self._watch()
            except Expired as expired:
                logger.info("pods are listed again: %s", expired)
                self._version = ""
                if self._failures:  # a list that is itself expired must not be asked for without a pause
                    await self._pause()
                self._failures += 1
            except (SourceError, TimeoutError) as error:
                self._failed(str(error) or "no answer in time")
                await self._pause()
            except Exception as error:
                # Whatever the client's library raises, or a pod that nobody thought of: without this task no server would
                # ever be seen to come or go. An event may have been lost, so all are listed again.
                logger.exception("pods are listed again, after what should not happen")
                self._version = ""
                self._failed(f"{type(error).__name__}: {str(error)[:400]}")
                await self._pause()

    async def _list(self) -> None:
        async with asyncio.timeout(self._timing.list_s):
            pods, version = await self._source.list()
        if not version:
            raise SourceError("the list has no resourceVersion")
        self._pods, self._twice = _by_name(pods)
        self._version, self._listed_s = version, self._clock()
        self._tell()

    async def _watch(self) -> None:
        """One watch, to its end, and a pause where that came early: else a server that ends each at once is asked all the
        time. Raises SourceError for an early end without an event."""
        left_s = self._listed_s + self._timing.relist_s - self._clock()
        if left_s <= 0:
            self._version = ""
            return
        watch_s = max(1.0, min(self._timing.watch_s, left_s) * (0.8 + 0.2 * self._jitter()))
        lasts_s, heard, begun_s = min(EARLY_S, watch_s / 2), False, self._clock()
        try:
            async with asyncio.timeout(watch_s + self._timing.spare_s):
                async for event in self._source.watch(self._version, watch_s):
                    heard = True
                    self._works()
                    self._heard(event)
        finally:
            early = self._clock() - begun_s < lasts_s
            if heard and not early:
                self._failures = 0
        if not early:
            self._failures = 0
            self._works()
        elif heard:
            self._failures += 1
            await self._pause()
        else:
            raise SourceError("it ends a watch at once, without an event")

    def _heard(self, event: Event) -> None:
        version = version_of(event.pod)
        if version:
            self._version = version
        if event.kind == "BOOKMARK":
            return
        name = _name(event.pod)
        self._twice.pop(name, None)
        if event.kind == "DELETED":
            self._pods.pop(name, None)
        elif event.kind in ("ADDED", "MODIFIED"):
            self._pods[name] = event.pod
        else:
            raise SourceError(f"an event of an unknown kind, {event.kind[:40]!r}")
        self._tell()

    def _tell(self) -> None:
        wrong = {name: fault for name, pod in self._pods.items() if (fault := fault_of(pod))}
        for line in self.faults.found({quoted(name): fault for name, fault in {**wrong, **self._twice}.items()}):
            logger.warning("no server: pod %s", line)
        self._publish(by_key(found for pod in self._pods.values() if (found := found_in(pod)) is not None))

    def _works(self) -> None:
        if self.error:
            logger.info("the Kubernetes API answers again")
        self.error = ""

    def _failed(self, error: str) -> None:
        self._failures += 1
        if error != self.error:
            logger.warning("servers are as they were last seen: the Kubernetes API: %s", error)
            self.error = error

    async def _pause(self) -> None:
        timing = self._timing
        most_s = min(timing.max_backoff_s, timing.first_backoff_s * 2 ** min(self._failures, 16))
        await asyncio.sleep(most_s * (0.5 + 0.5 * self._jitter()))


def _by_name(pods: list[Pod]) -> tuple[dict[str, Pod], dict[str, str]]:
    """The first of each name, and what is to be said of names that several have, which no API gives out."""
    by_name: dict[str, Pod] = {}
    twice = {}
    for pod in pods:
        name = _name(pod)
        if (first := by_name.setdefault(name, pod)) is not pod:
            uids = f"{quoted(uid_of(first))} and {quoted(uid_of(pod))}"
            twice[name] = f"the list has it twice, with the uids {uids}; the first counts, a name must be one pod's"
    return by_name, twice


def _name(pod: Pod) -> str:
    metadata = pod.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    if not isinstance(name, str):
        raise SourceError("a pod without a name")
    return name
