"""A cluster whose processes reach each other by IPv6 alone: gRPC, metrics, and KV, which UCX sends over TCP of IPv6."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from msgspec.structs import replace

from disagg.cli.rundir import pick_ports
from disagg.config.load import dump_config, load_config
from disagg.config.tree import AuthConfig, ServerRef
from disagg.telemetry.listening import EVERY, why_not_listen
from disagg.types.addresses import join
from tests.cluster.cluster import START_S
from tests.cluster.separate import SeparateProcesses
from tests.models.tiny import make_tiny

HERE = "::1"
PROMPT = list(range(5, 5 + 64))
pytestmark = pytest.mark.skipif(
    why_not_listen(HERE, 0, "server.port", "") is not None, reason="this machine has no ::1"
)


@pytest.fixture
def ipv6(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SeparateProcesses]:
    monkeypatch.setenv("UCX_TCP_AF_PRIO", "inet6")  # of an interface with addresses of both
    base = load_config(
        None,
        {
            "model.name": str(make_tiny("llama", tmp_path / "llama")),
            "engine.page_tokens": "4",
            "engine.kv_memory_bytes": "32MiB",
            "transfer.ucx_tls": "tcp",
        },
        {},
    )
    http_port, grpc_port, *ports = pick_ports(HERE, 6)
    found, running = [], SeparateProcesses(tmp_path / "run")
    running.http = f"http://{join(HERE, http_port)}"
    with running:
        for role in ("prefill", "decode"):
            port, metrics_port = ports.pop(), ports.pop()
            own = replace(base.server, name=role, host=HERE, port=port, metrics_port=metrics_port)
            running.start(role, role, dump_config(replace(base, server=own)))
            running.hosts[role] = f"[{HERE}]"
            found.append(ServerRef(name=role, role=role, address=join(HERE, port)))
        router = replace(base.router, host=EVERY, http_port=http_port, grpc_port=grpc_port, servers=tuple(found))
        running.start("router", "router", dump_config(replace(base, router=router, auth=AuthConfig(insecure=True))))
        running.wait(lambda: running.all_ready(2), START_S, "both servers")
        yield running


def sockets_over_ipv6(pid: int) -> set[str]:
    """Connections of TCP over HERE that the process has open, by their inodes."""
    lines = [line.split() for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]]
    here = "00000000000000000000000001000000"  # ::1, as the kernel writes it
    established = {each[9] for each in lines if each[3] == "01" and each[1].startswith(here)}
    links: list[str] = []
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            links.append(os.readlink(each))
    return {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")} & established


@pytest.mark.timeout(400)
def test_it_answers_and_kv_crosses_and_clients_of_ipv4_are_let_in(ipv6: SeparateProcesses) -> None:
    answer = ipv6.complete(PROMPT, max_tokens=4)
    assert len(answer.token_ids[0]) == 4
    sent, received = (f'disagg_transfer_payload_bytes_total{{direction="{each}"}}' for each in ("sent", "received"))
    ipv6.wait(lambda: ipv6.metrics("prefill")[sent] > 0, 30, "it is counted")
    ipv6.wait(lambda: ipv6.metrics("decode")[received] == ipv6.metrics("prefill")[sent], 30, "all that was sent")
    [worker] = ipv6.server("decode")["worker_pids"]
    assert sockets_over_ipv6(worker)
    over_ipv4 = ipv6.http.replace(f"[{HERE}]", "127.0.0.1")
    assert httpx.get(f"{over_ipv4}/health", timeout=30).status_code == 200
    # Who asks over IPv4 comes as ::ffff:127.0.0.1, and is on this machine all the same.
    assert httpx.get(f"{over_ipv4}/debug/dump", timeout=60).status_code == 200
