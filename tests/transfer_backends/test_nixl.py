"""What is NIXL's alone: how it is loaded and configured."""

from __future__ import annotations

import importlib.util
import multiprocessing
import re
import subprocess
import sys

import pytest
import torch

from disagg.transfer.backends.base import HOST, BackendError, create
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
