"""Says what is in a checkpoint, or how two differ.

    python -P tools/inspect_checkpoint.py runs/mine
    python -P tools/inspect_checkpoint.py --diff runs/mine/checkpoints/step-000010 runs/mine/checkpoints/step-000020

A path is a run (its newest complete checkpoint), one checkpoint, a folder in Megatron's torch_dist format or a Hugging
Face folder. Exit code 1: the checkpoint is not complete, or the two differ; 2: a path that is none of these.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dynamo_megatron.inspection import describe, differences, inspect


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", type=Path)
    parser.add_argument("--diff", nargs=2, type=Path, metavar=("A", "B"), help="compares the tensors, one at a time")
    options = parser.parse_args()
    if (options.path is None) == (options.diff is None):
        parser.error("give one path, or --diff and two")
    try:
        if options.diff is None:
            contents = inspect(options.path)
            print(describe(contents))
            return int(contents.problem is not None)
        found = 0
        for line in differences(*(inspect(path) for path in options.diff)):
            print(line, flush=True)
            found += 1
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{found} of the tensors differ" if found else "the same tensors, bit for bit")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
