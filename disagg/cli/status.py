"""`disagg status` and `disagg debug dump`: what a router says of its cluster."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from disagg.cli.memory import legend, memory_lines
from disagg.cli.terminal import for_terminal, get_http
from disagg.types.errors import DisaggError
from disagg.types.plain import NAME_CHARS, one_line

_STATE_STYLES = {
    "ready": "green",
    "loading": "yellow",
    "draining": "yellow",
    "drained": "yellow",
    "no-peer": "yellow",
    "mismatch": "red",
    "dead": "red",
}
_STORE_STYLES = {"ok": "green", "degraded": "red"}
_DEGRADED = "storage fails; until it works again KV goes no further than to the host, and nothing is read from storage"


def show_status(base_url: str, as_json: bool, memory: bool = False) -> None:
    """Prints both pools and the router, or every server's KV memory. Raises DisaggError if no router answers."""
    status = get_http(base_url, "/status")
    if not isinstance(status, dict):
        raise DisaggError(f"{base_url}: its /status is not that of a router")
    if as_json:
        print(for_terminal(json.dumps(status, ensure_ascii=False), sys.stdout))
        return
    # In a pipe there is no width to fit into: whole words, for grep.
    console = Console(highlight=False) if sys.stdout.isatty() else Console(width=160, highlight=False)
    if memory:
        print_memory(console, status)
    else:
        print_pools(console, status)


def print_pools(console: Console, status: Mapping[str, Any]) -> None:
    """status: of /status."""
    pools = {
        role: [s for s in status.get("servers", []) if s.get("role") == role] for role in ("prefill", "decode", "mixed")
    }
    for role, servers in pools.items():
        if servers or (role != "mixed" and not pools["mixed"]):
            console.print(pool_table(role, servers, versions=_several_versions(status)))
    for server in status.get("servers", []):
        if reason := server.get("reason") or server.get("error"):
            console.print(f"{server.get('name')}: {reason}", markup=False, soft_wrap=True)
        for each in server.get("carried") or ():
            console.print(_carried(server, each), style="red" if each.get("slow") else None, soft_wrap=True)
        if (server.get("offload") or {}).get("store") == "degraded":
            console.print(_cell(f"{server.get('name')}: {_DEGRADED}"), style="red", soft_wrap=True)
    draining = ", draining" if status.get("state") == "draining" else ""
    for router in status.get("routers", []):
        console.print(
            _cell(
                f"router {router.get('name')} (pid {router.get('pid')}): {router.get('inflight')} in flight, "
                f"{router.get('queued')} queued{draining}{_version(router)}"
            )
        )
        if router.get("error"):
            console.print(str(router["error"]), style="red", markup=False)


def print_memory(console: Console, status: Mapping[str, Any]) -> None:
    """status: of /status."""
    servers = status.get("servers", [])
    for server in servers:
        for line in memory_lines(server, console.width):
            console.print(line)
        console.print()
    console.print(legend() if servers else "no servers")


def pool_table(role: str, servers: Sequence[Mapping[str, Any]], *, versions: bool = False) -> Table:
    """One pool as a table. servers: of /status. versions: show theirs, since several serve together."""
    table = Table(title=f"{role} pool", title_justify="left", box=box.SIMPLE)
    table.add_column("name", overflow="fold")
    table.add_column("state", no_wrap=True)
    for column in ("ranks", "running", "waiting", "pages", "pid", "workers"):
        table.add_column(column, justify="right", overflow="fold")
    offloads = [server.get("offload") or {} for server in servers]
    tiers = any(each.get("host_pages_total") or each.get("store", "off") != "off" for each in offloads)
    if tiers:
        table.add_column("host pages", justify="right", overflow="fold")
        table.add_column("store", no_wrap=True)
    if versions:
        table.add_column("version", overflow="fold")
    table.add_column("address", overflow="fold")
    for server, offload in zip(servers, offloads, strict=True):
        state = str(server.get("state", ""))
        total = server.get("pages_total", 0)
        table.add_row(
            _cell(server.get("name", "")),
            Text(one_line(state, NAME_CHARS), style=_STATE_STYLES.get(state, "white")),
            _cell(_ranks(server)),
            _cell(server.get("running", "")),
            _cell(server.get("waiting", "")),
            _cell(f"{server.get('pages_used', 0)}/{total}" if total else "-"),
            _cell(server.get("pid") or "-"),
            _cell(" ".join(str(pid) for pid in server.get("worker_pids", [])) or "-"),
            *(_tier_cells(offload) if tiers else ()),
            *([_cell(server.get("version") or "-")] if versions else ()),
            _cell(server.get("address", "")),
        )
    if not servers:
        table.add_row("(empty)", *[""] * 8)
    return table


def _ranks(server: Mapping[str, Any]) -> str:
    """How many of each kind: tp2 pp2. Of data-parallel ranks and stages only if there are several."""
    shown = [f"tp{server['tp']}"] if server.get("tp") else []
    return " ".join(shown + [f"{kind}{server[kind]}" for kind in ("dp", "pp") if server.get(kind) not in (None, 0, 1)])


def _carried(server: Mapping[str, Any], each: Mapping[str, Any]) -> Text:
    """By what KV goes to one peer."""
    slow = ", though it computes on GPUs" if each.get("slow") else ""
    return _cell(
        f"{server.get('name')}: KV to {each.get('peer')} goes by {' or '.join(map(str, each.get('ways') or ()))}{slow}"
    )


def _tier_cells(offload: Mapping[str, Any]) -> tuple[Text, Text]:
    """Large pages of the host pool, and the state of storage."""
    total, store = offload.get("host_pages_total", 0), str(offload.get("store", "off"))
    pages = _cell(f"{offload.get('host_pages_used', 0)}/{total}" if total else "-")
    return pages, Text(one_line(store, NAME_CHARS), style=_STORE_STYLES.get(store, "white"))


def _version(process: Mapping[str, Any]) -> str:
    """Of a router; empty where it does not say."""
    return f", version {process['version']}, protocol {process.get('protocol')}" if process.get("version") else ""


def _several_versions(status: Mapping[str, Any]) -> bool:
    """Of servers that are there, and routers. Those that do not say theirs have one, too."""
    there = [
        server for server in status.get("servers", []) if server.get("incarnation") and server.get("state") != "dead"
    ]
    return len({(each.get("version"), each.get("protocol")) for each in (*there, *status.get("routers", []))}) > 1


def _cell(value: object) -> Text:
    """As it is, not as markup, and harmless to a terminal: whoever answers at the router's address has said it."""
    return Text(one_line(str(value)))


def show_dump(base_url: str) -> None:
    """Prints /debug/dump: text as it is, JSON indented, long texts in it with their line breaks."""
    dump = get_http(base_url, "/debug/dump")
    print(for_terminal(dump if isinstance(dump, str) else render_dump(dump), sys.stdout))


def render_dump(dump: object) -> str:
    """JSON for people: texts of several lines (stacks) come after the object that they belong to, under their path."""
    texts: list[str] = []

    def without_texts(value: object, path: str) -> object:
        if isinstance(value, dict):
            return {name: without_texts(each, f"{path}.{name}" if path else str(name)) for name, each in value.items()}
        if isinstance(value, list):
            return [without_texts(each, f"{path}[{index}]") for index, each in enumerate(value)]
        if isinstance(value, str) and "\n" in value.strip():
            texts.append(f"=== {path}\n{value.rstrip()}")
            return f"(see {path} below)"
        return value

    head = json.dumps(without_texts(dump, ""), indent=2, ensure_ascii=False)
    return "\n\n".join([head, *texts])
