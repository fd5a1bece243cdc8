"""The shipped processes, on a wire that suffers. See the plan.

python -m tests.cluster.wire_faults up ...        disagg up, whose servers are started like this:
python -m tests.cluster.wire_faults prefill ...   a server whose link frames suffer (links)
python -m tests.cluster.wire_faults worker ...    a worker whose writes and notifications suffer (pieces)
"""

from __future__ import annotations

import os
import sys

from tests.cluster.own_servers import ROLES, start_servers_by
from tests.cluster.wire_faults.plan import COMMAND, plan_of


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
        start_servers_by(COMMAND)
    elif role in ROLES:
        from tests.cluster.wire_faults import links

        links.install(plan, role)
    from disagg.cli.main import main as disagg

    disagg()
    return 0


if __name__ == "__main__":
    sys.exit(main())
