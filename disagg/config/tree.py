"""The one frozen configuration tree. Built by `config/load`; every other module takes the parts that it uses.

Sizes are bytes (in files and flags also "512MiB"), times seconds. Ranges live in the annotations, so that a bad value is
refused at start with its path, the value and what is allowed.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from msgspec import Meta, Struct, field

MIB = 1 << 20

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Seconds = Annotated[float, Meta(gt=0)]

Fusion = Literal["norm", "residual", "gate_up", "qkv", "few_rows", "rank_sums", "rotation", "ends"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
ServerRole = Literal["prefill", "decode", "mixed"]
ProcessRole = Literal["router", "prefill", "decode", "mixed"]
MixedPolicy = Literal["", "sarathi", "vllm", "simple_chunking", "orca", "faster_transformer"]


class ModelConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which model, and how it is computed."""

    name: str = "smollm2-135m"  # a known name, or a Hugging Face directory
    served_name: str = ""  # what clients call it; empty: the name, or the directory's last part
    dtype: Dtype = "auto"  # auto: float32 on CPU, the checkpoint's own on a GPU
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_model_len: NonNegativeInt = 0  # 0: the model's own
    prefill_attention: Literal["auto", "hopper", "cudnn", "triton", "torch"] = (
        "auto"  # auto: by device, dtype and what layers ask
    )
    decode_attention: Literal["auto", "triton", "torch"] = "auto"
    graphs: bool = True  # decode steps as CUDA graphs, where the model's can be captured
    fusions: tuple[Fusion, ...] = get_args(Fusion)  # on a GPU, where modules have the shape
    cache_dir: str = "~/.cache/disagg/models"

    @property
    def public_name(self) -> str:
        """What clients call the model."""
        return self.served_name or self.name.rstrip("/").rpartition("/")[2]


class EngineConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Scheduling and memory of one server."""

    # A size of 0 is chosen by the device and the model (config/steps).
    page_tokens: Annotated[int, Meta(ge=0, le=1024)] = 0  # of one KV page; equal on all servers of a cluster
    chunk_tokens: Annotated[int, Meta(ge=0, le=1 << 20)] = 0  # token budget of one prefill step
    max_running: Annotated[int, Meta(ge=0, le=4096)] = 0  # sequences decoding (or prompts in prefill) at once
    kv_memory_bytes: NonNegativeInt = 0  # 0: 512 MiB on CPU; on a GPU what gpu_memory_utilization leaves
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = (
        0.9  # of the device, for weights, steps and KV together
    )
    page_sizing: Literal["lcm", "max"] = "lcm"  # how large pages are sized, see memory/layout
    prefix_cache: bool = True
    keep_windows: bool = False  # keep KV that has left a sliding window, as if it were full attention: to compare with
    checkpoint_tokens: PositiveInt = 512  # how far apart states of recurrent layers are kept; whole pages
    max_waiting: PositiveInt = 4096  # legs queued before new ones are refused
    local_prefill_tokens: Annotated[int, Meta(ge=0, le=1 << 20)] = (
        128  # of a prompt that a decode server computes itself, if it has the others cached; 0: never
    )
    ungranted_share: Annotated[float, Meta(gt=0, le=1)] = 0.5  # finished but ungranted KV, share of the prefill pool
    grant_headroom_tokens: NonNegativeInt = 64  # of output per choice, for which a grant reserves pages
    lookahead_tokens: NonNegativeInt = 512  # for which all that decodes must be able to go on for more to begin
    preempt_after_s: Seconds = 2.0  # one that gave way waits this long before younger ones give way to it
    preemption: Literal["latest", "fewest_tokens"] = "latest"  # who gives way when pages run out
    policy: MixedPolicy = ""  # what a step of a mixed server computes; empty: sarathi
    prefill_delay_passes: Annotated[int, Meta(ge=0, le=1 << 20)] = (
        30  # before which prompts of ranks in lockstep run; 0: off
    )
    prefill_delay_low_usage: Annotated[float, Meta(ge=0, le=1)] = (
        0  # of a pool, below which none waits for others; 0: off
    )
    target_step_ms: Annotated[float, Meta(ge=0, le=1e6)] = 0  # which steps with prompts should take; 0: chunk_tokens


class WorkerConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The worker processes of one server."""

    command: tuple[str, ...] = ()  # empty: this Python with `-m disagg.worker`
    threads: PositiveInt = 1
    load_timeout_s: Seconds = 600.0
    silent_s: Seconds = 10.0  # no heartbeat for this long, but while workers are started: they end
    step_deadline_s: Seconds = 60.0  # one step longer than this: the workers end


class TransferConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Staging and the wire."""

    backend: str = "nixl"
    # A size of 0 is chosen by the device (config/staging).
    arena_bytes: NonNegativeInt = 0  # of each decode worker, shared by its peers
    segment_bytes: NonNegativeInt = 0  # what the arena is leased in
    link_segments: PositiveInt = 2  # leased by an active link
    gather_bytes: NonNegativeInt = 0  # one gather buffer, the largest piece
    gather_buffers: Annotated[int, Meta(ge=2)] = 4
    kernels: Literal["auto", "triton", "torch"] = "auto"  # of gather and scatter; auto: triton on CUDA, torch on CPU
    ucx_tls: str = "auto"  # UCX_TLS of the workers; auto: posix,cma,tcp on CPU, and on a GPU, like "", what UCX chooses
    ucx_net_devices: str = "auto"  # UCX_NET_DEVICES; auto: on CPU by our address, on a GPU as ""
    link_lease_s: Seconds = 10.0  # a link silent for this long is lost
    link_idle_s: Seconds = 1.0  # an idle link gives its ring back after this
    progress_s: Seconds = 30.0  # a granted transfer with no progress for this long is given up


class ServerConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One prefill, decode or mixed server."""

    name: str = ""
    tp: PositiveInt = 1  # ranks, each with some of the heads, and a GPU of its own
    dp: PositiveInt = 1  # data-parallel ranks of a mixed server, of tp ranks and a KV pool each
    pp: Annotated[int, Meta(ge=1, le=64)] = (
        1  # pipeline stages of a mixed server, of tp ranks each, with some of the layers
    )
    first_gpu: NonNegativeInt = 0  # of rank 0; rank r has the r-th after it
    host: str = "127.0.0.1"
    port: Port = 0  # gRPC: router streams, Peer.Link, health, reflection
    metrics_port: Port = 0  # HTTP: /metrics, /health, /live, /debug/dump
    advertise_host: str = ""  # what peers dial; empty: host
    drain_s: Seconds = 30.0
    pod: str = ""  # NAMESPACE/NAME/UID of the Kubernetes pod that this is; its end proves that of all its processes

    @property
    def num_ranks(self) -> int:
        """Worker processes: of all data-parallel ranks, or of all stages."""
        return self.tp * self.dp * self.pp


class ServerRef(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where a router finds a server."""

    name: str
    role: ServerRole
    address: str  # host:port of its gRPC service


class RouterConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The router: its faces, its queue and how it finds servers."""

    name: str = ""  # unique among the routers of these servers; empty: drawn at start
    host: str = "127.0.0.1"
    http_port: Port = 8000
    grpc_port: Port = 50051
    share_ports: bool = False  # with other routers on this machine: the kernel gives each connection to one of them
    own_http_port: Port = 0  # a further port, of this process alone, with all that http_port has; 0: none
    discovery: Literal["static", "dns", "kubernetes"] = "static"  # how servers are found; static: `servers`
    selector: str = ""  # dns: ROLE=HOST:PORT,...; kubernetes: of labels, empty: app.kubernetes.io/name=disagg
    namespace: str = ""  # of Kubernetes; empty: the router's own
    kubeconfig: str = ""  # a file that says where the Kubernetes API is; empty: as kubectl finds it
    servers: tuple[ServerRef, ...] = ()
    policy: Literal["kv_aware", "least_loaded", "round_robin"] = "kv_aware"  # which servers a request is sent to
    max_inflight: PositiveInt = 1024  # requests dispatched and not finished
    max_queued: NonNegativeInt = 1024  # requests waiting for a place or a server
    tenant_share: Annotated[float, Meta(gt=0, le=1)] = 0.9  # of max_inflight, for one tenant that is alone
    max_prompts_per_request: PositiveInt = 128
    memory_bytes: Annotated[int, Meta(ge=16 * MIB)] = 2048 * MIB  # of texts and unread answers, all requests together
    answer_bytes: Annotated[int, Meta(ge=MIB)] = 128 * MIB  # of one answer, as far as it is not sent
    max_attempts: PositiveInt = 3
    shed_wait_s: Annotated[float, Meta(ge=0, le=86400)] = 0.0  # a longer wait is not begun; 0: any is
    retry_share: Annotated[float, Meta(ge=0, le=100)] = 1.0  # of the requests of ten seconds, that may be run again
    retry_floor: Annotated[float, Meta(ge=0, le=1e6)] = 10.0  # and so many more each second
    request_deadline_s: Seconds = 600.0
    max_connections: PositiveInt = 2048  # of clients, over HTTP and over gRPC each
    max_calls_per_connection: PositiveInt = 1024  # gRPC calls open at once on one connection
    head_s: Seconds = 10.0  # from a connection's or request's first byte to the end of its head
    body_s: Seconds = 60.0  # from there to the end of its body, or of a gRPC request message
    idle_s: Seconds = 75.0  # a connection without a request is closed after this
    stall_s: Seconds = 60.0  # an answer of which the client takes nothing for this long is given up
    lease_s: Seconds = 10.0
    heartbeat_s: Seconds = 1.0
    drain_s: Seconds = 30.0


class OffloadConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """KV beside the GPU: in host memory, and in storage if `storage.url` names one."""

    enabled: bool = False
    host_bytes: NonNegativeInt = 0  # of each worker's host pool; 0: host_ratio
    host_ratio: Annotated[float, Meta(gt=0, le=1e6)] = 2.0  # of the device pool
    stride_tokens: NonNegativeInt = 256  # of an increment that is offloaded; 0: one page
    load: Literal["faster", "always"] = (
        "faster"  # what is kept: where that is faster than to compute it again, or always
    )
    copy: Literal["auto", "kernel", "memcpy"] = "auto"  # how pages cross; auto: what is faster on this machine


class StorageConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where KV is stored for all servers. Written and read by servers with offload.enabled; looked after by `disagg cache`."""

    url: str = ""  # file:///directory, s3://bucket/folder, gs://, az://
    options: dict[str, bool | int | float | str] = field(default_factory=dict)  # of the store and its client, flat
    budget_bytes: NonNegativeInt = 0  # what servers, and `disagg cache gc`, keep it to; 0: no limit
    compression: Literal["none", "zstd"] = "none"


class LogConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["json", "text"] = "json"
    lines_per_s: PositiveInt = (
        1000  # of each process; what is more is counted, and errors have some of it to themselves
    )
    max_bytes: Annotated[int, Meta(ge=64 << 10)] = 16 * MIB  # of one file in a run directory, which then gets a number
    keep: Annotated[int, Meta(ge=0, le=100)] = 3  # files with numbers that are kept


class RecordConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What servers did, step by step and request by request, for `disagg report`."""

    dir: str = ""  # a directory for Parquet files; empty: nothing is recorded


class AuthConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Who may call a router."""

    api_keys_file: str = ""  # lines of KEY TENANT; empty: no keys are asked for
    jwks_file: str = ""  # public keys whose JWTs count; empty: none do
    limits_file: str = ""  # lines of TENANT and what it may ask for; empty: as much as it wants
    jwt_audience: str = ""  # which a token's claim aud must name; empty: any, or none
    jwt_issuer: str = ""  # which a token's claim iss must be; empty: any, or none
    operators: tuple[str, ...] = ()  # tenants that may ask for more than /v1; empty: all that have a key
    insecure: bool = False  # whether processes listen beyond this machine without credentials that they ask for


class TlsConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Certificates, as PEM files that are read again when they change."""

    cert: str = ""  # of this process; a router's faces speak TLS if it is given
    key: str = ""
    ca: str = ""  # routers, servers and peers speak TLS to each other if it is given, and show certificates that it has signed
    server_name: str = ""  # in the certificates of servers that are dialled; empty: the host that is dialled


class TracingConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where spans of requests go."""

    otlp_endpoint: str = ""  # of an OpenTelemetry collector; empty: nothing is traced
    sample_ratio: Annotated[float, Meta(ge=0, le=1)] = 1.0  # of requests whose clients do not say whether they are


class DebugConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What people ask of a process that misbehaves."""

    remote: bool = False  # whether /debug/* answers clients on other machines, too


class Config(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything, for every role. A process uses the parts of its role."""

    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)
    log: LogConfig = field(default_factory=LogConfig)
    record: RecordConfig = field(default_factory=RecordConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    auth: AuthConfig = field(default_factory=AuthConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)
