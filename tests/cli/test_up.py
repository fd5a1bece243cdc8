"""What `disagg up` plans before it starts anything."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from disagg.cli import announce as announcing
from disagg.cli.announce import Seen, credentials_for, reachable, server_pids, server_states, serves
from disagg.cli.rundir import PORTS
from disagg.cli.up import UpOptions, cluster_processes, without_work
from disagg.config.load import dump_config, load_config
from disagg.config.tree import AuthConfig, Config, EngineConfig, OffloadConfig, RouterConfig, ServerConfig
from disagg.types.errors import ConfigError

ONE_OF_EACH = UpOptions(num_prefill=1, num_decode=1)


def test_every_process_has_its_name_role_and_ports_of_its_own() -> None:
    base = Config(router=RouterConfig(http_port=0, grpc_port=0), engine=EngineConfig(page_tokens=8))
    router, *servers = cluster_processes(base, UpOptions(num_prefill=2, num_decode=3))
    assert (router.name, router.role) == ("router", "router")
    assert [server.name for server in servers] == ["prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"]
    assert [server.role for server in servers] == ["prefill"] * 2 + ["decode"] * 3
    ports = [router.config.router.http_port, router.config.router.grpc_port]
    for server in servers:
        ports += [server.config.server.port, server.config.server.metrics_port]
    assert len(set(ports)) == 12
    assert all(port in PORTS for port in ports)
    assert all(server.config.engine.page_tokens == 8 for server in servers)


def test_the_router_is_told_where_each_server_will_be() -> None:
    router, *servers = cluster_processes(Config(), ONE_OF_EACH)
    assert {(ref.name, ref.role, ref.address) for ref in router.config.router.servers} == {
        (server.name, server.role, f"127.0.0.1:{server.config.server.port}") for server in servers
    }


def test_ports_that_were_asked_for_are_kept() -> None:
    router, *_ = cluster_processes(Config(router=RouterConfig(http_port=20_123, grpc_port=0)), ONE_OF_EACH)
    assert router.config.router.http_port == 20_123
    assert router.config.router.grpc_port not in (0, 20_123)


def test_each_pool_has_its_own_tp_size_or_the_configured_one() -> None:
    base = Config(server=ServerConfig(tp=2))
    for prefill_tp, decode_tp, tps in ((None, None, [2, 2, 2]), (None, 4, [2, 4, 4]), (1, 3, [1, 3, 3])):
        options = UpOptions(num_prefill=1, num_decode=2, prefill_tp=prefill_tp, decode_tp=decode_tp)
        assert [process.config.server.tp for process in cluster_processes(base, options)[1:]] == tps


def test_servers_stay_on_loopback_whoever_the_router_listens_to() -> None:
    base = Config(router=RouterConfig(host="0.0.0.0"), server=ServerConfig(host="0.0.0.0", advertise_host="elsewhere"))
    router, *servers = cluster_processes(base, ONE_OF_EACH)
    assert router.config.router.host == "0.0.0.0"
    assert all(
        (process.config.server.host, process.config.server.advertise_host) == ("127.0.0.1", "") for process in servers
    )


def test_every_plan_survives_its_file(tmp_path: Path) -> None:
    for process in cluster_processes(Config(), UpOptions(num_prefill=1, num_decode=2)):
        file = tmp_path / f"{process.name}.toml"
        file.write_text(dump_config(process.config))
        assert load_config(file, {}, {}) == process.config


@pytest.mark.parametrize(
    ("host", "dialled"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.1"),
        ("", "127.0.0.1"),
        ("::", "127.0.0.1"),
        ("::1", "[::1]"),
        ("[::1]", "[::1]"),
    ],
)
def test_a_host_that_is_listened_on_is_dialled_as_one_that_can_be(host: str, dialled: str) -> None:
    assert reachable(host) == dialled


def test_states_are_read_from_the_routers_status() -> None:
    assert server_states({"servers": [{"name": "p", "state": "ready"}]}) == {"p": "ready"}
    assert server_states("nonsense") == {}
    assert server_pids({"servers": [{"name": "p", "state": "ready", "pid": 7}, {"name": "d", "pid": 0}]}) == {"p": 7}


def test_who_serves_again_is_the_process_that_was_started_and_not_the_one_before() -> None:
    seen = Seen(True, {"p": "ready", "d": "loading", "hidden": "ready"}, {"p": 7, "d": 8})
    assert serves("p", 7, seen) and not serves("p", 9, seen), "the router has not heard of it yet"
    assert not serves("d", 8, seen)
    assert serves("hidden", 3, seen), "whose process a router does not tell"
    assert serves("router", 1, seen) and not serves("router", 1, Seen(False, {}, {}))


class _Watched:
    """Children that run, until all of these are proven."""

    def __init__(self, names: set[str]) -> None:
        self.unproven = set(names)
        self.pids = dict.fromkeys(names, 7)

    @property
    def draining(self) -> bool:
        return not self.unproven

    def proven(self, name: str) -> None:
        self.unproven.discard(name)


async def test_a_server_that_comes_up_long_after_the_others_has_served_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    router, *_ = cluster_processes(
        Config(router=RouterConfig(http_port=0, grpc_port=0)), UpOptions(num_prefill=1, num_decode=2)
    )
    states = {"prefill-0": "no-peer", "decode-0": "ready", "decode-1": "loading"}
    said: list[str] = []

    async def look(cluster: object) -> Seen:
        return Seen(True, dict(states), {})

    def ready(line: str) -> None:
        said.append(line)
        states["decode-1"] = "ready"

    for name in ("POLL_S", "LATE_S", "ALL_READY_S"):
        monkeypatch.setattr(announcing, name, 0.001)
    monkeypatch.setattr(announcing._Cluster, "look", look)
    monkeypatch.setattr(announcing, "result", ready)
    children = _Watched({"router", *states})
    async with asyncio.timeout(10):
        await announcing.announce({"router": router.config}, children)  # type: ignore[arg-type]
    assert len(said) == 1 and children.draining


def test_what_only_mixed_servers_can_have_is_theirs_alone_and_refused_where_there_are_none() -> None:
    base = Config(
        engine=EngineConfig(policy="vllm", prefill_delay_passes=7, prefill_delay_low_usage=0.5, page_tokens=8)
    )
    _, *servers = cluster_processes(base, UpOptions(num_prefill=1, num_decode=1, num_mixed=1))
    assert {process.role: process.config.engine for process in servers} == {
        "prefill": EngineConfig(page_tokens=8),
        "decode": EngineConfig(page_tokens=8),
        "mixed": base.engine,
    }
    with pytest.raises(ConfigError, match="only a mixed server can have that"):
        cluster_processes(Config(engine=EngineConfig(prefill_delay_passes=7)), ONE_OF_EACH)


def test_data_parallel_ranks_are_those_of_mixed_servers() -> None:
    options = UpOptions(num_prefill=1, num_decode=1, num_mixed=2, mixed_dp=3, mixed_tp=2)
    _, *servers = cluster_processes(Config(), options)
    assert {(process.role, process.config.server.dp, process.config.server.num_ranks) for process in servers} == {
        ("prefill", 1, 1),
        ("decode", 1, 1),
        ("mixed", 3, 6),
    }
    set_for_all = Config(server=ServerConfig(dp=2))
    _, *servers = cluster_processes(set_for_all, UpOptions(num_prefill=1, num_decode=1, num_mixed=1))
    assert {process.role: process.config.server.dp for process in servers} == {"prefill": 1, "decode": 1, "mixed": 2}
    with pytest.raises(ConfigError, match=r"server\.dp = 2: only a mixed server"):
        cluster_processes(set_for_all, ONE_OF_EACH)


def test_pipeline_stages_are_those_of_mixed_servers_alone() -> None:
    stages = Config(server=ServerConfig(pp=2, tp=2))
    _, *servers = cluster_processes(stages, UpOptions(num_prefill=1, num_decode=1, num_mixed=1))
    assert {process.role: process.config.server.num_ranks for process in servers} == {
        "prefill": 2,
        "decode": 2,
        "mixed": 4,
    }
    _, mixed = cluster_processes(stages, UpOptions(num_prefill=0, num_decode=0, num_mixed=1, mixed_pp=3))
    assert (mixed.config.server.tp, mixed.config.server.pp) == (2, 3)
    with pytest.raises(ConfigError, match=r"server\.pp = 2: only a mixed server can have that"):
        cluster_processes(stages, ONE_OF_EACH)


@pytest.mark.parametrize(
    ("flag", "options"),
    [
        ("--mixed-tp 2", UpOptions(num_prefill=1, num_decode=1, mixed_tp=2)),
        ("--mixed-dp 2", UpOptions(num_prefill=1, num_decode=1, mixed_dp=2)),
        ("--mixed-pp 2", UpOptions(num_prefill=1, num_decode=1, mixed_pp=2)),
        ("--prefill-tp 2", UpOptions(num_prefill=0, num_decode=0, num_mixed=1, prefill_tp=2)),
        ("--decode-tp 2", UpOptions(num_prefill=0, num_decode=0, num_mixed=1, decode_tp=2)),
    ],
)
def test_what_is_said_of_servers_that_there_are_none_of_is_refused(flag: str, options: UpOptions) -> None:
    with pytest.raises(ConfigError, match=f"^{flag}: there are no "):
        cluster_processes(Config(), options)


MIXED_ALONE = UpOptions(num_prefill=0, num_decode=0, num_mixed=1)


@pytest.mark.parametrize(
    ("said", "options", "offload"),
    [
        (r"server\.dp = 2 and server\.pp = 2", replace(MIXED_ALONE, mixed_dp=2, mixed_pp=2), False),
        (r"offload\.enabled = true and server\.dp = 2", replace(MIXED_ALONE, mixed_dp=2), True),
        (r"offload\.enabled = true and server\.pp = 2", replace(MIXED_ALONE, mixed_pp=2), True),
        (r"offload\.enabled = true and server\.pp = 2", replace(ONE_OF_EACH, num_mixed=1, mixed_pp=2), True),
    ],
)
def test_what_a_server_would_refuse_is_refused_in_the_same_words_before_anything_starts(
    said: str, options: UpOptions, offload: bool, tmp_path: Path
) -> None:
    base = Config(offload=OffloadConfig(enabled=offload))
    with pytest.raises(ConfigError, match=f"^{said}: ") as refused:
        cluster_processes(base, options)
    file = tmp_path / "mixed-0.toml"
    ranks = ServerConfig(dp=options.mixed_dp or 1, pp=options.mixed_pp or 1)
    file.write_text(dump_config(replace(base, server=ranks)))
    with pytest.raises(ConfigError) as by_server:
        load_config(file, {}, {})
    assert str(by_server.value) == str(refused.value)


@pytest.mark.parametrize(("role", "other"), [("prefill", "decode"), ("decode", "prefill")])
def test_servers_without_counterpart_beside_mixed_ones_are_started_and_said_to_have_nothing_to_do(
    role: str, other: str
) -> None:
    counts = {f"num_{role}": 2, f"num_{other}": 0}
    options = UpOptions(**counts, num_mixed=1)
    assert [process.name for process in cluster_processes(Config(), options)] == [
        "router",
        f"{role}-0",
        f"{role}-1",
        "mixed-0",
    ]
    said = without_work(options)
    assert said.startswith(f"--{role} 2 --{other} 0: {role} servers have nothing to do while there are no {other} ")
    assert "\n" not in said and "`disagg role`" in said
    for all_work in (MIXED_ALONE, ONE_OF_EACH, replace(ONE_OF_EACH, num_mixed=1)):
        assert without_work(all_work) == ""


def test_up_asks_its_router_with_an_operators_key_if_there_is_one(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("key-a team-a\nkey-b team-b\nkey-c team-c\n")

    def shown(*operators: str) -> str:
        return credentials_for(AuthConfig(api_keys_file=str(file), operators=operators))["authorization"]

    assert shown() == shown("elsewhere") == "Bearer key-a"
    assert shown("team-c", "team-b") == "Bearer key-b"
    assert credentials_for(AuthConfig(jwks_file="keys", operators=("team-a",))) == {}


def test_several_routers_share_two_ports_and_have_one_each() -> None:
    options = UpOptions(num_prefill=1, num_decode=1, num_routers=3)
    processes = cluster_processes(Config(router=RouterConfig(http_port=0, grpc_port=0)), options)
    assert [process.name for process in processes] == ["router-0", "router-1", "router-2", "prefill-0", "decode-0"]
    routers = [process.config.router for process in processes[:3]]
    assert len({(router.http_port, router.grpc_port) for router in routers}) == 1
    assert all(router.share_ports for router in routers)
    assert len({router.name for router in routers}) == len({router.own_http_port for router in routers}) == 3
    assert all(router.servers == routers[0].servers for router in routers)
    (alone, *_) = cluster_processes(Config(), ONE_OF_EACH)
    assert not alone.config.router.share_ports and not alone.config.router.own_http_port
