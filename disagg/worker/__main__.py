"""`python -m disagg.worker`: one rank. Started by a server, never by hand; it ends with its server."""

from __future__ import annotations

import argparse
import os

from disagg.telemetry.logs import LINES_PER_S, configure_logging
from disagg.telemetry.process import die_with_parent, leave, leave_signals_to_parent

# Under it torch asks for huge pages for large tensors on the host, weights above all: 2 to 4% of a decode step on a CPU.
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m disagg.worker", description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--group", type=int, default=0, help="the data-parallel rank that it belongs to")
    parser.add_argument("--sockets", required=True, help="directory of the server's ZeroMQ sockets")
    parser.add_argument("--incarnation", required=True)
    parser.add_argument("--parent", type=int, required=True, help="pid of the server")
    parser.add_argument("--name", required=True, help="of the server, for logs")
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--log-format", default="json")
    parser.add_argument("--log-lines-per-s", type=float, default=LINES_PER_S)
    args = parser.parse_args()
    leave_signals_to_parent()
    die_with_parent(args.parent)
    configure_logging(f"{args.name}/rank{args.rank}", args.log_level, args.log_format, args.log_lines_per_s)
    os.environ[HUGE_PAGES] = "1"
    from disagg.worker.process import WorkerProcess

    return WorkerProcess(args.rank, args.group, args.sockets, args.incarnation).run()


if __name__ == "__main__":
    leave(main())
