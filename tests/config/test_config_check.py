"""Settings that do not fit together, and settings that should be known."""

from __future__ import annotations

from typing import Literal

import pytest

from disagg.config.check import (
    check_config,
    check_descriptors,
    connections_allowed,
    descriptors_needed,
    warnings_of,
)
from disagg.config.tree import Config, EngineConfig, ModelConfig, RouterConfig, ServerConfig, ServerRef, TransferConfig
from disagg.types.errors import ConfigError

MIB = 1 << 20


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
            "engine.checkpoint_tokens = 512: it must be a multiple of engine.page_tokens = 24",
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
        (Config(server=ServerConfig(port=5, metrics_port=5)), "server.port and server.metrics_port are both 5"),
        (Config(server=ServerConfig(name="a b")), "no blanks"),
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


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda"])
def test_the_defaults_work_together_and_need_no_warning(device: Literal["auto", "cpu", "cuda"]) -> None:
    check_config(Config(model=ModelConfig(device=device)))
    assert warnings_of(Config()) == ()


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


def test_a_router_may_need_a_file_for_each_client_it_lets_wait() -> None:
    few, many = (Config(router=RouterConfig(max_inflight=n, max_queued=n)) for n in (10, 5000))
    assert descriptors_needed(many, "router")[1] - descriptors_needed(few, "router")[1] == 2 * 4990


@pytest.mark.parametrize("role", ["router", "prefill", "decode"])
@pytest.mark.parametrize("limit", [200, 1024, 20_000, 1 << 20])
def test_two_ports_full_of_connections_leave_a_process_what_it_needs_itself(
    role: Literal["router", "prefill", "decode"], limit: int
) -> None:
    least, _ = descriptors_needed(Config(), role)
    allowed = connections_allowed(Config(), role, limit)
    assert 8 <= allowed <= 4096
    assert 2 * allowed <= limit - least
