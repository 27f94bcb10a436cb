"""A Megatron checkpoint as a Hugging Face folder: `dynamo-megatron convert mcore2hf` under another name.

python -P tools/megatron_to_hf.py CHECKPOINT OUT [--dtype bfloat16] [--step N] [--model HF]
"""

import sys
from collections.abc import Sequence

from dynamo_megatron import cli


def main(words: Sequence[str]) -> int:
    return cli.main(["convert", "mcore2hf", *words])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
