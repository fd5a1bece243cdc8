"""A worker that beats once, ends at `Shutdown`, and takes its time over everything else: for `test_workers.py`.

Arguments: those of a worker, after seconds to be silent before each reply, and from one beat to the next, if there are more.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import threading
import time

import zmq

from disagg.messages.control import Dump, Dumped, Profiled, Shutdown, decode_request, encode_reply
from disagg.messages.transfer import Beat, EventFrame, encode_events


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("silent_s", type=float)
    parser.add_argument("beat_s", type=float)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--sockets")
    arguments, _ = parser.parse_known_args()
    context = zmq.Context()

    def dealer(name: str) -> zmq.Socket[bytes]:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, str(arguments.rank).encode())
        socket.connect(f"ipc://{arguments.sockets}/{name}")
        return socket

    control, transfer = dealer("control"), dealer("transfer")

    def beat() -> None:
        for number in itertools.count():
            transfer.send(encode_events(EventFrame(arguments.rank, number, (Beat(-1, 0.0, 0, 0),))))
            if not arguments.beat_s:
                return
            time.sleep(arguments.beat_s)

    threading.Thread(target=beat, daemon=True).start()
    while True:
        request = decode_request(control.recv())
        if isinstance(request, Shutdown):
            sys.exit(0)
        time.sleep(arguments.silent_s)
        is_dump = isinstance(request, Dump)
        control.send(encode_reply(Dumped(arguments.rank, "here") if is_dump else Profiled(arguments.rank, 5, 3)))


if __name__ == "__main__":
    main()
