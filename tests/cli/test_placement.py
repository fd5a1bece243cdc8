"""On which GPUs `disagg up` puts its servers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from disagg.cli.placement import describe, place
from disagg.cli.up import UpOptions, cluster_processes, on_gpus
from disagg.config.tree import Config, EngineConfig, ServerConfig
from disagg.types.errors import ConfigError


@st.composite
def clusters(draw: st.DrawFn) -> tuple[dict[str, int], int, int]:
    """(ranks of each server, GPUs, first of them) that can be placed."""
    first_gpu, available = draw(st.integers(0, 3)), draw(st.integers(1, 8))
    tps = draw(st.lists(st.integers(1, available), min_size=1, max_size=8))
    return {f"server-{number}": tp for number, tp in enumerate(tps)}, first_gpu + available, first_gpu


@settings(derandomize=True, deadline=None)
@given(clusters())
def test_every_rank_has_a_gpu_and_none_waits_while_another_has_two(cluster: tuple[dict[str, int], int, int]) -> None:
    tps, num_gpus, first_gpu = cluster
    placement = place(tps, num_gpus, first_gpu)
    assert list(placement.first_gpu) == list(tps)
    ranks = [0] * num_gpus
    for name, start in placement.first_gpu.items():
        assert first_gpu <= start and start + tps[name] <= num_gpus
        for gpu in range(start, start + tps[name]):
            ranks[gpu] += 1
    for name, start in placement.first_gpu.items():
        assert placement.sharers[name] == max(ranks[start : start + tps[name]])
    if sum(tps.values()) <= num_gpus - first_gpu:
        assert not placement.shared
    if set(tps.values()) == {1}:
        assert max(ranks[first_gpu:]) - min(ranks[first_gpu:]) <= 1
    assert placement.shared == ("share" in describe(placement, tps))


@settings(derandomize=True, deadline=None)
@given(clusters(), st.floats(0.1, 1.0))
def test_servers_on_one_gpu_never_take_more_of_it_than_one_would(
    cluster: tuple[dict[str, int], int, int], utilization: float
) -> None:
    tps, num_gpus, first_gpu = cluster
    base = Config(engine=EngineConfig(gpu_memory_utilization=utilization), server=ServerConfig(first_gpu=first_gpu))
    router, *servers = cluster_processes(base, UpOptions(num_prefill=len(tps), num_decode=1))[: len(tps) + 1]
    servers = [
        replace(plan, name=name, config=replace(plan.config, server=replace(plan.config.server, tp=tp)))
        for plan, (name, tp) in zip(servers, tps.items(), strict=True)
    ]
    placed_router, *placed = on_gpus([router, *servers], place(tps, num_gpus, first_gpu))
    assert placed_router == router
    taken = [0.0] * num_gpus
    for plan in placed:
        for gpu in range(plan.config.server.first_gpu, plan.config.server.first_gpu + plan.config.server.tp):
            taken[gpu] += plan.config.engine.gpu_memory_utilization
    assert max(taken) <= utilization * 1.000001


@pytest.mark.parametrize(
    ("tps", "num_gpus", "first_gpus"),
    [
        ((1, 1), 2, (0, 1)),
        ((1, 1), 1, (0, 0)),
        ((1, 2), 3, (0, 1)),
        ((1, 2), 2, (0, 0)),
        ((2, 1), 2, (0, 0)),
        ((2, 2), 2, (0, 0)),
        ((2, 2), 3, (0, 1)),
        ((2, 1, 1, 1), 3, (0, 2, 0, 1)),
        ((2, 4, 2), 8, (0, 2, 6)),
    ],
)
def test_servers_take_consecutive_gpus_one_after_the_other_and_share_when_there_are_no_more(
    tps: tuple[int, ...], num_gpus: int, first_gpus: tuple[int, ...]
) -> None:
    named = {f"server-{number}": tp for number, tp in enumerate(tps)}
    assert tuple(place(named, num_gpus).first_gpu.values()) == first_gpus


def test_the_operator_is_told_who_has_what() -> None:
    tps = {"prefill-0": 2, "decode-0": 1}
    assert describe(place(tps, 3), tps) == "prefill-0 on GPUs 0 to 1, decode-0 on GPU 2"
    assert describe(place(tps, 2), tps).startswith("prefill-0 on GPUs 0 to 1, decode-0 on GPU 0; there are fewer GPUs")


@pytest.mark.parametrize(
    ("num_gpus", "first_gpu", "sentence"),
    [
        (0, 0, 'model.device = "cuda": this machine shows no GPU'),
        (2, 0, "prefill-0 has 3 ranks, each of which needs a GPU of its own; there are 2"),
        (4, 2, "there are 4, of which server.first_gpu = 2 leaves 2"),
        (2, 5, "there are 2, and server.first_gpu = 5 leaves none of them"),
    ],
)
def test_what_cannot_be_placed_is_refused_with_both_numbers(num_gpus: int, first_gpu: int, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        place({"prefill-0": 3}, num_gpus, first_gpu)
    assert sentence in str(refused.value)
