"""What is NIXL's alone: how it is loaded and configured."""

from __future__ import annotations

import importlib.util
import multiprocessing
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from disagg.transfer.backends import nixl
from disagg.transfer.backends.base import HOST, BackendError, create
from disagg.transfer.backends.nixl import nvidia_on_the_bus, with_cuda
from tests.transfer_backends.memory import HostMemory
from tests.transfer_backends.peer import UCX, run_process

pytestmark = pytest.mark.skipif(importlib.util.find_spec("nixl_cu13") is None, reason="nixl-cu13 is not installed")


def test_importing_the_backend_loads_neither_nixl_nor_torch() -> None:
    code = (
        "import sys, disagg.transfer.backends.base, disagg.transfer.backends.nixl\n"
        "assert not {'torch', 'nixl_cu13', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_one_process_has_one_ucx_configuration() -> None:
    first = create("nixl", name="first", **UCX)
    with pytest.raises(BackendError, match="in the same process"):
        create("nixl", name="second", **{**UCX, "ucx_tls": "tcp"})
    second = create("nixl", name="second", **UCX)
    second.close()
    first.close()


def test_a_tensor_is_registered_as_it_lies() -> None:
    backend = create("nixl", name="tensor", **UCX)
    tensor = torch.zeros(4096, dtype=torch.uint8)
    region = backend.register(tensor)
    assert (region.address, region.nbytes, region.device) == (tensor.data_ptr(), 4096, HOST)
    for bad in (tensor[::2], torch.empty(0, dtype=torch.uint8)):
        with pytest.raises(BackendError, match="contiguous and not empty"):
            backend.register(bad)
    backend.close()


def close_after_writing_to_a_dead_peer() -> None:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=run_process, args=(theirs, "dead", 4096))
    process.start()
    backend = create("nixl", name="closing", **UCX)
    memory = HostMemory(4096)
    region = backend.register(memory)
    ours.send(("metadata",))
    peer = backend.add_peer(ours.recv())
    ours.send(("region",))
    remote = ours.recv()
    backend.warm_up(peer, region, remote)
    while backend.outstanding:
        backend.poll()
    process.kill()
    process.join()
    backend.prepare_write(peer, region, 0, remote, 0, 64, b"")()
    backend.close()


def test_closing_right_after_a_write_to_a_dead_peer_does_not_abort_the_process() -> None:
    process = multiprocessing.get_context("spawn").Process(target=close_after_writing_to_a_dead_peer)
    process.start()
    process.join(120)  # two processes import torch, one after the other
    exit_code = process.exitcode
    process.kill()
    assert exit_code == 0


def test_an_agent_that_cannot_start_says_where_the_reason_is_and_what_is_likely() -> None:
    starts = (
        "from disagg.transfer.backends.base import BackendError, create\n"
        "try: create('nixl', name='a', ucx_tls='nonsense')\n"
        "except BackendError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", starts], capture_output=True, text=True, timeout=60, check=True)
    assert re.search(r"NIXL agent 'a' cannot start: .*; UCX says why .* UCX_\* variable .*`ulimit -f`", done.stdout)


def a_device(bus: Path, name: str, vendor: str, kind: str) -> None:
    (bus / name).mkdir(parents=True)
    (bus / name / "vendor").write_text(f"{vendor}\n")
    (bus / name / "class").write_text(f"{kind}\n")


def test_a_gpu_is_found_on_the_bus_whoever_may_use_it(tmp_path: Path) -> None:
    assert not nvidia_on_the_bus(tmp_path / "no such bus")
    a_device(tmp_path, "0000:00:1f.0", "0x8086", "0x030000")  # another maker's display
    a_device(tmp_path, "0000:01:00.1", "0x10de", "0x040300")  # the same card's sound
    (tmp_path / "0000:02:00.0").mkdir()  # one that cannot be read
    assert not nvidia_on_the_bus(tmp_path)
    a_device(tmp_path, "0000:01:00.0", "0x10de", "0x030200")
    assert nvidia_on_the_bus(tmp_path)


@pytest.mark.parametrize(
    "given", ["all", "cuda", "posix,cuda_copy,tcp", "rc, cuda ,tcp", r"posix,\cuda_copy", "^cuda", " ^ib,tcp"]
)
def test_transports_that_have_cuda_or_forbid_some_stay_as_they_are(given: str) -> None:
    assert with_cuda(given) == given


@pytest.mark.parametrize("given", ["posix,cma,tcp", "tcp", "cuda_ipc,rc", r"\tcp"])
def test_to_transports_without_cuda_a_copy_is_added(given: str) -> None:
    assert with_cuda(given) == f"{given},cuda_copy"


@pytest.mark.parametrize(("gpu", "expected"), [(False, "posix,cma,tcp"), (True, "posix,cma,tcp,cuda_copy")])
def test_only_a_machine_with_a_gpu_wants_more(monkeypatch: pytest.MonkeyPatch, gpu: bool, expected: str) -> None:
    monkeypatch.setattr(nixl, "nvidia_on_the_bus", lambda: gpu)
    assert nixl.ucx_settings("posix,cma,tcp", "lo")["UCX_TLS"] == expected
    assert "UCX_TLS" not in nixl.ucx_settings(None, None), "left to UCX"
