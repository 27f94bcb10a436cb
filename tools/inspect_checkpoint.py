"""Shows what is in a checkpoint, or how two differ: `dynamo-megatron inspect` under another name.

python -P tools/inspect_checkpoint.py PATH | --diff PATH PATH
"""

import sys

from dynamo_megatron.cli import main

if __name__ == "__main__":
    sys.exit(main(["inspect", *sys.argv[1:]]))
