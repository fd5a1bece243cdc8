"""The whole product on two GPUs, or one: `disagg up` with real processes, NIXL over cuda_ipc, gRPC and HTTP.

    prefill-0 on GPU 0 ── KV ──> decode-0 on GPU 1        more ranks than GPUs: servers share them, ranks of one never do

On a single GPU both servers share it, and only what has several ranks in a server is skipped. Skipped where there is none.
`--gpu-tests-on cpu` runs the same on a CPU, without what is said of a GPU's memory.
"""

from __future__ import annotations

import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.cluster.campaign import check, total
from tests.cluster.cluster import CLI, Cluster
from tests.models import reference
from tests.models.reference import Answer
from tests.models.tiny import VOCAB_SIZE, make_tiny

MOST_GPUS = 2  # that anything here is about
LENGTHS = (1, 17, 64, 200, 333)
OUTPUTS = 24
RESTARTS = 5
READY_S = 120.0
FREED_MIB = 64  # a process that has ended holds no memory; what the driver keeps for itself varies by less
MOST_STRIKES = 5
CHUNK_TOKENS = 64
EIGHT_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8}
# Enough KV that a transfer in small pieces takes a while.
WIDE = {
    **EIGHT_HEADS,
    "num_hidden_layers": 12,
    "hidden_size": 128,
    "intermediate_size": 128,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
LONG = 3000
SMALL_PIECES = (
    "transfer.gather_bytes=64KiB",
    "transfer.segment_bytes=64KiB",
    "transfer.arena_bytes=1MiB",
    "transfer.link_segments=2",
)
FLAGS = ("--dtype", "float32", "--chunk-tokens", str(CHUNK_TOKENS))

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def device(request: pytest.FixtureRequest) -> str:
    wanted = str(request.config.getoption("--gpu-tests-on"))
    if wanted == "cuda" and not torch.cuda.device_count():
        pytest.skip(f"needs a GPU; torch {torch.__version__} sees none")
    return wanted


def num_gpus(device: str) -> int:
    """That clusters here are placed on."""
    return torch.cuda.device_count() if device == "cuda" else MOST_GPUS


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("models") / "llama", **EIGHT_HEADS)


@pytest.fixture(scope="module")
def answers(device: str, model_dir: Path) -> list[Answer]:
    """What transformers says, on the same kind of device."""
    torch.backends.cuda.matmul.allow_tf32 = False
    return reference.generate(model_dir, prompts(), OUTPUTS, device)


def prompts() -> list[list[int]]:
    rng = random.Random(11)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


def cluster_on(device: str, run_dir: Path, model_dir: Path, *flags: str, sets: Sequence[str] = ()) -> Cluster:
    env = {"TRITON_INTERPRET": "0"}  # which all other tests have at 1
    return Cluster(run_dir, "--model", str(model_dir), *FLAGS, *flags, sets=(f"model.device={device}", *sets), env=env)


def ask(cluster: Cluster, asked: Sequence[Sequence[int]], salt: str, outputs: int = OUTPUTS) -> list[list[int]]:
    """salt: new where nothing is to come from a prefix cache."""
    fields = {"max_tokens": outputs, "ignore_eos": True, "cache_salt": salt, "timeout_s": 300}
    with ThreadPoolExecutor(len(asked)) as pool:
        futures = [pool.submit(cluster.complete, list(prompt), **fields) for prompt in asked]
        return [future.result().token_ids[0] for future in futures]


# ---- right answers


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_answers_are_those_of_transformers(
    prefill_tp: int, decode_tp: int, device: str, model_dir: Path, answers: list[Answer], tmp_path: Path
) -> None:
    if max(prefill_tp, decode_tp) > num_gpus(device):
        pytest.skip("ranks of one server share no GPU")
    tps = ("--prefill-tp", str(prefill_tp), "--decode-tp", str(decode_tp), "--kv-memory", "64MiB")
    with cluster_on(device, tmp_path, model_dir, *tps) as cluster:
        compared = check(answers, ask(cluster, prompts(), "first"), "first")
        again = check(answers, ask(cluster, prompts(), "second"), "second")
        assert total(cluster, "disagg_prefill_tokens", "decode") == 0, "decode received all that it did not compute"
        assert total(cluster, "disagg_checksum_failures") == 0
        cluster.check_adds_up()
        said = [line for line in cluster.output().splitlines() if " on GPU" in line]
    print(f"TP {prefill_tp} to {decode_tp}: (steps, ties) {compared}, {again}; {said}")
    if device == "cuda":
        (line,) = said
        assert ("share" in line) == (prefill_tp + decode_tp > num_gpus(device))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("env", [{}, {"CUDA_VISIBLE_DEVICES": ""}], ids=["seen", "hidden"])
def test_servers_on_the_cpu_of_a_machine_with_a_gpu_answer(
    env: dict[str, str], model_dir: Path, tmp_path: Path
) -> None:
    """NIXL wants a transport of CUDA memory wherever there is a GPU; where it is hidden UCX has none."""
    flags = ("--model", str(model_dir), *FLAGS)
    with Cluster(tmp_path / "run", *flags, sets=("model.device=cpu",), env=env) as cluster:
        check(reference.generate(model_dir, prompts(), OUTPUTS), ask(cluster, prompts(), "cpu"), f"on the CPU, {env}")
        assert "cuda_copy" not in cluster.output(), "nobody did anything wrong"
        cluster.check_adds_up()


def test_pools_that_size_themselves_leave_room_for_each_other_on_shared_gpus(
    device: str, model_dir: Path, answers: list[Answer], tmp_path: Path
) -> None:
    tp = str(min(MOST_GPUS, num_gpus(device)))
    flags = ("--prefill-tp", tp, "--decode-tp", tp)
    half = ("engine.gpu_memory_utilization=0.5",)
    with cluster_on(device, tmp_path, model_dir, *flags, sets=half) as cluster:
        check(answers, ask(cluster, prompts(), "first"), "first")
        used = memory_mib(device)
        sizes = [line for name in ("prefill-0", "decode-0") for line in log_lines(cluster, name, "KV memory: ")]
    print(f"MiB in use with all pools made: {used}; {sizes}")
    assert len(sizes) == 2
    if device == "cuda" and 2 * int(tp) > num_gpus(device):
        assert all("0.25 of the device" in line for line in sizes)


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("server.first_gpu=7", "server.first_gpu = 7 leaves none of them"),
        ("server.tp=8", "8 ranks, each of which needs"),
    ],
)
def test_gpus_that_are_not_there_are_refused_before_anything_starts(
    setting: str, sentence: str, device: str, model_dir: Path, tmp_path: Path
) -> None:
    if device == "cpu":
        pytest.skip("a CPU has no GPUs to run out of")
    up = (*CLI, "up", "--model", str(model_dir), "--run-dir", str(tmp_path / "run"), "--set", setting)
    ports = ("--http-port", "0", "--grpc-port", "0", "--set", "model.device=cuda")
    done = subprocess.run((*up, *ports), capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert sentence in line


def test_a_server_that_is_started_alone_on_a_gpu_that_is_not_there_says_so_and_ends(
    device: str, model_dir: Path, tmp_path: Path
) -> None:
    if device == "cpu":
        pytest.skip("a CPU has no GPUs to run out of")
    config = tmp_path / "server.toml"
    config.write_text(f'[model]\nname = "{model_dir}"\ndevice = "cuda"\n[server]\nfirst_gpu = 7\n')
    done = subprocess.run((*CLI, "decode", "--config", str(config)), capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "a rank is placed on GPU 7" in done.stderr and "has GPUs 0 to" in done.stderr


# ---- restarts, and the memory that comes back


class MemoryWatch:
    """Least memory in use on each GPU since `begin`, MiB; looked at several times a second."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._least: list[int] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def begin(self) -> None:
        with self._lock:
            self._least = memory_mib(self._device)

    @property
    def least(self) -> list[int]:
        with self._lock:
            return list(self._least)

    def _look(self) -> None:
        while not self._stop.wait(0.05):
            with self._lock:
                now = memory_mib(self._device)
                before = self._least or now
                self._least = [min(pair) for pair in zip(before, now, strict=True)]


def memory_mib(device: str) -> list[int]:
    """In use on each GPU, by whomever; nothing on a CPU."""
    if device == "cpu":
        return []
    query = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
    done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
    return [int(line) for line in done.stdout.split()]


def log_lines(cluster: Cluster, name: str, part: str) -> list[str]:
    lines = (cluster.run_dir / f"{name}.log").read_text().splitlines()
    return [line[line.index(part) :].partition('"')[0] for line in lines if part in line]


def test_both_servers_are_restarted_five_times_and_their_memory_comes_back_each_time(
    device: str, model_dir: Path, answers: list[Answer], tmp_path: Path
) -> None:
    empty = memory_mib(device)
    names = ("prefill-0", "decode-0")
    with (
        MemoryWatch(device) as watch,
        cluster_on(device, tmp_path, model_dir, "--kv-memory", "20GiB" if device == "cuda" else "64MiB") as cluster,
    ):
        check(answers, ask(cluster, prompts(), "before"), "before")
        serving = [memory_mib(device)]
        freed = []
        for number in range(RESTARTS):
            pids = {name: cluster.server(name)["pid"] for name in names}
            how = signal.SIGTERM if number % 2 == 0 else signal.SIGKILL
            watch.begin()
            started = time.monotonic()
            for pid in pids.values():
                cluster.kill(pid, how)
            cluster.wait(lambda pids=pids: all_replaced(cluster, pids), READY_S, "both servers restarted")
            ready_s = time.monotonic() - started
            freed.append(watch.least)
            check(answers, ask(cluster, prompts(), f"restart {number}"), f"after restart {number}")
            serving.append(memory_mib(device))
            print(f"{how.name}: ready after {ready_s:.1f} s; MiB in use {freed[-1]}, then {serving[-1]}")
        cluster.check_adds_up()
    after = memory_mib(device)
    print(f"MiB in use on each GPU: {empty} before, {serving[0]} serving, {after} after the cluster has ended")
    for least in freed:
        assert all(now - before <= FREED_MIB for now, before in zip(least, empty, strict=True)), freed
    for later in serving[1:]:
        assert all(now - first <= FREED_MIB for now, first in zip(later, serving[0], strict=True)), serving
    assert all(now - before <= FREED_MIB for now, before in zip(after, empty, strict=True)), after


def all_replaced(cluster: Cluster, pids: dict[str, int]) -> bool:
    servers = {server["name"]: server for server in cluster.status()["servers"]}
    return cluster.healthy() and all(
        servers[name]["state"] == "ready" and servers[name]["pid"] not in (pid, 0) for name, pid in pids.items()
    )


# ---- a worker dies while it sends


@pytest.fixture(scope="module")
def wide_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("models") / "wide", **WIDE)


@contextmanager
def asking(cluster: Cluster, prompt: Sequence[int], salt: str) -> Iterator[Future[list[list[int]]]]:
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(ask, cluster, [prompt], salt, 16)


@pytest.mark.parametrize("num_prefill", [1, 2])
def test_a_prefill_worker_killed_while_it_sends_costs_neither_the_answer_nor_the_decode_server(
    num_prefill: int, device: str, wide_dir: Path, tmp_path: Path
) -> None:
    """One prefill server: the request waits for the next incarnation. Two: the other one serves it."""
    rng = random.Random(5)
    prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(LONG)]
    flags = ("--prefill", str(num_prefill), "--kv-memory", "1GiB")
    with cluster_on(device, tmp_path, wide_dir, *flags, sets=SMALL_PIECES) as cluster:
        (expected,) = ask(cluster, [prompt], "undisturbed", 16)
        decode = cluster.server("decode-0")
        for strike in range(MOST_STRIKES):
            if struck_while_sending(cluster, prompt, f"strike {strike}", expected):
                break
            cluster.wait_healthy(READY_S)
        else:
            raise AssertionError(f"none of {MOST_STRIKES} strikes hit a transfer")
        alive = cluster.server("decode-0")
        assert (alive["worker_pids"], alive["incarnation"]) == (decode["worker_pids"], decode["incarnation"])
        assert ask(cluster, [prompt], "afterwards", 16) == [expected]
        cluster.wait_healthy(READY_S)
        cluster.check_adds_up()


def struck_while_sending(cluster: Cluster, prompt: Sequence[int], salt: str, expected: list[int]) -> bool:
    """Asks, kills the worker that sends as soon as pieces land, and checks the answer. False if it was all over by then."""
    lost = total(cluster, "disagg_transfer_failures", "decode")
    before = received(cluster)
    with asking(cluster, prompt, salt) as asked:
        cluster.wait(lambda: received(cluster) > before or asked.done(), 60, "the first pieces")
        sender = sending(cluster)
        started = time.monotonic()
        cluster.kill(cluster.server(sender)["worker_pids"][0])
        answer = asked.result()
        seconds = time.monotonic() - started
    assert answer == [expected], f"{sender} was killed while it sent"
    hit = total(cluster, "disagg_transfer_failures", "decode") > lost
    print(f"{sender} killed after {received(cluster) - before:g} pieces, answer {seconds:.1f} s later, hit: {hit}")
    return hit


def received(cluster: Cluster) -> float:
    return cluster.metrics("decode-0")['disagg_transfer_pieces_total{direction="received"}']


def sending(cluster: Cluster) -> str:
    """The prefill server that computes or sends."""
    servers = [server for server in cluster.status()["servers"] if server["role"] == "prefill"]
    return str(max(servers, key=lambda server: server["running"])["name"])
