"""Compares two model folders tensor by tensor: Hugging Face's, what hf2mcore wrote, a run or one of its checkpoints.

    python -P tools/verify_conversion.py A B

Prints how many tensors are bit-equal and the largest difference. Exit codes: 0 all bit-equal, 1 not, 2 bad input.
"""

from __future__ import annotations

import argparse
import sys

from dynamo_megatron.checkpoint.convert import compare_weights


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a")
    parser.add_argument("b")
    folders = parser.parse_args()
    try:
        largest, unequal = compare_weights(folders.a, folders.b)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    worst = max(largest, key=largest.get)
    print(f"{len(largest) - len(unequal)} of {len(largest)} tensors bit-equal")
    if unequal:
        print(f"differ: {', '.join(unequal[:3])}{' ...' if len(unequal) > 3 else ''}")
    print(f"largest difference {largest[worst]:.3g} in {worst}")
    return 1 if unequal else 0


if __name__ == "__main__":
    sys.exit(main())
