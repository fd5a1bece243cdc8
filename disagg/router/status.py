"""One server as `/status` shows it. Pure."""

from __future__ import annotations

from typing import Any

from msgspec import to_builtins

from disagg.messages.legs import LoadReport
from disagg.router.view import ClusterView, ServerView


def server_status(server: ServerView, view: ClusterView) -> dict[str, Any]:
    hello, load = server.hello, server.load
    return {
        "name": server.name,
        "role": server.role.value,
        "becomes": server.becomes,
        "role_failed": hello.role_change.failed if hello is not None and hello.role_change is not None else "",
        "tp": hello.tp if hello is not None else 0,
        "dp": hello.dp if hello is not None else 0,
        "pp": hello.pp if hello is not None else 0,
        "pid": hello.pid if hello is not None else 0,
        "worker_pids": list(hello.worker_pids) if hello is not None else [],
        "state": view.state(server).value,
        "running": load.running if load is not None else 0,
        "waiting": load.waiting if load is not None else 0,
        "pages_used": load.pages_used if load is not None else 0,
        "pages_total": load.pages_total if load is not None else 0,
        "pages_free": load.pages_free if load is not None else 0,
        "pages_evictable": load.pages_evictable if load is not None else 0,
        "memory": to_builtins(load.memory) if load is not None else None,
        "offload": _offload(load),
        "arena": to_builtins(load.arena) if load is not None else None,
        "received": to_builtins(load.received) if load is not None else [],
        "carried": to_builtins(load.carried) if load is not None else [],
        "steps": to_builtins(load.steps) if load is not None else None,
        "loop_gap_s": load.loop_gap_s if load is not None else 0.0,
        "cached_pages": list(server.cached.counts()),
        "host_cached_pages": list(server.on_host.counts()),
        "stored_pages": list(server.stored.counts()),
        "address": server.address,
        "incarnation": hello.incarnation if hello is not None else "",
        "connected": server.connected,
        "silent_s": round(server.silent_s, 1),
        "error": server.error,
        "version": hello.version.software if hello is not None else "",
        "protocol": hello.version.protocol if hello is not None else 0,
        "weights": hello.weights_hash if hello is not None else "",
        "reason": server.reason,
        "circuits": {work.value: circuit.value for work, circuit in server.circuits.items()},
    }


def _offload(load: LoadReport | None) -> dict[str, Any]:
    """KV beside the GPU, in large pages of each rank's host pool; zeros and "off" without."""
    host = load.memory.host if load is not None and load.memory is not None else None
    return {
        "host_pages_used": host.pages_used if host is not None else 0,
        "host_pages_total": host.pages_total if host is not None else 0,
        "store": load.store if load is not None else "off",
    }
