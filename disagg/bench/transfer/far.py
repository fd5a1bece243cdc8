"""What the two ends of a transfer between two machines say to each other, and how their clocks compare.

    dials: coordinator, prefill ranks                         listens: decode ranks
      Offer ─────────────────────────────────────────────────> Welcome, or Refused with the reason
      Ping ──────────────────────────────────────────────────> Pong           how clocks compare
      ForRank(command) ──────────────────────────────────────> FromRank(answer)
                                                               Free           how far rings are free, as it changes
      Bye

Commands and answers are those of `trial`; frames are those of multiprocessing's connections, without its pickles. Nobody shows
who he is: this is for networks of one's own, and for as long as a measurement takes. Knows frames and times; nothing of KV.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable
from multiprocessing.connection import Connection

import msgspec
from msgspec import Struct

from disagg.bench.transfer import trial
from disagg.types.errors import ConfigError, DisaggError

DEFAULT_PORT = 7600
MAX_FRAME_BYTES = 64 << 20
MAX_RANKS = 16
FRAME_S = 30.0  # for a frame that has begun
HELLO_S = 10.0
PINGS = 32


class Offer(Struct, frozen=True, tag="offer"):
    """The dialling end's first message. version: of the code, which both ends must share. ranks: of the decode side."""

    version: str
    ranks: int


class Welcome(Struct, frozen=True, tag="welcome"):
    """The ranks have started. gpus: their names."""

    gpus: tuple[str, ...]


class Refused(Struct, frozen=True, tag="refused"):
    reason: str


class ForRank(Struct, frozen=True, tag="for_rank"):
    """command: a trial.Command, encoded. Its times are of the clock of who listens."""

    rank: int
    command: bytes


class FromRank(Struct, frozen=True, tag="from_rank"):
    """answer: a trial.Answer, encoded. Its times are of the clock of who listens."""

    rank: int
    answer: bytes


class Free(Struct, frozen=True, tag="free"):
    """By decode rank, the watermark of its ring. Comes before every answer, and between answers as it changes."""

    watermarks: tuple[int, ...]


class Ping(Struct, frozen=True, tag="ping"):
    pass


class Pong(Struct, frozen=True, tag="pong"):
    here_s: float


class Bye(Struct, frozen=True, tag="bye"):
    pass


Message = Offer | Welcome | Refused | ForRank | FromRank | Free | Ping | Pong | Bye

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode


class Wire:
    """One connection between the two ends. Every method raises DisaggError for what the other end does wrong, or its end."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(True)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connected.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(FRAME_S), 0))
        self.own_host = str(connected.getsockname()[0])
        self.connection = Connection(connected.detach())

    def send(self, message: Message) -> None:
        try:
            self.connection.send_bytes(_encode(message))
        except OSError as error:
            raise DisaggError(f"the other end cannot be told: {error}") from error

    def receive(self, timeout_s: float) -> Message | None:
        """The next message; None if none begins within timeout_s."""
        try:
            if not self.connection.poll(timeout_s):
                return None
            message: Message = _decode(self.connection.recv_bytes(MAX_FRAME_BYTES))
            return message
        except EOFError as error:
            raise DisaggError("the other end has hung up") from error
        except OSError as error:
            raise DisaggError(f"the other end cannot be heard: {error}") from error
        except msgspec.DecodeError as error:
            raise DisaggError(f"the other end speaks another language: {error}") from error

    def close(self) -> None:
        self.connection.close()


class Clock(Struct, frozen=True):
    """The other end's monotonic clock. offset_s: what it is ahead of ours, give or take error_s."""

    offset_s: float
    error_s: float

    @classmethod
    def of(cls, pings: Iterable[tuple[float, float, float]]) -> Clock:
        """(our time before, its time, our time after) of each; the quickest one says it best."""
        before, there, after = min(pings, key=lambda ping: ping[2] - ping[0])
        return cls(there - (before + after) / 2, (after - before) / 2)

    def there(self, command: trial.Command) -> trial.Command:
        """A command of ours, in the other end's time."""
        if isinstance(command, trial.Receive | trial.ReceiveUnstaged):
            return msgspec.structs.replace(command, deadline_s=command.deadline_s + self.offset_s)
        return command

    def here(self, answer: trial.Answer) -> trial.Answer:
        """An answer of the other end's, in our time."""
        if not isinstance(answer, trial.Received):
            return answer
        return trial.Received(
            answer.landed_s - self.offset_s,
            tuple(
                trial.Interval(each.stage, each.start_s - self.offset_s, each.stop_s - self.offset_s)
                for each in answer.intervals
            ),
        )


def parse_address(text: str, option: str) -> tuple[str, int]:
    """ "10.0.0.5:7600", "[fd00::5]:7600", or either without a port. Raises ConfigError."""
    host, colon, port = text.rpartition(":")
    if not colon or (text.count(":") > 1 and not host.endswith("]")):
        host, port = text, str(DEFAULT_PORT)
    if not host.strip("[]") or not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise ConfigError(f"{option} = {text!r}: it must be HOST or HOST:PORT, with a port up to 65535")
    return host.strip("[]"), int(port)
