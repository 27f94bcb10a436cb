"""How long a run of 10,000 steps takes to resume, and the memory of each of its processes, beside the short run.

    python -P benchmarks/long_run_resume.py RUN WORK [--steps 10000 --prompts 512 --history 1000000]

RUN is the output folder of a real run of `train` with a checkpoint, as `make demo` leaves it; it is copied into WORK
twice, as it is and with the files that RUN would have after that many steps. Both copies are resumed for one step. The
result is JSON on stdout. Run it from the folder where RUN was started. Do not run anything else meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import psutil

from dynamo_megatron.algorithm.history import COLUMNS
from dynamo_megatron.checkpoint.folder import (
    MANIFEST_FILE,
    latest_checkpoint,
    read_manifest,
    read_state,
    write_manifest,
    write_state,
)
from dynamo_megatron.tracking.metrics import read_rows

sys.path.insert(0, str(Path(__file__).parent))  # python -P leaves this folder out
from measure import machine

BEYOND = 3  # steps after the checkpoint, whose lines the resume drops
SAMPLE_EVERY = 0.2  # seconds
TIMEOUT = 900.0  # seconds for a resume and one step
PACKAGES = ("dynamo-megatron", "torch", "megatron-core", "sglang")


def lengthen(run: Path, steps: int, prompts: int, history: int) -> None:
    """Gives the files of a run the size that they have after `steps` steps of `prompts` prompts, `history` different
    ones in all; its newest checkpoint becomes that of step `steps`."""
    metrics, allocation = list(read_rows(run / "metrics.jsonl", "step")), read_rows(run / "allocation.jsonl", "step")
    drawn = next(allocation)
    with (run / "metrics.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({**metrics[-1], "step": s}) + "\n" for s in range(1, steps + BEYOND + 1))
    with (run / "allocation.jsonl").open("w", encoding="utf-8") as file:
        for step in range(1, steps + BEYOND + 1):
            first = step * prompts
            rows = ({**drawn, "step": step, "prompt_id": f"{(first + i) % history:064x}"} for i in range(prompts))
            file.writelines(json.dumps(row) + "\n" for row in rows)
    _, folder = latest_checkpoint(run / "checkpoints")
    state, manifest = read_state(folder), read_manifest(folder)
    trials = np.full(history, 8.0)
    half = trials / 2
    columns = (trials, half, trials / 16, trials / 4, half, 9 * half, half, 20 * half, trials, 30 * trials)
    ids = [f"{i:064x}" for i in range(history)]
    state["allocator"] = {"prompt_ids": ids, **dict(zip(COLUMNS, columns, strict=True))}
    (folder / MANIFEST_FILE).unlink()
    write_state(folder, state)
    contents = {key: manifest[key] for key in ("model", "dtype", "layout")}
    checksums = {name: checksum for name, checksum in manifest["checksums"].items() if not name.startswith("state.")}
    write_manifest(folder, {"step": steps, **contents}, checksums)
    folder.rename(folder.with_name(f"step-{steps:06d}"))
    for evaluations in (run / "evaluations.jsonl", *run.glob("hf*/export.json")):
        evaluations.unlink(missing_ok=True)  # of another step


def resume(run: Path) -> dict[str, Any]:
    """Resumes the run for one step: seconds to the lines on the way, peak resident bytes of every kind of process.

    Raises SystemExit if the run fails."""
    step = latest_checkpoint(run / "checkpoints")[0] + 1
    words = ["train", str(run / "config.yaml"), f"trainer.steps={step}", f"output_dir={run}"]
    words += ["checkpoint.export_hf=never", "eval.every=null", "checkpoint.every=null"]
    console, peaks, seen = run / "resume.log", defaultdict(int), {}
    begin = time.monotonic()
    with console.open("w") as out:
        command = [sys.executable, "-P", "-m", "dynamo_megatron.cli", *words]
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        while process.poll() is None and time.monotonic() - begin < TIMEOUT:
            _sample(psutil.Process(process.pid), peaks)
            text = console.read_text()
            for name, mark in (("resumed", "\nresumed from "), ("first step", f"\nstep {step}/{step} ")):
                if mark in text:
                    seen.setdefault(name, time.monotonic() - begin)
            time.sleep(SAMPLE_EVERY)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)
    if process.returncode:
        raise SystemExit(f"{console}: exit code {process.returncode}: {console.read_text()[-2000:]}")
    *_, metrics = read_rows(run / "metrics.jsonl", "step")
    assert metrics["step"] == step, f"{run}: ends with step {metrics['step']}, not {step}"
    return {"seconds to": seen, "seconds of the step": metrics["time/step"], "peak resident bytes": dict(peaks)}


def _sample(root: psutil.Process, peaks: dict[str, int]) -> None:
    """Rounds `peaks` up to what the processes have now; several of a kind count as the largest."""
    try:
        for process in (root, *root.children(recursive=True)):
            words = " ".join(process.cmdline())
            rank = process.environ().get("RANK")
            kind = "SGLang" if "sglang" in words or "guard" in words else f"rank {rank}" if rank else "launcher"
            if rank and "spawn_main" in words:
                kind = "child processes of ranks"
            peaks[kind] = max(peaks[kind], process.memory_info().rss)
    except psutil.Error:  # it has ended since it was listed
        return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--history", type=int, default=1_000_000)
    options = parser.parse_args()
    result: dict[str, Any] = {"machine": machine(PACKAGES)}
    for name in ("short", "long"):
        run = options.work / name
        copytree(options.run, run, symlinks=True, ignore=lambda *_: ["rollouts", "logs", ".lock"])
        if name == "long":
            lengthen(run, options.steps, options.prompts, options.history)
        files = ("metrics.jsonl", "allocation.jsonl")
        sizes = {file: (run / file).stat().st_size for file in files}
        result[name] = {"bytes": sizes, **resume(run)}
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
