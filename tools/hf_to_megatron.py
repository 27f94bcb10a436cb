"""A Hugging Face folder as a Megatron checkpoint: `dynamo-megatron convert hf2mcore` under another name.

python -P tools/hf_to_megatron.py HF OUT [--dtype bfloat16]
"""

import sys
from collections.abc import Sequence

from dynamo_megatron import cli


def main(words: Sequence[str]) -> int:
    return cli.main(["convert", "hf2mcore", *words])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
