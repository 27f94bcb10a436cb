"""Shows what is in a checkpoint, or how two differ: `dynamo-megatron inspect`.

    python -P tools/inspect_checkpoint.py runs/mine
    python -P tools/inspect_checkpoint.py --diff runs/mine/checkpoints/step-000010 runs/mine/checkpoints/step-000020

A path is a run (its newest complete checkpoint), one checkpoint, a folder in Megatron's torch_dist format or a Hugging
Face folder. Exit code 1: the checkpoint is not complete, or the two differ; 2: a path that is none of these.
"""

from __future__ import annotations

import sys

from dynamo_megatron.cli import main

if __name__ == "__main__":
    sys.exit(main(["inspect", *sys.argv[1:]]))
