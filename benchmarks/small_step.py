"""What a small training step costs: the demo's RL, by process and by part.

    make runs/demo/task && python -P benchmarks/small_step.py

Runs `dynamo-megatron train configs/demo/rl.yaml configs/methods/dynamo.yaml` without evaluations and checkpoints and
watches all its processes. Reported over the steps after `--skip`: seconds of a step and of its parts (from
metrics.jsonl), CPU seconds a step of every process, and HTTP requests a step; and of the whole run the largest memory
of all processes together (proportional set size: pages that several processes map count once). Processes that end
early are counted while they live. Writes benchmarks/results/small_step.json with machine and versions under
`--label`: what other labels have found stays in the file, so that two versions can be compared.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent))
from measure import keep, machine

RESULTS = Path(__file__).parent / "results" / "small_step.json"
CONFIGS = ["configs/demo/rl.yaml", "configs/methods/dynamo.yaml"]
PACKAGES = ["torch", "sglang", "megatron-core", "aiohttp"]
SAMPLE_EVERY = 0.25  # seconds
MEMORY_EVERY = 2.0  # seconds: the kernel goes over all pages
REQUEST = re.compile(r'"(GET|POST) (/\S*?)[ ?]')


def role(process: psutil.Process) -> str:
    """What a process of a run does; "other" for what lives for a moment (compilers, `ps`)."""
    command = " ".join(process.cmdline())
    if command.startswith("sglang::"):
        return command.split()[0].removeprefix("sglang::").partition("_")[0] + " (SGLang)"
    if "sglang.launch_server" in command:
        return "guard" if "runtime.guard" in command else "HTTP server (SGLang)"
    if "reward.worker" in command:
        return "reward workers"
    if "multiprocessing" in command:
        return "resource tracker" if "resource_tracker" in command else "rollout process"
    if "dynamo_megatron.cli" in command or "launcher.local" in command:
        return f"rank {process.environ()['RANK']}" if "RANK" in process.environ() else "launcher"
    return "other"


class Watch:
    """CPU seconds and memory of a process and its descendants."""

    def __init__(self, root: psutil.Process):
        self._root, self._roles = root, {}
        self.cpu: dict[int, float] = {}  # seconds, of all that were ever seen
        self.peak = 0  # bytes
        self.at_peak: dict[str, int] = {}
        self._next = 0.0

    def sample(self) -> None:
        memory: dict[str, int] = defaultdict(int)
        weighs = time.monotonic() >= self._next
        for process in [self._root, *self._root.children(recursive=True)]:
            try:
                if weighs or process.pid not in self._roles:  # SGLang's processes name themselves late
                    self._roles[process.pid] = role(process)
                times = process.cpu_times()
                self.cpu[process.pid] = times.user + times.system
                if weighs:
                    memory[self._roles[process.pid]] += process.memory_full_info().pss
            except psutil.Error:  # it has ended meanwhile
                continue
        if weighs:
            self._next = time.monotonic() + MEMORY_EVERY
        if sum(memory.values()) > self.peak:
            self.peak, self.at_peak = sum(memory.values()), dict(memory)

    def by_role(self) -> dict[str, float]:
        seconds: dict[str, float] = defaultdict(float)
        for pid, used in self.cpu.items():
            seconds[self._roles[pid]] += used
        return seconds


def watch_run(steps: int, skip: int, overrides: Iterable[str], folder: Path) -> dict[str, Any]:
    output = folder / "run"
    words = [f"output_dir={output}", f"trainer.steps={steps}", "eval.every=null", "checkpoint.every=1000"]
    words += ['rollout.server_args=["--disable-radix-cache","--log-level-http","info"]', *overrides]
    command = [sys.executable, "-P", "-m", "dynamo_megatron.cli", "train", *CONFIGS, *words]
    metrics, server_log = output / "metrics.jsonl", output / "logs" / "sglang-server-0.log"
    log = folder / "train.log"
    before = calls_before = None
    with open(log, "w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        watch = Watch(psutil.Process(process.pid))
        done = 0
        while process.poll() is None:
            watch.sample()
            done = len(rows(metrics))
            if before is None and done >= skip:
                before, calls_before, first = watch.by_role(), calls(server_log), done
            if before is not None and done < steps:  # not what ends the run
                after, calls_after, last = watch.by_role(), calls(server_log), done
            time.sleep(SAMPLE_EVERY)
    if process.returncode:
        sys.exit(f"the run failed with exit code {process.returncode}:\n{log.read_text()[-3000:]}")
    counted = last - first
    taken = rows(metrics)[first:last]
    parts = sorted(key for key in taken[0] if key.startswith("time/"))
    cpu = {name: (after[name] - before.get(name, 0.0)) / counted for name in after}
    requests = {path: (n - calls_before.get(path, 0)) / counted for path, n in calls_after.items()}
    return {
        "steps": counted,
        "seconds of a step": {key: statistics.median(row[key] for row in taken) for key in parts},
        "CPU seconds a step": {"all": sum(cpu.values()), **dict(sorted(cpu.items(), key=lambda c: -c[1]))},
        "requests a step": {"all": sum(requests.values()), **{path: n for path, n in requests.items() if n}},
        "peak bytes": {"all": watch.peak, **dict(sorted(watch.at_peak.items(), key=lambda m: -m[1]))},
    }


def rows(metrics: Path) -> list[dict[str, float]]:
    """Those of steps; evaluations have rows of their own."""
    if not metrics.exists():
        return []
    read = [json.loads(line) for line in metrics.read_text().splitlines() if line.endswith("}")]
    return [row for row in read if "time/step" in row]


def calls(log: Path) -> dict[str, int]:
    """HTTP requests by path."""
    counts: dict[str, int] = defaultdict(int)
    for _, path in REQUEST.findall(log.read_text()):
        counts[path] += 1
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--label", default="now")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--steps", type=int, default=44)
    parser.add_argument("--skip", type=int, default=4, help="steps that are not counted: the first ones warm up")
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE for the run")
    arguments = parser.parse_args()
    described = machine(PACKAGES)
    with tempfile.TemporaryDirectory() as folder:
        found = watch_run(arguments.steps, arguments.skip, arguments.overrides, Path(folder))
    keep(arguments.out, arguments.label, {"machine": described, **found})


if __name__ == "__main__":
    main()
