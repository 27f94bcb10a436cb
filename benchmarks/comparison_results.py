"""Computes the results of `dynamo-megatron compare compare/NAME` from its evaluations.

    python -P benchmarks/comparison_results.py NAME LOAD CONTROL [CONTROL ...] [--add CURVES ...]

`results/NAME_curves.jsonl` has the evaluations of the seeds that have run. `--add` appends those of further seeds: the
curves.jsonl of a comparison with the same arms and learning rates. For each CONTROL, an arm, writes
`results/NAME_CONTROL.json`: what the other arms cost compared with it, with LOAD, a remark on what ran beside. The
picture `docs/evidence_NAME.png` is of the first CONTROL.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dynamo_megatron.comparison.curves import Outcome, arrays, whole_seeds
from dynamo_megatron.comparison.spec import planned_runs, read_spec
from dynamo_megatron.comparison.statistics import find
from dynamo_megatron.comparison.table import Measured, as_plain

sys.path.insert(0, str(Path(__file__).parent))  # python -P leaves this folder out
from measure import machine

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parents[1] / "docs"
PACKAGES = ("torch", "megatron-core", "sglang", "numpy")


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def with_control(name: str, control: str, evaluations: Sequence[dict[str, Any]]) -> Measured:
    """`evaluations`: the lines of curves.jsonl of the seeds that have run. They cannot tell failed runs: none may have
    failed."""
    no_runs_there = str(RESULTS / name)
    spec = read_spec(f"compare/{name}").model_copy(update={"control": control, "output_dir": no_runs_there})
    by_run = defaultdict(list)
    for row in evaluations:
        by_run[row["arm"], row["lr"], row["seed"]].append(row)
    curves = {run: by_run[run.arm, run.rate, run.seed] for run in planned_runs(spec)}
    outcomes = {run: Outcome(0, "") if own else None for run, own in curves.items()}
    seeds = whole_seeds(spec, outcomes)
    arms = arrays(spec, seeds, outcomes, curves)
    return Measured(spec, seeds, outcomes, curves, arms, find(arms, control))


def main() -> None:
    from dynamo_megatron.comparison.picture import draw  # matplotlib takes a second to import

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("load")
    parser.add_argument("controls", nargs="+")
    parser.add_argument("--add", nargs="*", type=Path, default=[])
    options = parser.parse_args()
    kept = RESULTS / f"{options.name}_curves.jsonl"
    evaluations = rows(kept) if kept.is_file() else []
    for file in options.add:
        known, added = {row["seed"] for row in evaluations}, rows(file)
        if twice := sorted(known & {row["seed"] for row in added}):
            raise SystemExit(f"{file}: {kept} has evaluations of seeds {twice} already")
        evaluations += added
    compared = {control: with_control(options.name, control, evaluations) for control in options.controls}
    seeds = {row["seed"] for row in evaluations}
    if left_out := sorted(seeds - set(compared[options.controls[0]].seeds)):
        raise SystemExit(f"{options.name}: seeds {left_out} lack arms or learning rates of its spec, or are not in it")
    kept.write_text("".join(f"{json.dumps(row)}\n" for row in evaluations), encoding="utf-8")
    here = {key: value for key, value in machine(PACKAGES).items() if key != "load average before"}  # LOAD was there
    for control, measured in compared.items():
        found = as_plain(measured)
        result = {
            "machine": here,
            "command": f"dynamo-megatron compare compare/{options.name}; control {control}",
            "load": options.load,
            "comparison": found,
        }
        file = RESULTS / f"{options.name}_{control}.json"
        file.write_text(f"{json.dumps(result, indent=1)}\n", encoding="utf-8")
        if control == options.controls[0]:
            draw(measured, found, DOCS / f"evidence_{options.name}.png")


if __name__ == "__main__":
    main()
