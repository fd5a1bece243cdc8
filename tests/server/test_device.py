"""Where workers compute, and what UCX is told."""

from __future__ import annotations

import ctypes

import pytest

from disagg.server import device
from disagg.server.device import choose_device, choose_dtype, count_gpus, memory_bytes, ucx_choice


def test_a_device_that_was_named_is_taken() -> None:
    assert choose_device("cpu") == "cpu"
    assert choose_device("cuda") == "cuda"


@pytest.mark.parametrize(
    ("version", "gpus", "chosen"),
    [("2.11.0+cu130", 2, "cuda"), ("2.11.0", 1, "cuda"), ("2.11.0+cu130", 0, "cpu"), ("2.11.0+cpu", 2, "cpu")],
)
def test_a_device_of_our_choice_is_a_gpu_where_there_is_one_and_torch_can_use_it(
    version: str, gpus: int, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device.importlib.metadata, "version", lambda _: version)
    monkeypatch.setattr(device, "count_gpus", lambda: gpus)
    assert choose_device("auto") == chosen


class Driver:
    """libcuda as far as counting goes. init: the status of cuInit."""

    def __init__(self, gpus: int, init: int) -> None:
        self._gpus, self._init = gpus, init

    def cuInit(self, flags: int) -> int:  # noqa: N802
        assert flags == 0
        return self._init

    def cuDeviceGetCount(self, count: object) -> int:  # noqa: N802
        count._obj.value = self._gpus  # type: ignore[attr-defined]
        return 0


def test_gpus_are_those_that_the_driver_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    no_device = 100  # CUDA_ERROR_NO_DEVICE
    for driver, gpus in ((Driver(2, 0), 2), (Driver(2, no_device), 0)):
        monkeypatch.setattr(ctypes, "CDLL", lambda _, driver=driver: driver)
        assert count_gpus() == gpus


def test_without_a_driver_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert count_gpus() == 0


def test_ucx_is_restrained_on_a_cpu_and_free_on_a_gpu_unless_told() -> None:
    assert ucx_choice("auto", "cpu", "lo") == "lo"
    assert ucx_choice("auto", "cuda", "lo") == ""
    for setting in ("", "tcp"):
        assert ucx_choice(setting, "cpu", "lo") == ucx_choice(setting, "cuda", "lo") == setting


def test_the_memory_of_this_machine_is_a_plausible_number() -> None:
    assert 1 << 28 < memory_bytes() < 1 << 50


def test_a_dtype_that_is_left_open_follows_the_device() -> None:
    assert choose_dtype("auto", "cpu", "bfloat16") == "float32"
    assert choose_dtype("auto", "cuda", "bfloat16") == "bfloat16"
    assert choose_dtype("float16", "cpu", "bfloat16") == "float16"
