"""The two example agents from a fresh clone: success on held-out tasks before and after, and the time of each part.

    make agents-figures        # this file with its defaults; downloads what `make setup` installs

Clones this repository's last commit into FOLDER, sets it up there, and runs the commands of docs/agents.md for each
example. The results are written as JSON, and the table of docs/agents.md is written from them. Do not run anything else
meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dynamo_megatron.evaluation.results import markdown_row
from dynamo_megatron.reports.run_record import read_run

sys.path.insert(0, str(Path(__file__).parent))  # python -P leaves this folder out
from demo import before_and_after, write_part
from measure import machine, run_logged

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "agents.json", ROOT / "docs" / "agents.md"
EXAMPLES = ("calculator", "treasure")
PACKAGES = ("dynamo-megatron", "torch", "megatron-core", "sglang", "transformers")
LIMIT = 3600.0  # seconds of each command


def seconds_of(command: Sequence[str], folder: Path, log: Path) -> float:
    """Of a command in `folder`. Raises SystemExit where it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    fresh = {"PIP_NO_CACHE_DIR": "1", "DYNAMO_MEGATRON_CACHE": str(folder / "runs" / "cache")}
    start = time.monotonic()
    done = run_logged(command, log, LIMIT, cwd=folder, env={**os.environ, **fresh})
    if done["exit code"] != 0:
        raise SystemExit("\n".join([*done["log"], f"{' '.join(command)}: exit code {done['exit code']}; see {log}"]))
    return time.monotonic() - start


def example(folder: Path, python: Path, name: str, keys: Sequence[str] = ()) -> dict[str, Any]:
    """Makes the task, warms the model up and trains it, in `folder`, which has configs/ and tools/. `keys`: for both
    trainings. Scores are fractions, times seconds."""
    cli, logs = ["-m", "dynamo_megatron.cli"], folder / "runs" / f"{name}-logs"
    commands = {
        "task": [f"tools/{name}_task.py", f"runs/{name}/task"],
        "warm-up": [*cli, "sft", f"configs/{name}/warmup.yaml", "--ranks", "2", *keys],
        "RL": [*cli, "train", f"configs/{name}/rl.yaml", "configs/methods/dynamo.yaml", *keys],
    }
    seconds = {
        part: seconds_of([str(python), "-P", *words], folder, logs / f"{part}.log") for part, words in commands.items()
    }
    run = folder / "runs" / name / "rl"
    return {**before_and_after(run, read_run(run)), "seconds": seconds}


def page_part(results: dict[str, Any]) -> str:
    """What docs/agents.md has of the results."""
    host = results["machine"]
    lines = [
        f"Results of `make agents-figures` on {host['cores']} CPU cores (load average before the start: "
        f"{host['load average before']:.1f}). Each example was run once, with one seed "
        "(`benchmarks/results/agents.json`):",
        "",
        markdown_row(["example", "held-out tasks", "success before, %", "after, %", "gain, points (95 %)", "minutes"]),
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, made in results["examples"].items():
        gain, low, high = (100 * value for value in made["gain"])
        scores = [f"{100 * made[f'pass@1 {when}']:.1f}" for when in ("before", "after")]
        minutes = sum(made["seconds"].values()) / 60
        row = [name, str(made["problems"]), *scores, f"{gain:+.1f} ({low:+.1f} to {high:+.1f})", f"{minutes:.1f}"]
        lines.append(markdown_row(row))
    lines += [
        "",
        "Success is pass@1. The interval is of the paired difference, from resampling the tasks. The minutes are those "
        "of the commands above, both evaluations included. They do not include `make setup`, which took "
        f"{results['set-up seconds'] / 60:.1f} minutes in a fresh clone.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "agents-figures", help="of the clone; a new one")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE, help="file whose table is written from the results")
    options = parser.parse_args()
    clone = options.folder.resolve()
    if clone.exists():
        raise SystemExit(f"{clone}: already there; remove it, or name another folder (--folder)")
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    results: dict[str, Any] = {"machine": machine(PACKAGES), "examples": {}}
    results["set-up seconds"] = seconds_of(["make", "setup"], clone, clone / "runs" / "setup.log")
    for name in EXAMPLES:
        results["examples"][name] = example(clone, clone / ".venv" / "bin" / "python", name)
        print(name, json.dumps(results["examples"][name]), flush=True)
    options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    write_part(options.page, "agents", page_part(results))


if __name__ == "__main__":
    main()
