"""By what KV goes to each peer, as operators are told."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.messages.control import ucx_log_of
from disagg.messages.legs import CarriedBy
from disagg.messages.transfer import PeerWired
from disagg.server.carriers import Carriers, over_tcp
from disagg.server.ucx_log import LAST_LINES, last_words, log_last_words

TCP, RDMA, IPC = "multi-frag copy-in tcp/eth0", "zero-copy rc_mlx5/mlx5_0:1", "zero-copy cuda_ipc/cuda"


@pytest.mark.parametrize(
    ("ways", "slow"),
    [
        ((TCP,), True),
        (("zero-copy 50% on tcp/eth0 and 50% on tcp/eth1", TCP), True),
        ((RDMA,), False),
        ((IPC, TCP), False),
        (("zero-copy 90% on rc_mlx5/mlx5_0:1 and 10% on tcp/eth0",), False),
        ((), False),
    ],
)
def test_what_goes_over_tcp_alone_is_known(ways: tuple[str, ...], slow: bool) -> None:
    assert over_tcp(ways) is slow


def test_what_is_learned_is_logged_once_and_reported_while_the_link_is_up(caplog: pytest.LogCaptureFixture) -> None:
    up = {1: "decode-0", 2: "decode-1"}
    carriers = Carriers(lambda link: up.get(link, ""))
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            carriers.learned(PeerWired(1, 0, (RDMA,)), "cuda")
        carriers.learned(PeerWired(2, 0, (TCP,)), "cuda")
        carriers.learned(PeerWired(3, 0, (TCP,)), "cuda")  # of a link that is down by now
        carriers.learned(PeerWired(2, 1, ()), "cuda")
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert f"KV to decode-1 goes over TCP ({TCP})" in caplog.records[1].getMessage()
    said = CarriedBy("decode-0", (RDMA,)), CarriedBy("decode-1", (TCP,), slow=True)
    assert carriers.report("cuda") == said
    assert not any(each.slow for each in carriers.report("cpu"))
    del up[2]
    assert carriers.report("cuda") == said[:1]


@given(st.lists(st.tuples(st.integers(0, 5), st.lists(st.sampled_from([TCP, RDMA, IPC]), max_size=3))))
def test_each_peer_is_reported_with_all_that_its_ranks_said(events: list[tuple[int, list[str]]]) -> None:
    carriers = Carriers(lambda link: f"peer-{link}")
    wanted: dict[str, set[str]] = {}
    for link, ways in events:
        carriers.learned(PeerWired(link, 0, tuple(ways)), "cpu")
        wanted.setdefault(f"peer-{link}", set()).update(ways)
    assert {each.peer: set(each.ways) for each in carriers.report("cpu")} == {k: v for k, v in wanted.items() if v}


def test_what_ucx_wrote_last_is_told_of_a_rank_that_was_killed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = Path(ucx_log_of(str(tmp_path), 1))
    lines = [f"[1.5] [vm:7:0]   arbiter.c:7 UCX  FATAL {number}" for number in range(20)]
    file.write_bytes(bytes(9000) + "\n".join([*lines, "[1.5] [vm:7:0]   | a table |", ""]).encode())
    assert last_words(file) == lines[-LAST_LINES:]
    with caplog.at_level(logging.WARNING):
        log_last_words(str(tmp_path), 1)
        log_last_words(str(tmp_path), 2)  # which wrote nothing
    assert len(caplog.records) == LAST_LINES
    assert "UCX of rank 1 said last" in caplog.text
