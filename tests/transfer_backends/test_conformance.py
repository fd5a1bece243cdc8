"""One suite for every transfer backend: what `TransferBackend` promises, against peers that live, freeze and die."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest

from disagg.transfer.backends.base import (
    WARM_UP_BYTES,
    BackendError,
    FailedWrite,
    Peer,
    Polled,
    Region,
    TransferBackend,
    create,
)
from tests.transfer_backends.loopback import Hub, LoopbackBackend
from tests.transfer_backends.memory import HostMemory
from tests.transfer_backends.peer import UCX, run_process, serve
from tests.transfer_backends.say import say

MIB = 1 << 20
REGION_BYTES = 8 * MIB
PATIENCE_S = 60.0  # for what must happen at last; the machine may be busy
NOTICED_S = 10.0  # by then a dead peer is missed; UCX's keepalive alone would take 20 s and more


class RemotePeer:
    """A peer under control of the test. It answers commands as long as it is neither frozen nor dead."""

    def __init__(self, name: str, connection: Connection, signal_: Callable[[int], None]) -> None:
        self.name, self._connection, self._signal = name, connection, signal_
        self.metadata: bytes = self.ask("metadata")
        self.region: Region = self.ask("region")

    def ask(self, command: str, *arguments: Any) -> Any:
        self._connection.send((command, *arguments))
        assert self._connection.poll(PATIENCE_S), f"{self.name} does not answer {command}"
        return self._connection.recv()

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)


class Cluster:
    """The agent under test, `me`, and its peers. Keeps what `me` was told until somebody asks for it."""

    def __init__(self, kind: str) -> None:
        self._kind, self._hub = kind, Hub()
        self._ends: list[Callable[[], None]] = []
        self.me: TransferBackend = self._backend("me")
        self.memory = HostMemory(REGION_BYTES)
        self.region = self.me.register(self.memory)
        self.completed: set[int] = set()
        self.failed: dict[int, FailedWrite] = {}
        self.notifications: list[tuple[str, bytes]] = []
        self.gone: list[Peer] = []
        self.wired: list[Peer] = []

    def _backend(self, name: str) -> TransferBackend:
        return create("nixl", name=name, **UCX) if self._kind == "nixl" else LoopbackBackend(name, self._hub)

    def spawn(self, name: str) -> RemotePeer:
        ours, theirs = multiprocessing.Pipe()
        if self._kind == "nixl":
            context = multiprocessing.get_context("spawn")
            process = context.Process(target=run_process, args=(theirs, name, REGION_BYTES), daemon=True)
            process.start()
            theirs.close()

            def send_signal(number: int) -> None:
                assert process.pid is not None
                os.kill(process.pid, number)
                if number == signal.SIGKILL:
                    process.join()

            self._ends.append(process.kill)
            return RemotePeer(name, ours, send_signal)
        backend, killed = LoopbackBackend(name, self._hub), threading.Event()
        life = backend.metadata().decode()
        thread = threading.Thread(target=serve, args=(theirs, backend, REGION_BYTES, False, killed), daemon=True)
        thread.start()

        def act(number: int) -> None:
            if number == signal.SIGKILL:
                killed.set()
                self._hub.kill(life)
            else:
                self._hub.freeze(life, number == signal.SIGSTOP)

        self._ends.append(lambda: act(signal.SIGKILL))
        return RemotePeer(name, ours, act)

    def join(self, remote: RemotePeer) -> Peer:
        """Introduce a peer and `me` to each other."""
        remote.ask("add", self.me.metadata())
        peer = self.me.add_peer(remote.metadata)
        self.me.warm_up(peer, self.region, remote.region, remote_offset=REGION_BYTES - WARM_UP_BYTES)
        return peer

    def poll(self) -> Polled:
        polled = self.me.poll()
        for handle in polled.completed:
            assert handle not in self.completed, "reported twice"
            assert handle not in self.failed
            self.completed.add(handle)
        for failure in polled.failed:
            assert failure.handle not in self.failed, "reported twice"
            assert failure.handle not in self.completed
            self.failed[failure.handle] = failure
        self.notifications += polled.notifications
        self.gone += polled.gone
        self.wired += [wired.peer for wired in polled.wired]
        return polled

    def until(self, condition: Callable[[], Any], patience_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + patience_s
        while not condition():
            assert time.monotonic() < deadline, f"waited {patience_s} s in vain; failed: {self.failed}"
            self.poll()

    def until_kept(self, remote: RemotePeer, count: int) -> list[tuple[str, bytes]]:
        """Notifications that a peer has kept, as soon as there are `count`."""
        kept: list[tuple[str, bytes]] = []

        def enough() -> bool:
            kept.extend(remote.ask("notifications"))
            return len(kept) >= count

        self.until(enough)
        return kept

    def answer(self) -> bytes:
        self.until(lambda: self.notifications)
        return self.notifications.pop(0)[1]

    def fill(self, offset: int, data: bytes) -> None:
        self.memory.view[offset : offset + len(data)] = data

    def end(self) -> None:
        self.me.close()
        self.me.close()
        for end in self._ends:
            end()


@pytest.fixture(scope="module", params=["loopback", "nixl"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    if request.param == "nixl" and importlib.util.find_spec("nixl_cu13") is None:
        pytest.skip("nixl-cu13 is not installed")
    cluster = Cluster(request.param)
    yield cluster
    cluster.end()


@pytest.fixture(scope="module")
def left(cluster: Cluster) -> tuple[RemotePeer, Peer]:
    remote = cluster.spawn("left")
    return remote, cluster.join(remote)


@pytest.fixture(scope="module")
def right(cluster: Cluster) -> tuple[RemotePeer, Peer]:
    remote = cluster.spawn("right")
    return remote, cluster.join(remote)


@pytest.fixture(autouse=True)
def _nothing_left_over(cluster: Cluster) -> Iterator[None]:
    cluster.notifications.clear()
    cluster.gone.clear()
    yield
    cluster.until(lambda: not cluster.me.outstanding)


def pattern(nbytes: int, seed: int) -> bytes:
    return bytes((i * 31 + seed * 17 + (i >> 8)) & 0xFF for i in range(nbytes))


Both = tuple[RemotePeer, Peer]


@pytest.mark.parametrize("nbytes", [1, 7, 4096, 65537])
def test_a_write_lands_bit_exact_and_nowhere_else(cluster: Cluster, left: Both, nbytes: int) -> None:
    remote, peer = left
    remote.ask("fill", 0, b"\xee" * (2 * 65537 + 300))
    cluster.fill(5, pattern(nbytes, nbytes))
    handle = cluster.me.prepare_write(peer, cluster.region, 5, remote.region, 130, nbytes, b"landed")()
    cluster.until(lambda: handle in cluster.completed)
    assert remote.ask("read", 0, nbytes + 260) == b"\xee" * 130 + pattern(nbytes, nbytes) + b"\xee" * 130
    assert cluster.until_kept(remote, 1) == [("me", b"landed")]


def test_a_write_that_was_planned_begins_when_it_is_called_and_its_source_may_change_until_then(
    cluster: Cluster, left: Both
) -> None:
    remote, peer = left
    remote.ask("fill", 0, bytes(8192))
    planned = [
        cluster.me.prepare_write(peer, cluster.region, 0, remote.region, place, 4096, b"%d" % place)
        for place in (0, 4096)
    ]
    assert planned[0] is not None and cluster.me.outstanding == 0, "nothing is under way yet"
    cluster.fill(0, pattern(4096, 5))
    handle = planned[0]()
    cluster.until(lambda: handle in cluster.completed)
    assert cluster.until_kept(remote, 1) == [("me", b"0")]
    del planned  # the second never begins
    assert remote.ask("read", 0, 8192) == pattern(4096, 5) + bytes(4096)
    with pytest.raises(ValueError, match="no range of a region"):
        cluster.me.prepare_write(peer, cluster.region, 0, remote.region, REGION_BYTES, 1, b"")


def test_a_write_that_was_planned_for_a_peer_that_is_removed_fails_when_it_begins(cluster: Cluster) -> None:
    remote = cluster.spawn("planned")
    peer = cluster.join(remote)
    before = cluster.me.prepare_write(peer, cluster.region, 0, remote.region, 0, 64, b"stale")
    cluster.me.remove_peer(peer)
    after = cluster.me.prepare_write(peer, cluster.region, 0, remote.region, 0, 64, b"stale")
    again = cluster.join(remote)
    stale = [before(), after()]
    fresh = cluster.me.prepare_write(again, cluster.region, 0, remote.region, 0, 64, b"fresh")()
    cluster.until(lambda: set(stale) <= set(cluster.failed) and fresh in cluster.completed)
    assert cluster.until_kept(remote, 1) == [("me", b"fresh")]
    remote.kill()


def test_the_notification_follows_the_data(cluster: Cluster, left: Both) -> None:
    remote, peer = left
    for value in range(1, 41):
        cluster.fill(0, bytes([value]) * MIB)
        cluster.me.prepare_write(peer, cluster.region, 0, remote.region, 0, MIB, b"verify 0 %d %d" % (MIB, value))()
        assert cluster.answer() == b"same", f"write {value} was announced before it had landed"
    say(cluster.me, peer, b"verify 0 %d 41" % MIB)
    assert cluster.answer() == b"different", "the peer's comparison can fail"


def test_many_writes_are_in_flight_at_once(cluster: Cluster, left: Both) -> None:
    remote, peer = left
    data = pattern(64 * 4096, 3)
    cluster.fill(0, data)
    handles = [
        cluster.me.prepare_write(peer, cluster.region, i * 4096, remote.region, (63 - i) * 4096, 4096, b"%d" % i)()
        for i in range(64)
    ]
    assert len(set(handles)) == 64
    assert cluster.me.outstanding == 64
    cluster.until(lambda: cluster.completed.issuperset(handles))
    wanted = b"".join(data[i * 4096 : (i + 1) * 4096] for i in reversed(range(64)))
    assert remote.ask("read", 0, 64 * 4096) == wanted
    assert sorted(int(message) for _, message in cluster.until_kept(remote, 64)) == list(range(64))


def test_a_peer_is_wired_once_the_first_bytes_have_landed_there(cluster: Cluster, left: Both, right: Both) -> None:
    cluster.until(lambda: {"left", "right"} <= {peer.name for peer in cluster.wired})
    assert Counter(peer.name for peer in cluster.wired if peer.name in ("left", "right")) == {"left": 1, "right": 1}


def test_two_peers_get_what_is_theirs(cluster: Cluster, left: Both, right: Both) -> None:
    for i in range(10):
        for seed, (remote, peer) in enumerate((left, right)):
            cluster.fill(seed * 4096, pattern(4096, seed + i))
            handle = cluster.me.prepare_write(
                peer, cluster.region, seed * 4096, remote.region, 8192, 4096, b"%s" % remote.name.encode()
            )()
            cluster.until(lambda handle=handle: handle in cluster.completed)
            assert remote.ask("read", 8192, 4096) == pattern(4096, seed + i)
    for remote, _ in (left, right):
        assert cluster.until_kept(remote, 10) == [("me", remote.name.encode())] * 10


def test_peers_write_here_too_and_say_who_they_are(cluster: Cluster, left: Both, right: Both) -> None:
    for place, (remote, _) in enumerate((left, right)):
        remote.ask("fill", 0, pattern(5000, place))
        remote.ask("write", "me", 0, cluster.region, place * 8192, 5000, b"from the other side")
        cluster.until(lambda: cluster.notifications)
        assert cluster.notifications == [(remote.name, b"from the other side")]
        cluster.notifications.clear()
        assert bytes(cluster.memory.view[place * 8192 : place * 8192 + 5000]) == pattern(5000, place)


@pytest.mark.parametrize("nbytes", [0, 1, 1000, 70_000, MIB])
def test_notifications_of_any_size_arrive(cluster: Cluster, left: Both, nbytes: int) -> None:
    remote, peer = left
    message = pattern(nbytes, 9)
    say(cluster.me, peer, message)
    assert cluster.until_kept(remote, 1) == [("me", message)]
    cluster.me.prepare_write(peer, cluster.region, 0, remote.region, 0, 64, message)()
    assert cluster.until_kept(remote, 1) == [("me", message)]
    say(cluster.me, peer, b"echo " + message)
    assert cluster.answer() == message


def test_notifications_of_a_peer_keep_their_order(cluster: Cluster, left: Both) -> None:
    remote, peer = left
    messages = [b"%d" % i for i in range(200)]
    for message in messages:
        say(cluster.me, peer, message)
    assert [message for _, message in cluster.until_kept(remote, 200)] == messages


def test_polling_with_nothing_outstanding_says_nothing_and_is_cheap(cluster: Cluster, left: Both) -> None:
    cluster.until(lambda: not cluster.me.outstanding)
    assert cluster.poll() == Polled()
    rounds = 2000
    before = time.thread_time()
    for _ in range(rounds):
        cluster.me.poll()
    assert (time.thread_time() - before) / rounds < 1e-3


def test_ranges_outside_of_a_region_are_refused_at_once(cluster: Cluster, left: Both) -> None:
    remote, peer = left
    for local_offset, remote_offset, nbytes in (
        (0, REGION_BYTES - 10, 11),
        (REGION_BYTES, 0, 1),
        (-1, 0, 1),
        (0, 0, 0),
    ):
        with pytest.raises(ValueError, match="no range of a region"):
            cluster.me.prepare_write(peer, cluster.region, local_offset, remote.region, remote_offset, nbytes, b"")()
    assert cluster.me.outstanding == 0


def test_memory_that_the_peer_did_not_register_is_not_written(cluster: Cluster, left: Both) -> None:
    remote, peer = left
    elsewhere = Region(remote.region.address + (1 << 40), 4096, -1)
    handle = cluster.me.prepare_write(peer, cluster.region, 0, elsewhere, 0, 4096, b"never")()
    cluster.until(lambda: handle in cluster.failed)
    assert cluster.gone == [], "the peer has done nothing wrong"
    good = cluster.me.prepare_write(peer, cluster.region, 0, remote.region, 0, 4096, b"fine")()
    cluster.until(lambda: good in cluster.completed)
    assert cluster.until_kept(remote, 1) == [("me", b"fine")]


@pytest.mark.parametrize("metadata", [b"", b"junk", b"loopback", bytes(500)])
def test_bytes_that_are_no_metadata_are_refused(cluster: Cluster, metadata: bytes) -> None:
    with pytest.raises(BackendError, match="no metadata"):
        cluster.me.add_peer(metadata)


def test_a_write_to_a_removed_peer_fails_cleanly_and_the_peer_can_be_added_again(cluster: Cluster) -> None:
    remote = cluster.spawn("removed")
    peer = cluster.join(remote)
    cluster.me.remove_peer(peer)
    cluster.me.remove_peer(peer)
    handle = cluster.me.prepare_write(peer, cluster.region, 0, remote.region, 0, 64, b"late")()
    cluster.me.warm_up(peer)
    cluster.until(lambda: handle in cluster.failed)
    assert "removed" in cluster.failed[handle].reason
    again = cluster.join(remote)
    assert again != peer
    stale = cluster.me.prepare_write(peer, cluster.region, 0, remote.region, 0, 64, b"stale")()
    fresh = cluster.me.prepare_write(again, cluster.region, 0, remote.region, 0, 64, b"fresh")()
    cluster.until(lambda: stale in cluster.failed and fresh in cluster.completed)
    assert cluster.until_kept(remote, 1) == [("me", b"fresh")]
    assert cluster.gone == []
    remote.kill()


def test_a_killed_peer_fails_its_writes_long_before_a_keepalive_and_its_successor_works(
    cluster: Cluster, left: Both
) -> None:
    remote = cluster.spawn("mortal")
    peer = cluster.join(remote)
    first = cluster.me.prepare_write(peer, cluster.region, 0, remote.region, 0, 4096, b"")()
    cluster.until(lambda: first in cluster.completed)
    remote.freeze()
    in_flight = [
        cluster.me.prepare_write(peer, cluster.region, 0, remote.region, 0, 4 * MIB, b"doomed")() for _ in range(3)
    ]
    cluster.poll()
    remote.kill()
    after = cluster.me.prepare_write(peer, cluster.region, 0, remote.region, 0, 4096, b"doomed")()
    cluster.until(lambda: cluster.gone and all(h in cluster.failed for h in [*in_flight, after]), NOTICED_S)
    assert cluster.gone == [peer], "said once"

    other, its_peer = left
    handle = cluster.me.prepare_write(its_peer, cluster.region, 0, other.region, 0, 4096, b"alive")()
    cluster.until(lambda: handle in cluster.completed)
    assert cluster.until_kept(other, 1) == [("me", b"alive")]

    cluster.me.remove_peer(peer)
    successor = cluster.spawn("mortal")
    reborn = cluster.join(successor)
    cluster.fill(0, pattern(4096, 77))
    handle = cluster.me.prepare_write(reborn, cluster.region, 0, successor.region, 0, 4096, b"again")()
    cluster.until(lambda: handle in cluster.completed)
    assert successor.ask("read", 0, 4096) == pattern(4096, 77)
    assert cluster.until_kept(successor, 1) == [("me", b"again")]
    assert cluster.gone == [peer]
    successor.kill()


def test_a_restarted_peer_may_be_added_without_removing_the_dead_one(cluster: Cluster) -> None:
    remote = cluster.spawn("twice")
    peer = cluster.join(remote)
    remote.kill()
    successor = cluster.spawn("twice")
    reborn = cluster.join(successor)
    old = cluster.me.prepare_write(peer, cluster.region, 0, successor.region, 0, 64, b"old")()
    new = cluster.me.prepare_write(reborn, cluster.region, 0, successor.region, 0, 64, b"new")()
    cluster.until(lambda: old in cluster.failed and new in cluster.completed)
    assert cluster.until_kept(successor, 1) == [("me", b"new")]
    successor.kill()


def test_a_frozen_peer_blocks_nobody_else_and_its_writes_are_neither_done_nor_failed(
    cluster: Cluster, left: Both
) -> None:
    frozen = cluster.spawn("frozen")
    peer = cluster.join(frozen)
    other, its_peer = left
    warm = cluster.me.prepare_write(peer, cluster.region, 0, frozen.region, 0, 4096, b"")()
    cluster.until(lambda: warm in cluster.completed)
    frozen.freeze()
    cluster.fill(0, b"\x05" * 4096)
    stuck = cluster.me.prepare_write(peer, cluster.region, 0, frozen.region, 0, 4096, b"after the thaw")()
    for i in range(20):
        handle = cluster.me.prepare_write(its_peer, cluster.region, 0, other.region, 0, 4096, b"%d" % i)()
        cluster.until(lambda handle=handle: handle in cluster.completed)
    assert len(cluster.until_kept(other, 20)) == 20
    assert stuck not in cluster.failed
    assert cluster.gone == [], "being slow proves nothing"
    frozen.thaw()
    cluster.until(lambda: stuck in cluster.completed)
    assert ("me", b"after the thaw") in cluster.until_kept(frozen, 2)
    assert frozen.ask("read", 0, 4096) == b"\x05" * 4096
    frozen.kill()


def test_removing_a_peer_with_writes_in_flight_fails_them_and_nothing_else(cluster: Cluster, left: Both) -> None:
    remote = cluster.spawn("leaving")
    peer = cluster.join(remote)
    warm = cluster.me.prepare_write(peer, cluster.region, 0, remote.region, 0, 64, b"")()
    cluster.until(lambda: warm in cluster.completed)
    remote.freeze()
    handles = [cluster.me.prepare_write(peer, cluster.region, 0, remote.region, 0, 4 * MIB, b"x")() for _ in range(3)]
    cluster.me.remove_peer(peer)
    cluster.until(lambda: all(handle in cluster.failed for handle in handles))
    other, its_peer = left
    good = cluster.me.prepare_write(its_peer, cluster.region, 0, other.region, 0, 4096, b"fine")()
    cluster.until(lambda: good in cluster.completed)
    assert cluster.until_kept(other, 1) == [("me", b"fine")]
    remote.kill()


def test_warming_up_is_seen_by_nobody(cluster: Cluster) -> None:
    remote = cluster.spawn("cold")
    peer = cluster.join(remote)
    assert isinstance(peer, Peer)
    cluster.until(lambda: not cluster.me.outstanding)
    say(cluster.me, peer, b"first")
    assert cluster.until_kept(remote, 1) == [("me", b"first")]
    assert remote.ask("read", 0, REGION_BYTES - WARM_UP_BYTES) == bytes(REGION_BYTES - WARM_UP_BYTES)
    assert all(handle >= 0 for handle in cluster.completed)
    remote.kill()
    cluster.me.warm_up(peer, cluster.region, remote.region)
    cluster.until(lambda: not cluster.me.outstanding)


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BackendError, match="known: nixl"):
        create("carrier-pigeon", name="me")
