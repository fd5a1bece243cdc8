"""Transfers without staging, to compare with: one descriptor per page, layer and plane, pool to pool, over NIXL.

What connectors do that have no staging: the whole pool is registered, descriptor lists of all its pages are prepared once
per peer, and a transfer picks from them. Nothing serves requests this way here. Knows pools and NIXL.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt

from disagg.bench.transfer.trial import SendUnstaged, UnstagedPeer
from disagg.messages.layout import LayerGroup
from disagg.messages.pieces import HeadSlice
from disagg.models.pool import Pool
from disagg.transfer.backends.nixl import load_nixl, ucx_settings

_MESSAGE = b"unstaged"


class UnstagedAgent:
    """An agent of its own, with the pool registered. Belongs to one thread."""

    def __init__(self, name: str, ucx_tls: str, ucx_net_devices: str, pool: Pool) -> None:
        nixl, _ = load_nixl(ucx_settings(ucx_tls or None, ucx_net_devices or None))
        self._agent: Any = nixl.nixl_agent(name, nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        self._name = name
        self._pool = pool
        self._device = max(pool.bytes.get_device(), 0)
        self._kind = "VRAM" if pool.bytes.is_cuda else "DRAM"
        self._registered = self._agent.register_memory(
            [(pool.bytes.data_ptr(), pool.bytes.nbytes, self._device, "")], self._kind
        )
        self._peers: dict[int, UnstagedPeer] = {}
        self._prepared: dict[HeadSlice, tuple[Any, Any]] = {}
        self._notified = 0

    def describe(self, rank: int) -> UnstagedPeer:
        return UnstagedPeer(
            rank=rank,
            name=self._name,
            metadata=self._agent.get_agent_metadata(),
            pool_address=self._pool.bytes.data_ptr(),
            pool_device=self._device,
            num_pages=self._pool.num_large,
            group=self._pool.groups[0],
        )

    def meet(self, peer: UnstagedPeer) -> None:
        self._agent.add_remote_agent(peer.metadata)
        self._peers[peer.rank] = peer

    def poll(self) -> None:
        for messages in self._agent.get_new_notifs().values():
            self._notified += len(messages)

    def wait(self, writes: int, deadline_s: float) -> None:
        """For notifications. Raises TimeoutError."""
        while self._notified < writes:
            self.poll()
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{self._notified} of {writes} writes without staging came in time")
        self._notified -= writes

    def send(self, command: SendUnstaged) -> None:
        """Write the slices and wait until they are written. Raises TimeoutError."""
        units = len(self._pool.groups[0].layers) * self._pool.groups[0].planes
        local, remote = (_every_unit(pages, units) for pages in (command.src_pages, command.dst_pages))
        handles = []
        for part in command.slices:
            ours, theirs = self._lists(part)
            handle = self._agent.make_prepped_xfer("WRITE", ours, local, theirs, remote, _MESSAGE)
            self._agent.transfer(handle)
            handles.append(handle)
        while handles:
            handles = [handle for handle in handles if not self._released(handle)]
            self.poll()
            if time.monotonic() > command.deadline_s:
                raise TimeoutError("a write without staging did not end in time")

    def close(self) -> None:
        for ours, theirs in self._prepared.values():
            ours.release()
            theirs.release()
        for peer in self._peers.values():
            self._agent.remove_remote_agent(peer.name)
        self._agent.deregister_memory(self._registered)

    def _released(self, handle: Any) -> bool:
        if self._agent.check_xfer_state(handle) != "DONE":
            return False
        handle.release()
        return True

    def _lists(self, part: HeadSlice) -> tuple[Any, Any]:
        """Prepared descriptors of every page, layer and plane of a slice, on both sides."""
        if part not in self._prepared:
            peer, pool = self._peers[part.dst_rank], self._pool
            ours = _descriptors(
                pool.bytes.data_ptr(),
                self._device,
                pool.num_large,
                pool.groups[0],
                part.src_head_start,
                part.heads,
                pool.page_tokens,
            )
            theirs = _descriptors(
                peer.pool_address,
                peer.pool_device,
                peer.num_pages,
                peer.group,
                part.dst_head_start,
                part.heads,
                pool.page_tokens,
            )
            self._prepared[part] = (
                self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", self._agent.get_xfer_descs(ours, self._kind)),
                self._agent.prep_xfer_dlist(peer.name, self._agent.get_xfer_descs(theirs, self._kind)),
            )
        return self._prepared[part]


def _every_unit(pages: tuple[int, ...], units: int) -> npt.NDArray[np.int32]:
    """Indices of all units of these pages in a list that has `units` per page, unit by unit.

    NIXL joins descriptors that follow each other in memory. In most systems a page's layers do not, and so here neither
    do neighbours in the list.
    """
    return (np.array(pages, dtype=np.int32) * units + np.arange(units, dtype=np.int32)[:, None]).reshape(-1)


def _descriptors(
    address: int, device: int, num_pages: int, group: LayerGroup, head_start: int, heads: int, page_tokens: int
) -> npt.NDArray[np.uint64]:
    """[pages * layers * planes, 3]: address, bytes, device. Adjacent heads of a page, layer and plane are one range."""
    head_bytes = page_tokens * group.head_dim * group.dtype_bytes
    units = num_pages * len(group.layers) * group.planes
    out = np.empty((units, 3), dtype=np.uint64)
    out[:, 0] = (
        address + head_start * head_bytes + np.arange(units, dtype=np.uint64) * np.uint64(group.kv_heads * head_bytes)
    )
    out[:, 1] = heads * head_bytes
    out[:, 2] = device
    return out
