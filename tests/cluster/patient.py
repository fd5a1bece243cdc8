"""The shipped processes, but that KV is loaded however slow that is: `python -m tests.cluster.patient up ...`.

Whether a load pays is measured, and with tiny models on a busy machine it often does not. Where a test counts what is
loaded, it has to be.
"""

from __future__ import annotations

import sys

from tests.cluster.own_servers import ROLES, start_servers_by

COMMAND = (sys.executable, "-m", "tests.cluster.patient")  # in the place of `python -m disagg.cli`
PATIENCE_S = 120.0


def main() -> int:
    if sys.argv[1] == "up":
        start_servers_by(COMMAND)
    elif sys.argv[1] in ROLES:
        from disagg.offload.rates import Rates

        Rates.worth_loading = lambda rates, tokens, host_bytes, storage_bytes: True  # type: ignore[method-assign]
        Rates.patience_s = lambda rates, tokens: PATIENCE_S  # type: ignore[method-assign]
    from disagg.cli.main import main as disagg

    disagg()
    return 0


if __name__ == "__main__":
    sys.exit(main())
