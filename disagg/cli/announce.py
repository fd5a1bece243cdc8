"""What `disagg up` tells people of its cluster: what it waits for, `ready` once, and who serves again that had ended."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from msgspec import Struct

from disagg.auth.keys import KEYS_BYTES, parse_keys
from disagg.auth.tls import trusting
from disagg.cli.children import Children
from disagg.cli.terminal import note, problem, result
from disagg.config.tree import AuthConfig, Config
from disagg.types.addresses import bare
from disagg.types.errors import ConfigError
from disagg.types.plain import one_line
from disagg.types.small_files import home_expanded, read_small

if TYPE_CHECKING:
    import httpx

ALL_READY_S = 15.0  # once requests succeed, how long the last servers are waited for before `ready` is said
POLL_S = 0.25
ANSWER_S = 5.0  # how long the router may take to say how it is, before it is asked again
STILL_WAITING_S = 10.0
LATE_S = 2.0  # once requests succeed, how often servers are looked for that have not come up yet
UP = ("ready", "no-peer")  # states of servers whose workers have come up


class Seen(Struct, frozen=True):
    """The cluster at one moment. servers: state by name. pids: of the processes that say so, as far as the router tells."""

    healthy: bool
    servers: dict[str, str]
    pids: dict[str, int]


async def announce(routers: Mapping[str, Config], children: Children) -> None:
    """Until the children drain. routers: by the name of their process. It is a service to people: whatever goes wrong here ends
    nothing else."""
    try:
        await _say_states(routers, children)
    except Exception as error:  # noqa: BLE001
        problem(f"the cluster runs, but its state cannot be followed: {type(error).__name__}: {error}")


async def _say_states(routers: Mapping[str, Config], children: Children) -> None:
    import httpx

    config = next(iter(routers.values()))
    scheme, host = "https" if config.tls.cert else "http", reachable(config.router.host)
    base_url = f"{scheme}://{host}:{config.router.http_port}"
    certificate = home_expanded(config.tls.cert, "tls.cert") if config.tls.cert else None
    verify = True if certificate is None else trusting(None, own=certificate)
    async with httpx.AsyncClient(base_url=base_url, timeout=ANSWER_S, trust_env=False, verify=verify) as client:
        cluster = _Cluster(routers, client, f"{scheme}://{host}")
        late = await _until_ready(cluster, children)
        if not children.draining:
            result(f"ready http={base_url} grpc={host}:{config.router.grpc_port}")
        await _say_who_serves_again(cluster, children, late)


class _Cluster:
    """Asked over its router's HTTP port."""

    def __init__(self, routers: Mapping[str, Config], client: httpx.AsyncClient, base: str) -> None:
        """base: of the ports that several routers have for themselves."""
        self.routers = tuple(routers)
        self._config = next(iter(routers.values()))
        self.servers = tuple(server.name for server in self._config.router.servers)
        own = [config.router.own_http_port for config in routers.values()]
        self._health_urls = ["/health"] if len(routers) == 1 else [f"{base}:{port}/health" for port in own]
        self._client = client

    async def look(self) -> Seen | None:
        """None: nobody answers."""
        import httpx

        with contextlib.suppress(httpx.HTTPError, ValueError, TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                # Whoever of several routers answers: all have to.
                healthy = all([(await self._client.get(url)).status_code == 200 for url in self._health_urls])
                answer = await self._client.get("/status", headers=credentials_for(self._config.auth))
                if answer.status_code in (401, 403) and healthy:
                    # A router that takes tokens only, or whose operators have no keys, tells us no more than its health.
                    return Seen(healthy, dict.fromkeys(self.servers, "ready"), {})
                return Seen(healthy, server_states(answer.json()), server_pids(answer.json()))
        return None


def _prove(seen: Seen, children: Children) -> set[str]:
    """The servers that have come up."""
    up = {name for name, state in seen.servers.items() if state in UP}
    for name in up:
        children.proven(name)
    return up


async def _until_ready(cluster: _Cluster, children: Children) -> set[str]:
    """Says what is waited for. Ends when requests will succeed; returns the servers that have not come up by then."""
    late = set(cluster.servers)
    begin_s = said_waiting_s = time.monotonic()
    said: dict[str, str] = {}
    healthy_since_s: float | None = None
    while not children.draining:
        await asyncio.sleep(POLL_S)
        now_s = time.monotonic()
        seen = await cluster.look()
        states = seen.servers if seen is not None else {}
        if seen is not None:
            late -= _prove(seen, children)
        for name, state in states.items():
            if said.get(name) != state:
                said[name] = state
                note(one_line(f"{name}: {state}"))
        if seen is not None:
            healthy_since_s = (healthy_since_s or now_s) if seen.healthy else None
        if seen is not None and healthy_since_s is not None:
            for name in cluster.routers:
                children.proven(name)
            all_ready = all(state == "ready" for state in states.values())
            if all_ready or now_s - healthy_since_s > ALL_READY_S:
                break
        if now_s - said_waiting_s >= STILL_WAITING_S:
            said_waiting_s = now_s
            waiting = [name for name, state in states.items() if state != "ready"] or ["the router"]
            note(f"still waiting for {', '.join(waiting)} ({now_s - begin_s:.0f} s)")
    return late


async def _say_who_serves_again(cluster: _Cluster, children: Children, late: set[str]) -> None:
    """Of children that ended and were started again, each once it serves; they are said to have ended when they do. late: servers
    that have not come up yet; what they end with after they have, may pass as well.
    """
    known, looked_s = children.pids, time.monotonic()
    while not children.draining:
        await asyncio.sleep(POLL_S)
        pids = children.pids
        waiting = [name for name, pid in pids.items() if known.get(name) != pid]
        if not waiting and not (late and time.monotonic() - looked_s >= LATE_S):
            continue
        seen, looked_s = await cluster.look(), time.monotonic()
        if seen is None:
            continue
        late = late - _prove(seen, children)
        for name in waiting:
            if serves(name, pids[name], seen):
                known[name] = pids[name]
                note(one_line(f"{name}: ready again"))


def serves(name: str, pid: int, seen: Seen) -> bool:
    """This process serves. A server's state may still be of the process before it; a router answers for itself."""
    if name not in seen.servers:
        return seen.healthy
    return seen.servers[name] == "ready" and seen.pids.get(name, pid) == pid


def server_pids(status: object) -> dict[str, int]:
    """Name and process of every server in a router's /status, as far as it knows them."""
    servers = status.get("servers", []) if isinstance(status, dict) else []
    return {str(server["name"]): int(server["pid"]) for server in servers if server.get("pid")}


def credentials_for(auth: AuthConfig) -> dict[str, str]:
    """The headers with which this process asks its own router: any of the keys that it takes, of an operator if it can be."""
    if not auth.api_keys_file:
        return {}
    path = home_expanded(auth.api_keys_file, "auth.api_keys_file")
    try:
        tenants = parse_keys(read_small(path, KEYS_BYTES), path)
    except (ConfigError, OSError):  # it has changed since the router has read it, which the router's log says
        return {}
    key = next((each for each, tenant in tenants.items() if tenant in auth.operators), next(iter(tenants)))
    return {"authorization": f"Bearer {key.decode()}"}


def server_states(status: object) -> dict[str, str]:
    """Name and state of every server in a router's /status."""
    servers = status.get("servers", []) if isinstance(status, dict) else []
    return {str(server["name"]): str(server["state"]) for server in servers}


def reachable(host: str) -> str:
    """What a client on this machine dials for a host that is listened on."""
    every = {
        "0.0.0.0": "127.0.0.1",
        "::": "127.0.0.1",
        "": "127.0.0.1",
    }  # `::` takes IPv4, too, and is that where there is no IPv6
    dialled = every.get(bare(host), bare(host))
    return f"[{dialled}]" if ":" in dialled else dialled
