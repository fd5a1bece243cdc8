"""One rank's process: the compute thread runs plans, the transfer thread does transfers, beats, and answers dumps.

    engine ── PUB plans ──────> SUB   compute thread (main)  ── PUSH results ──> engine
           ── ROUTER control ─> DEALER ┐ transfer thread: hands loading on to the compute thread
           ── ROUTER transfer > DEALER ┘                  heartbeat every second, also while a step computes
                                         offload threads  (worker/offload_driver): copies, and storage

The first two share the pool, two queues with an eventfd each, and how far plans are computed: the compute thread tells the
transfer driver, and reads there which layers pieces wait for.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq

from disagg.messages.control import (
    ControlFailed,
    ControlReply,
    ControlRequest,
    Dump,
    Dumped,
    Load,
    Loaded,
    MakePool,
    OpenOffload,
    OpenTransfer,
    PoolMade,
    Profile,
    Profiled,
    Shutdown,
    decode_request,
    encode_reply,
)
from disagg.messages.plan import Hello, Ready, WorkerFailed, WorkerPlan, decode_to_worker, encode_from_worker, plans_of
from disagg.messages.tiers import TierCommand, TierEvent
from disagg.messages.transfer import Beat, CommandFrame, EventFrame, TransferEvent, decode_commands, encode_events
from disagg.telemetry.loop import Gaps
from disagg.telemetry.memory import keep_loaded
from disagg.telemetry.stacks import dump_stacks_on_signal, format_stacks
from disagg.types.errors import ConfigError, ProtocolError

if TYPE_CHECKING:
    from disagg.worker.executor import Executor, Launched
    from disagg.worker.offload_driver import OffloadDriver
    from disagg.worker.transfer_driver import TransferDriver

logger = logging.getLogger(__name__)

BEAT_S = 1.0
IDLE_POLL_S = 0.1
CLOSE_S = 3.0
SWITCH_S = 0.0005  # after so long a thread must let go of the interpreter: the other one may have a piece to post
LOOK_S = 0.0001  # so often the compute thread looks for a plan while a step is under way on a GPU
MEETING = "ranks"  # what the names of files begin with by which ranks find each other, beside the sockets


class WorkerProcess:
    """`run` returns the exit status: 0 after Shutdown, 1 after a failure that was reported."""

    def __init__(self, rank: int, dp_rank: int, sockets: str, incarnation: str) -> None:
        """dp_rank: the data-parallel rank whose plans are this worker's."""
        dump_stacks_on_signal()
        self._rank = rank
        self._dp_rank = dp_rank
        self._incarnation = incarnation
        self._sockets = Path(sockets)
        self._context = zmq.Context()
        self._results = self._context.socket(zmq.PUSH)  # of the compute thread, which is the one that makes this object
        self._results.sndhwm = 0
        self._results.connect(f"ipc://{sockets}/results")
        self._executor: Executor | None = None
        self._driver: TransferDriver | None = None
        self._offload: OffloadDriver | None = None
        self._jobs: queue.SimpleQueue[ControlRequest] = queue.SimpleQueue()  # transfer thread -> compute thread
        self._replies: queue.SimpleQueue[ControlReply] = queue.SimpleQueue()  # compute thread -> transfer thread
        self._job_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._computed_plan = -1
        self._busy_since_s = 0.0
        self._launched: Launched | None = None
        self._failure = ""
        self._stopping = False

    def run(self) -> int:
        sys.setswitchinterval(SWITCH_S)
        transfers = threading.Thread(target=self._serve_transfers, name="transfer", daemon=True)
        transfers.start()
        try:
            self._compute()
            self._stopping = True
            self._wake()
            deadline = time.monotonic() + CLOSE_S
            if self._offload is not None:
                self._offload.close()
            transfers.join(CLOSE_S)
            if self._offload is not None:
                self._offload.join(max(0.0, deadline - time.monotonic()))
        except Exception as error:  # whatever a step raises, the server learns of it
            logger.exception("the worker cannot go on")
            self._send_result(WorkerFailed(self._rank, f"{type(error).__name__}: {error}"))
            time.sleep(0.1)  # let ZeroMQ deliver it; the engine would learn of our exit anyway
            return 1
        return 0

    def _wake(self) -> None:
        """The transfer thread looks again. By any thread."""
        os.eventfd_write(self._wake_fd, 1)

    # ---- compute thread

    def _compute(self) -> None:
        plans = self._context.socket(zmq.SUB)
        plans.rcvhwm = 0
        plans.subscribe(plans_of(self._dp_rank))
        plans.connect(f"ipc://{self._sockets}/plans")
        poller = zmq.Poller()
        poller.register(plans, zmq.POLLIN)
        poller.register(self._job_fd, zmq.POLLIN)
        while not self._failure:
            launched = self._launched
            if launched is not None and launched.is_over:
                self._collect()
                continue
            events = dict(poller.poll(1000 if launched is None else 0))
            if launched is not None and not events:
                time.sleep(LOOK_S)  # for the next plan, or the end of this one
            if self._job_fd in events:
                os.eventfd_read(self._job_fd)
                while not self._jobs.empty():
                    job = self._jobs.get()
                    if isinstance(job, Shutdown):
                        return
                    self._replies.put(self._do(job))
                    self._wake()
            if plans in events:
                _, payload = plans.recv_multipart()
                message = decode_to_worker(payload)
                if isinstance(message, Hello):
                    self._send_result(Ready(self._rank, message.incarnation))
                else:
                    self._run_plan(message)
        raise ProtocolError(self._failure)

    def _run_plan(self, plan: WorkerPlan) -> None:
        """Launch it, and then collect the one before it; where steps do not overlap, itself."""
        assert self._executor is not None
        driver = self._driver

        def written(layer: int) -> None:
            if driver is not None and driver.layer_written(plan.plan_no, layer):
                self._wake()

        self._busy_since_s = self._busy_since_s or time.monotonic()
        launched = self._executor.launch(plan, written)
        if driver is not None:  # in the order of plans and layers; on a GPU it looks itself when that is over
            driver.plan_computed(plan.plan_no)
            if driver.waits_for_plans:
                self._wake()
        if self._launched is not None:
            self._collect()
            self._busy_since_s = time.monotonic()
        self._launched = launched
        if not self._executor.overlaps:
            self._collect()

    def _collect(self) -> None:
        """Wait for the step that is under way, and report it."""
        assert self._executor is not None and self._launched is not None
        result = self._executor.collect(self._launched)
        self._launched = None
        self._busy_since_s = 0.0
        self._computed_plan = result.plan_no
        self._send_result(result)

    def _send_result(self, message: object) -> None:
        self._results.send(encode_from_worker(message))

    def _do(self, job: ControlRequest) -> ControlReply:
        try:
            return self._try(job)
        except ConfigError as error:
            return ControlFailed(self._rank, str(error), config=True)
        except ImportError as error:
            return ControlFailed(self._rank, f"a library that workers need is not installed: {error}", config=True)
        except Exception as error:  # as above
            logger.exception("%s failed", type(job).__name__)
            return ControlFailed(self._rank, f"{type(error).__name__}: {error}", config=False)

    def _try(self, job: ControlRequest) -> ControlReply:
        match job:
            case Load():
                from disagg.worker.executor import Executor

                started = time.perf_counter()
                self._executor = Executor(self._rank, job.tp, job.dp, job.pp)
                device = f"cuda:{job.first_gpu + self._rank}" if job.device == "cuda" else job.device
                self._executor.load(
                    Path(job.model_dir), job.dtype, device, job.threads, job.gemv_copies, job.computation
                )
                load_s = time.perf_counter() - started
                self._executor.connect(self._sockets / MEETING, job.meet_s, job.collective_s)
                model = self._executor.model
                return Loaded(
                    rank=self._rank,
                    groups=model.whole_groups,
                    vocab_size=model.vocab_size,
                    max_model_len=model.max_model_len,
                    eos_token_ids=model.eos_token_ids,
                    load_s=load_s,
                    weights_hash=model.weights_hash,
                    files=dict(model.files),
                    lockstep=self._executor.lockstep,
                    cuts=model.cuts,
                )
            case Profile():
                assert self._executor is not None
                total_bytes, peak_bytes = self._executor.profile(job.chunk_tokens, job.max_slots)
                return Profiled(self._rank, total_bytes, peak_bytes)
            case MakePool():
                assert self._executor is not None
                cut = job.stages[self._executor.stage] if job.stages else job
                pool_bytes = self._executor.make_pool(
                    job.num_large, cut.large_bytes, cut.strides, job.page_tokens, job.max_slots
                )
                keep_loaded()
                return PoolMade(self._rank, pool_bytes)
            case OpenOffload():
                # Here, because it takes its time: the transfer thread beats.
                from disagg.worker.offload_driver import OffloadDriver

                assert self._executor is not None and self._offload is None
                executor = self._executor
                self._offload = OffloadDriver(self._rank, executor.num_ranks, job, executor.pool, self._wake)
                return self._offload.opened()
            case _:
                raise ProtocolError(f"{type(job).__name__} is no job of the compute thread")

    # ---- transfer thread

    def _serve_transfers(self) -> None:
        try:
            self._transfer_loop()
        except Exception as error:  # as above: the compute thread tells
            logger.exception("the transfer thread cannot go on")
            self._failure = f"transfer thread: {type(error).__name__}: {error}"
            os.eventfd_write(self._job_fd, 1)

    def _transfer_loop(self) -> None:
        identity = str(self._rank).encode()
        control = self._dealer("control", identity)
        transfer = self._dealer("transfer", identity)
        poller = zmq.Poller()
        for source in (control, transfer, self._wake_fd):
            poller.register(source, zmq.POLLIN)
        next_beat_s = 0.0
        received = sent = 0
        turns = Gaps(time.monotonic())
        while not self._stopping:
            events = _wait(poller, self._driver.nap_s if self._driver is not None else IDLE_POLL_S)
            woke_s = time.monotonic()
            if self._wake_fd in events:
                os.eventfd_read(self._wake_fd)
                while not self._replies.empty():
                    control.send(encode_reply(self._replies.get()))
            if control in events:
                self._control(control)
            if transfer in events:
                while transfer.poll(0):
                    frame = decode_commands(transfer.recv())
                    if frame.number != received:
                        raise ProtocolError(f"command frame {frame.number} arrived where {received} was due")
                    received += 1
                    self._command(frame)
            reports: list[TransferEvent | TierEvent] = []
            if self._driver is not None:
                if self._driver.busy or (not events and self._driver.has_peers):
                    self._driver.turn()
                reports += self._driver.take_events()
            if self._offload is not None:
                reports += self._offload.take_reports()
            now = time.monotonic()
            if now >= next_beat_s:
                next_beat_s = now + BEAT_S
                reports.append(self._beat(now, turns.longest(now)[0]))
            if reports:
                transfer.send(encode_events(EventFrame(self._rank, sent, tuple(reports))))
                sent += 1
            turns.note(time.monotonic() - woke_s, 0.0, now)
        if self._driver is not None:
            self._driver.close()  # by the thread that made it, before the interpreter takes its modules apart

    def _command(self, frame: CommandFrame) -> None:
        assert self._driver is not None, "a transfer was commanded before OpenTransfer"
        for request in frame.messages:
            if not isinstance(request, TierCommand):
                self._driver.handle(request)
            elif self._offload is None:
                raise ProtocolError(f"{type(request).__name__}, and nothing is offloaded here")
            else:
                self._offload.handle(request)

    def _dealer(self, name: str, identity: bytes) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.sndhwm = socket.rcvhwm = 0
        socket.connect(f"ipc://{self._sockets}/{name}")
        return socket

    def _beat(self, now: float, longest_turn_s: float) -> Beat:
        busy_since = self._busy_since_s
        driver = self._driver
        return Beat(
            plan_no=self._computed_plan,
            busy_s=now - busy_since if busy_since else 0.0,
            bound=driver.bound if driver else 0,
            writes_in_flight=driver.writes_in_flight if driver else 0,
            longest_turn_s=longest_turn_s,
        )

    def _control(self, control: zmq.Socket[bytes]) -> None:
        request = decode_request(control.recv())
        if isinstance(request, Dump):
            text = f"rank {self._rank}, incarnation {self._incarnation}, plan {self._computed_plan} computed\n"
            if self._driver is not None:
                text += f"transfer: {self._driver.describe()}\n"
            if self._offload is not None:
                text += f"offload: {self._offload.describe()}\n"
            control.send(encode_reply(Dumped(self._rank, text + format_stacks())))
        elif isinstance(request, OpenTransfer):
            control.send(encode_reply(self._open_transfer(request)))
        else:
            self._jobs.put(request)
            os.eventfd_write(self._job_fd, 1)

    def _open_transfer(self, request: OpenTransfer) -> ControlReply:
        """The agent belongs to this thread, so it is made here."""
        from disagg.transfer.backends.base import BackendError
        from disagg.worker.transfer_driver import TransferDriver

        assert self._executor is not None
        try:
            driver = TransferDriver(self._rank, request, self._executor.pool)
        except (BackendError, ConfigError) as error:
            return ControlFailed(self._rank, str(error), config=True)
        opened = driver.opened(os.getpid())
        self._driver = driver
        return opened


def _wait(poller: zmq.Poller, nap_s: float) -> dict[Any, int]:
    """What has come after at most so long. ZeroMQ counts milliseconds: a shorter nap is slept to its end."""
    if 0 < nap_s < 0.001:
        time.sleep(nap_s)
    return dict(poller.poll(int(nap_s * 1e3)))
