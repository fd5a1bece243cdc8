"""The shipped processes, on a wire that suffers. See the plan.

python -m tests.cluster.wire_faults up ...        disagg up, whose servers are started like this:
python -m tests.cluster.wire_faults prefill ...   a server whose link frames suffer (links)
python -m tests.cluster.wire_faults worker ...    a worker whose writes and notifications suffer (pieces)
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.cluster.wire_faults.plan import COMMAND, plan_of

SERVERS = ("prefill", "decode")


def main() -> int:
    role = sys.argv[1]
    plan = plan_of(os.environ)
    if role == "worker":
        del sys.argv[1]
        from disagg.worker.__main__ import main as worker
        from tests.cluster.wire_faults import pieces

        pieces.install(plan, sys.argv[sys.argv.index("--name") + 1])
        return worker()
    if role == "up":
        _start_servers_so()
    elif role in SERVERS:
        from tests.cluster.wire_faults import links

        links.install(plan, role)
    from disagg.cli.main import main as disagg

    disagg()
    return 0


def _start_servers_so() -> None:
    """Servers of this `up` are started by this module; the router as ever."""
    from disagg.cli import up

    shipped = up.ChildSpec

    def wrapped(name: str, argv: tuple[str, ...], log: Path) -> up.ChildSpec:
        role = argv[argv.index("disagg.cli") + 1]
        given = argv[argv.index(role) :]
        return shipped(name, (*COMMAND, *given) if role in SERVERS else argv, log)

    up.ChildSpec = wrapped


if __name__ == "__main__":
    sys.exit(main())
