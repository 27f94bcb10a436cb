"""What the runs of a comparison did with their baseline from history.

    python -P benchmarks/history_runs.py NAME ARM FOLDER [NAME ARM FOLDER ...]

FOLDER is the output_dir of `compare/NAME`. Writes benchmarks/results/history_runs.json: for each arm the share of
prompts with each number of rollouts, and the share of steps in which `score_ratio` was at its limit.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from dynamo_megatron.algorithm.energy import RATIO_RANGE

OUT = Path(__file__).parent / "results" / "history_runs.json"


def lines(folder: Path, arm: str, file: str) -> list[dict[str, Any]]:
    """Returns the rows of `file` in all runs of the arm. Raises ValueError where there are none."""
    files = sorted(folder.glob(f"runs/{arm}-lr*/{file}"))
    found = [json.loads(line) for path in files for line in path.read_text(encoding="utf-8").splitlines()]
    if not found:
        raise ValueError(f"{folder}/runs: no {file} of a run of {arm}; name the comparison's output_dir and an arm")
    return found


def measured(folder: Path, arm: str) -> dict[str, Any]:
    counts = Counter(row["n"] for row in lines(folder, arm, "allocation.jsonl"))
    ratios = [row["advantage/score_ratio"] for row in lines(folder, arm, "metrics.jsonl")]
    return {
        "runs": len(list(folder.glob(f"runs/{arm}-lr*.json"))),
        "steps": len(ratios),
        "rollouts per prompt": {str(n): round(counts[n] / counts.total(), 4) for n in sorted(counts)},
        "share of steps at the largest score_ratio": round(ratios.count(RATIO_RANGE[1]) / len(ratios), 4),
    }


def main(names: list[str]) -> None:
    arms = zip(names[::3], names[1::3], names[2::3], strict=True)
    found = {f"{name} {arm}": measured(Path(folder), arm) for name, arm, folder in arms}
    OUT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
