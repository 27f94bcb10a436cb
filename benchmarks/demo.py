"""The demo's RL run with three seeds: scores before and after, seconds per step, peak memory of all processes.

    make demo-figures        # the warm-up where it is missing, then this file with its defaults

A run that was interrupted is resumed, one that is finished is not repeated. When all runs are finished, the results are
written as JSON, and the table of `make demo` in README.md is written from them. Do not run anything else meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
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

from dynamo_megatron.evaluation.estimates import paired_bootstrap
from dynamo_megatron.evaluation.results import align, markdown_row, problem_pass_at_k, read_results, results_file
from dynamo_megatron.reports.run_record import RunRecord, read_revisits, read_run

sys.path.insert(0, str(Path(__file__).parent))  # python -P leaves this folder out
from measure import machine

ROOT = Path(__file__).parents[1]
RESULTS, README = ROOT / "benchmarks" / "results" / "demo.json", ROOT / "README.md"
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
    words = ["train", *CONFIGS, *keys, f"output_dir={folder}"]
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
        "seconds per step": statistics.median(run.metric("time/step").tolist()),
        "parts of a step": {
            name: statistics.median(run.metric(f"time/{name}").tolist())
            for name in ("generate", "logprobs", "update", "reshard", "other")
        },
    }


def readme_part(results: dict[str, Any]) -> str:
    """What README has: mean, minimum and maximum over the seeds."""
    runs = results["runs"]
    quantities: list[tuple[str, int, Callable[[dict[str, Any]], float]]] = [
        (f"pass@1 on {runs[0]['problems']} held-out problems before the run, %", 1, lambda r: 100 * r["pass@1 before"]),
        (f"the same after {runs[0]['steps']} steps, %", 1, lambda r: 100 * r["pass@1 after"]),
        ("gain, points", 1, lambda r: 100 * r["gain"][0]),
        (
            "ratio of mean rollouts per problem: problems solved 20 to 80 % of the time so far / problems always "
            "solved so far",
            2,
            lambda r: r["sometimes to always"],
        ),
        ("median time of a step, seconds", 2, lambda r: r["seconds per step"]),
        ("time of a run, minutes", 1, lambda r: r["seconds"] / 60),
        ("peak memory of all processes, GB", 1, lambda r: r["peak bytes"] / 1e9),
    ]
    many = f"{len(runs)} runs with different seeds" if len(runs) > 1 else "one run"
    lines = [
        f"`make demo` on {results['machine']['cores']} CPU cores, {many} (`benchmarks/results/demo.json`):",
        "",
        markdown_row(["quantity", "mean", "range"]),
        "|---|---:|---:|",
    ]
    for what, digits, of in quantities:
        values = [of(run) for run in runs]
        if None in values:  # a run without such problems
            continue
        mean, low, high = (f"{x:.{digits}f}" for x in (np.mean(values), min(values), max(values)))
        lines.append(markdown_row([what, mean, f"{low} to {high}"]))
    return "\n".join(lines) + "\n"


def marks(name: str) -> tuple[str, str]:
    """The lines around a part of a page that is written from results."""
    return f"<!-- begin: {name} -->\n", f"<!-- end: {name} -->\n"


def write_part(page: Path, name: str, part: str) -> None:
    """Raises ValueError where the page has not one part of that name."""
    text, (begin, end) = page.read_text(encoding="utf-8"), marks(name)
    if (text.count(begin), text.count(end)) != (1, 1):
        raise ValueError(f"{page}: there must be one line {begin.strip()} and one line {end.strip()}")
    before, _, rest = text.partition(begin)
    page.write_text(before + begin + part + end + rest.partition(end)[2], encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "demo-figures", help="folder for the runs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--readme", type=Path, default=README, help="file whose table is written from the results")
    parser.add_argument("keys", nargs="*", metavar="key=value", help="for every run, such as trainer.steps=2")
    options = parser.parse_args()
    options.runs.mkdir(parents=True, exist_ok=True)
    at_start = machine(PACKAGES)
    runs = []
    for seed in options.seeds:
        folder, load = options.runs / f"seed-{seed}", os.getloadavg()[0]
        measured = train(folder, [f"seed={seed}", *options.keys])
        whole = {key: measured[key] for key in ("seconds", "peak bytes")}
        runs.append({**figures(folder, seed), **whole, "load average before": load})
        print(json.dumps(runs[-1]), flush=True)
    results = {"machine": at_start, "keys": options.keys, "runs": runs}
    options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    write_part(options.readme, "demo", readme_part(results))


if __name__ == "__main__":
    main()
