"""One process of the cluster: what every role does first, and then the role itself, imported only then."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from disagg.config.check import check_descriptors, check_exposure, check_role, connections_allowed, warnings_of
from disagg.config.check_offload import warnings_of_offload
from disagg.config.load import load_config
from disagg.config.tree import Config, ProcessRole
from disagg.router.names import drawn_name
from disagg.telemetry.logs import configure_logging, log_uncaught_exceptions
from disagg.telemetry.memory import few_arenas, give_back_always
from disagg.telemetry.process import (
    die_with_parent,
    heartbeat_to,
    never_wait_for_readers,
    no_heartbeat,
    raise_descriptor_limit,
)
from disagg.telemetry.stacks import dump_stacks_on_signal
from disagg.types.ids import Role

if TYPE_CHECKING:
    from disagg.server.role import ServerRole

log = logging.getLogger(__name__)


def run_role(
    role: ProcessRole,
    file: Path | None,
    overrides: Mapping[str, object],
    heartbeat_fd: int | None,
    parent_pid: int | None,
) -> int:
    """Runs until the process is told to end; returns its exit code. Raises ConfigError.

    heartbeat_fd and parent_pid come from a supervisor; without them nobody watches this process.
    """
    few_arenas()
    if parent_pid is not None:
        die_with_parent(parent_pid)
    heartbeat = no_heartbeat if heartbeat_fd is None else heartbeat_to(heartbeat_fd)
    never_wait_for_readers()
    config = load_config(file, overrides)
    check_role(config, role)
    check_exposure(config, role)
    if role == "router" and not config.router.name:
        config = replace(config, router=replace(config.router, name=drawn_name()))
    name = config.router.name if role == "router" else config.server.name or role
    configure_logging(name, config.log.level, config.log.format, config.log.lines_per_s)
    log_uncaught_exceptions()
    dump_stacks_on_signal()
    limit = raise_descriptor_limit()
    of_offload = () if role == "router" else warnings_of_offload(config)
    for warning in (*warnings_of(config), *of_offload, check_descriptors(config, role, limit)):
        if warning:
            log.warning(warning)
    if role == "router":
        most = connections_allowed(config, role, limit)
        config = replace(config, router=replace(config.router, max_connections=most))
    give_back_always()
    return _run(role, config, heartbeat)


def _run(role: ProcessRole, config: Config, heartbeat: Callable[[], None]) -> int:
    if role == "router":
        from disagg.cli.router_process import run as run_router

        return run_router(config, heartbeat)
    from disagg.server.run import run_server

    return int(run_server(config, server_role, Role(role), heartbeat))


def server_role(role: Role) -> ServerRole:
    """What a server of this role is."""
    if role is Role.PREFILL:
        from disagg.prefill_server.role import PREFILL

        return PREFILL
    if role is Role.MIXED:
        from disagg.mixed_server.role import MIXED

        return MIXED
    from disagg.decode_server.role import DECODE

    return DECODE
