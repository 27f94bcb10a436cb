"""A Hugging Face folder as a Megatron checkpoint: `dynamo-megatron convert hf2mcore` under another name.

python -P tools/hf_to_megatron.py HF OUT
"""

import sys

from dynamo_megatron.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "hf2mcore", *sys.argv[1:]]))
