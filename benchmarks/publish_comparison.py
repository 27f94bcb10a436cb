"""Puts the scores that `make compare` found into README, its tables and curves into benchmarks/results."""

from __future__ import annotations

import shutil
from pathlib import Path


def publish(root: Path) -> None:
    """`root`: the repository's."""
    made, results, readme = root / "runs" / "compare", root / "benchmarks" / "results", root / "README.md"
    scores = (made / "comparison.md").read_text().split("## Final scores\n\n")[1].split("\n\n## ")[0]
    before, _, rest = readme.read_text().partition("<!-- compare -->\n")
    readme.write_text(f"{before}<!-- compare -->\n{scores}\n{rest[rest.index('<!-- end -->') :]}")
    for name in ("comparison.md", "curves.jsonl"):
        shutil.copyfile(made / name, results / f"demo_{name}")


if __name__ == "__main__":
    publish(Path(__file__).parents[1])
