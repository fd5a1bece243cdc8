"""Bringing a group up, with one that only answers: what ranks are told, and what is refused before they are."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from disagg.config.tree import Config, EngineConfig, ModelConfig, OffloadConfig, ServerConfig, StorageConfig
from disagg.convert.inspect import ModelFacts as InspectedModel
from disagg.engine.facts import OffloadFacts
from disagg.memory.groups import spec_of
from disagg.memory.layout import pool_layout
from disagg.messages.control import (
    Computation,
    ControlReply,
    ControlRequest,
    Load,
    Loaded,
    MakePool,
    OffloadOpen,
    OpenOffload,
    OpenTransfer,
    PoolMade,
    Profile,
    Profiled,
    TransferOpen,
)
from disagg.messages.layout import GroupKind, LayerGroup, StatePart
from disagg.mixed_server.role import MIXED
from disagg.offload.host_size import least_large, size_host
from disagg.offload.rules import offload_rules
from disagg.offload.store import StoreError
from disagg.prefill_server.role import PREFILL
from disagg.server import bringup
from disagg.server.bringup import Bringup, Incarnation, computation_of, spent, with_device
from disagg.server.offloading import Offloading
from disagg.types.errors import ConfigError
from disagg.types.ids import Role

KIB, MIB = 1 << 10, 1 << 20
FULL = LayerGroup("full", (0, 1), 2, 8, "float32")
WINDOW = LayerGroup("window", (2,), 2, 8, "float32", GroupKind.WINDOW, window=40)
STATE = LayerGroup.of_states("state", (3,), (StatePart("ssm", (64,), "float32"),))
INSPECTED = InspectedModel(
    architecture="Tiny",
    model_type="tiny",
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=10,
    max_model_len=64,
    max_model_len_note="",
    torch_dtype="float32",
    weight_bytes=100,
    num_parameters=25,
    sliding_window=None,
    layer_types=("full_attention",) * 2,
    eos_token_ids=(2,),
    bos_token_id=None,
    tie_word_embeddings=False,
)


class FakeGroup:
    """Ranks that are content with everything, and remember it."""

    incarnation = "0123456789abcdef"
    directory = "/nowhere"

    def __init__(self, ranks: int, groups: tuple[LayerGroup, ...], cuts: tuple[int, ...] = ()) -> None:
        self.asked: list[ControlRequest] = []
        self.call_s: dict[str, float] = {}
        self.device_bytes: tuple[int, ...] = ()  # of each rank; none on a CPU
        self._tp = ranks
        self._groups = groups
        self._cuts = cuts

    async def call(self, request: ControlRequest, timeout_s: float) -> list[ControlReply]:
        self.asked.append(request)
        self.call_s[type(request).__name__] = 1.0
        return [self._reply(rank, request) for rank in range(self._tp)]

    async def barrier(self, timeout_s: float) -> None: ...

    def _reply(self, rank: int, request: ControlRequest) -> ControlReply:
        match request:
            case Load():
                return Loaded(rank, self._groups, 10, 64, (2,), 0.1, "w" * 64, {}, cuts=self._cuts)
            case Profile():
                return Profiled(rank, self.device_bytes[rank] if self.device_bytes else 0, 0)
            case MakePool():
                return PoolMade(rank, request.num_large * request.large_bytes)
            case OpenTransfer():
                return TransferOpen(rank, 1, b"", 0, 0, 0)
            case OpenOffload():
                return OffloadOpen(rank, request.num_large * request.large_bytes, "memcpy: there is no GPU")
        raise AssertionError(request)


def config_of(tp: int = 1, **offload: Any) -> Config:
    return Config(
        model=ModelConfig(device="cpu"),
        engine=EngineConfig(kv_memory_bytes=4 * MIB, max_running=4),
        server=ServerConfig(tp=tp),
        offload=OffloadConfig(enabled=True, **offload),
    )


async def brought_up(config: Config, *groups: LayerGroup) -> tuple[Incarnation, FakeGroup]:
    sized, device = with_device(config, PREFILL)
    group = FakeGroup(config.server.tp, groups or (FULL,))
    return await Bringup(sized, PREFILL, device, Path()).run(group, INSPECTED), group  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bringup, "memory_bytes", lambda: 1 << 40)


def test_workers_are_told_all_that_is_set_of_how_a_model_is_computed() -> None:
    assert computation_of(ModelConfig(), Role.DECODE, 0) == Computation(chunk_rows=0)
    assert computation_of(ModelConfig(), Role.DECODE, 128) == Computation(mixed=True, chunk_rows=128), (
        "some of its steps are of both phases"
    )
    every = ModelConfig(prefill_attention="triton", decode_attention="torch", graphs=False, fusions=("norm",))
    assert computation_of(every, Role.PREFILL, 128) == Computation("triton", "torch", False, ("norm",), decode_rows=64)
    assert computation_of(ModelConfig(), Role.MIXED, 0) == Computation(mixed=True)


def test_where_the_time_of_a_start_went_is_said_of_every_part() -> None:
    calls = {"Load": 14.0, "Profile": 2.0, "MakePool": 3.0, "OpenTransfer": 4.0}
    without = (
        "starting workers 9.0 s, loading 5.0 s, largest step 2.0 s, pool and captures 3.0 s, transfers 4.0 s, offload "
    )
    assert spent(calls, 5.0) == f"{without}0.0 s"
    assert spent({**calls, "OpenOffload": 6.0}, 5.0) == f"{without}6.0 s"


async def test_without_offload_no_rank_hears_of_it() -> None:
    up, group = await brought_up(Config(model=ModelConfig(device="cpu"), engine=EngineConfig(kv_memory_bytes=4 * MIB)))
    assert up.facts.offload is None
    assert [type(each) for each in group.asked] == [Load, Profile, MakePool, OpenTransfer]


async def test_the_host_pool_is_so_many_times_the_device_pool_and_opened_after_the_transfer() -> None:
    config = config_of(tp=2, host_ratio=1.5, stride_tokens=250, copy="memcpy")
    storage = StorageConfig(url="s3://bucket", options={"allow_http": True}, compression="zstd")
    up, group = await brought_up(Config(**{**_parts(config), "storage": storage}))
    made, _, opened = group.asked[-3:]
    assert isinstance(made, MakePool) and isinstance(opened, OpenOffload)
    assert isinstance(group.asked[-2], OpenTransfer)
    assert opened.num_large == made.num_large * 3 // 2
    assert up.facts.offload == OffloadFacts(opened.num_large, 250, storage=True)
    scope = up.facts.memory.scope
    assert (opened.large_bytes, opened.strides) == (made.large_bytes, made.strides)
    assert (opened.weights, opened.dtype, opened.page_tokens) == (scope.weights, scope.dtype, scope.page_tokens)
    assert (opened.groups, opened.checkpoint_tokens) == (scope.groups, 512)
    assert (opened.url, opened.options, opened.compression) == ("s3://bucket", {"allow_http": True}, "zstd")


async def test_bytes_of_the_host_pool_win_over_the_ratio_and_make_whole_large_pages() -> None:
    up, group = await brought_up(config_of(host_bytes=MIB + 17))
    opened = group.asked[-1]
    assert isinstance(opened, OpenOffload)
    assert opened.num_large == MIB // opened.large_bytes
    assert up.facts.offload == OffloadFacts(opened.num_large, 256, storage=False)


@pytest.mark.parametrize(
    ("groups", "stride_tokens", "says"),
    [
        ((FULL,), 250, "it is 240 here, in whole pages of 16 tokens"),
        ((FULL,), 0, "it is 16 here, in whole pages of 16 tokens"),
        ((FULL, STATE), 256, "it is 512 here, in whole checkpoints of 512"),
        ((FULL,), 256, ""),
    ],
)
async def test_a_stride_that_is_rounded_is_said_once(
    groups: tuple[LayerGroup, ...], stride_tokens: int, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    await brought_up(config_of(stride_tokens=stride_tokens), *groups)
    said = [each.message for each in caplog.records if "stride_tokens" in each.message]
    assert len(said) == bool(says) and all(says in each for each in said)
    assert any("pages are copied by memcpy: there is no GPU" in each.message for each in caplog.records)


async def test_a_host_pool_that_the_machine_cannot_hold_is_refused_with_both_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bringup, "memory_bytes", lambda: 100 * MIB)
    with pytest.raises(ConfigError, match=r"offload.host_bytes = 60MiB: .* 2 ranks, 120 MiB in all: .* has, 100 MiB"):
        with_device(config_of(tp=2, host_bytes=60 * MIB), PREFILL)
    with pytest.raises(ConfigError, match=r"offload.host_ratio = 30: that is 120 MiB of host memory .* has, 100 MiB"):
        await brought_up(config_of(host_ratio=30.0))
    monkeypatch.setattr(bringup, "memory_bytes", lambda: 0)
    await brought_up(config_of(host_ratio=30.0))


async def test_a_host_pool_in_which_nothing_fits_is_refused_and_a_ratio_gives_room_for_a_span() -> None:
    with pytest.raises(ConfigError, match=r"offload: offload.host_bytes = 8KiB holds 2 .* may need 16, 64 KiB"):
        await brought_up(config_of(host_bytes=8 * KIB))
    _, group = await brought_up(config_of(host_ratio=0.001))
    opened = group.asked[-1]
    assert isinstance(opened, OpenOffload) and opened.num_large == 16


def test_room_for_a_span_is_room_for_what_every_group_keeps_of_it() -> None:
    layout = pool_layout([spec_of(each, 16) for each in (FULL, WINDOW, STATE)], 16, 32)
    rules = offload_rules(layout, 64)
    full, window, state = (-(-pages // per) for pages, per in zip((4, 4 + 3, 2), layout.per_large, strict=True))
    assert least_large(rules) == full + window + state
    assert size_host(OffloadConfig(host_ratio=2.0), rules, 100).num_large == 200


def _parts(config: Config) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__struct_fields__}


# ---- storage


def offloading(url: str, enabled: bool = True, **options: bool | str) -> Offloading:
    return Offloading(Config(offload=OffloadConfig(enabled=enabled), storage=StorageConfig(url=url, options=options)))


@pytest.mark.parametrize(
    ("url", "options", "says"),
    [
        ("ftp://host/x", {}, "must begin with one of"),
        ("s3://bucket", {"allow_htpp": True}, "allow_htpp is not an option"),
        ("file:///proc/none/kv", {}, "cannot be used"),
    ],
)
def test_a_store_that_can_never_be_used_is_refused_at_start(url: str, options: dict[str, bool], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        offloading(url, **options).open()


async def test_a_store_that_is_down_is_no_reason_not_to_start(tmp_path: Path) -> None:
    url = "s3://bucket"
    down = offloading(url, endpoint="http://127.0.0.1:9", allow_http=True, access_key_id="a", secret_access_key="b")
    down.open()
    assert down.state == "ok", "nobody has asked it yet"
    for off in (offloading(""), offloading(url, enabled=False)):
        off.open()
        assert off.state == "off" and off.idle
    up, _ = await brought_up(config_of())
    assert offloading("").up(up.facts, _send, lambda event: None) is None


async def test_a_keeper_lives_as_long_as_its_workers_and_its_store_longer(tmp_path: Path) -> None:
    kept = offloading(f"file://{tmp_path}/kv")
    kept.open()
    up, _ = await brought_up(config_of())
    keeper = kept.up(up.facts, _send, lambda event: None)
    assert keeper is not None and kept.state == "ok" and kept.idle
    kept.tick()
    (tmp_path / "kv").rmdir()
    (tmp_path / "kv").write_text("in the way")
    store = kept._store
    assert store is not None
    for _ in range(3):
        with pytest.raises(StoreError):
            await store.replace("a", [b"x"])
    assert kept.state == "degraded" and kept.failures == 3
    assert kept.describe()["works"] is False
    await kept.down()
    assert kept.state == "degraded"
    kept.tick()
    assert kept.up(up.facts, _send, lambda event: None) is not keeper
    await kept.down()


def _send(rank: int, messages: object) -> None: ...


async def staged(tp: int, cuts: tuple[int, ...], device_bytes: tuple[int, ...], engine: EngineConfig) -> FakeGroup:
    """Brought up with layers cut there."""
    server = ServerConfig(tp=tp, pp=len(cuts) - 1)
    sized, device = with_device(Config(model=ModelConfig(device="cpu"), engine=engine, server=server), MIXED)
    group = FakeGroup(server.num_ranks, (FULL, WINDOW), cuts)
    group.device_bytes = device_bytes
    up = await Bringup(sized, MIXED, device, Path()).run(group, INSPECTED)  # type: ignore[arg-type]
    assert (up.facts.tp, up.facts.pp, up.facts.sampling_rank) == (tp, len(cuts) - 1, server.num_ranks - tp)
    return group


@pytest.mark.parametrize("tp", [1, 2])
async def test_stages_have_pages_of_their_own_size_and_as_many_as_the_smallest_has_room_for(tp: int) -> None:
    """FULL is layers 0 and 1, WINDOW is layer 2: stage 0 has one layer of one group, stage 1 has the others."""
    group = await staged(tp, (0, 1, 3), (), EngineConfig(kv_memory_bytes=4 * MIB, max_running=4))
    (load,) = (each for each in group.asked if isinstance(each, Load))
    assert (load.tp, load.pp) == (tp, 2)
    (made,) = (each for each in group.asked if isinstance(each, MakePool))
    page_bytes = 2 * (2 // tp) * 8 * 4 * 16  # of one layer
    layout = pool_layout([spec_of(layers.on_rank(tp), 16) for layers in (FULL, WINDOW)], 16)
    first, second = made.stages
    full, window = layout.per_large
    assert first.strides == (page_bytes,) and first.large_bytes == full * page_bytes
    assert second.large_bytes == max(full, window) * page_bytes
    assert [second.large_bytes // stride for stride in second.strides] == [full, window]
    assert made.num_large == 4 * MIB // second.large_bytes


@pytest.mark.parametrize(("device_bytes", "stage"), [((64 * MIB, 9 * MIB), 1), ((2 * MIB, 64 * MIB), 0)])
async def test_the_stage_with_least_memory_says_how_many_pages_there_are(
    device_bytes: tuple[int, int], stage: int
) -> None:
    group = await staged(1, (0, 1, 3), device_bytes, EngineConfig(max_running=4, gpu_memory_utilization=1.0))
    (made,) = (each for each in group.asked if isinstance(each, MakePool))
    assert made.num_large == device_bytes[stage] // made.stages[stage].large_bytes


@pytest.mark.parametrize(
    ("chunk_tokens", "max_running", "said"),
    [
        (16, 64, "steps have up to 80 tokens, for engine.max_running = 64 answers and a page"),
        (80, 64, ""),
        (16, 4, "up to 20"),
    ],
)
async def test_a_mixed_server_says_where_its_steps_have_more_tokens_than_were_asked_for(
    caplog: pytest.LogCaptureFixture, chunk_tokens: int, max_running: int, said: str
) -> None:
    caplog.set_level(logging.INFO)
    await staged(
        1, (0, 1, 3), (), EngineConfig(kv_memory_bytes=4 * MIB, chunk_tokens=chunk_tokens, max_running=max_running)
    )
    lines = [line for line in caplog.messages if "engine.chunk_tokens is" in line]
    assert len(lines) == bool(said)
    if said:
        assert said in lines[0] and lines[0].endswith(f"engine.chunk_tokens is {chunk_tokens}")
