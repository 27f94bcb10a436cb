"""What the benchmarks share: the machine and its versions, interleaved timing, peak memory."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

WARM_UP = 10
ROUNDS = (5, 30)  # timed: at least, at most
VERSIONS = ("torch", "triton", "megatron-core", "transformer-engine", "apex", "transformers", "numpy")
SECONDS = 6.0  # for one call's rounds, warm-up included, where the least number of timed rounds allows it


def installed(package: str) -> str | None:
    """The version of a distribution, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def machine(packages: Sequence[str]) -> dict[str, Any]:
    """Processor, GPU where there is one, and versions; None for a package that is not installed."""
    with open("/proc/cpuinfo") as file:
        models = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    found: dict[str, Any] = {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "load average before": os.getloadavg()[0],
        "python": platform.python_version(),
        **{package: installed(package) for package in packages},
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "gpu bytes": properties.total_memory, "cuda": torch.version.cuda}
        found |= clocks()
    return found


def keep(file: Path, label: str, found: Mapping[str, Any]) -> None:
    """Prints what was found and writes it into `file` under `label`; other labels stay."""
    print(json.dumps(found, indent=1))
    before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({**before, label: found}, indent=1) + "\n", encoding="utf-8")


def clocks() -> dict[str, str]:
    """Driver, clocks, power and temperature as nvidia-smi says them; empty without a GPU or without nvidia-smi."""
    if not torch.cuda.is_available() or shutil.which("nvidia-smi") is None:
        return {}
    asked = ["driver_version", "clocks.sm", "clocks.mem", "power.draw", "temperature.gpu"]
    uuid = torch.cuda.get_device_properties(0).uuid
    command = ["nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={','.join(asked)}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode:
        return {"nvidia-smi": " ".join((done.stdout + done.stderr).split())}
    return dict(zip(asked, (field.strip() for field in done.stdout.strip().split(",")), strict=True))


def run_logged(command: Sequence[str], log: Path, timeout: float, **options: Any) -> dict[str, Any]:
    """Runs a command with its output in `log`: "exit code", and "log", the output's end, where that is not 0.

    After `timeout` seconds the command and its children are ended; the exit code is then None.
    """
    with open(log, "w", encoding="utf-8") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, **options)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    result: dict[str, Any] = {"exit code": code}
    if code != 0:
        result["log"] = log.read_text(encoding="utf-8", errors="replace").splitlines()[-30:]
    if code is None:
        result["log"].append(f"ended after {timeout:g} s")
    return result


def summary(samples: Sequence[float]) -> dict[str, float]:
    """Median, p10, p90 and the number of samples, which are seconds."""
    p10, p90 = np.percentile(samples, [10, 90]).tolist()
    return {"median": statistics.median(samples), "p10": p10, "p90": p90, "samples": len(samples)}


def seconds_once(call: Callable[[], Any], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def interleaved(
    calls: Mapping[str, Callable[[], Any]],
    device: torch.device,
    *,
    before: Callable[[], Any] = lambda: None,
    warm_up: int = WARM_UP,
    rounds: tuple[int, int] = ROUNDS,
    seconds: float = SECONDS,
) -> dict[str, dict[str, float]]:
    """`summary` of every call's seconds, taken in turns (ABAB), so that a drifting clock meets all alike.

    `before` runs untimed ahead of each. A call that has had its `seconds` sits out the rounds it need not take.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    spent = dict.fromkeys(calls, 0.0)
    for number in range(-warm_up, rounds[1]):
        for name, call in calls.items():
            if spent[name] > seconds and not 0 <= number < rounds[0]:
                continue
            before()
            took = seconds_once(call, device)
            spent[name] += took
            if number >= 0:
                samples[name].append(took)
    return {name: summary(taken) for name, taken in samples.items()}


def peak_bytes(call: Callable[[], Any], device: torch.device) -> int:
    """The most memory that tensors take during `call` on a GPU, beyond what is there before it; 0 on a CPU."""
    if device.type != "cuda":
        call()
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
