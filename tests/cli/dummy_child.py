"""A child for the tests of the supervisor: beats, and ends on SIGTERM. Appends its pid and port-like slot to a file.

Arguments: slot, file of pids, then what the supervisor adds.
"""

import os
import signal
import subprocess
import sys
import time

from disagg.telemetry.process import die_with_parent, heartbeat_to

slot, pids = sys.argv[1], sys.argv[2]
fd, parent_pid = int(sys.argv[sys.argv.index("--heartbeat-fd") + 1]), int(sys.argv[sys.argv.index("--parent-pid") + 1])
die_with_parent(parent_pid)
signal.signal(signal.SIGTERM, signal.SIG_IGN if slot == "stubborn" else lambda *_: sys.exit(0))
if slot == "misconfigured":
    print("error: engine.page_tokens = 0", file=sys.stderr)
    sys.exit(2)
worker = 0
if slot == "with-worker":
    code = (
        "import sys, time; from disagg.telemetry.process import die_with_parent; "
        "die_with_parent(int(sys.argv[1])); time.sleep(600)"
    )
    worker = subprocess.Popen([sys.executable, "-c", code, str(os.getpid())]).pid
beat = heartbeat_to(fd)
beat()
with open(pids, "a") as file:
    file.write(f"{slot} {os.getpid()} {worker}\n")
while True:
    beat()
    time.sleep(0.1)
