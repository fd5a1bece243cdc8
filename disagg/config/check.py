"""Checks settings against each other; each alone was checked when it was read. Pure.

`check_config` raises ConfigError for what cannot work; `warnings_of` returns what works but should be known.
"""

from __future__ import annotations

import re
from collections import Counter

from msgspec import Struct
from msgspec.structs import replace

from disagg.config.check_offload import check_offload
from disagg.config.sizes import format_size, show_bytes
from disagg.config.staging import PAGE_BYTES, Device, size_staging
from disagg.config.steps import CPU_PAGE_TOKENS
from disagg.config.tree import (
    AuthConfig,
    Config,
    EngineConfig,
    ProcessRole,
    RouterConfig,
    ServerConfig,
    ServerRole,
    TransferConfig,
)
from disagg.types.addresses import is_loopback, split
from disagg.types.arithmetic import ceil_div
from disagg.types.errors import ConfigError
from disagg.types.plain import quoted
from disagg.types.tenants import MAX_TENANT_CHARS, TENANT, TENANT_SIGNS

WHOLE_PROMPTS = ("vllm", "orca", "faster_transformer")
LEAST_KV_BYTES = 1 << 14
MAX_NAME_CHARS = 128
MAX_POD_CHARS = 400
FOUND_SERVERS = 64  # for which a router that finds servers has descriptors, at least
MODEL_NAME_SIGNS = "._-/:@+="  # beside letters and digits
# Open files, by what was counted in running processes, twice over.
BASE_DESCRIPTORS = 96  # sockets to listen at, gRPC's and ZeroMQ's own, event loops, libraries
DESCRIPTORS_PER_SERVER = 4  # a stream, and for a moment a trial of its address or a question for its dump
DESCRIPTORS_PER_RANK = 16  # its process, its sockets
LEAST_CONNECTIONS = 8
MOST_CONNECTIONS = (
    4096  # of a server's gRPC port, whose routers and peers have one or a few each; a router's are a setting
)
PORTS = 2  # that each process listens at
PEERS = 64  # of a server: how many there will be it does not know
LINKS_PER_ARENA = 4  # no link gets more than its share, a quarter: as the arena itself deals them out


def check_config(config: Config) -> None:
    """Raises ConfigError naming the settings that do not fit together, their values, and what is allowed."""
    _check_text("", config)
    _check_users(config)
    _check_model(config)
    _check_engine(config)
    check_offload(config)
    _check_ranks(config.server)
    _check_transfer(config)
    _check_server(config)
    _check_router(config)
    _check_auth(config.auth)
    _check_tls(config)
    _check_times(config)


class Least(Struct, frozen=True):
    """What a setting of seconds must be at least, or what it waits for cannot have happened."""

    path: str
    least_s: float
    why: str


# Where something beats, twice its beat: one that is late loses nothing.
LEAST_S = (
    Least("worker.load_timeout_s", 5, "a worker takes seconds to start, whatever the model"),
    Least("worker.silent_s", 2, "a worker says that it is there once in a second"),
    Least("worker.step_deadline_s", 1, "a step may take as long"),
    Least("transfer.link_lease_s", 2, "the ends of a link say that they are there once in a second"),
    Least("transfer.progress_s", 2, "what is missing is asked for after a second without progress"),
    Least("router.request_deadline_s", 0.1, "no answer could be complete"),
    Least("router.head_s", 0.1, "no client would be fast enough"),
    Least("router.body_s", 0.1, "no client would be fast enough"),
    Least("router.stall_s", 0.1, "no client would be fast enough"),
    Least("router.idle_s", 0.1, "no client would be fast enough"),
    Least("router.heartbeat_s", 0.05, "processes would do little else"),
)


def _check_times(config: Config) -> None:
    for each in LEAST_S:
        section, _, name = each.path.partition(".")
        value = getattr(getattr(config, section), name)
        if value < each.least_s:
            raise ConfigError(f"{each.path} = {value:g}: it must be at least {each.least_s:g}: {each.why}")


# Settings that only a mixed server can have otherwise than by default, and why.
MIXED_ONLY = {
    "policy": "what the steps of other servers compute is their role's to say",
    "prefill_delay_passes": "prompts wait for steps of sequences that decode, and others have no steps of both",
    "prefill_delay_low_usage": "prompts wait for steps of sequences that decode, and others have no steps of both",
}


def check_role(config: Config, role: ProcessRole) -> None:
    """Raises ConfigError for settings that servers of this role cannot have."""
    if role in ("router", "mixed"):
        return
    if config.server.dp != 1:
        raise ConfigError(
            f"server.dp = {config.server.dp}: only a mixed server can have data-parallel ranks: KV that is sent between servers "
            "comes from one pool and goes to one; it must be 1"
        )
    if config.server.pp > 1:
        raise ConfigError(
            f"server.pp = {config.server.pp}: only a mixed server can have that: a {role} server exchanges KV with ranks that "
            "have all layers; it must be 1"
        )
    for name, why in MIXED_ONLY.items():
        value = getattr(config.engine, name)
        if value != getattr(EngineConfig(), name):
            said = quoted(value) if isinstance(value, str) else f"{value:g}"
            raise ConfigError(f"engine.{name} = {said}: only a mixed server can have that: {why}")


def _asks(config: Config) -> bool:
    """Whether a router asks for credentials."""
    return bool(config.auth.api_keys_file or config.auth.jwks_file)


def check_exposure(config: Config, role: ProcessRole) -> None:
    """Raises ConfigError for a process that would listen beyond this machine without asking who is there, unless told to."""
    if config.auth.insecure:
        return
    anyway = "or allow it with --insecure (auth.insecure = true) inside a trusted network"
    if role == "router" and not (is_loopback(config.router.host) or _asks(config)):
        raise ConfigError(
            f"router.host = {quoted(config.router.host)}: whoever reaches it could use the cluster; ask for keys "
            f"(auth.api_keys_file or auth.jwks_file), listen on 127.0.0.1, {anyway}"
        )
    if role != "router" and not (is_loopback(config.server.host) or config.tls.ca):
        raise ConfigError(
            f"server.host = {quoted(config.server.host)}: whoever reaches it could read and write the memory that holds KV; "
            f"let processes show certificates (tls.cert, tls.key and tls.ca), listen on 127.0.0.1, {anyway}"
        )


def _check_auth(auth: AuthConfig) -> None:
    for path, value in (("auth.jwt_audience", auth.jwt_audience), ("auth.jwt_issuer", auth.jwt_issuer)):
        if value and not auth.jwks_file:
            raise ConfigError(f"{path} = {quoted(value)}: it is looked for in tokens, which need auth.jwks_file")
    asked = bool(auth.api_keys_file or auth.jwks_file)
    if auth.limits_file and not asked:
        raise ConfigError(
            f"auth.limits_file = {quoted(auth.limits_file)}: whose a request is, is known by its key only; it needs "
            "auth.api_keys_file or auth.jwks_file"
        )
    if auth.operators and not asked:
        raise ConfigError(
            f"auth.operators = {quoted(','.join(auth.operators))}: tenants are told by their keys or tokens; it needs "
            "auth.api_keys_file or auth.jwks_file"
        )
    for tenant in auth.operators:
        if not TENANT.fullmatch(tenant):
            raise ConfigError(
                f"auth.operators has {quoted(tenant)}: a tenant has letters, digits and {TENANT_SIGNS} only, and at most "
                f"{MAX_TENANT_CHARS} characters"
            )


def _check_tls(config: Config) -> None:
    tls = config.tls
    if bool(tls.cert) != bool(tls.key):
        given, lacking = ("tls.cert", "tls.key") if tls.cert else ("tls.key", "tls.cert")
        raise ConfigError(f"{given} is set and {lacking} is not; a certificate and its key go together")
    for path, value in (("tls.ca", tls.ca), ("tls.server_name", tls.server_name)):
        if value and not tls.cert:
            raise ConfigError(
                f"{path} = {quoted(value)}: it needs tls.cert and tls.key, which this process shows to others"
            )


def without_mixed_only(engine: EngineConfig) -> EngineConfig:
    """The same for servers of other roles."""
    return replace(engine, **{name: getattr(EngineConfig(), name) for name in MIXED_ONLY})


def warnings_of(config: Config) -> tuple[str, ...]:
    """Sentences for the log of the process that starts with this configuration."""
    found = []
    if config.debug.remote:
        found.append(
            "debug.remote = true: whoever reaches the HTTP port can read what every request is doing, and the stacks of "
            "every process; keep it inside a trusted network"
        )
    hosts = {
        "server.host": config.server.host,
        "server.advertise_host": config.server.advertise_host,
        "router.host": config.router.host,
    }
    for path, host in hosts.items():
        if not host or is_loopback(host):
            continue
        if path == "router.host":
            lacking = [
                what for what, there in (("TLS", config.tls.cert), ("authentication", _asks(config))) if not there
            ]
            if lacking:
                found.append(
                    f"{path} = {host}: the router accepts requests from other machines without {' and without '.join(lacking)}; "
                    "keep it inside a trusted network"
                )
        elif not config.tls.ca:
            found.append(
                f"{path} = {host}: servers exchange transfer agent metadata with whoever reaches this address, and "
                "that metadata grants raw read and write access to the memory that holds KV; there is no TLS (tls.ca); "
                "keep it inside a trusted network"
            )
    return tuple(found)


def descriptors_needed(config: Config, role: ProcessRole) -> tuple[int, int]:
    """(with fewer open files the process cannot work at all, with fewer it may refuse what its other limits allow)."""
    if role == "router":
        router = config.router
        servers = len(router.servers) if router.discovery == "static" else FOUND_SERVERS
        least = BASE_DESCRIPTORS + DESCRIPTORS_PER_SERVER * servers
        return least, least + PORTS * router.max_connections
    least = BASE_DESCRIPTORS + DESCRIPTORS_PER_RANK * config.server.num_ranks
    return least, least + PEERS * (DESCRIPTORS_PER_SERVER + config.server.num_ranks)


def check_descriptors(config: Config, role: ProcessRole, limit: int) -> str:
    """limit: open files that this process may have. A warning, or nothing. Raises ConfigError if it cannot work so."""
    least, wanted = descriptors_needed(config, role)
    said = f"this process may have {limit} files open (the hard limit, `ulimit -Hn`)"
    if limit < least:
        raise ConfigError(f"{said}; a {role} process with this configuration needs {least} at least; raise the limit")
    if limit >= wanted:
        return ""
    why = "router.max_connections clients at each of its ports" if role == "router" else f"{PEERS} peers and routers"
    return f"{said}; with {why} it may need {wanted}; beyond its limit it refuses connections; raise the limit"


def connections_allowed(config: Config, role: ProcessRole, limit: int) -> int:
    """How many connections each of its two ports may accept at most, so that what comes from outside leaves the process
    the files that it needs for itself: for its workers, whose sockets end it when there is no descriptor for them, for what
    it dials, and for its other port."""
    least, _ = descriptors_needed(config, role)
    wanted = config.router.max_connections if role == "router" else MOST_CONNECTIONS
    return min(wanted, max(LEAST_CONNECTIONS, (limit - least) // PORTS))


def _check_model(config: Config) -> None:
    """What clients call the model goes into every answer, into paths of URLs, logs and labels."""
    model = config.model
    name = model.public_name
    if len(name) <= MAX_NAME_CHARS and all(each.isalnum() or each in MODEL_NAME_SIGNS for each in name):
        return
    raise ConfigError(
        f"model.served_name = {quoted(model.served_name)}, so clients would call the model {quoted(name)}: that must have "
        f"letters, digits and {MODEL_NAME_SIGNS} only, and at most {MAX_NAME_CHARS} characters"
    )


def _check_text(path: str, value: object) -> None:
    """What came from a command line or the environment as bytes that are no text could be neither logged nor written."""
    if isinstance(value, Struct):
        for name in value.__struct_fields__:
            _check_text(f"{path}.{name}".lstrip("."), getattr(value, name))
    elif isinstance(value, tuple):
        for each in value:
            _check_text(path, each)
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"{path} = {quoted(value)}: it is not UTF-8 at character {error.start}") from error


def _check_engine(config: Config) -> None:
    engine = config.engine
    if 0 < engine.kv_memory_bytes < LEAST_KV_BYTES:
        raise ConfigError(
            f"engine.kv_memory_bytes = {format_size(engine.kv_memory_bytes)}: it must be at least "
            f"{format_size(LEAST_KV_BYTES)}, or 0 to let the server decide"
        )
    if engine.target_step_ms and engine.policy in WHOLE_PROMPTS:
        raise ConfigError(
            f"engine.target_step_ms = {engine.target_step_ms:g}: engine.policy = {quoted(engine.policy)} computes prompts in one "
            "step, however long that takes; only policies that cut prompts into chunks can keep steps to a time"
        )
    page_tokens = engine.page_tokens or CPU_PAGE_TOKENS  # which are chosen wherever longer ones do not fit
    if engine.checkpoint_tokens % page_tokens:
        raise ConfigError(
            f"engine.checkpoint_tokens = {engine.checkpoint_tokens}: it must be a multiple of "
            f"engine.page_tokens = {page_tokens}, such as {ceil_div(engine.checkpoint_tokens, page_tokens) * page_tokens}"
        )


def _check_transfer(config: Config) -> None:
    wanted = config.model.device
    devices: tuple[Device, ...] = ("cpu", "cuda") if wanted == "auto" else (wanted,)
    refusals = []
    for device in devices:  # which of them it is, is known only where the server runs
        try:
            check_staging(size_staging(config.transfer, device), device)
        except ConfigError as refusal:
            refusals.append(refusal)
    if len(refusals) == len(devices):
        raise refusals[0]


def check_staging(transfer: TransferConfig, device: Device) -> None:
    """transfer: from size_staging. Raises ConfigError for what does not go together, or not with the device."""
    if transfer.kernels == "triton" and device == "cpu":
        raise ConfigError('transfer.kernels = "triton": Triton has no kernels for a CPU; it must be "auto" or "torch"')
    arena, segment, gather = transfer.arena_bytes, transfer.segment_bytes, transfer.gather_bytes
    for name, value in (("arena_bytes", arena), ("segment_bytes", segment), ("gather_bytes", gather)):
        if value % PAGE_BYTES:
            raise ConfigError(f"transfer.{name} = {value}: it must be a multiple of {PAGE_BYTES} bytes")
    if segment * LINKS_PER_ARENA > arena:
        raise ConfigError(
            f"transfer.segment_bytes = {format_size(segment)}: it must be at most a quarter of transfer.arena_bytes = "
            f"{format_size(arena)}, so that several links find a segment"
        )
    if arena % segment:
        raise ConfigError(
            f"transfer.arena_bytes = {format_size(arena)}: it must be a multiple of transfer.segment_bytes = "
            f"{format_size(segment)}"
        )
    share = arena // segment // LINKS_PER_ARENA
    if transfer.link_segments > share:
        raise ConfigError(
            f"transfer.link_segments = {transfer.link_segments}: one link may lease a quarter of "
            f"transfer.arena_bytes = {format_size(arena)}, so it must be at most {share} (segments of "
            f"{format_size(segment)})"
        )
    if gather > segment:
        raise ConfigError(
            f"transfer.gather_bytes = {format_size(gather)}: one piece must fit into a segment, so it must be at most "
            f"transfer.segment_bytes = {format_size(segment)}"
        )


def check_memory(config: Config, transfer: TransferConfig, role: ServerRole, machine_bytes: int) -> None:
    """transfer: from size_staging. machine_bytes: 0 where that is not known. Raises ConfigError where workers on the CPU would
    need more than the machine has, whoever else runs there.
    """
    staging, what = 0, "no staging"
    gather = transfer.gather_bytes * transfer.gather_buffers
    if role == "decode":  # which sends what it has when it drains
        staging, what = transfer.arena_bytes + gather, "transfer.arena_bytes + gather_bytes x gather_buffers"
    elif role == "prefill":
        staging, what = gather, "transfer.gather_bytes x transfer.gather_buffers"
    needed = config.server.num_ranks * (config.engine.kv_memory_bytes + staging)
    if machine_bytes and needed > machine_bytes:
        raise ConfigError(
            f"engine.kv_memory_bytes = {format_size(config.engine.kv_memory_bytes)} and {what} = {format_size(staging)}, for "
            f"{config.server.num_ranks} ranks: more than this machine has, {show_bytes(machine_bytes)}"
        )


def check_host_memory(tp: int, host_bytes: int, beside_bytes: int, why: str, machine_bytes: int) -> None:
    """host_bytes: of each rank's host pool. beside_bytes: of the machine's memory, what each takes for its pool on the device
    and for staging; 0 on a GPU. why: the settings behind host_bytes. machine_bytes: 0 where that is not known. Raises
    ConfigError where all ranks of a server need more than the machine has, whoever else runs there.
    """
    if machine_bytes and tp * (host_bytes + beside_bytes) > machine_bytes:
        beside = f" beside {show_bytes(beside_bytes)} for its KV memory and staging" if beside_bytes else ""
        each = f" for each of {tp} ranks, {show_bytes(tp * (host_bytes + beside_bytes))} in all" if tp > 1 else ""
        raise ConfigError(
            f"{why}: that is {show_bytes(host_bytes)} of host memory{beside}{each}: more than this machine has, "
            f"{show_bytes(machine_bytes)}"
        )


def _check_ranks(server: ServerConfig) -> None:
    if server.dp > 1 and server.pp > 1:
        raise ConfigError(
            f"server.dp = {server.dp} and server.pp = {server.pp}: data-parallel ranks have no pipeline stages; one of the two "
            "must be 1"
        )


def _check_users(config: Config) -> None:
    """Whatever else makes an address wrong is said by whoever opens it. This is asked of every process, since all can show their
    settings."""
    addresses = (
        ("storage.url", config.storage.url, "the environment, or storage.options"),
        ("tracing.otlp_endpoint", config.tracing.otlp_endpoint, "OTEL_EXPORTER_OTLP_HEADERS in the environment"),
    )
    for path, address, where in addresses:
        if "@" in address.rpartition("://")[2].partition("/")[0]:
            raise ConfigError(f"{path} may have no user: credentials belong into {where}; it is not repeated here")


def _check_server(config: Config) -> None:
    server = config.server
    if server.port and server.port == server.metrics_port:
        raise ConfigError(f"server.port and server.metrics_port are both {server.port}; they must differ")
    _check_name("server.name", server.name)
    _check_pod(server.pod)


def _check_router(config: Config) -> None:
    router = config.router
    _check_name("router.name", router.name)
    if router.http_port and router.http_port == router.grpc_port:
        raise ConfigError(f"router.http_port and router.grpc_port are both {router.http_port}; they must differ")
    if router.own_http_port and router.own_http_port in (router.http_port, router.grpc_port):
        raise ConfigError(
            f"router.own_http_port = {router.own_http_port}: it is another port's, too; it must differ from "
            "router.http_port and router.grpc_port"
        )
    if router.share_ports and not (router.http_port and router.grpc_port):
        raise ConfigError(
            "router.share_ports = true and a port of 0, which takes a free one: router.http_port and router.grpc_port must "
            "be those of the other routers"
        )
    if router.answer_bytes > router.memory_bytes:
        raise ConfigError(
            f"router.answer_bytes = {format_size(router.answer_bytes)}: one answer may take at most what all may, "
            f"router.memory_bytes = {format_size(router.memory_bytes)}"
        )
    if router.heartbeat_s * 2 > router.lease_s:
        raise ConfigError(
            f"router.heartbeat_s = {router.heartbeat_s}: it must be at most half of router.lease_s = {router.lease_s}, "
            "or one late heartbeat loses every request"
        )
    _check_discovery(router)
    for what, values in (("name", [s.name for s in router.servers]), ("address", [s.address for s in router.servers])):
        twice = [value for value, count in Counter(values).items() if count > 1]
        if twice:
            raise ConfigError(
                f'router.servers has the {what} "{twice[0]}" more than once; every {what} must be its own'
            )
    for server in router.servers:
        _check_name("router.servers", server.name)
        if not server.name:
            raise ConfigError(f'router.servers has a server at "{server.address}" without a name')
        try:
            split(server.address)
        except ValueError as error:
            raise ConfigError(
                f'router.servers: "{server.name}" has the address {quoted(server.address)}: {error}'
            ) from error


def _check_pod(pod: str) -> None:
    if pod and (pod.count("/") != 2 or not all(pod.split("/")) or len(pod) > MAX_POD_CHARS):
        raise ConfigError(
            f"server.pod = {quoted(pod)}: it must be NAMESPACE/NAME/UID of the pod, with at most {MAX_POD_CHARS} characters"
        )


def _check_discovery(router: RouterConfig) -> None:
    if router.discovery != "static" and router.servers:
        raise ConfigError(
            f"router.servers lists servers, and router.discovery = {router.discovery} finds them; give one of the two"
        )
    if router.discovery == "static" and router.selector:
        raise ConfigError("router.selector says where servers are found; it needs router.discovery = dns or kubernetes")
    if router.discovery == "dns" and not router.selector:
        raise ConfigError("router.discovery = dns needs router.selector = ROLE=HOST:PORT,...")
    for path, value in (("router.namespace", router.namespace), ("router.kubeconfig", router.kubeconfig)):
        if value and router.discovery != "kubernetes":
            raise ConfigError(f"{path} = {quoted(value)}: it needs router.discovery = kubernetes")
    if router.namespace and not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", router.namespace):
        raise ConfigError(f"router.namespace = {quoted(router.namespace)}: it is no name of a Kubernetes namespace")


def _check_name(path: str, name: str) -> None:
    """Names go into messages, logs, labels and files."""
    if "/" in name or not name.isprintable() or any(each.isspace() for each in name):
        raise ConfigError(f"{path} = {quoted(name)}: it must have no blanks and no slashes")
    if len(name) > MAX_NAME_CHARS:
        raise ConfigError(f"{path} = {quoted(name)}: it must have at most {MAX_NAME_CHARS} characters")
