"""The demo's RL run: scores before and after, seconds per step, peak memory of all processes. From the shipped warm
start with three seeds, and with the first seed from other warm-ups.

    make demo-figures        # four warm-ups where they are missing, then this file with them

A run that was interrupted is resumed, one that is finished is not repeated. When all runs are finished, the results are
written as JSON, and README's table is printed. Do not run anything else meanwhile.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from dynamo_megatron.evaluation.results import (
    align,
    markdown_row,
    paired_bootstrap,
    problem_pass_at_k,
    read_results,
    results_file,
)
from dynamo_megatron.reports.run_record import RunRecord, read_revisits, read_run

sys.path.insert(0, str(Path(__file__).parent))  # python -P leaves this folder out
from measure import machine

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "demo.json"
CONFIGS = ("configs/demo/rl.yaml", "configs/methods/dynamo.yaml")
PACKAGES = ("dynamo-megatron", "torch", "megatron-core", "sglang", "transformers")
SAMPLE_EVERY = 1.0  # seconds between two samples of the memory


def tree_pss(root: psutil.Process) -> int:
    """Bytes of a process and its descendants: a page that n processes share counts as 1/n in each (PSS)."""
    total = 0
    for process in (root, *root.children(recursive=True)):
        try:
            total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):  # it has ended since it was listed
            continue
    return total


def train(folder: Path, keys: Sequence[str]) -> dict[str, float]:
    """Runs or resumes the training in `folder`: the seconds of all tries together and the largest peak, which are kept
    in FOLDER.json. A run that these say is finished is not started. Raises SystemExit where the run fails."""
    kept, console = folder.with_suffix(".json"), folder.with_suffix(".log")
    # Without the cache, from which a run could take the evaluation of the start as another run has measured it.
    words = ["train", *CONFIGS, *keys, "eval.cache=false", f"output_dir={folder}"]
    before = {"command": words, "finished": False, "seconds": 0.0, "peak bytes": 0}
    if kept.is_file():
        before = json.loads(kept.read_text(encoding="utf-8"))
    if before["command"] != words:
        raise SystemExit(f"{kept}: of another command; remove it and {folder}, or name another folder (--runs)")
    if before["finished"]:
        return before
    command = [sys.executable, "-P", "-m", "dynamo_megatron.cli", *words]
    start, peak = time.monotonic(), 0
    with open(console, "a", encoding="utf-8") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    try:
        root = psutil.Process(process.pid)
        while process.poll() is None:
            peak = max(peak, tree_pss(root))
            time.sleep(SAMPLE_EVERY)
    finally:
        if process.poll() is None:  # Ctrl-C here: the run saves and ends
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=120)
        total = {
            "command": words,
            "finished": process.returncode == 0,
            "seconds": before["seconds"] + time.monotonic() - start,
            "peak bytes": max(before["peak bytes"], peak),
        }
        kept.write_text(json.dumps(total), encoding="utf-8")
    if process.returncode:
        raise SystemExit(f"{folder}: the run ended with exit code {process.returncode}; see {console}")
    return total


def before_and_after(folder: Path, run: RunRecord) -> dict[str, Any]:
    """Of a finished run with its first and last evaluation: scores in fractions."""
    ends = [run.evaluations[0], run.evaluations[-1]]
    results = align(*(read_results(results_file(folder, each["step"])) for each in ends))
    gain = paired_bootstrap(*(problem_pass_at_k(each, 1) for each in results))
    return {
        "steps": run.metrics[-1]["step"],
        "problems": len(results[0]),
        "pass@1 before": ends[0]["eval/pass@1"],
        "pass@1 after": ends[1]["eval/pass@1"],
        "gain": list(gain),  # mean and 95 % interval over problems
    }


def figures(folder: Path, seed: int) -> dict[str, Any]:
    """Of a finished run: scores in fractions, times in seconds."""
    run, revisits = read_run(folder), read_revisits(folder)
    rates, given = revisits.success_rates, revisits.rollouts
    sometimes, always = given[(rates >= 0.2) & (rates <= 0.8)], given[rates == 1]
    return {
        "seed": seed,
        **before_and_after(folder, run),
        "sometimes to always": float(sometimes.mean() / always.mean()) if len(sometimes) and len(always) else None,
        "seconds per step": statistics.median(run.series("time/step").tolist()),
        "parts of a step": {
            name: statistics.median(run.series(f"time/{name}").tolist())
            for name in ("generate", "logprobs", "update", "weight_sync", "other")
        },
    }


def table(results: dict[str, Any]) -> str:
    """Of each group of runs mean, minimum and maximum, as README has them."""
    runs = results["runs"]

    def spread(runs: list[dict[str, Any]], digits: int, of: Callable[[dict[str, Any]], float]) -> str:
        values = [of(run) for run in runs]
        mean, low, high = (f"{x:.{digits}f}" for x in (np.mean(values), min(values), max(values)))
        return f"{mean} ({low} to {high})"

    lines = [
        f"pass@1 on {runs[0]['problems']} held-out problems in %, before and after {runs[0]['steps']} steps",
        "",
        markdown_row(["runs", "before", "after", "gain, points"]),
        "|---|---:|---:|---:|",
    ]
    for what, group in (
        (f"the demo, {len(runs)} seeds", runs),
        (f"{len(results['runs from other warm-ups'])} other warm-ups", results["runs from other warm-ups"]),
    ):
        if group:
            scores = (lambda r: r["pass@1 before"], lambda r: r["pass@1 after"], lambda r: r["gain"][0])
            lines.append(markdown_row([what, *(spread(group, 1, lambda r, of=of: 100 * of(r)) for of in scores)]))
    costs = (
        f"A run of the first row takes {spread(runs, 1, lambda r: r['seconds'] / 60)} minutes, a step "
        f"{spread(runs, 2, lambda r: r['seconds per step'])} seconds, and all processes together need at most "
        f"{spread(runs, 1, lambda r: r['peak bytes'] / 1e9)} GB of memory."
    )
    if all(run["sometimes to always"] is not None for run in runs):
        ratio = spread(runs, 2, lambda r: r["sometimes to always"])
        costs += (
            f" Problems solved 20 to 80 % of the time so far got {ratio} times the rollouts of those solved always."
        )
    return "\n".join([*lines, "", costs])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--warmups", type=Path, nargs="*", default=[], help="models of other warm-ups")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "demo-figures", help="folder for the runs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("keys", nargs="*", metavar="key=value", help="for every run, such as trainer.steps=2")
    options = parser.parse_args()
    options.runs.mkdir(parents=True, exist_ok=True)
    at_start = machine(PACKAGES)

    def run(name: str, seed: int, *keys: str) -> dict[str, Any]:
        folder = options.runs / name
        measured = train(folder, [f"seed={seed}", *options.keys, *keys])
        whole = {key: measured[key] for key in ("seconds", "peak bytes")}
        made = {**figures(folder, seed), **whole}
        print(json.dumps(made), flush=True)
        return made

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
    print(table(results))


if __name__ == "__main__":
    main()
