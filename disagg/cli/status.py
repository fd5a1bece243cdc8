"""`disagg status` and `disagg debug dump`: what a router says of its cluster."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from disagg.cli.answers import (
    CarriedSaid,
    ClusterStatus,
    OffloadSaid,
    RouterSaid,
    ServerSaid,
    cluster_status,
    dump_said,
    read_json,
)
from disagg.cli.asking import DUMP_BYTES, Allowed, ask
from disagg.cli.memory import legend, memory_lines
from disagg.cli.terminal import for_terminal
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
    reply = ask(base_url, "/status")
    status = cluster_status(reply)
    if as_json:
        print(for_terminal(json.dumps(read_json(reply), ensure_ascii=False), sys.stdout))
        return
    # In a pipe there is no width to fit into: whole words, for grep.
    console = Console(highlight=False) if sys.stdout.isatty() else Console(width=160, highlight=False)
    if memory:
        print_memory(console, status)
    else:
        print_pools(console, status)


def print_pools(console: Console, status: ClusterStatus) -> None:
    """A table for each pool, then what is to be known of each server, and the router."""
    pools = {
        role: [server for server in status.servers if server.role == role] for role in ("prefill", "decode", "mixed")
    }
    for role, servers in pools.items():
        if servers or (role != "mixed" and not pools["mixed"]):
            console.print(pool_table(role, servers, versions=_several_versions(status)))
    for server in status.servers:
        if reason := server.reason or server.error:
            console.print(_cell(f"{server.name}: {reason}"), soft_wrap=True)
        for each in server.carried:
            console.print(_carried(server, each), style="red" if each.slow else None, soft_wrap=True)
        if server.offload is not None and server.offload.store == "degraded":
            console.print(_cell(f"{server.name}: {_DEGRADED}"), style="red", soft_wrap=True)
    draining = ", draining" if status.state == "draining" else ""
    for router in status.routers:
        has = f"{router.inflight} in flight, {router.queued} queued{draining}{_version(router)}"
        console.print(_cell(f"router {router.name} (pid {router.pid}): {has}"))
        if router.error:
            console.print(_cell(router.error), style="red")


def print_memory(console: Console, status: ClusterStatus) -> None:
    """Every server's KV memory."""
    for server in status.servers:
        for line in memory_lines(server, console.width):
            console.print(line)
        console.print()
    console.print(legend() if status.servers else "no servers")


def pool_table(role: str, servers: Sequence[ServerSaid], *, versions: bool = False) -> Table:
    """One pool as a table. versions: show theirs, since several serve together."""
    table = Table(title=f"{role} pool", title_justify="left", box=box.SIMPLE)
    table.add_column("name", overflow="fold")
    table.add_column("state", no_wrap=True)
    for column in ("ranks", "running", "waiting", "pages", "pid", "workers"):
        table.add_column(column, justify="right", overflow="fold")
    offloads = [server.offload or OffloadSaid() for server in servers]
    tiers = any(each.host_pages_total or each.store != "off" for each in offloads)
    if tiers:
        table.add_column("host pages", justify="right", overflow="fold")
        table.add_column("store", no_wrap=True)
    if versions:
        table.add_column("version", overflow="fold")
    table.add_column("address", overflow="fold")
    for server, offload in zip(servers, offloads, strict=True):
        total = server.pages_total
        table.add_row(
            _cell(server.name),
            Text(one_line(server.state, NAME_CHARS), style=_STATE_STYLES.get(server.state, "white")),
            _cell(_ranks(server)),
            _cell(server.running),
            _cell(server.waiting),
            _cell(f"{server.pages_used}/{total}" if total else "-"),
            _cell(server.pid or "-"),
            _cell(" ".join(str(pid) for pid in server.worker_pids) or "-"),
            *(_tier_cells(offload) if tiers else ()),
            *([_cell(server.version or "-")] if versions else ()),
            _cell(server.address),
        )
    if not servers:
        table.add_row("(empty)", *[""] * 8)
    return table


def _ranks(server: ServerSaid) -> str:
    """How many of each kind: tp2 pp2. Of data-parallel ranks and stages only if there are several."""
    shown = [f"tp{server.tp}"] if server.tp else []
    return " ".join(
        shown + [f"{kind}{n}" for kind, n in (("dp", server.dp), ("pp", server.pp)) if n not in (None, 0, 1)]
    )


def _carried(server: ServerSaid, each: CarriedSaid) -> Text:
    """By what KV goes to one peer."""
    slow = ", though it computes on GPUs" if each.slow else ""
    return _cell(f"{server.name}: KV to {each.peer} goes by {' or '.join(each.ways)}{slow}")


def _tier_cells(offload: OffloadSaid) -> tuple[Text, Text]:
    """Large pages of the host pool, and the state of storage."""
    total, store = offload.host_pages_total, offload.store
    pages = _cell(f"{offload.host_pages_used}/{total}" if total else "-")
    return pages, Text(one_line(store, NAME_CHARS), style=_STORE_STYLES.get(store, "white"))


def _version(router: RouterSaid) -> str:
    """Empty where it does not say."""
    return f", version {router.version}, protocol {router.protocol}" if router.version else ""


def _several_versions(status: ClusterStatus) -> bool:
    """Of servers that are there, and routers. Those that do not say theirs have one, too."""
    there = [server for server in status.servers if server.incarnation and server.state != "dead"]
    versions = {(server.version, server.protocol) for server in there}
    return len(versions | {(router.version, router.protocol) for router in status.routers}) > 1


def _cell(value: object) -> Text:
    """As it is, not as markup, and harmless to a terminal: whoever answers at the router's address has said it."""
    return Text(one_line(str(value)))


def show_dump(base_url: str) -> None:
    """Prints /debug/dump: text as it is, JSON indented, long texts in it with their line breaks."""
    dump = dump_said(ask(base_url, "/debug/dump", allowed=Allowed(most_bytes=DUMP_BYTES)))
    print(for_terminal(dump if isinstance(dump, str) else render_dump(dump), sys.stdout))


def render_dump(dump: object) -> str:
    """JSON for people: texts of several lines (stacks) come after the object that they belong to, under their path."""
    texts: list[str] = []

    def without_texts(value: object, path: str) -> object:
        if isinstance(value, dict):
            dot = f"{path}." if path else ""
            return {name: without_texts(each, f"{dot}{one_line(name, NAME_CHARS)}") for name, each in value.items()}
        if isinstance(value, list):
            return [without_texts(each, f"{path}[{index}]") for index, each in enumerate(value)]
        if isinstance(value, str) and "\n" in value.strip():
            texts.append(f"=== {path}\n{value.rstrip()}")
            return f"(see {path} below)"
        return value

    head = json.dumps(without_texts(dump, ""), indent=2, ensure_ascii=False)
    return "\n\n".join([head, *texts])
