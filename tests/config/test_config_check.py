"""Settings that do not fit together, and settings that should be known."""

from __future__ import annotations

from typing import Literal

import pytest

from disagg.config.check import check_config, warnings_of
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
