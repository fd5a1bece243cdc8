"""Settings that do not fit together, and settings that should be known."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from msgspec.structs import replace

from disagg.config.check import (
    LEAST_S,
    MIXED_ONLY,
    Least,
    check_config,
    check_descriptors,
    check_exposure,
    check_memory,
    check_role,
    connections_allowed,
    descriptors_needed,
    warnings_of,
    without_mixed_only,
)
from disagg.config.check_offload import warnings_of_offload
from disagg.config.staging import size_staging
from disagg.config.tree import (
    AuthConfig,
    Config,
    EngineConfig,
    ModelConfig,
    OffloadConfig,
    RouterConfig,
    ServerConfig,
    ServerRef,
    ServerRole,
    StorageConfig,
    TlsConfig,
    TracingConfig,
    TransferConfig,
)
from disagg.types.errors import ConfigError

MIB = 1 << 20
README = Path(__file__).parents[2] / "README.md"


def ref(name: str, address: str) -> ServerRef:
    return ServerRef(name=name, role="decode", address=address)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            Config(engine=EngineConfig(kv_memory_bytes=1024)),
            "engine.kv_memory_bytes = 1KiB: it must be at least 16KiB, or 0",
        ),
        (
            Config(engine=EngineConfig(page_tokens=24)),
            "engine.checkpoint_tokens = 512: it must be a multiple of engine.page_tokens = 24, such as 528",
        ),
        (Config(transfer=TransferConfig(segment_bytes=32 * MIB)), "a quarter of transfer.arena_bytes = 64MiB"),
        (
            Config(transfer=TransferConfig(segment_bytes=3 * MIB, gather_bytes=MIB)),
            "multiple of transfer.segment_bytes",
        ),
        (Config(transfer=TransferConfig(link_segments=5)), "at most 4"),
        (
            Config(model=ModelConfig(device="cpu"), transfer=TransferConfig(gather_bytes=8 * MIB)),
            "transfer.gather_bytes = 8MiB",
        ),
        (
            Config(model=ModelConfig(device="cuda"), transfer=TransferConfig(arena_bytes=64 * MIB)),
            "must be at most a quarter of transfer.arena_bytes = 64MiB",
        ),
        (Config(transfer=TransferConfig(gather_bytes=5000)), "a multiple of 4096"),
        (
            Config(model=ModelConfig(device="cpu"), transfer=TransferConfig(kernels="triton")),
            'transfer.kernels = "triton": Triton has no kernels for a CPU',
        ),
        (
            Config(offload=OffloadConfig(enabled=True), engine=EngineConfig(prefix_cache=False)),
            "offload.enabled = true and engine.prefix_cache = false",
        ),
        (Config(storage=StorageConfig(url="s3://user:secret@bucket/folder")), "storage.url may have no user"),
        (
            Config(tracing=TracingConfig(otlp_endpoint="http://me:secret@x:4318")),
            "tracing.otlp_endpoint may have no user",
        ),
        (Config(tracing=TracingConfig(otlp_endpoint="me:secret@x:4317")), "tracing.otlp_endpoint may have no user"),
        (Config(server=ServerConfig(port=5, metrics_port=5)), "server.port and server.metrics_port are both 5"),
        (Config(server=ServerConfig(name="a b")), "no blanks"),
        (Config(auth=AuthConfig(jwt_audience="llm")), "auth.jwt_audience = 'llm': it is looked for in tokens"),
        (Config(auth=AuthConfig(api_keys_file="k", jwt_issuer="i")), "auth.jwt_issuer = 'i'"),
        (Config(auth=AuthConfig(operators=("ops",))), "auth.operators = 'ops': tenants are told by their keys"),
        (Config(auth=AuthConfig(jwks_file="j", operators=("ops", "two words"))), "auth.operators has 'two words'"),
        (Config(model=ModelConfig(served_name="a b")), "must have letters, digits and ._-/:@+= only"),
        (Config(model=ModelConfig(served_name="a\nb")), r"'a\nb'"),
        (Config(model=ModelConfig(served_name="\u202eab")), "letters, digits"),
        (Config(model=ModelConfig(served_name="x" * 129)), "at most 128 characters"),
        (Config(model=ModelConfig(served_name="x" * 5_000_000)), "(5000000 characters)"),
        (Config(model=ModelConfig(name="/models/My Model")), "clients would call the model 'My Model'"),
        (Config(router=RouterConfig(http_port=7, grpc_port=7)), "router.http_port and router.grpc_port are both 7"),
        (Config(router=RouterConfig(lease_s=1.5)), "at most half of router.lease_s"),
        (Config(router=RouterConfig(servers=(ref("a", "h:1"), ref("a", "h:2")))), 'the name "a" more than once'),
        (Config(router=RouterConfig(servers=(ref("a", "h:1"), ref("b", "h:1")))), 'the address "h:1" more than once'),
        (Config(router=RouterConfig(servers=(ref("a", "h"),))), "host:port"),
        (Config(router=RouterConfig(servers=(ref("a", "h:0"),))), "host:port"),
        (Config(router=RouterConfig(servers=(ref("", "h:1"),))), "without a name"),
    ],
)
def test_settings_that_cannot_work_together_are_refused(config: Config, says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_config(config)
    assert says in str(raised.value)
    assert "secret@" not in str(raised.value)


@pytest.mark.parametrize("least", LEAST_S, ids=lambda each: each.path)
def test_times_in_which_nothing_can_have_happened_are_refused(least: Least) -> None:
    section, _, name = least.path.partition(".")

    def with_value(value_s: float) -> Config:
        return replace(Config(), **{section: replace(getattr(Config(), section), **{name: value_s})})

    check_config(with_value(least.least_s))
    with pytest.raises(ConfigError, match=f"{least.path} = .*: it must be at least {least.least_s:g}"):
        check_config(with_value(0.99 * least.least_s))
    row = next(line for line in README.read_text().splitlines() if line.startswith(f"| `{least.path}` "))
    assert f"at least {least.least_s:g} |" in row


def test_every_time_has_a_least_value_or_works_however_short() -> None:
    times = {
        f"{section}.{name}"
        for section in Config.__struct_fields__
        for name in getattr(Config(), section).__struct_fields__
        if name.endswith("_s") and not name.endswith("_per_s")
    }
    any_works = {
        "engine.preempt_after_s",
        "transfer.link_idle_s",
        "server.drain_s",
        "router.drain_s",
        "router.shed_wait_s",
    }
    of_its_heartbeat = {"router.lease_s"}
    assert times == {least.path for least in LEAST_S} | any_works | of_its_heartbeat


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda"])
def test_the_defaults_work_together_and_need_no_warning(device: Literal["auto", "cpu", "cuda"]) -> None:
    check_config(Config(model=ModelConfig(device=device)))
    assert warnings_of(Config()) == ()


def test_where_nothing_is_offloaded_it_is_said_of_what_only_offload_uses() -> None:
    storage = StorageConfig(url="file:///kv")
    idle = Config(offload=OffloadConfig(host_bytes=1 << 30), storage=storage)
    check_config(idle)
    (warning,) = warnings_of_offload(idle)
    assert warning.startswith(f"offload.host_bytes = {1 << 30} and storage.url = file:///kv: without use")
    assert "--offload on" in warning
    assert len(warnings_of_offload(Config(storage=storage))) == 1
    assert warnings_of_offload(Config()) == ()
    assert warnings_of_offload(Config(offload=OffloadConfig(enabled=True, host_bytes=1 << 30), storage=storage)) == ()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1", "[::1]"])
def test_loopback_needs_no_warning(host: str) -> None:
    assert warnings_of(Config(server=ServerConfig(host=host), router=RouterConfig(host=host))) == ()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.4", "decode-0.decode"])
def test_a_server_that_others_reach_warns_that_metadata_grants_memory_access(host: str) -> None:
    (warning,) = warnings_of(Config(server=ServerConfig(host=host)))
    assert host in warning
    assert "raw read and write access" in warning
    assert "no TLS" in warning


def test_a_router_that_others_reach_warns_that_it_has_no_authentication() -> None:
    (warning,) = warnings_of(Config(router=RouterConfig(host="0.0.0.0")))
    assert "authentication" in warning


@pytest.mark.parametrize("name", ["two words", "a/b", "line\nbreak", "\x1b[31m", "x" * 129])
def test_names_are_plain_words(name: str) -> None:
    with pytest.raises(ConfigError, match=r"router\.name"):
        check_config(Config(router=RouterConfig(name=name)))
    with pytest.raises(ConfigError, match=r"server\.name"):
        check_config(Config(server=ServerConfig(name=name)))


@pytest.mark.parametrize("role", ["router", "prefill", "decode"])
def test_the_limit_on_open_files_is_checked_against_what_is_configured(
    role: Literal["router", "prefill", "decode"],
) -> None:
    config = Config(server=ServerConfig(tp=2), router=RouterConfig(servers=(ref("d", "a:1"), ref("e", "a:2"))))
    least, wanted = descriptors_needed(config, role)
    assert check_descriptors(config, role, wanted) == ""
    warning = check_descriptors(config, role, wanted - 1)
    assert f"may have {wanted - 1} files open" in warning
    assert f"may need {wanted}" in warning
    assert check_descriptors(config, role, least)
    with pytest.raises(ConfigError, match=f"may have {least - 1} files open.*needs {least} at least"):
        check_descriptors(config, role, least - 1)


def test_a_router_may_need_a_file_for_each_connection_that_it_lets_in() -> None:
    few, many = (Config(router=RouterConfig(max_connections=n)) for n in (10, 5000))
    assert descriptors_needed(many, "router")[1] - descriptors_needed(few, "router")[1] == 2 * 4990


@pytest.mark.parametrize("role", ["router", "prefill", "decode"])
@pytest.mark.parametrize("limit", [200, 1024, 20_000, 1 << 20])
def test_two_ports_full_of_connections_leave_a_process_what_it_needs_itself(
    role: Literal["router", "prefill", "decode"], limit: int
) -> None:
    least, _ = descriptors_needed(Config(), role)
    allowed = connections_allowed(Config(), role, limit)
    assert 8 <= allowed <= (Config().router.max_connections if role == "router" else 4096)
    assert 2 * allowed <= limit - least


@pytest.mark.parametrize(
    ("wanted", "limit", "allowed"),
    [(4, 1 << 20, 4), (2048, 1 << 20, 2048), (10_000, 1 << 20, 10_000), (10_000, 2352, 1000)],
)
def test_a_router_lets_in_as_many_as_it_is_told_to_if_it_has_the_files(wanted: int, limit: int, allowed: int) -> None:
    config = Config(router=RouterConfig(max_connections=wanted, discovery="kubernetes"))
    assert descriptors_needed(config, "router")[0] == 352
    assert connections_allowed(config, "router", limit) == allowed
    said = check_descriptors(config, "router", limit)
    assert ("router.max_connections" in said) is (allowed < wanted)


@pytest.mark.parametrize(
    ("kv_memory", "arena", "tp", "machine", "fits"),
    [
        (1 << 60, 0, 1, 1 << 40, False),
        (1 << 80, 0, 1, 1 << 40, False),
        (600 * MIB, 0, 1, 1 << 30, True),
        (600 * MIB, 0, 2, 1 << 30, False),
        (600 * MIB, 512 * MIB, 1, 1 << 30, False),
        (0, 0, 1, 1 << 30, True),
        (1 << 60, 0, 1, 0, True),  # how much there is, is not known
    ],
)
def test_memory_that_no_machine_like_this_has_is_refused_before_anything_starts(
    kv_memory: int, arena: int, tp: int, machine: int, fits: bool
) -> None:
    config = Config(
        engine=EngineConfig(kv_memory_bytes=kv_memory),
        transfer=TransferConfig(arena_bytes=arena),
        server=ServerConfig(tp=tp),
    )
    transfer = size_staging(config.transfer, "cpu")
    if fits:
        check_memory(config, transfer, "decode", machine)
        return
    with pytest.raises(ConfigError, match=r"engine.kv_memory_bytes = .* more than this machine has, (1 TiB|1 GiB)"):
        check_memory(config, transfer, "decode", machine)


def test_what_is_no_text_is_refused_with_its_path() -> None:
    for config, path in (
        (Config(model=ModelConfig(name="m\udcff")), "model.name"),
        (Config(router=RouterConfig(servers=(ref("d\udcff", "h:1"),))), "router.servers.name"),
    ):
        with pytest.raises(ConfigError, match=rf"{path} = '.\\udcff': it is not UTF-8 at character 1"):
            check_config(config)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("engine", "says"),
    [
        (EngineConfig(policy="orca"), "engine.policy = 'orca': only a mixed server can have that"),
        (EngineConfig(prefill_delay_passes=5), "engine.prefill_delay_passes = 5: only a mixed server can have that"),
        (EngineConfig(prefill_delay_passes=0), "engine.prefill_delay_passes = 0: only a mixed server can have that"),
        (EngineConfig(prefill_delay_low_usage=0.2), "engine.prefill_delay_low_usage = 0.2: only a mixed server"),
    ],
)
def test_what_only_mixed_servers_can_have_is_refused_by_others(
    role: Literal["prefill", "decode"], engine: EngineConfig, says: str
) -> None:
    for fine in ("router", "mixed"):
        check_role(Config(engine=engine), fine)
    with pytest.raises(ConfigError) as raised:
        check_role(Config(engine=engine), role)
    assert says in str(raised.value)
    check_role(Config(engine=without_mixed_only(engine)), role)
    assert set(MIXED_ONLY) >= {"policy", "prefill_delay_passes", "prefill_delay_low_usage"}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_data_parallel_ranks_are_refused_where_kv_is_sent_and_with_offload(role: Literal["prefill", "decode"]) -> None:
    config = Config(server=ServerConfig(dp=2))
    check_config(config)
    for fine in ("router", "mixed"):
        check_role(config, fine)
    with pytest.raises(
        ConfigError, match=r"server.dp = 2: only a mixed server can have data-parallel ranks: .* it must be 1"
    ):
        check_role(config, role)
    offloads = Config(server=ServerConfig(dp=2), offload=OffloadConfig(enabled=True))
    with pytest.raises(
        ConfigError, match=r"offload.enabled = true and server.dp = 2: .*; one of the two must be false or 1"
    ):
        check_config(offloads)


def test_all_data_parallel_ranks_need_memory_and_open_files() -> None:
    one, four = (Config(server=ServerConfig(tp=2, dp=dp)) for dp in (1, 2))
    assert descriptors_needed(four, "mixed")[0] > descriptors_needed(one, "mixed")[0]
    config = Config(server=ServerConfig(tp=2, dp=2), engine=EngineConfig(kv_memory_bytes=300 << 20))
    check_memory(config, config.transfer, "mixed", 1200 << 20)
    with pytest.raises(ConfigError, match="for 4 ranks: more than this machine has"):
        check_memory(config, config.transfer, "mixed", 1199 << 20)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_pipeline_stages_are_for_mixed_servers_without_offload(role: Literal["prefill", "decode"]) -> None:
    staged = Config(server=ServerConfig(pp=2))
    for fine in ("router", "mixed"):
        check_role(staged, fine)
    with pytest.raises(ConfigError, match=r"server\.pp = 2: only a mixed server can have that: a .* it must be 1"):
        check_role(staged, role)
    check_config(staged)
    with pytest.raises(ConfigError, match=r"offload\.enabled = true and server\.pp = 2: .*\(server\.pp = 1\)"):
        check_config(Config(server=ServerConfig(pp=2), offload=OffloadConfig(enabled=True)))


BEYOND = "10.0.0.4"


@pytest.mark.parametrize("role", ["prefill", "decode", "mixed"])
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", BEYOND, "decode-0.decode"])
def test_a_server_listens_beyond_its_machine_with_certificates_or_if_it_is_told_to(role: ServerRole, host: str) -> None:
    config = Config(server=ServerConfig(host=host))
    with pytest.raises(ConfigError, match=r"server\.host.*tls\.ca.*--insecure"):
        check_exposure(config, role)
    check_exposure(config, "router")
    check_exposure(replace(config, auth=AuthConfig(insecure=True)), role)
    check_exposure(replace(config, tls=TlsConfig(cert="c", key="k", ca="a")), role)
    with pytest.raises(ConfigError):
        check_exposure(replace(config, tls=TlsConfig(cert="c", key="k"), auth=AuthConfig(api_keys_file="f")), role)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", BEYOND, "router.example"])
def test_a_router_listens_beyond_its_machine_if_it_asks_for_keys_or_is_told_to(host: str) -> None:
    config = Config(router=RouterConfig(host=host))
    with pytest.raises(ConfigError, match=r"router\.host.*auth\.api_keys_file.*--insecure"):
        check_exposure(replace(config, tls=TlsConfig(cert="c", key="k", ca="a")), "router")
    check_exposure(config, "prefill")
    for auth in (AuthConfig(insecure=True), AuthConfig(api_keys_file="f"), AuthConfig(jwks_file="f")):
        check_exposure(replace(config, auth=auth), "router")


def test_what_is_secured_needs_no_warning() -> None:
    secured = Config(
        router=RouterConfig(host=BEYOND),
        server=ServerConfig(host=BEYOND),
        auth=AuthConfig(api_keys_file="f"),
        tls=TlsConfig(cert="c", key="k", ca="a"),
    )
    assert warnings_of(secured) == ()
    (warning,) = warnings_of(replace(secured, auth=AuthConfig()))
    assert "authentication" in warning and "TLS" not in warning


@pytest.mark.parametrize(
    "tls", [TlsConfig(cert="c"), TlsConfig(key="k"), TlsConfig(ca="a"), TlsConfig(server_name="n")], ids=str
)
def test_certificates_keys_and_authorities_go_together(tls: TlsConfig) -> None:
    with pytest.raises(ConfigError, match=r"tls\."):
        check_config(Config(tls=tls))
