"""Counts the repository's lines and words and compares them with the budgets; exit code 1 above one of them.

Counts what git tracks, blank lines and comments included. A change that needs a larger budget raises it here and says
in its commit message why.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CODE = r"\.(py|js|css|html|sh)$"
# what is counted: (the most, unit, pattern of a path)
BUDGETS = {
    "product": (37_250, "lines", rf"^(dynamo_megatron|kernels|launcher|tools)/.*{CODE}"),
    "tests": (27_880, "lines", r"^tests/.*\.py$"),
    "benchmarks": (3_930, "lines", r"^benchmarks/.*\.py$"),
    "docs": (37_900, "words", r"\.md$"),
}


def main() -> int:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files, over = [path for path in listed.splitlines() if (ROOT / path).is_file()], 0
    for name, (most, unit, pattern) in BUDGETS.items():
        texts = [(ROOT / path).read_text() for path in files if re.search(pattern, path)]
        found = sum(len(text.split()) if unit == "words" else text.count("\n") for text in texts)
        above = f", {found - most:,} too many" if found > most else ""
        print(f"{name:10} {found:7,} of {most:7,} {unit}{above}")
        over |= found > most
    return int(over)


if __name__ == "__main__":
    sys.exit(main())
