"""From the start of `disagg up` to ready, and to the first answer, again and again: `python -m bench.starts`.

A random model of Llama-3.1-8B's shape, one prefill and one decode server, nothing set. The first start compiles what this
machine has not compiled yet; the others are warm. After each, one prompt is answered and all processes end.
`--device cpu` with a small shape runs the same on a CPU, to try it.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from pathlib import Path

from bench.engine import SHAPE
from bench.gpu_cluster import add_shape, ask, make_model_apart, prompt_of
from tests.cluster.cluster import Cluster

SAID = re.compile(r"starting workers [^\"]*")  # of a server's log: where its time went


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    add_shape(parser, SHAPE.vocab_size)
    parser.add_argument("--tokens", type=int, default=1024, help="of the prompt")
    parser.add_argument("--starts", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model_dir = make_model_apart(arguments.model_dir or Path(directory) / "model", arguments)
        for number in range(arguments.starts):
            run_dir = Path(directory) / f"run-{number}"
            flags = ("--model", str(model_dir), "--dtype", arguments.dtype)
            started_s = time.perf_counter()
            with Cluster(run_dir, *flags, sets=(f"model.device={arguments.device}",)) as cluster:
                ready_s = time.perf_counter() - started_s
                asked = ask(cluster, prompt_of(number, arguments.tokens, arguments.vocab), 4)
                said = [
                    f"{name}: {found}"
                    for name in ("prefill-0", "decode-0")
                    for found in SAID.findall((cluster.run_dir / f"{name}.log").read_text())
                ]
                ending_s = time.perf_counter()
            print(
                f"start {number + 1}: ready after {ready_s:.1f} s; first token of {arguments.tokens} tokens "
                f"{asked.first_token_s * 1e3:.0f} ms, ended in {time.perf_counter() - ending_s:.1f} s; {'; '.join(said)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
