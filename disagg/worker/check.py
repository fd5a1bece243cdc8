"""`python -m disagg.worker.check DIR DTYPE TP PP`: says whether workers would take a model, without loading it.

For whoever may not load torch. One line of JSON on stdout: {"refused": null, or why it is; "unused": how many
of the stored values the model does not use}. Exit status 0 in both cases.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from disagg.convert.sense import making_sense
from disagg.models.check import check_model
from disagg.text.model_files import ModelFiles
from disagg.types.errors import ConfigError


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m disagg.worker.check", description=__doc__)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("dtype")
    parser.add_argument("tp", type=int)
    parser.add_argument("pp", type=int)
    args = parser.parse_args()
    refused, unused = None, 0
    try:
        with making_sense(args.model_dir):
            unused = check_model(ModelFiles.read(args.model_dir), args.dtype, args.tp, args.pp)
    except ConfigError as error:
        refused = str(error)
    print(json.dumps({"refused": refused, "unused": unused}))


if __name__ == "__main__":
    main()
