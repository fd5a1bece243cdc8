"""`disagg bench transfer` between two machines: what is refused, how clocks are compared, and real processes on both ends."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from disagg.bench.transfer import far, listen, trial
from disagg.bench.transfer.far import Clock, ForRank, Free, FromRank, Offer, Ping, Refused, Welcome, Wire, parse_address
from disagg.bench.transfer.listen import ListenOptions, refusal, unfit
from disagg.cli.main import cli
from disagg.messages.control import OpenTransfer
from disagg.types.errors import ConfigError, DisaggError
from disagg.types.version import own_version

MIB = 1 << 20
PATIENCE_S = 120.0
GONE = r"hung up|cannot be heard"
OPTIONS = ListenOptions(host="127.0.0.1", port=0, device="auto", ucx_tls=None, ucx_net_devices=None, alone_s=60.0)
times = st.floats(-1e6, 1e6)
delays = st.floats(0, 1)


@given(times, st.lists(st.tuples(times, delays, delays), min_size=1, max_size=8))
def test_clocks_are_wrong_by_no_more_than_is_said(offset_s: float, pings: list[tuple[float, float, float]]) -> None:
    clock = Clock.of((start, start + out + offset_s, start + out + back) for start, out, back in pings)
    assert abs(clock.offset_s - offset_s) <= clock.error_s + 1e-6
    assert clock.error_s <= min(out + back for _, out, back in pings) / 2 + 1e-6


def test_times_that_cross_are_in_the_time_of_who_reads_them() -> None:
    clock = Clock(100.0, 0.0)
    asked, told = trial.ReceiveUnstaged(3, 5.0), trial.Received(107.0, (trial.Interval("scatter", 106.0, 107.0),))
    assert clock.there(asked) == replace(asked, deadline_s=105.0)
    assert clock.here(told) == trial.Received(7.0, (trial.Interval("scatter", 6.0, 7.0),))
    assert clock.there(trial.Quit()) == trial.Quit() and clock.here(trial.Done()) == trial.Done()


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.5", ("10.0.0.5", far.DEFAULT_PORT)),
        ("pod-1.pods:80", ("pod-1.pods", 80)),
        ("fd00::5", ("fd00::5", far.DEFAULT_PORT)),
        ("[fd00::5]", ("fd00::5", far.DEFAULT_PORT)),
        ("[fd00::5]:80", ("fd00::5", 80)),
    ],
)
def test_an_address_has_a_port_or_the_usual_one(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text, "--to") == address


@pytest.mark.parametrize("text", ["", ":80", "host:port", "host:70000", "host:-1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--to = .*it must be HOST or HOST:PORT"):
        parse_address(text, "--to")


def test_other_code_and_odd_numbers_of_ranks_are_refused_with_both_sides_named() -> None:
    assert refusal(Offer("a", 2), "a") == ""
    assert refusal(Offer("a", 2), "b").startswith("the versions differ: a dials, b listens")
    assert "1 to 16" in refusal(Offer("a", 0), "a") and "1 to 16" in refusal(Offer("a", 17), "a")


def test_what_does_not_fit_this_machine_is_refused_with_the_numbers() -> None:
    transfer = OpenTransfer("nixl", "D", 512 * MIB, 0, 0, "", "")
    group = trial.SHAPES["smollm2-135m"].on_rank(1)
    command = trial.Open("decode", 0, "cpu", group, 0, 16, 10, transfer, False)
    assert unfit(command, OPTIONS, 1, 2048 * MIB) == ""
    assert unfit(command, OPTIONS, 4, 0) == "", "it is not known what there is"
    assert "GiB" in unfit(command, OPTIONS, 4, 2048 * MIB)
    assert "--device cuda" in unfit(command, replace(OPTIONS, device="cuda"), 1, 0)


@pytest.fixture
def dialled() -> Iterator[Wire]:
    """The dialling end of a connection to something that listens."""
    said: list[str] = []
    listening = threading.Event()

    def say(text: str) -> None:
        said.append(text)
        listening.set()

    options = replace(OPTIONS, alone_s=1.0)
    thread = threading.Thread(target=listen.listen, args=(options, say), daemon=True)
    thread.start()
    assert listening.wait(10)
    port = int(said[0].split()[2].rpartition(":")[2].rstrip(";"))
    wire = Wire(socket.create_connection(("127.0.0.1", port), 10))
    wire.said = said  # type: ignore[attr-defined]
    yield wire
    wire.close()
    thread.join(30)
    assert not thread.is_alive(), "it ends when nobody dials"


def test_another_version_is_refused_over_the_wire_and_others_are_served_after_it(dialled: Wire) -> None:
    dialled.send(Offer("another", 1))
    answer = dialled.receive(10)
    assert isinstance(answer, Refused) and "another dials" in answer.reason


def test_what_this_machine_cannot_do_is_no_failure_of_it(dialled: Wire) -> None:
    """So that who dialled ends as with any option that cannot be."""
    dialled.send(Offer(str(own_version()), 1))
    assert isinstance(dialled.receive(60), Welcome)
    transfer = OpenTransfer("nixl", "D", 1 << 50, 0, 0, "", "")
    command = trial.Open("decode", 0, "cpu", trial.SHAPES["smollm2-135m"].on_rank(1), 0, 16, 10, transfer, False)
    dialled.send(ForRank(0, trial.encode(command)))
    answer = dialled.receive(10)
    assert isinstance(answer, FromRank)
    failed = trial.decode_answer(answer.answer)
    assert isinstance(failed, trial.Failed) and failed.refused and "GiB" in failed.reason


@pytest.mark.parametrize("message", [Ping(), Free((1,)), ForRank(0, b""), Welcome(())])
def test_who_does_not_begin_with_an_offer_is_hung_up_on(dialled: Wire, message: far.Message) -> None:
    dialled.send(message)
    with pytest.raises(DisaggError, match=GONE):
        dialled.receive(10)


@pytest.mark.parametrize("content", [b"", b"\xc1", b"\x00" * 100])
def test_nonsense_is_hung_up_on(dialled: Wire, content: bytes) -> None:
    dialled.connection.send_bytes(content)
    with pytest.raises(DisaggError, match=GONE):
        dialled.receive(10)


def test_a_frame_that_is_too_long_is_not_read(dialled: Wire) -> None:
    dialled.connection._send((far.MAX_FRAME_BYTES + 1).to_bytes(4, "big"))  # type: ignore[attr-defined]
    with pytest.raises(DisaggError, match=GONE):
        dialled.receive(10)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--listen --tp 1:1", "--tp beside --listen"),
        ("--listen --to host", "--to beside --listen"),
        ("--listen host:port", "--listen = 'host:port'"),
        ("--to host:port", "--to = 'host:port'"),
    ],
)
def test_options_that_do_not_go_together_are_refused(arguments: str, said: str) -> None:
    result = CliRunner().invoke(cli, ["bench", "transfer", *arguments.split()])
    assert result.exit_code == 2
    assert said in result.output


def test_that_nobody_listens_may_pass() -> None:
    result = CliRunner().invoke(cli, ["bench", "transfer", "--to", "127.0.0.1:1"])
    assert result.exit_code == 1
    assert "nobody listens at 127.0.0.1:1" in result.output


@pytest.mark.skipif(importlib.util.find_spec("nixl_cu13") is None, reason="nixl-cu13 is not installed")
@pytest.mark.long
def test_kv_crosses_to_ranks_of_another_end_and_is_compared_there(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "disagg.cli", "bench", "transfer"]
    listener = subprocess.Popen([*command, "--listen", "127.0.0.1:0"], stderr=subprocess.PIPE, text=True)
    try:
        assert listener.stderr is not None
        port = listener.stderr.readline().split()[2].rpartition(":")[2].rstrip(";")
        asked = (
            f"--to 127.0.0.1:{port} --device cpu --tp 1:2 --tp 2:1 --tokens 70 --shape 3x4x16xfloat32 --page-tokens 8 "
            "--piece 20KiB --arena 56KiB --repeat 2 --unstaged --no-curve --json"
        )
        kept = tmp_path / "figures.json"
        done = subprocess.run(
            [*command, *asked.split(), str(kept)], capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert done.returncode == 0, done.stderr
    finally:
        listener.terminate()
        listener.wait(30)
    figures = msgspec.json.decode(kept.read_bytes())
    assert [measured["what"] for measured in figures["measurements"]] == ["first contact", "staged", "unstaged"] * 2
    for _, staged, _ in (figures["measurements"][:3], figures["measurements"][3:]):
        assert staged["pieces"] == 6, "more than the arena has room for: the rings go round"
        assert 0 < staged["seconds"] < 60 and 0 < staged["clock_error_s"] < 1
        assert staged["copy_s"] == 0
        assert len(staged["ways"]) == 1
    assert f"to 127.0.0.1:{port}" in done.stdout and "UCX wrote by" in done.stdout
