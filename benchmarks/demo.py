"""The demo's RL run: scores before and after, seconds a step. From the shipped warm start with three seeds, and from
other warm-ups with the first seed.

    make demo-figures        # four warm-ups where they are missing, then this file with them

A run that was interrupted is resumed, one that is finished is not repeated. When all runs are finished, the results are
written as JSON, and the rows of docs/evidence.md are printed. Do not run anything else meanwhile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dynamo_megatron.evaluation.results import (
    markdown_row,
    paired_bootstrap,
    problem_pass_at_k,
    read_results,
    results_file,
)
from dynamo_megatron.reports.run_record import read_revisits, read_run

sys.path.insert(0, str(Path(__file__).parent))  # python -P leaves this folder out
from measure import machine

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "demo.json"
CONFIGS = ("configs/demo/rl.yaml", "configs/methods/dynamo.yaml")
PACKAGES = ("dynamo-megatron", "torch", "megatron-core", "sglang", "transformers")


def figures(folder: Path, seed: int) -> dict[str, Any]:
    """Of a finished run with its first and last evaluation: scores in fractions, times in seconds."""
    run, revisits = read_run(folder), read_revisits(folder)
    first, last = run.evaluations[0], run.evaluations[-1]
    results = [read_results(results_file(folder, each["step"])) for each in (first, last)]
    rates, given = revisits.success_rates, revisits.rollouts
    sometimes, always = given[(rates >= 0.2) & (rates <= 0.8)], given[rates == 1]
    parts = ("generate", "logprobs", "update", "weight_sync", "other")
    return {
        "seed": seed,
        "steps": run.metrics[-1]["step"],
        "problems": len(results[0]),
        "pass@1 before": first["eval/pass@1"],
        "pass@1 after": last["eval/pass@1"],
        "gain": list(paired_bootstrap(*(problem_pass_at_k(each, 1) for each in results))),  # 95 % over problems
        "sometimes to always": float(sometimes.mean() / always.mean()) if len(sometimes) and len(always) else None,
        "seconds per step": statistics.median(run.series("time/step").tolist()),
        "parts of a step": {name: statistics.median(run.series(f"time/{name}").tolist()) for name in parts},
    }


def spread(runs: list[dict[str, Any]], digits: int, of: Callable[[dict[str, Any]], float]) -> str:
    values = [of(run) for run in runs]
    mean, low, high = (f"{x:.{digits}f}" for x in (statistics.mean(values), min(values), max(values)))
    return f"{mean} ({low} to {high})"


def rows(results: dict[str, Any]) -> str:
    """Of each group of runs mean, minimum and maximum."""
    runs, others = results["runs"], results["runs from other warm-ups"]
    scores = (lambda r: r["pass@1 before"], lambda r: r["pass@1 after"], lambda r: r["gain"][0])
    lines = []
    for what, group in ((f"the demo, {len(runs)} seeds", runs), (f"{len(others)} other warm-ups", others)):
        if group:
            lines.append(markdown_row([what, *(spread(group, 1, lambda r, of=of: 100 * of(r)) for of in scores)]))
    lines.append(f"A step takes {spread(runs, 2, lambda r: r['seconds per step'])} seconds.")
    if all(run["sometimes to always"] is not None for run in runs):
        ratio = spread(runs, 2, lambda r: r["sometimes to always"])
        lines.append(f"Problems solved 20 to 80 % of the time got {ratio} times the rollouts of those solved always.")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--warmups", type=Path, nargs="*", default=[], help="models of other warm-ups")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "demo-figures", help="folder for the runs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("keys", nargs="*", metavar="key=value", help="for every run, such as trainer.steps=2")
    options = parser.parse_args()
    at_start = machine(PACKAGES)

    def run(name: str, seed: int, *keys: str) -> dict[str, Any]:
        folder = options.runs / name
        words = [*CONFIGS, *options.keys, *keys, f"seed={seed}", f"output_dir={folder}"]
        subprocess.run([sys.executable, "-P", "-m", "dynamo_megatron.cli", "train", *words], cwd=ROOT, check=True)
        return figures(folder, seed)

    results = {
        "machine": at_start,
        "keys": options.keys,
        "runs": [run(f"seed-{seed}", seed) for seed in options.seeds],
        "runs from other warm-ups": [
            run(f"warm-up-{number}", options.seeds[0], f"model.path={model}")
            for number, model in enumerate(options.warmups, start=1)
        ],
    }
    options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(rows(results))


if __name__ == "__main__":
    main()
