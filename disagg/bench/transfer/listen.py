"""`disagg bench transfer --listen`: decode ranks of this machine, for whoever dials. Knows processes and frames."""

from __future__ import annotations

import multiprocessing.connection
import socket
import time
from collections.abc import Callable

import msgspec
from msgspec import Struct

from disagg.bench.transfer import trial
from disagg.bench.transfer.far import (
    HELLO_S,
    MAX_RANKS,
    Bye,
    ForRank,
    Free,
    FromRank,
    Offer,
    Ping,
    Pong,
    Refused,
    Welcome,
    Wire,
)
from disagg.bench.transfer.processes import RankProcesses
from disagg.config.sizes import show_bytes
from disagg.server.device import memory_bytes
from disagg.server.networks import choose_net_devices
from disagg.types.errors import ConfigError, DisaggError
from disagg.types.version import own_version

ALONE_S = 3600.0  # nobody dials: it ends
SILENT_S = 300.0  # who has dialled says nothing: a first start may compile kernels for as long
FREE_EVERY_S = 0.0005  # how often rings are looked at while pieces land


class ListenOptions(Struct, frozen=True, kw_only=True):
    """What this end decides. ucx_tls, ucx_net_devices: None: what the other end says, and the device that it is reached by."""

    host: str
    port: int
    device: str
    ucx_tls: str | None
    ucx_net_devices: str | None
    alone_s: float = ALONE_S


def listen(options: ListenOptions, say: Callable[[str], None]) -> int:
    """Serve one dialling end after the other, until nobody has dialled for long. Raises ConfigError if it cannot listen."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        server = socket.create_server((options.host, options.port), family=family)
    except OSError as error:
        raise ConfigError(f"--listen: cannot listen on {options.host}:{options.port}: {error}") from error
    with server:
        port = server.getsockname()[1]
        say(f"listening on {options.host}:{port}; on the other machine: disagg bench transfer --to HOST:{port}")
        say("whoever reaches this port may have this machine move bytes: nobody is asked who he is; end it when done")
        server.settimeout(options.alone_s)
        while True:
            try:
                accepted, where = server.accept()
            except TimeoutError:
                say(f"nobody has dialled for {options.alone_s:g} s")
                return 0
            wire = Wire(accepted)
            try:
                say(f"{where[0]} dials")
                _serve(wire, options)
                say(f"{where[0]} is done")
            except DisaggError as error:
                say(f"{where[0]}: {error}")
            finally:
                wire.close()


def refusal(offer: Offer, own: str) -> str:
    """Why this offer cannot be taken; empty if it can. own: version."""
    if offer.version != own:
        return f"the versions differ: {offer.version} dials, {own} listens; both ends must run the same code"
    if not 0 < offer.ranks <= MAX_RANKS:
        return f"{offer.ranks} decode ranks are asked for; 1 to {MAX_RANKS} are possible"
    return ""


def unfit(command: trial.Open, options: ListenOptions, ranks: int, available: int) -> str:
    """Why a rank cannot be opened so; empty if it can. available: bytes of this machine's memory, 0 if that is not known."""
    kind = command.device.partition(":")[0]
    if options.device not in ("auto", kind):
        return f"the other end asks for {kind}; this one was started with --device {options.device}"
    wanted = ranks * (
        command.num_pages * command.group.page_bytes(command.page_tokens) + command.transfer.staging_bytes
    )
    if kind == "cpu" and available and wanted > available // 2:
        return (
            f"{show_bytes(wanted)} are asked for, of {show_bytes(available)} of memory here, of which half may be "
            "taken; ask for fewer --tokens or a smaller --arena"
        )
    return ""


def _serve(wire: Wire, options: ListenOptions) -> None:
    offer = wire.receive(HELLO_S)
    if not isinstance(offer, Offer):
        raise DisaggError(f"it did not say within {HELLO_S:g} s what it wants")
    if reason := refusal(offer, str(own_version())):
        wire.send(Refused(reason))
        raise DisaggError(f"refused: {reason}")
    with RankProcesses(trial.Pair(0, offer.ranks)) as ranks:
        wire.send(Welcome(ranks.gpus))
        _Session(wire, ranks, options).run()


class _Session:
    """Passes commands on to ranks, and their answers back."""

    def __init__(self, wire: Wire, ranks: RankProcesses, options: ListenOptions) -> None:
        self._wire, self._ranks, self._options = wire, ranks, options
        self._free: tuple[int, ...] = ()
        self._receiving = 0  # ranks into which pieces come
        self._available = memory_bytes()

    def run(self) -> None:
        """Until the other end says goodbye. Raises DisaggError."""
        heard_s = time.monotonic()
        connections = [rank.connection for rank in self._ranks.dst]
        while True:
            timeout_s = FREE_EVERY_S if self._receiving else 1.0
            ready = multiprocessing.connection.wait([self._wire.connection, *connections], timeout_s)
            for rank, connection in enumerate(connections):
                if connection in ready:
                    self._answer(rank)
            if self._wire.connection in ready:
                heard_s = time.monotonic()
                if not self._obey():
                    return
            if time.monotonic() - heard_s > SILENT_S:
                raise DisaggError(f"it has said nothing for {SILENT_S:g} s")
            if self._receiving:
                self._say_free()

    def _obey(self) -> bool:
        """False if it was a goodbye."""
        message = self._wire.receive(0.0)
        match message:
            case ForRank() if 0 <= message.rank < len(self._ranks.dst):
                self._command(message)
            case Ping():
                self._wire.send(Pong(time.monotonic()))
            case Bye():
                return False
            case None:
                pass
            case _:
                raise DisaggError(f"it said {type(message).__name__}, which has no place here")
        return True

    def _command(self, message: ForRank) -> None:
        try:
            command = trial.decode_command(message.command)
        except msgspec.DecodeError as error:
            raise DisaggError(f"it speaks another language: {error}") from error
        if isinstance(command, trial.Open):
            if reason := unfit(command, self._options, len(self._ranks.dst), self._available):
                self._wire.send(FromRank(message.rank, trial.encode(trial.Failed(reason, refused=True))))
                return
            command = self._own(command)
        self._receiving += isinstance(command, trial.Receive)
        self._ranks.dst[message.rank].tell(command)

    def _own(self, command: trial.Open) -> trial.Open:
        """With what this end decides."""
        options, transfer = self._options, command.transfer
        devices = options.ucx_net_devices
        if devices is None:
            devices = choose_net_devices(f"{self._wire.own_host}:0") if command.device == "cpu" else ""
        transfer = msgspec.structs.replace(
            transfer,
            ucx_tls=transfer.ucx_tls if options.ucx_tls is None else options.ucx_tls,
            ucx_net_devices=devices,
            ucx_log=self._ranks.ucx_log("decode"),
        )
        return msgspec.structs.replace(command, transfer=transfer)

    def _answer(self, rank: int) -> None:
        answer = self._ranks.dst[rank].hear_any()
        self._receiving -= isinstance(answer, trial.Received)
        self._say_free(always=True)
        self._wire.send(FromRank(rank, trial.encode(answer)))

    def _say_free(self, always: bool = False) -> None:
        free = self._ranks.watermarks
        if always or free != self._free:
            self._free = free
            self._wire.send(Free(free))
