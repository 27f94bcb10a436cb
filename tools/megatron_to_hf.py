"""A Megatron checkpoint as a Hugging Face folder: `dynamo-megatron convert mcore2hf` under another name.

python -P tools/megatron_to_hf.py CHECKPOINT OUT [--model HF]
"""

import sys

from dynamo_megatron.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "mcore2hf", *sys.argv[1:]]))
